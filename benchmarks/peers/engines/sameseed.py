"""sameseed itself: ModelRunner for passes, Engine for batches, LLM for texts."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import sameseed
from sameseed import devices
from sameseed.cli.options import draft_choice
from sameseed.config import CacheConfig, EngineConfig
from sameseed.engine.build import build_engine
from sameseed.measure.workload import without_past
from sameseed.report import record
from sameseed.request import Request, SamplingParams, Sequence
from sameseed.spec.draft import Draft

BLOCK_SIZE = 16


class Engine:
    """`options`: format (as --format), kv_format (as --kv-format; "auto" by default)."""

    def load(self, model: Path, threads: int, max_len: int, batch: int, options: dict[str, Any]) -> dict[str, object]:
        config = EngineConfig(
            max_num_rows=max(512, batch * max_len),  # all prompts fit in one pass, so that sequences stay in step
            max_num_seqs=batch,
            max_model_len=max_len,
            format=options.get("format", "auto"),
            threads=threads,
            cache=CacheConfig(
                BLOCK_SIZE,
                (batch + 1) * -(-max_len // BLOCK_SIZE),
                options.get("kv_format", "auto"),
                prefix_cache=False,
            ),
        )
        self.engine = build_engine(str(model), config)
        self.runner = self.engine.runner
        self.params = SamplingParams()
        self.cached: Sequence | None = None
        settings = {
            "format": config.format,
            "kv_format": self.runner.cache.format,
            "backend": self.runner.model.ops.name,
            "isa": devices.native_isa(),
            "weights": self.runner.model.weights.embedding.format,
        }
        return {
            "versions": {"sameseed": sameseed.__version__, "commit": record.commit(), "torch": torch.__version__},
            "settings": settings,
        }

    def _sequence(self, tokens: Seq[int]) -> Sequence:
        seq = Sequence(0, tokens, self.params, 0)
        if not self.runner.blocks.reserve(seq, len(tokens) + 64):
            raise RuntimeError("the cache is too small for this measurement; raise max_len")
        return seq

    def _forward(self, seq: Sequence, draft: Draft) -> tuple[float, torch.Tensor]:
        pending = [seq.num_pending]
        start = time.perf_counter()
        out = self.runner.forward([seq], draft, pending)
        return time.perf_counter() - start, out.logits

    def rows(self, tokens: Seq[int], context: int) -> float:
        if self.cached is None or self.cached.num_cached != context:
            if self.cached is not None:
                self.runner.blocks.release(self.cached)
            self.cached = self._sequence([3 + i % 500 for i in range(context)])
            self._forward(self.cached, Draft.empty(1))
            self.cached.num_cached = context
        seq = self.cached
        # As in verification: one pending token, the others as a draft. Nothing is committed, so the cache is unchanged.
        seq.token_ids.append(tokens[0])
        seconds, logits = self._forward(seq, Draft.chains([list(tokens[1:])]))
        seq.token_ids.pop()
        if logits.shape[0] != len(tokens):
            raise RuntimeError(f"{logits.shape[0]} rows of logits for {len(tokens)} tokens")
        return seconds

    def prefill(self, tokens: Seq[int]) -> float:
        seq = self._sequence(tokens)
        seconds, _ = self._forward(seq, Draft.empty(1))
        self.runner.blocks.release(seq)
        return seconds

    def batch(self, prompts: Seq[Seq[int]], steps: int) -> float:
        if self.cached is not None:
            self.runner.blocks.release(self.cached)
            self.cached = None
        params = SamplingParams(max_tokens=steps + 2, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            self.engine.add(Request(f"peer{i}", tuple(prompt), params, 0))
        self.engine.step()  # the prompts, and the first token of each
        start = time.perf_counter()
        for _ in range(steps):
            if len(self.engine.step()) != len(prompts):
                raise RuntimeError("not every sequence ran in this step; give the cache more blocks")
        seconds = time.perf_counter() - start
        for i in range(len(prompts)):
            self.engine.abort(f"peer{i}")
        return seconds

    def probe(self, tokens: Seq[int], count: int) -> list[float]:
        seq = self._sequence(tokens)
        _, logits = self._forward(seq, Draft.empty(1))
        self.runner.blocks.release(seq)
        values: list[float] = logits[-1, :count].tolist()
        return values


class Writer:
    """`options`: format; way: the draft as for --draft ("{draft}": the draft model's path); draft_format.

    The length policy is goodput.
    """

    def load(
        self, model: Path, threads: int, max_len: int, draft: Path | None, options: dict[str, Any]
    ) -> dict[str, object]:
        settings: dict[str, Any] = {"format": options.get("format", "auto"), "threads": threads}
        more: dict[str, Any] = {"max_model_len": max_len, "max_num_seqs": 1, "prefix_cache": False}
        if way := options.get("way"):
            spec = draft_choice(way.format(draft=draft), str(model))
            assert spec is not None, "no way to draft is named none"
            spec = replace(spec, policy="goodput", num_draft_tokens=12, format=options.get("draft_format", "auto"))
            more["draft"] = without_past(spec)  # no past requests as a source of drafts, since prompts are repeated
        self.llm = sameseed.LLM(str(model), **settings, **more)
        settings |= {"draft": way or None, "isa": devices.native_isa()}
        return {"versions": {"sameseed": sameseed.__version__, "torch": torch.__version__}, "settings": settings}

    def write(self, prompt: Seq[int], count: int) -> list[int]:
        return list(self.llm.generate([list(prompt)], temperature=0.0, max_tokens=count)[0].token_ids)
