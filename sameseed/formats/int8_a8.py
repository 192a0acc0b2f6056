"""Format int8_a8: the KV cache in int8, its products with int8 queries and 16-bit softmax weights, all integers.

The counterpart of the weight scheme w8a8 for the KV cache. Rows are stored as in `int8`. Scaled queries are quantized
to int8 by row and head, like activation rows. Softmax weights are quantized to 16 bits by query and block of keys
before the product with the values; their sum is not quantized. After SageAttention (Zhang et al., 2025), but here each
scale belongs to one row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sameseed.formats import int8
from sameseed.scheme import Format


class Int8Products(Format):
    """For the KV cache only; the scheme for weights with quantized activation rows is `w8a8`."""

    name = "int8_a8"
    bits = 8
    weights = False
    kv_dtype = query_dtype = torch.int8

    def encode_kv(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return int8.FORMAT.encode_kv(x)

    def decode_kv(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        return int8.FORMAT.decode_kv(codes, scales)


FORMAT = Int8Products()
