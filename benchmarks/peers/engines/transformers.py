"""Hugging Face transformers: the model's own forward pass with a dynamic cache."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache


class Engine:
    """`options`: dtype ("bfloat16" by default)."""

    def load(self, model: Path, threads: int, max_len: int, batch: int, options: dict[str, Any]) -> dict[str, object]:
        torch.set_num_threads(threads)
        dtype = options.get("dtype", "bfloat16")
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self.cache: DynamicCache | None = None
        return {
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
            "settings": {"dtype": dtype, "attention": self.model.config._attn_implementation},
        }

    @torch.inference_mode()
    def _forward(self, tokens: Seq[Seq[int]], cache: DynamicCache, logits: int) -> tuple[float, torch.Tensor]:
        """Seconds and logits of one pass over tokens [B, T], with logits of the last `logits` positions (0: all)."""
        ids = torch.tensor(tokens)
        start = time.perf_counter()
        out = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=logits)
        return time.perf_counter() - start, out.logits

    def rows(self, tokens: Seq[int], context: int) -> float:
        if self.cache is None or self.cache.get_seq_length() != context:
            self.cache = DynamicCache(config=self.model.config)
            self._forward([[3 + i % 500 for i in range(context)]], self.cache, 1)
        seconds, _ = self._forward([tokens], self.cache, 0)
        self.cache.crop(-len(tokens))
        return seconds

    def prefill(self, tokens: Seq[int]) -> float:
        return self._forward([tokens], DynamicCache(config=self.model.config), 1)[0]

    def batch(self, prompts: Seq[Seq[int]], steps: int) -> float:
        cache = DynamicCache(config=self.model.config)
        self._forward(prompts, cache, 1)
        return sum(self._forward([[3 + b] for b in range(len(prompts))], cache, 1)[0] for _ in range(steps))

    def probe(self, tokens: Seq[int], count: int) -> list[float]:
        _, logits = self._forward([tokens], DynamicCache(config=self.model.config), 1)
        values: list[float] = logits[0, -1, :count].float().tolist()
        return values


class Writer:
    """`options`: way "ngram" (prompt lookup of `k` tokens). With a draft: assisted generation with default settings."""

    def load(
        self, model: Path, threads: int, max_len: int, draft: Path | None, options: dict[str, Any]
    ) -> dict[str, object]:
        torch.set_num_threads(threads)

        def read(path: Path) -> Any:
            where, file = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
            return AutoModelForCausalLM.from_pretrained(where, dtype=torch.bfloat16, **file).eval()

        self.model = read(model)
        self.how: dict[str, Any] = {"assistant_model": read(draft)} if draft else {}
        if options.get("way") == "ngram":
            self.how = {"prompt_lookup_num_tokens": options["k"]}
        return {
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
            "settings": {"dtype": "bfloat16", **options},
        }

    @torch.inference_mode()
    def write(self, prompt: Seq[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, **self.how
        )
        text: list[int] = out[0, len(prompt) :].tolist()
        return text
