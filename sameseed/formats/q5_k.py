"""Format q5_k: 5-bit codes with 6-bit scales and minima for each 32 (llama.cpp's Q5_K)."""

from __future__ import annotations

from sameseed.formats._kquant import KQuant


class Q5K(KQuant):
    """Codes 0..31; steps and minima 0..63."""

    name = "q5_k"
    bits = 5


FORMAT = Q5K()
