"""Quantizer rtn: round to nearest, with the format's default scales. Needs no calibration."""

from __future__ import annotations

from sameseed.quantize import Quantizer


class Rtn(Quantizer):
    """Rounds as loading a model with `--format` does."""

    rounds = True


METHOD = Rtn
