"""Format q4_k: 4-bit codes with 6-bit scales and minima for each 32 (llama.cpp's Q4_K)."""

from __future__ import annotations

from sameseed.formats._kquant import KQuant


class Q4K(KQuant):
    """Codes 0..15; steps and minima 0..63."""

    name = "q4_k"
    bits = 4


FORMAT = Q4K()
