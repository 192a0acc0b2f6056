"""Format q4_1: 4-bit codes with a scale and a minimum for each 32 (llama.cpp's Q4_1)."""

from sameseed.formats._blocks import Blocks

FORMAT = Blocks("q4_1", bits=4)
