"""block drafter (DFlash: Chen et al., 2026): a head reads the target's hidden states and drafts a chain in one pass.

The pass reads the last known token and mask tokens, which attend to keys and values made from the target's hidden
states. An optional Markov head adds a bias to each position's logits, given the token chosen before it (DSpark:
DeepSeek-AI, 2026); so does the selector of DFlash2, to those of the likeliest tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sameseed.drafters._chains import Chain, ChainDrafter, chain_lengths, draft_of, lengthen
from sameseed.drafters._eagle_context import Reading
from sameseed.drafters._followers import PREFILL
from sameseed.drafters._vocabulary import VOCABULARY
from sameseed.fields import setting, within
from sameseed.models.block import BlockRunner
from sameseed.request import Sequence
from sameseed.spec.draft import Draft


class BlockDrafter(Reading, ChainDrafter):
    """A block head with its own format and cache, which follows each sequence by the target's hidden states.

    The whole block is run for any number of draft tokens, so a short draft is the beginning of a longer one.
    """

    @dataclass(frozen=True)
    class Options(ChainDrafter.Options):
        vocabulary: str = setting("", VOCABULARY)
        prefill_rows: int = within(512, 1, help=PREFILL)

    at_once = True
    kind = BlockRunner

    @property
    def limit(self) -> int:
        return self.followers.limit + 2  # the last known token has no row of its own

    def propose(self, seqs: Seq[Sequence], num_draft: Seq[int]) -> Draft:
        """Chains for all sequences from one pass, with leaves if the option `siblings` is set."""
        siblings = self.options.siblings
        lengths = self._heed_most(chain_lengths(seqs, num_draft, siblings), self.runner.model.config.num_guesses)
        chains, size = [Chain() for _ in seqs], self.runner.model.config.block_size
        with self.followers.drafting(seqs, [min(n, 1) for n in lengths], lambda *_: size) as ready:
            if ready:
                self._guess([_GrowingBlock(seqs[b], lengths[b], chains[b]) for b in ready])
        return draft_of(chains, num_draft, self.policy.uses_confidence, siblings)

    def _guess(self, growing: Seq[_GrowingBlock]) -> None:
        """Read the last tokens, run all blocks, and choose the chains' tokens from the logits, position by position."""
        seqs = [g.seq for g in growing]
        self.followers.last(seqs)
        counts = [g.count for g in growing]
        holders = [self.followers[seq].holder for seq in seqs]
        logits, gates = self.runner.guess(holders, [s.token_ids[-1] for s in seqs], counts)
        rows = self.guesses.rows(logits)
        gate = None if gates is None else self.guesses.rows(gates)
        ends = np.cumsum(counts)
        for g, end in zip(growing, ends.tolist(), strict=True):
            g.first = end - g.count
        has_bias = self.runner.model.weights.markov is not None
        for place in range(max(counts)):
            active = [g for g in growing if place < g.count and not g.chain.ended]
            if not active:
                return
            bias = self._bias(active) if has_bias else None
            for i, g in enumerate(active):
                row = rows[g.first + place]
                row = row if bias is None else row + bias[i]
                if gate is not None:
                    row = self.runner.model.selected(row, g.last, gate[g.first + place])
                lengthen(g.chain, self.guesses, row, g.seq, 1 + self.options.siblings, self.policy.least_probability)

    def _bias(self, active: Seq[_GrowingBlock]) -> NDArray[np.float32]:
        """The Markov head's bias to the logits [n, Vd], given the last token of each chain."""
        model, last = self.runner.model, [g.last for g in active]
        return self.guesses.rows(model.bias(torch.tensor(last, dtype=torch.int32, device=model.device)))


@dataclass
class _GrowingBlock:
    """One sequence's chain while it is drafted, up to `count` tokens; `first`: the row of its first logits."""

    seq: Sequence
    count: int
    chain: Chain
    first: int = 0

    @property
    def last(self) -> int:
        """The token before the next one."""
        return self.chain.tokens[-1] if self.chain.tokens else self.seq.token_ids[-1]


DRAFTER = BlockDrafter
