"""AMD PACE: bfloat16 on processors with AVX-512 BF16; its speculation is a parallel draft (PARD)."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence as Seq
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from pace.llm import KVCacheType, LLMModel, PardSpecDecodeConfig, SamplingConfig

CACHE = KVCacheType.SLAB_POOL  # the cache that its server is documented with


def about(**settings: object) -> dict[str, object]:
    """Versions and settings for the record."""
    versions = {"amd-pace": version("amd-pace"), "torch": torch.__version__}
    return {"versions": versions, "settings": {"dtype": "bfloat16", "cache": CACHE.value, **settings}}


class Engine:
    """Its model's forward pass, which computes the logits of all tokens, also of a prompt's."""

    def load(self, model: Path, threads: int, max_len: int, batch: int, options: dict[str, Any]) -> dict[str, object]:
        torch.set_num_threads(threads)
        self.generator = LLMModel(str(model), dtype=torch.bfloat16, kv_cache_type=CACHE, disable_tqdm=True).generator
        self.max_len = max_len
        self.generator._cache.remove_context(self._context(batch))  # allocates enough memory for all of them
        self.known: Any = None  # a context with cached tokens, and their number
        return about(**options)

    def _context(self, batch: int) -> Any:
        return self.generator._cache.create_context(self.generator.model.config, self.max_len, batch_size=batch)

    @torch.inference_mode()
    def _forward(self, tokens: Seq[Seq[int]], cached: int, context: Any) -> tuple[float, torch.Tensor]:
        """Seconds and logits of one pass over tokens [B, T] after `cached` tokens."""
        ids = torch.tensor(tokens)
        positions = torch.arange(cached, cached + ids.shape[1]).expand(ids.shape[0], -1)
        start = time.perf_counter()
        out = self.generator.step(ids, positions, context)
        return time.perf_counter() - start, out.logits

    def rows(self, tokens: Seq[int], context: int) -> float:
        if self.known is None or self.known[1] != context:
            self.known = self._context(1), context
            self._forward([[3 + i % 500 for i in range(context)]], 0, self.known[0])
        seconds, _ = self._forward([tokens], context, self.known[0])
        self.known[0].remove_cache(len(tokens))
        return seconds

    def prefill(self, tokens: Seq[int]) -> float:
        context = self._context(1)
        seconds, _ = self._forward([tokens], 0, context)
        self.generator._cache.remove_context(context)
        return seconds

    def batch(self, prompts: Seq[Seq[int]], steps: int) -> float:
        context, cached = self._context(len(prompts)), len(prompts[0])
        self._forward(prompts, 0, context)
        last = [[3 + b] for b in range(len(prompts))]
        seconds = sum(self._forward(last, cached + i, context)[0] for i in range(steps))
        self.generator._cache.remove_context(context)
        return seconds

    def probe(self, tokens: Seq[int], count: int) -> list[float]:
        context = self._context(1)
        _, logits = self._forward([tokens], 0, context)
        self.generator._cache.remove_context(context)
        values: list[float] = logits[0, -1, :count].float().tolist()
        return values


class Writer:
    """`options`: k, the tokens of a parallel draft."""

    def load(
        self, model: Path, threads: int, max_len: int, draft: Path | None, options: dict[str, Any]
    ) -> dict[str, object]:
        torch.set_num_threads(threads)
        spec = PardSpecDecodeConfig(str(draft), num_speculative_tokens=options["k"]) if draft else None
        how: dict[str, Any] = {"dtype": torch.bfloat16, "kv_cache_type": CACHE, "spec_config": spec}
        self.model = LLMModel(str(model), disable_tqdm=True, **how)
        return about(**options)

    def write(self, prompt: Seq[int], count: int) -> list[int]:
        out = self.model.generate(torch.tensor([prompt]), SamplingConfig(max_new_tokens=count, do_sample=False))
        text: list[int] = out.output_token_ids[0, len(prompt) :].tolist()
        return text[:count]
