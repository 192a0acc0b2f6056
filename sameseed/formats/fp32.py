"""Format fp32: 32-bit floats, as they are."""

import torch

from sameseed.formats._dense import Dense

FORMAT = Dense("fp32", torch.float32)
