"""Format q4_1: 4-bit codes with a scale and a minimum for each 32 (llama.cpp's Q4_1)."""

from __future__ import annotations

from sameseed.formats._block32 import Block32


class Q41(Block32):
    """Codes 0..15."""

    name = "q4_1"
    bits = 4
    scale_parts = ("least", "scales")


FORMAT = Q41()
