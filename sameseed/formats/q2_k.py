"""Format q2_k: 2-bit codes with small scales and minima for each 16 (llama.cpp's Q2_K)."""

from __future__ import annotations

from sameseed.formats._kquant import KQuant


class Q2K(KQuant):
    """Codes 0..3. Steps and minima have 4 bits in llama.cpp's files, and 6 bits in weights encoded here."""

    name = "q2_k"
    bits = 2
    part = 16


FORMAT = Q2K()
