"""Format q5_0: 5-bit codes with a scale for each 32 (llama.cpp's Q5_0)."""

from sameseed.formats._blocks import Blocks

FORMAT = Blocks("q5_0", bits=5, zero=16)
