"""Placement of a small Llama's weights in a big Llama, so that the big model computes the same function.

Primed letters are dimensions of the big model. "Live" dimensions hold the small model. Each rule below is exact in real
numbers, and in floating point wherever possible.

* **Hidden.** Live dimensions come first; the other dimensions of the residual stream stay 0. With n of C' dimensions
  live, the mean square shrinks to n / C' of its value. So eps is scaled by n / C', and norm weights by sqrt(n / C').
* **Rotary pairs.** Pair i of D / 2 rotates by theta^(-2i / D), as pair i D' / D of the bigger head does. If D' is no
  multiple of D, theta becomes theta^(D' / D), and pair i stays pair i.
* **Softmax scale.** The scale is D'^-0.5 instead of D^-0.5, so queries must be larger by r = sqrt(D' / D). The largest
  power of two in r goes into the weights. Multiplying by the rest of r would round every weight. Instead the residual
  stream has a second copy, with (r / power - 1) times the first copy's norm weight. The same weights on both copies
  add up to r.
* **Vocabulary.** One more hidden dimension holds a constant c. c^2 replaces a part of eps, so that norms still agree.
  LM head rows of padding tokens are negative there and 0 in live dimensions: their logits are far below 0.
* **Heads, neurons, layers.** Surplus ones are random, but their values (v) or up projections are rows of zeros, which
  every number format keeps exactly. So random output weights multiply exact zeros.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sameseed.errors import ConfigError
from sameseed.models.config import LLAMA, MASK_TOKENS, ModelConfig, parse_config, sizes_of

ALIGN = 128  # live dimensions start at multiples of the largest quantization group, so that they share no scale
SIGNAL = 32.0  # the constant after the last norm is SIGNAL / (root mean square of the small model's stream there)
PENALTY = 256.0  # negative LM head weight of padding tokens on the constant: logit -SIGNAL * PENALTY / RMS
SIZES = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
MAX_THETA = 1e30  # above this, float32 loses frequencies


@dataclass(frozen=True)
class TwinLayout:
    """The placement of a small model in a big model with `config`."""

    small: ModelConfig
    config: ModelConfig
    raw: Mapping[str, Any]  # config.json of the big model, without the dtype
    copies: tuple[int, ...]  # first hidden dimension of each copy of the residual stream
    constant: int | None  # hidden dimension of the constant
    constant_value: float
    norm_scale: float
    query_scale: float  # a power of two
    copy_share: float  # norm weight of the second copy before q, divided by the first copy's
    layers: tuple[int, ...]  # [L] layer of the big model for each layer of the small model
    heads: tuple[int | None, ...]  # [H'] query head of the small model; None: surplus head
    kv_heads: tuple[int | None, ...]  # [Hk'] KV head of the small model; None: surplus head
    pairs: tuple[int, ...]  # [D] dimension of the big head for each dimension of a small query or key

    def as_dict(self) -> dict[str, Any]:
        """Plain data for the twin's record: tells readers, e.g. draft heads, where the small hidden states are."""
        return {
            "hidden_offsets": list(self.copies),
            "hidden_size": self.small.hidden_size,
            "layers": list(self.layers),
            "heads": [i for i, h in enumerate(self.heads) if h is not None],
            "kv_heads": [i for i, h in enumerate(self.kv_heads) if h is not None],
            "rotary_dims": list(self.pairs),
            "intermediate_size": self.small.intermediate_size,
            "vocab_size": self.small.vocab_size,
            "constant": None if self.constant is None else {"index": self.constant, "value": self.constant_value},
            "norm_scale": self.norm_scale,
            "query_scale": self.query_scale * (1 + self.copy_share),
        }


def make_layout(small: ModelConfig, shape: ModelConfig, raw: Mapping[str, Any], name: str = "the shape") -> TwinLayout:
    """Place a model with config `small` (config.json: `raw`) in `shape`, called `name`. Raises ConfigError."""
    heads, kv_heads = _place_heads(small, shape, name)
    ratio = shape.head_dim / small.head_dim
    query_scale = 2.0 ** math.floor(math.log2(ratio) / 2)
    share = math.sqrt(ratio) / query_scale - 1
    copies, constant = _place(small, shape, 2 if share else 1, name)
    live = len(copies) * small.hidden_size
    padded = shape.vocab_size > small.vocab_size
    # The constant replaces at most half of eps; the rest of eps still guards against division by 0.
    value = 2.0 ** math.floor(math.log2(small.rms_eps * live / 2) / 2) if padded else 0.0
    eps = (small.rms_eps * live - value**2) / shape.hidden_size
    theta, pairs = _rotary(small, shape.head_dim)
    own = _raw_config(shape, raw, eps, theta)
    return TwinLayout(
        small=small,
        config=parse_config(own, where=f"twin of shape {name}"),
        raw=own,
        copies=copies,
        constant=constant if padded else None,
        constant_value=value,
        norm_scale=math.sqrt(live / shape.hidden_size),
        query_scale=query_scale,
        copy_share=share,
        layers=tuple(i * shape.num_layers // small.num_layers for i in range(small.num_layers)),
        heads=heads,
        kv_heads=kv_heads,
        pairs=pairs,
    )


def _raw_config(shape: ModelConfig, raw: Mapping[str, Any], eps: float, theta: float) -> dict[str, Any]:
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling")
    if scaling is not None and "rope_theta" in scaling:
        scaling = {**scaling, "rope_theta": theta}
    kept = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "spd_type", "para_num")
    return {
        **LLAMA,
        **{name: raw[name] for name in (*kept, *MASK_TOKENS) if name in raw},
        **sizes_of(shape),
        "tie_word_embeddings": shape.tied_embeddings,
        "rms_norm_eps": eps,
        "rope_theta": theta,
        "rope_parameters" if raw.get("rope_parameters") else "rope_scaling": scaling,
    }


def _place_heads(
    small: ModelConfig, shape: ModelConfig, name: str
) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
    """`heads` and `kv_heads` of a TwinLayout. Raises ConfigError for features or dimensions that do not fit."""
    for there, what in (
        (small.qkv_bias or small.o_bias or small.mlp_bias, "biases"),
        (small.qk_norm, "norms of queries and keys"),
        (any(w is not None for w in small.windows), "a sliding window"),
        (small.rope.kind == "factors", "rope factors that no config.json can name"),
    ):
        if there:
            raise ConfigError(f"the source has {what}, which a twin (a plain Llama) has not; choose another source")
    group, big_group = small.num_heads // small.num_kv_heads, shape.num_heads // shape.num_kv_heads
    spread = -(-group // big_group)  # KV heads of the big model that carry one of the small model
    for field in SIZES:
        least, why = getattr(small, field), ""
        if field == "num_kv_heads" and spread > 1:
            least, why = least * spread, f" ({spread} for each of its {least})"
        if getattr(shape, field) < least:
            raise ConfigError(f"{name} has {field} {getattr(shape, field)}, needs {least}{why}; choose a larger shape")
    if shape.tied_embeddings and not small.tied_embeddings:
        raise ConfigError(f"{name} ties its head to its embedding, the source does not; choose another shape")
    kv_heads = [i // spread if i < small.num_kv_heads * spread else None for i in range(shape.num_kv_heads)]
    heads: list[int | None] = []
    for i, kv in enumerate(kv_heads):
        first = i % spread * big_group  # index among the query heads of the small model's KV head
        within = range(first, first + big_group)
        heads += [None if kv is None or j >= group else kv * group + j for j in within]
    return tuple(heads), tuple(kv_heads)


def _place(small: ModelConfig, shape: ModelConfig, count: int, name: str) -> tuple[tuple[int, ...], int]:
    """First dimension of each copy of the stream, aligned or packed, and the constant's. Raises ConfigError."""
    constants = int(shape.vocab_size > small.vocab_size)
    for unit in (ALIGN, 1):
        size = -(-small.hidden_size // unit) * unit
        last = (count - 1) * size + small.hidden_size
        if (count * size + 1 if constants else last) <= shape.hidden_size:
            return tuple(i * size for i in range(count)), count * size
    why = []
    if count > 1:
        why.append(f"head_dim {shape.head_dim} over {small.head_dim} is no power of 4 and takes the stream twice")
    if constants:
        why.append("a padded vocabulary takes one more")
    raise ConfigError(
        f"{name} has hidden_size {shape.hidden_size}, and the source needs {count * small.hidden_size + constants} "
        f"({'; '.join(why)}); choose a wider shape"
    )


def _rotary(small: ModelConfig, head_dim: int) -> tuple[float, tuple[int, ...]]:
    """rope_theta, and the big head's dimension for each small one. Pairs are (i, i + D / 2). Raises ConfigError."""
    half, theta = small.head_dim // 2, small.rope.theta
    if head_dim % small.head_dim == 0:
        step = head_dim // small.head_dim
    else:
        step, theta = 1, theta ** (head_dim / small.head_dim)
        if theta > MAX_THETA:
            raise ConfigError(f"head_dim {head_dim} cannot carry the frequencies; take a multiple of {small.head_dim}")
    first = [i * step for i in range(half)]
    return theta, tuple(first + [head_dim // 2 + i for i in first])
