"""Format bf16_a16: the KV cache in bf16, its products with queries and softmax weights that are rounded to bf16 too.

The counterpart of the weight scheme bf16-a16 for the KV cache. Rows are stored as in `bf16`. Scaled queries are rounded
to bf16. Softmax weights are rounded to bf16, in blocks of keys, before the product with the values; their sum is not
rounded.
"""

import torch

from sameseed.formats import bf16
from sameseed.scheme import Cached

FORMAT = Cached("bf16_a16", bf16.FORMAT, query_dtype=torch.bfloat16)
