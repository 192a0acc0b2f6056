"""Format int8_a8: the KV cache in int8, its products with int8 queries and 16-bit softmax weights, all integers.

The counterpart of the weight scheme w8a8 for the KV cache. Rows are stored as in `int8`. Scaled queries are quantized
to int8 by row and head, like activation rows. Softmax weights are quantized to 16 bits by query and block of keys
before the product with the values; their sum is not quantized. After SageAttention (Zhang et al., 2025), but here each
scale belongs to one row.
"""

import torch

from sameseed.formats import int8
from sameseed.scheme import Cached

FORMAT = Cached("int8_a8", int8.FORMAT, query_dtype=torch.int8)
