"""Quantizer rtn: round to nearest, with the scales that the format takes by itself. Needs no calibration."""

from __future__ import annotations

from sameseed.quantize import Quantizer


class Rtn(Quantizer):
    """What loading with `--format` does."""

    rounds = True


METHOD = Rtn
