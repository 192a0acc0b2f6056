"""Format bf16_a16: the KV cache in bf16, its products with queries and softmax weights that are rounded to bf16 too.

What bf16-a16 is for weights: the rows are stored as in `bf16`; scaled queries are rounded to bf16, and so, in blocks of
keys, are the softmax weights before they meet the values (their sum is not).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sameseed.scheme import Format


class Bf16Products(Format):
    """For the cache only; weights with rounded rows are `bf16-a16`."""

    name = "bf16_a16"
    bits = 16
    weights = False
    kv_dtype = query_dtype = torch.bfloat16

    def encode_kv(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return x.bfloat16(), None

    def decode_kv(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        return codes.float()


FORMAT = Bf16Products()
