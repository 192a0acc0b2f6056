"""draft_model drafter (Leviathan et al., 2023; Chen et al., 2023): a smaller model drafts a chain of tokens.

It samples with the target's own noise (coupled sampling), so a draft token is accepted if both draw the same token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass

from sameseed.drafters._chains import Chain, ChainDrafter, ChainWriter, chain_lengths
from sameseed.drafters._followers import Following
from sameseed.request import Sequence
from sameseed.spec.draft import Draft, LateDraft
from sameseed.spec.drafter import Parts


class DraftModelDrafter(Following, ChainDrafter):
    """A second model with its own format and cache, in which a Shadow follows each sequence."""

    @dataclass(frozen=True)
    class Options(Following.Options, ChainDrafter.Options):
        """Those of a model, and siblings."""

    owns = "model"

    def __init__(self, options: Options, parts: Parts) -> None:
        super().__init__(options, parts)
        self.writer = ChainWriter(self.runner, self.policy, self.followers.vocab_limit, options.siblings)
        # What was drafted ahead, by sequence: the length of the text before it, and the chain, which the shadow holds.
        self._ready: dict[int, tuple[int, Chain]] = {}

    def propose(self, seqs: Seq[Sequence], num_draft: Seq[int]) -> Draft | LateDraft:
        """Chains for all sequences together, one pass of the draft model per token, with leaves for `siblings`."""
        followers, chains = self.followers, []
        num_nodes, num_draft = num_draft, chain_lengths(seqs, num_draft, self.options.siblings)
        for seq, num in zip(seqs, num_draft, strict=True):
            start, chain = self._ready.pop(seq.seq_id, (0, Chain()))
            chain.cut(num if start == len(seq) else 0)  # to none if the text went on differently
            chains.append(chain)
        active = followers.follow(seqs, num_draft, [len(c.tokens) for c in chains])
        for b in active:
            chains[b].cut(len(followers[seqs[b]]) - len(seqs[b]))  # to none if the shadow was cut back
        drafted = [c if b in active else Chain() for b, c in enumerate(chains)]
        return self.writer.draft({b: followers[seqs[b]] for b in active}, drafted, num_draft, num_nodes)

    def ahead(
        self, seqs: Seq[Sequence], draft: Draft, num_draft: Seq[int], going: Callable[[], bool]
    ) -> list[list[int]]:
        """After a full-length draft: predict the target's next token if all is accepted, and a chain after it."""
        blocks, guesses = self.runner.blocks, [Chain() for _ in seqs]
        if self.options.siblings:  # which path of a tree will be accepted is unknown
            return [[] for _ in seqs]
        # A draft that ended early is rarely accepted as a whole. Blocks are taken only if many are free.
        whole = [b for b, k in enumerate(num_draft) if 0 < k == draft.count(b)]
        shadows = {b: self.followers[seqs[b]] for b in whole}
        active = [
            b
            for b in whole
            if blocks.num_free * 4 >= blocks.num_blocks
            and blocks.reserve(shadows[b], min(len(shadows[b]) + num_draft[b] + 1, self.followers.limit))
        ]
        self.writer.extend([shadows[b] for b in active], [guesses[b] for b in active], [1] * len(active), going)
        ready = {b: (len(shadows[b]), Chain()) for b in active if guesses[b].tokens}
        chains, lengths = [chain for _, chain in ready.values()], [num_draft[b] for b in ready]
        self.writer.extend([shadows[b] for b in ready], chains, lengths, going)
        self._ready = {seqs[b].seq_id: r for b, r in ready.items()}
        return [c.tokens + (ready[b][1].tokens if b in ready else []) for b, c in enumerate(guesses)]

    def rewind(self, seq: Sequence, length: int) -> None:
        self._ready.pop(seq.seq_id, None)
        self.followers.rewind(seq, length)

    def release(self, seq: Sequence) -> None:
        self._ready.pop(seq.seq_id, None)
        self.followers.release(seq)


DRAFTER = DraftModelDrafter
