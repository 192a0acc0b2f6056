"""What another policy decides, within a cap."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field

from sameseed.lengths._cost import EngineCost
from sameseed.lengths.fixed import FixedLength
from sameseed.spec.drafter import LengthPolicy


@dataclass(frozen=True)
class CappedLength(FixedLength):
    """Another policy's judgement of tokens, at most `num_draft_tokens`: for a drafter that serves a larger one."""

    policy: LengthPolicy = field(default_factory=FixedLength)

    def calibrate(self, measure: Callable[[], EngineCost]) -> None:
        self.policy.calibrate(measure)

    @property
    def uses_confidence(self) -> bool:
        return self.policy.uses_confidence

    def stop(self, confidence: float) -> bool:
        return self.policy.stop(confidence)

    def ends(self, paths: Seq[Seq[float]]) -> bool:
        return self.policy.ends(paths)
