"""Format q4_k: 4-bit codes with 6-bit scales and minima for each 32 (llama.cpp's Q4_K)."""

from sameseed.formats._blocks import Blocks

FORMAT = Blocks("q4_k", bits=4, part=32)
