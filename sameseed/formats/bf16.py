"""Format bf16: bfloat16 (8 exponent bits, 7 of mantissa), rounded to nearest even.

Activation rows x stay float32; with the scheme bf16-a16 they are rounded to bf16 too.
"""

import torch

from sameseed.formats._dense import Dense

FORMAT = Dense("bf16", torch.bfloat16, "activations-bf16")
