"""KVCache: the keys and values of all layers on the device, in blocks, in any format that supports the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from sameseed import scheme
from sameseed.formats._memory import reserved
from sameseed.scheme import Format, KVLayer


class KVCache:
    """Storage for `num_blocks` blocks of `block_size` rows in each of `num_layers` layers.

    A layer holds k, v [num_blocks, block_size, Hk, W] in the format's storage type (W: D, or the bytes of a packed
    row), and scales float32 [num_blocks, block_size, Hk] for formats that have them. Rows are addressed by
    slot = block * block_size + offset. `format`: one for both, or one for keys and one for values ("int8/bf16");
    each may name formats for near and far tokens ("bf16+int4"). On a CPU a row takes memory once it is stored.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        format: str = "fp32",
        device: str = "cpu",
    ) -> None:
        self.format = format
        self.head_dim = head_dim
        self.num_blocks = num_blocks
        self.block_size = block_size

        def rows(fmt: Format) -> tuple[Tensor, Tensor | None]:
            codes, scales = fmt.encode_kv(torch.zeros(1, num_kv_heads, head_dim))
            shape = (num_layers, num_blocks, block_size, *codes.shape[1:])
            where = torch.device(device)
            stored = reserved(shape, codes.dtype, where)
            return stored, None if scales is None else reserved(shape[:4], torch.float32, where)

        (k, k_scale), (v, v_scale) = map(rows, scheme.kv_formats(format))
        self.stacked = KVLayer(format, k, v, k_scale, v_scale)  # all layers, as the first axis of each tensor
        self.layers = [
            KVLayer(
                format, k[i], v[i], None if k_scale is None else k_scale[i], None if v_scale is None else v_scale[i]
            )
            for i in range(num_layers)
        ]

    @property
    def nbytes(self) -> int:
        tensors = [t for x in self.layers for t in (x.k, x.v, x.k_scale, x.v_scale) if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)
