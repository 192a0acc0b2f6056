"""Format q5_k: 5-bit codes with 6-bit scales and minima for each 32 (llama.cpp's Q5_K)."""

from sameseed.formats._blocks import Blocks

FORMAT = Blocks("q5_k", bits=5, part=32)
