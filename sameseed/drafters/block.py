"""block drafter (DFlash: Chen et al., 2026): a head reads the target's hidden states and drafts a chain in one pass.

The pass reads the last known token and mask tokens, which attend to keys and values made from the target's hidden
states. An optional Markov head adds a bias to each position's logits, given the token chosen before it (DSpark:
DeepSeek-AI, 2026); so does the selector of DFlash2, to those of the likeliest tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import torch

from sameseed.drafters._chains import Chain, ChainDrafter, chain_lengths, draft_of, lengthen
from sameseed.drafters._eagle_context import Reading
from sameseed.models.block import BlockRunner
from sameseed.request import Sequence
from sameseed.spec.draft import Draft


class BlockDrafter(Reading, ChainDrafter):
    """A block head with its own format and cache; the whole block is run for any number of draft tokens."""

    @dataclass(frozen=True)
    class Options(Reading.Options, ChainDrafter.Options):
        """Those of a head, and siblings."""

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
                self._guess([seqs[b] for b in ready], [chains[b] for b in ready], [lengths[b] for b in ready])
        return draft_of(chains, num_draft, self.policy.uses_confidence, siblings)

    def _guess(self, seqs: Seq[Sequence], chains: Seq[Chain], counts: Seq[int]) -> None:
        """Read the last tokens, run all blocks, and choose the chains' tokens from the logits, position by position."""
        model, read = self.runner.model, self.guesses.rows
        self.followers.last(seqs)
        holders = [self.followers[seq].holder for seq in seqs]
        logits, gates = self.runner.guess(holders, [s.token_ids[-1] for s in seqs], counts)
        rows, gate = read(logits), None if gates is None else read(gates)
        first = [0, *accumulate(counts)]  # the row of each sequence's first logits
        for place in range(max(counts)):
            active = [i for i, chain in enumerate(chains) if place < counts[i] and not chain.ended]
            if not active:
                return
            before = [(chains[i].tokens or seqs[i].token_ids)[-1] for i in active]
            bias = None  # of the Markov head, to the logits [n, Vd]
            if model.weights.markov is not None:
                bias = read(model.bias(torch.tensor(before, dtype=torch.int32, device=model.device)))
            for n, i in enumerate(active):
                row = rows[first[i] + place] if bias is None else rows[first[i] + place] + bias[n]
                if gate is not None:
                    row = model.selected(row, before[n], gate[first[i] + place])
                least = self.policy.least_probability
                lengthen(chains[i], self.guesses, row, seqs[i], 1 + self.options.siblings, least)


DRAFTER = BlockDrafter
