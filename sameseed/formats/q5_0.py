"""Format q5_0: 5-bit codes with a scale for each 32 (llama.cpp's Q5_0)."""

from __future__ import annotations

from sameseed.formats._block32 import Block32


class Q50(Block32):
    """Codes 0..31 with the zero point 16."""

    name = "q5_0"
    bits = 5
    zero = 16


FORMAT = Q50()
