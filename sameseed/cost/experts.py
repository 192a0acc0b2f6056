"""Distinct experts: how many of a layer's experts consecutive rows of a text choose; random rows choose more."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
from torch import Tensor

from sameseed import store
from sameseed.cost.round import Passes
from sameseed.models.config import ModelConfig
from sameseed.models.qwen3_moe import MoeConfig
from sameseed.models.runner import ModelRunner
from sameseed.ops import ExpertWeights, Forward, Ops, Replayed, RowSource
from sameseed.ops.reference import choose_experts
from sameseed.request import Completion, SamplingParams, Sequence
from sameseed.spec.draft import Draft

ROWS, MOST, LONGEST = (1, 2, 4, 8, 16), 8, 512  # rows of a pass; texts that are read, and tokens of each


def counted(config: ModelConfig, path: Path) -> ModelConfig:
    """The config with the distinct experts that were counted in texts of the model at `path`, if any were."""
    if not isinstance(config, MoeConfig):
        return config
    known = store.read("experts", store.weights_key(path), lambda arrays: arrays["distinct"].shape[1:] == (2,))
    return replace(config, distinct=tuple((m, n) for m, n in known["distinct"].tolist())) if known else config


@dataclass(frozen=True)
class TextPasses:
    """Passes over rows of the model's own texts, by measured `passes` over rows that choose experts at random.

    Both take as long as reading the experts that they choose.
    """

    passes: Passes
    config: MoeConfig  # with counted experts

    def cost(self, rows: float, batch: float = 1.0, context: float = 0.0) -> float:
        measured = replace(self.config, distinct=()).read_share(rows)
        return self.passes.cost(rows, batch, context) * self.config.read_share(rows, batch) / measured


def in_texts(passes: Passes, config: ModelConfig) -> Passes:
    """The passes over rows of texts; `config`: as `counted` returns it."""
    return TextPasses(passes, config) if isinstance(config, MoeConfig) and config.distinct else passes


def in_words(config: ModelConfig) -> str:
    """How many distinct experts rows choose, and where that comes from; "" for a model without experts."""
    counts = ", ".join(f"{n:.1f} for {m:.0f}" for m, n in getattr(config, "distinct", ()))
    assumed = "assumed, as if rows chose at random (`sameseed bench` counts them)"
    return f"{counts} rows, counted in its texts" if counts else assumed if isinstance(config, MoeConfig) else ""


class _Watched(Ops):
    """Ops that note which experts each row chooses; passes run op by op."""

    def __init__(self, backend: ModuleType) -> None:
        super().__init__(backend)
        self.chosen: list[Tensor] = []  # [T, top_k] for each layer with experts

    def experts(
        self, rows: RowSource, w: ExpertWeights, residual: Tensor | None = None, logits: Tensor | None = None
    ) -> Tensor:
        own = self.product(rows, w.router, w.router_bias) if logits is None else logits
        self.chosen.append(choose_experts(own, w.top_k, w.normalize, w.chosen_by)[0])
        return super().experts(rows, w, residual, logits)

    def replayer(self, forward: Forward) -> Replayed:
        return partial(forward, self)


def count(runner: ModelRunner, path: Path, texts: Seq[Completion]) -> ModelConfig:
    """Count the experts of a layer that 1 to 16 consecutive rows choose. Keeps the means, and returns `counted`."""
    model, ops = runner.model, _Watched(runner.model.ops.backend)
    if not isinstance(model.config, MoeConfig) or model.config.top_k == model.config.num_experts:
        return model.config
    found = {m: list[int]() for m in ROWS}
    watched = runner.beside(type(model)(model.config, model.weights, ops, model.max_model_len))
    for text in texts[:: -(-len(texts) // MOST) or 1]:
        tokens = [*text.prompt_token_ids, *text.token_ids][-min(LONGEST, model.max_model_len) :]
        seq = Sequence(-1, tokens, SamplingParams(), 0)
        if text.token_ids and runner.blocks.reserve(seq, len(seq)):
            watched.forward([seq], Draft.empty(1), [len(seq)])
        runner.blocks.release(seq)
        for own in (layer[-len(text.token_ids) :] for layer in ops.chosen):
            for m in (m for m in ROWS if m <= len(own)):
                found[m] += [rows.unique().numel() for rows in own.unfold(0, m, 1)]
        ops.chosen.clear()
    if means := [(m, float(np.mean(each))) for m, each in found.items() if each]:
        store.write("experts", store.weights_key(path), {"distinct": np.array(means)})
    return counted(model.config, path)
