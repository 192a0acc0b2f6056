"""history: drafts get longer after fully accepted drafts, and shorter after others."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import ClassVar

from sameseed.lengths.confidence import ConfidenceLength
from sameseed.request import Sequence
from sameseed.spec.drafter import Round


class HistoryLength(ConfidenceLength):
    """A length per request: two tokens more after a fully accepted draft, one less after any other draft.

    The length starts at `START` and stays in 1..num_draft_tokens. No times are measured (the heuristic schedule of
    assisted generation in transformers: Gante, 2023). For chains only: a tree with branches is never fully accepted.
    """

    START: ClassVar[int] = 4

    def __init__(self, num_draft_tokens: int, threshold: float = 0.0) -> None:
        super().__init__(num_draft_tokens, threshold)
        self._next: dict[int, int] = {}

    @property
    def uses_confidence(self) -> bool:
        return self.threshold > 0

    def lengths(
        self, seqs: Seq[Sequence], num_rows: int | None = None, budget: int | None = None, beside: int = 0
    ) -> list[int]:
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
