"""Format q6_k: 6-bit codes with an 8-bit scale for each 16 (llama.cpp's Q6_K)."""

from __future__ import annotations

from sameseed.formats._kquant import KQuant


class Q6K(KQuant):
    """Codes 0..63 with the zero point 32; steps may be negative."""

    name = "q6_k"
    bits = 6
    part = 16
    zero = 32
    scale_parts = ("scales",)


FORMAT = Q6K()
