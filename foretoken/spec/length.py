"""Length policies: how many tokens a drafter may guess for each sequence, and when it should stop by itself.

Any rule is lossless here: acceptance never looks at why a draft ended.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from foretoken.config import SpecConfig
from foretoken.request import Sequence


class LengthPolicy(Protocol):
    """Decides draft lengths from what happened so far."""

    def lengths(self, seqs: Seq[Sequence]) -> list[int]:
        """The most tokens to draft for each sequence in the next round; 0 for none."""

    def update(self, seqs: Seq[Sequence], num_draft: Seq[int], num_accepted: Seq[int]) -> None:
        """What the round brought."""

    @property
    def uses_confidence(self) -> bool:
        """Does `stop` look at the probability (so that a drafter must compute it)?"""

    def stop(self, confidence: float) -> bool:
        """Should a draft end after a token to which the drafter gave this probability?"""


@dataclass(frozen=True)
class FixedLength:
    """Always `num_draft_tokens`; 0 is plain decoding."""

    num_draft_tokens: int = 0

    def lengths(self, seqs: Seq[Sequence]) -> list[int]:
        return [self.num_draft_tokens] * len(seqs)

    def update(self, seqs: Seq[Sequence], num_draft: Seq[int], num_accepted: Seq[int]) -> None:
        return None

    @property
    def uses_confidence(self) -> bool:
        return False

    def stop(self, confidence: float) -> bool:
        return False


@dataclass(frozen=True)
class ConfidenceLength(FixedLength):
    """At most `num_draft_tokens`, ending with the first token whose draft probability is below `threshold`."""

    threshold: float = 0.0

    @property
    def uses_confidence(self) -> bool:
        return True

    def stop(self, confidence: float) -> bool:
        return confidence < self.threshold


def make_policy(spec: SpecConfig) -> LengthPolicy:
    """The policy that a SpecConfig asks for."""
    if spec.method == "none":
        return FixedLength(0)
    if spec.confidence is None:
        return FixedLength(spec.num_draft_tokens)
    return ConfidenceLength(spec.num_draft_tokens, spec.confidence)
