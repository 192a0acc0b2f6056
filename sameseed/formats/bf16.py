"""Format bf16: bfloat16 (8 exponent bits, 7 of mantissa), rounded to nearest even."""

from __future__ import annotations

import torch

from sameseed.formats._dense import Dense

FORMAT = Dense("bf16", torch.bfloat16)
