"""Format bf16: bfloat16 (8 exponent bits, 7 of mantissa), rounded to nearest even.

Rows of x stay float32, or are rounded too where the scheme asks for bf16 activations (bf16-a16).
"""

from __future__ import annotations

import torch

from sameseed.formats._dense import Dense

FORMAT = Dense("bf16", torch.bfloat16, "activations-bf16")
