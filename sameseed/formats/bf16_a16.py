"""Format bf16_a16: the KV cache in bf16, its products with queries and softmax weights that are rounded to bf16 too.

The counterpart of the weight scheme bf16-a16 for the KV cache. Rows are stored as in `bf16`. Scaled queries are rounded
to bf16. Softmax weights are rounded to bf16, in blocks of keys, before the product with the values; their sum is not
rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sameseed.scheme import Format


class Bf16Products(Format):
    """For the KV cache only; the scheme for weights with rounded activation rows is `bf16-a16`."""

    name = "bf16_a16"
    bits = 16
    weights = False
    kv_dtype = query_dtype = torch.bfloat16

    def encode_kv(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return x.bfloat16(), None

    def decode_kv(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        return codes.float()


FORMAT = Bf16Products()
