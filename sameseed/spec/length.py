"""Length policies: how many tokens a drafter may guess for each sequence, and when it should stop by itself.

Any rule is lossless here: acceptance never looks at why a draft ended.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from sameseed.request import Sequence, TimeSplit
from sameseed.spec.draft import Draft


@dataclass(frozen=True)
class Round:
    """What one pass brought: for each sequence the draft tokens that were asked for, guessed, and right.

    `num_rows`: of the target's pass; `times`: seconds of its stages, or None where nobody looked;
    `nodes`: the accepted path of each, or None where drafts are chains.
    """

    seqs: Seq[Sequence]
    num_asked: Seq[int]
    num_draft: Seq[int]
    num_accepted: Seq[int]
    num_rows: int = 0
    times: TimeSplit | None = None
    nodes: Seq[Seq[int]] | None = None


class Trims(Protocol):
    """Who may drop nodes of a draft before it is checked."""

    def trim(self, draft: Draft, seqs: Seq[Sequence], num_rows: int, members: Seq[int] | None = None) -> Draft:
        """The draft, maybe with fewer nodes. `num_rows`: of known tokens in the pass.

        Only drafts of `members` (indices of sequences; None: of all) may lose nodes.
        """


class LengthPolicy(Trims, Protocol):
    """Decides draft lengths from what happened so far."""

    def lengths(self, seqs: Seq[Sequence], num_rows: int | None = None, budget: int | None = None) -> list[int]:
        """The most tokens to draft for each sequence in the next round; 0 for none.

        `num_rows`: of known tokens in the pass, of all its sequences; `budget`: draft tokens that it has room for.
        """

    def update(self, round_: Round) -> None:
        """What the round brought."""

    def release(self, seq: Sequence) -> None:
        """The sequence is gone: forget it."""

    @property
    def uses_confidence(self) -> bool:
        """Does `stop` look at the probability (so that a drafter must compute it)?"""

    def stop(self, confidence: float) -> bool:
        """Should a draft end after a token to which the drafter gave this probability?"""

    def ends(self, paths: Seq[Seq[float]]) -> bool:
        """Should chains that grow together all end? `paths`: of each, its probability up to each of its tokens."""


@dataclass(frozen=True)
class FixedLength:
    """Always `num_draft_tokens`; 0 is plain decoding."""

    num_draft_tokens: int = 0

    def lengths(self, seqs: Seq[Sequence], num_rows: int | None = None, budget: int | None = None) -> list[int]:
        return [self.num_draft_tokens] * len(seqs)

    def update(self, round_: Round) -> None:
        return None

    def release(self, seq: Sequence) -> None:
        return None

    @property
    def uses_confidence(self) -> bool:
        return False

    def stop(self, confidence: float) -> bool:
        return False

    def ends(self, paths: Seq[Seq[float]]) -> bool:
        return False

    def trim(self, draft: Draft, seqs: Seq[Sequence], num_rows: int, members: Seq[int] | None = None) -> Draft:
        return draft


@dataclass(frozen=True)
class ConfidenceLength(FixedLength):
    """At most `num_draft_tokens`, ending with the first token whose draft probability is below `threshold`."""

    threshold: float = 0.0

    @property
    def uses_confidence(self) -> bool:
        return True

    def stop(self, confidence: float) -> bool:
        return confidence < self.threshold


@dataclass(frozen=True)
class HistoryLength(ConfidenceLength):
    """Each request's own length: two tokens more after a draft that was right to its end, one less after any other.

    It begins with `START` tokens, never leaves 1..num_draft_tokens, and needs no clock (the heuristic schedule of
    assisted generation in transformers: Gante, 2023). For chains: a tree with branches is never right as a whole.
    """

    START: ClassVar[int] = 4
    _next: dict[int, int] = field(default_factory=dict, compare=False)

    @property
    def uses_confidence(self) -> bool:
        return self.threshold > 0

    def lengths(self, seqs: Seq[Sequence], num_rows: int | None = None, budget: int | None = None) -> list[int]:
        return [self._next.get(seq.seq_id, min(self.START, self.num_draft_tokens)) for seq in seqs]

    def update(self, round_: Round) -> None:
        for seq, asked, drafted, accepted in zip(
            round_.seqs, round_.num_asked, round_.num_draft, round_.num_accepted, strict=True
        ):
            if drafted:
                now = asked + 2 if accepted == drafted else asked - 1
                self._next[seq.seq_id] = max(1, min(now, self.num_draft_tokens))

    def release(self, seq: Sequence) -> None:
        self._next.pop(seq.seq_id, None)


@dataclass(frozen=True)
class CappedLength(FixedLength):
    """Another policy's judgement of tokens, at most `num_draft_tokens`: for a drafter that serves a larger one."""

    policy: LengthPolicy = FixedLength()

    @property
    def uses_confidence(self) -> bool:
        return self.policy.uses_confidence

    def stop(self, confidence: float) -> bool:
        return self.policy.stop(confidence)

    def ends(self, paths: Seq[Seq[float]]) -> bool:
        return self.policy.ends(paths)
