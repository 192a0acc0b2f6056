"""confidence: a draft ends with the first token whose draft probability is below a threshold."""

from __future__ import annotations

from dataclasses import dataclass

from sameseed.lengths.fixed import FixedLength


@dataclass(frozen=True)
class ConfidenceLength(FixedLength):
    """At most `num_draft_tokens`, ending with the first token whose draft probability is below `threshold`."""

    threshold: float = 0.0

    @classmethod
    def build(cls, num_draft_tokens: int, confidence: float | None = None) -> ConfidenceLength:
        """The policy for these settings."""
        return cls(num_draft_tokens, confidence or 0.0)

    @property
    def uses_confidence(self) -> bool:
        return True

    @property
    def least_probability(self) -> float:
        return self.threshold


POLICY = ConfidenceLength
