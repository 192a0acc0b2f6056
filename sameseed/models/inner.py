"""Models inside others, which share their memory: with an LM head over a part of the vocabulary, or in fewer bits."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sameseed import scheme
from sameseed.errors import ConfigError
from sameseed.models.decoder import Decoder
from sameseed.ops import Ops
from sameseed.scheme import QuantTensor


def take_rows(ops: Ops, w: QuantTensor, rows: Tensor) -> QuantTensor:
    """Rows [n] of a weight [O, K] as a weight [n, K]: in the same format, or in bf16 where rows share scales."""
    plain = ops.unpack(w)
    rows = rows.to(next(iter(plain.parts.values())).device)
    if all(part.shape[0] == w.shape[0] for part in plain.parts.values()):
        parts = {name: part.index_select(0, rows) for name, part in plain.parts.items()}
        taken = replace(plain, shape=(len(rows), w.shape[1]), parts=parts)
    else:
        dense = scheme.get(plain.format).decode_rows(plain, rows).bfloat16()
        taken = scheme.get("bf16").encode(dense)
    return ops.pack(taken)


def with_tokens(model: Decoder, ids: Tensor) -> Decoder:
    """The model with an LM head over the tokens `ids` [n] only; other tokens get the logit -inf. The rest is shared.

    A full LM head is most of the cost of a draft (FR-Spec: Zhao et al., 2025). Ids outside the model's vocabulary are
    left out. Raises ConfigError where none is left.
    """
    kept = torch.tensor(sorted({t for t in ids.tolist() if t < model.config.vocab_size}), device=model.device)
    if not len(kept):
        raise ConfigError("the draft model has none of the tokens of `vocabulary`; leave the option out")
    weights = replace(model.weights, lm_head=take_rows(model.ops, model.weights.lm_head, kept))
    return type(model)(model.config, weights, model.ops, model.max_model_len, token_ids=kept)


def nested_view(model: Decoder) -> Decoder:
    """The model with each matrix replaced by the 4-bit matrix inside it, where there is one.

    Nothing is copied (any-precision nesting: Park et al., 2024). The embedding keeps its precision, because a pass
    reads only a few of its rows. Raises ConfigError where no matrix contains a 4-bit one.
    """
    w = model.weights
    weights = replace(w, layers=tuple(map(_lower, w.layers)), lm_head=_lower(w.lm_head))
    mine, its = ([m for layer in x.layers for m in layer.matrices] + [x.lm_head] for x in (weights, w))
    if all(a is b for a, b in zip(mine, its, strict=True)):
        formats = ", ".join(sorted({m.format for m in w.matrices}))
        raise ConfigError(f"weights in {formats} hold no 4-bit ones; load the target with --format w8a8n")
    return type(model)(model.config, weights, model.ops, model.max_model_len)


def _lower(w: Any) -> Any:
    """Weights of any kind, with each matrix replaced by the one inside it."""
    if isinstance(w, QuantTensor):
        return scheme.get(w.format).lower(w) or w
    if isinstance(w, tuple):
        return tuple(map(_lower, w))
    if is_dataclass(w) and not isinstance(w, type):
        return replace(w, **{f.name: _lower(getattr(w, f.name)) for f in fields(w)})
    return w
