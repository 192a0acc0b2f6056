"""Formats of the KV cache, as oracles for the codes and scales that kernels store and read.

The formats themselves are held to their definitions in contract/test_formats.py and unit/formats.
"""

from functools import cache

import torch

from sameseed import scheme

LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
KV_FORMATS = sorted(["fp32", "bf16", "fp16", *LARGEST])


class KvOracle:
    """How one format stores rows of the KV cache."""

    def __init__(self, name):
        self.format = scheme.kv_format(name)
        self.name, self.kv_dtype = name, self.format.kv_dtype
        self.scaled = self.format.encode_kv(torch.zeros(1, 1, 2, device="cpu"))[1] is not None
        self.encode_kv, self.decode_kv = self.format.encode_kv, self.format.decode_kv

    def width(self, dim):
        """The number of elements that a row of `dim` values takes."""
        return self.encode_kv(torch.zeros(1, 1, dim, device="cpu"))[0].shape[-1]


kv_oracle = cache(KvOracle)
