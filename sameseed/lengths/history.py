"""history: longer drafts after those that were right to their end, shorter ones after others."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import ClassVar

from sameseed.lengths.confidence import ConfidenceLength
from sameseed.request import Sequence
from sameseed.spec.drafter import Round


class HistoryLength(ConfidenceLength):
    """Each request's own length: two tokens more after a draft that was right to its end, one less after any other.

    It begins with `START` tokens, never leaves 1..num_draft_tokens, and needs no clock (the heuristic schedule of
    assisted generation in transformers: Gante, 2023). For chains: a tree with branches is never right as a whole.
    """

    START: ClassVar[int] = 4

    def __init__(self, num_draft_tokens: int, threshold: float = 0.0) -> None:
        super().__init__(num_draft_tokens, threshold)
        self._next: dict[int, int] = {}

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


POLICY = HistoryLength
