"""KVCache: the keys and values of all layers on the device, in blocks, in any format that supports the cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from sameseed import scheme
from sameseed.formats._memory import reserved
from sameseed.kvcache.state import RecurrentStates
from sameseed.memory import HUGE
from sameseed.scheme import Format, KVLayer


class KVCache:
    """Storage for `num_blocks` blocks of `block_size` rows in each layer; a row's slot is block * block_size + offset.

    `shapes`: KV heads Hk and head size D of each layer (`ModelConfig.kv_shapes`). A layer holds k, v [num_blocks,
    block_size, Hk, W] in the format's storage type (W: D, or the bytes of a packed row), and scales float32
    [num_blocks, block_size, Hk] for formats that have them. `format`: see `scheme.kv_formats`. On a CPU a row takes
    memory once it is stored.
    """

    def __init__(
        self,
        shapes: Seq[tuple[int, int]],
        num_blocks: int,
        block_size: int,
        format: str = "fp32",
        device: str = "cpu",
        states: RecurrentStates | None = None,
    ) -> None:
        self.format = format
        self.states = states  # of a model with recurrent layers
        self.shapes = tuple(shapes)
        self.num_blocks = num_blocks
        self.block_size = block_size

        def rows(fmt: Format, count: int, heads: int, dim: int) -> tuple[Tensor, Tensor | None]:
            codes, scales = fmt.encode_kv(torch.zeros(1, heads, dim))
            # A new huge page may take 5 ms (docs/log/2026-q4.md), so layers of bf16 begin theirs at different rows.
            where, size = torch.device(device), block_size * heads * dim * 2
            apart = -(-((HUGE // count - num_blocks * size) % HUGE) // size)
            spare = apart if where.type == "cpu" and num_blocks * size > HUGE else 0
            shape = (count, num_blocks + spare, block_size, *codes.shape[1:])
            stored = reserved(shape, codes.dtype, where)
            return stored, None if scales is None else reserved(shape[:4], torch.float32, where)

        # Layers of one shape together, and their tensors stacked, with the layers as first axis.
        self.stacks: list[tuple[KVLayer, list[KVLayer]]] = []
        at: dict[tuple[int, int], list[KVLayer]] = {}
        for shape, count in Counter(self.shapes).items():
            (k, k_scale), (v, v_scale) = (rows(fmt, count, *shape) for fmt in scheme.kv_formats(format))
            scales = (k_scale, v_scale)
            layers = [KVLayer(format, k[i], v[i], *(s if s is None else s[i] for s in scales)) for i in range(count)]
            self.stacks.append((KVLayer(format, k, v, k_scale, v_scale), layers))
            at[shape] = layers[::-1]
        self.layers = [at[shape].pop() for shape in self.shapes]

    @property
    def nbytes(self) -> int:
        tensors = [t for x in self.layers for t in (x.k, x.v, x.k_scale, x.v_scale) if t is not None]
        return sum(t[: self.num_blocks].nbytes for t in tensors)
