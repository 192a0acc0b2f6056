"""Format q6_k: 6-bit codes with an 8-bit scale for each 16 (llama.cpp's Q6_K)."""

from sameseed.formats._blocks import Blocks

FORMAT = Blocks("q6_k", bits=6, part=16, zero=32)
