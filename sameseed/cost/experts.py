"""Distinct experts: how many of a layer's experts consecutive rows of a text choose; random rows choose more."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from sameseed import store
from sameseed.models.config import ModelConfig
from sameseed.models.qwen3_moe import MoeConfig
from sameseed.models.runner import ModelRunner
from sameseed.ops import Ops
from sameseed.ops.reference import choose_experts
from sameseed.request import Completion, SamplingParams, Sequence
from sameseed.spec.draft import Draft

ROWS, MOST, LONGEST = (1, 2, 4, 8, 16), 8, 512  # rows of a pass; texts that are read, and tokens of each


def counted(config: ModelConfig, path: Path) -> ModelConfig:
    """The config with the distinct experts that were counted in texts of the model at `path`, if any were."""
    if not isinstance(config, MoeConfig) or (known := store.read("experts", store.weights_key(path))) is None:
        return config
    return replace(config, distinct=tuple((m, n) for m, n in known["distinct"].tolist()))


def in_words(config: ModelConfig) -> str:
    """How many distinct experts rows choose, and where that comes from; "" for a model without experts."""
    counts = ", ".join(f"{n:.1f} for {m:.0f}" for m, n in getattr(config, "distinct", ()))
    assumed = "assumed, as if rows chose at random (`sameseed bench` counts them)"
    return f"{counts} rows, counted in its texts" if counts else assumed if isinstance(config, MoeConfig) else ""


def count(runner: ModelRunner, path: Path, texts: Seq[Completion]) -> None:
    """Count the experts of a layer that 1 to 16 consecutive rows choose; keep the means for `counted`, if they vary."""
    model, ops, chosen = runner.model, Ops(runner.model.ops.backend), list[Tensor]()
    if not isinstance(model.config, MoeConfig) or model.config.top_k == model.config.num_experts:
        return
    plain, found = ops.experts, {m: list[int]() for m in ROWS}

    def noted(rows: Any, w: Any, residual: Tensor | None = None, logits: Tensor | None = None) -> Tensor:
        own = ops.product(rows, w.router, w.router_bias) if logits is None else logits
        chosen.append(choose_experts(own, w.top_k, w.normalize)[0])
        return plain(rows, w, residual, logits)

    vars(ops).update(experts=noted, replayer=lambda forward: partial(forward, ops))  # op by op
    watched = runner.beside(type(model)(model.config, model.weights, ops, model.max_model_len))
    for text in texts[:: -(-len(texts) // MOST) or 1]:
        tokens = [*text.prompt_token_ids, *text.token_ids][-min(LONGEST, model.max_model_len) :]
        seq = Sequence(-1, tokens, SamplingParams(), 0)
        if text.token_ids and runner.blocks.reserve(seq, len(seq)):
            watched.forward([seq], Draft.empty(1), [len(seq)])
        runner.blocks.release(seq)
        for own in (layer[-len(text.token_ids) :] for layer in chosen):
            for m in (m for m in ROWS if m <= len(own)):
                found[m] += [rows.unique().numel() for rows in own.unfold(0, m, 1)]
        chosen.clear()
    if means := [(m, float(np.mean(each))) for m, each in found.items() if each]:
        store.write("experts", store.weights_key(path), {"distinct": np.array(means)})
