"""Format fp32: 32-bit floats, as they are."""

from __future__ import annotations

import torch

from sameseed.formats._dense import Dense

FORMAT = Dense("fp32", torch.float32)
