"""fixed: always the configured number of draft tokens; below another drafter, at most that number."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field

from sameseed.cost.running import EngineCost
from sameseed.spec.drafter import LengthPolicy


@dataclass(frozen=True)
class FixedLength(LengthPolicy):
    """Always `num_draft_tokens`; 0 is plain decoding."""

    num_draft_tokens: int = 0

    @classmethod
    def build(cls, num_draft_tokens: int, confidence: float | None = None) -> FixedLength:
        """The policy for these settings."""
        return cls(num_draft_tokens)


@dataclass(frozen=True)
class CappedLength(FixedLength):
    """At most `num_draft_tokens` per draft; `policy` may end a draft earlier. For drafters below another drafter."""

    policy: LengthPolicy = field(default_factory=FixedLength)

    def calibrate(self, measure: Callable[[], EngineCost]) -> None:
        self.policy.calibrate(measure)

    @property
    def uses_confidence(self) -> bool:
        return self.policy.uses_confidence

    @property
    def least_probability(self) -> float:
        return self.policy.least_probability

    def ends(self, paths: Seq[Seq[float]]) -> bool:
        return self.policy.ends(paths)


POLICY = FixedLength
