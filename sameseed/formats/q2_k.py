"""Format q2_k: 2-bit codes with small scales and minima for each 16 (llama.cpp's Q2_K)."""

from sameseed.formats._blocks import Blocks

FORMAT = Blocks("q2_k", bits=2, part=16)
