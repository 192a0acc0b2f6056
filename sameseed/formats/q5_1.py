"""Format q5_1: 5-bit codes with a scale and a minimum for each 32 (llama.cpp's Q5_1)."""

from __future__ import annotations

from sameseed.formats._block32 import Block32


class Q51(Block32):
    """Codes 0..31."""

    name = "q5_1"
    bits = 5
    scale_parts = ("least", "scales")


FORMAT = Q51()
