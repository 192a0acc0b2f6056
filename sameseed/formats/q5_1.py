"""Format q5_1: 5-bit codes with a scale and a minimum for each 32 (llama.cpp's Q5_1)."""

from sameseed.formats._blocks import Blocks

FORMAT = Blocks("q5_1", bits=5)
