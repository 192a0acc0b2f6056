"""Format fp16: IEEE half precision, rounded to nearest even."""

import torch

from sameseed.formats._dense import Dense

FORMAT = Dense("fp16", torch.float16)
