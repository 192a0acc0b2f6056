"""Format fp8_e5m2: 8-bit floats, 5 exponent and 2 mantissa bits (at most 57344), scales as fp8_e4m3 has them."""

import torch

from sameseed.formats._fp8 import Float8

FORMAT = Float8("fp8_e5m2", torch.float8_e5m2)
