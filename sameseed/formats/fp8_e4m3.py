"""Format fp8_e4m3: 8-bit floats, 4 exponent and 3 mantissa bits (at most 448), a scale per row or token and head."""

import torch

from sameseed.formats._fp8 import Float8

FORMAT = Float8("fp8_e4m3", torch.float8_e4m3fn)
