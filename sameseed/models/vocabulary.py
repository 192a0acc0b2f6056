"""An LM head over a part of the vocabulary (FR-Spec: Zhao et al., 2025): a full one is most of the cost of a draft."""

from __future__ import annotations

from dataclasses import replace

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

    Ids outside the model's vocabulary are left out. Raises ConfigError where none is left.
    """
    kept = torch.tensor(sorted({t for t in ids.tolist() if t < model.config.vocab_size}), device=model.device)
    if not len(kept):
        raise ConfigError(
            "the draft model has none of the tokens of `vocabulary`; name others, or leave the option out"
        )
    weights = replace(model.weights, lm_head=take_rows(model.ops, model.weights.lm_head, kept))
    return type(model)(model.config, weights, model.ops, model.max_model_len, token_ids=kept)
