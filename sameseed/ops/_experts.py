"""The weights of a mixture of experts, as ops and models pass them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from sameseed.scheme import QuantTensor

TILE = 32  # rows of a tile of packed weights; weights are packed in chunks of whole tiles


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """A router over E experts of width F, and the experts; biases are float32.

    `top_k`: experts of a row. `normalize`: their weights are a softmax over the chosen logits, else over all.
    `limit`: gates are gpt-oss's clamped SwiGLU (`silu_mul`); `act`: "gelu" in place of that. `factors`: of the weights.
    """

    router: QuantTensor  # [E, C]
    router_bias: Tensor | None  # [E]
    gate_up: tuple[QuantTensor, ...]  # per expert [2 F, C]: rows of the gate, then of up
    gate_up_bias: Tensor | None  # [E, 2 F]
    down: tuple[QuantTensor, ...]  # per expert [C, F]
    down_bias: Tensor | None  # [E, C]
    top_k: int
    normalize: bool
    limit: float | None = None
    act: Literal["silu", "gelu"] = "silu"
    factors: Tensor | None = None  # [E]


def parted(w: QuantTensor, count: int) -> tuple[QuantTensor, ...] | None:
    """Views of `count` equal matrices that are stacked along O; None if they do not begin at tiles."""
    height = w.shape[0] // count
    if w.layout != "plain" and height % TILE:
        return None

    def part(i: int, x: Tensor) -> Tensor:
        size = len(x) // count
        return x[i * size : (i + 1) * size]

    shape = (height, w.shape[1])
    return tuple(replace(w, shape=shape, parts={n: part(i, x) for n, x in w.parts.items()}) for i in range(count))
