"""disco: a draft ends when the whole draft is no longer likely to be accepted (DISCO: Mamou et al., 2024).

DISCO uses a classifier, trained beforehand, on the draft model's probabilities and the position in the draft. Here the
acceptance rates of tokens with similar probability are learned while decoding (`_acceptance.py`). The policy measures
no times and ignores costs; `goodput` considers them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from sameseed.lengths._acceptance import Acceptance, DraftNodes
from sameseed.lengths.fixed import FixedLength
from sameseed.request import Sequence
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Round

LIKELY = 0.3  # SpecDec++ (Huang et al., 2024) stops when some token is rejected with probability 0.7


class DiscoLength(FixedLength):
    """Ends a draft after the first token whose path is accepted with a probability below `threshold`, 0..1.

    A draft has at least one token and at most `num_draft_tokens`. If a drafter gives no probabilities, acceptance rates
    are kept by position.
    """

    uses_confidence = trims = True

    def __init__(self, num_draft_tokens: int, threshold: float = LIKELY) -> None:
        super().__init__(num_draft_tokens)
        self.threshold = threshold
        self.acceptance = Acceptance(max(1, num_draft_tokens))
        self._nodes: dict[int, DraftNodes] = {}  # drafts of the current round, by request id

    @classmethod
    def build(cls, num_draft_tokens: int, confidence: float | None = None) -> DiscoLength:
        """The policy for these settings."""
        return cls(num_draft_tokens, LIKELY if confidence is None else confidence)

    def lengths(
        self, seqs: Seq[Sequence], num_rows: int | None = None, budget: int | None = None, beside: int = 0
    ) -> list[int]:
        """The maximum if the drafter gives probabilities (drafts are cut later); else up to an unlikely position."""
        if self.acceptance.tells or not self.num_draft_tokens:
            return [self.num_draft_tokens] * len(seqs)
        chain = range(-1, self.num_draft_tokens - 1)
        return [len(self._kept(DraftNodes(chain, None, self.acceptance.rates(seq.seq_id)))) for seq in seqs]

    def _kept(self, nodes: DraftNodes) -> list[int]:
        """Nodes whose parents are likely enough. The first unlikely node of a path is kept, to learn its rate too."""
        return [i for i, p in enumerate(nodes.parents) if p < 0 or nodes.likely[p] >= self.threshold]

    def ends(self, paths: Seq[Seq[float]]) -> bool:
        """True if all of these chains have become too unlikely."""
        rates = self.acceptance.rates(-1)
        return all(DraftNodes(range(-1, len(p) - 1), p, rates).likely[-1] < self.threshold for p in paths)

    def trim(self, draft: Draft, seqs: Seq[Sequence], num_rows: int, members: Seq[int] | None = None) -> Draft:
        """The draft without the descendants of nodes that are too unlikely, for sequences `members` (None: all)."""
        self._nodes = self.acceptance.read(draft, seqs)
        keep: list[list[int] | None] = [None] * len(seqs)
        for b in range(len(seqs)) if members is None else members:
            nodes = self._nodes.get(seqs[b].seq_id)
            if nodes is not None and len(kept := self._kept(nodes)) < len(nodes.parents):
                keep[b], self._nodes[seqs[b].seq_id] = kept, nodes.kept(kept)
        return draft if all(k is None for k in keep) else draft.kept(keep)

    def update(self, round_: Round) -> None:
        self.acceptance.learn_round(round_, self._nodes)
        self._nodes = {}

    def release(self, seq: Sequence) -> None:
        self.acceptance.release(seq.seq_id)
        self._nodes.pop(seq.seq_id, None)


POLICY = DiscoLength
