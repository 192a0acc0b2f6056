"""fixed: always the configured number of draft tokens; below another drafter, at most that number."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field

from sameseed.cost.running import EngineCost
from sameseed.request import Sequence
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import LengthPolicy, Round


@dataclass(frozen=True)
class FixedLength:
    """Always `num_draft_tokens`; 0 is plain decoding."""

    num_draft_tokens: int = 0

    @classmethod
    def build(cls, num_draft_tokens: int, confidence: float | None = None) -> FixedLength:
        """The policy for these settings."""
        return cls(num_draft_tokens)

    def calibrate(self, measure: Callable[[], EngineCost]) -> None:
        return None

    def lengths(
        self, seqs: Seq[Sequence], num_rows: int | None = None, budget: int | None = None, beside: int = 0
    ) -> list[int]:
        return [self.num_draft_tokens] * len(seqs)

    def update(self, round_: Round) -> None:
        return None

    def release(self, seq: Sequence) -> None:
        return None

    def recovers(self, seq: Sequence, unread: int, share: float = 1.0) -> bool:
        return True

    @property
    def uses_confidence(self) -> bool:
        return False

    @property
    def least_probability(self) -> float:
        return 0.0

    def ends(self, paths: Seq[Seq[float]]) -> bool:
        return False

    @property
    def trims(self) -> bool:
        return type(self).trim is not FixedLength.trim

    def trim(self, draft: Draft, seqs: Seq[Sequence], num_rows: int, members: Seq[int] | None = None) -> Draft:
        return draft


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
