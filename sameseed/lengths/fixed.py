"""fixed: always as many tokens as asked for."""

from __future__ import annotations

from sameseed.spec.drafter import FixedLength

__all__ = ["POLICY", "FixedLength"]

POLICY = FixedLength
