"""parallel drafter (PARD: An et al., 2025): a small model drafts a whole chain in one pass, over mask tokens.

Its pass reads the tokens that became certain since the last pass, then a mask token for each draft token but the first.
The masks' rows are dropped after the pass. The next pass reads accepted tokens as themselves, so that the cache is the
same as after a fresh prefill.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from sameseed.batch import MAX_NODES
from sameseed.drafters._chains import Chain, ChainDrafter, chain_lengths, draft_of, likely_after
from sameseed.drafters._followers import Following
from sameseed.errors import ConfigError
from sameseed.fields import within
from sameseed.request import Sequence
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Parts
from sameseed.spec.sampling import drawable, drawer
from sameseed.spec.verify import on_host


class ParallelDrafter(Following, ChainDrafter):
    """A model trained to predict at mask tokens, with its own format and cache; a Shadow follows each sequence.

    A draft of k tokens takes one pass over k rows, besides rows of tokens not read yet. Drafts may end before k tokens.
    """

    @dataclass(frozen=True)
    class Options(ChainDrafter.Options):
        """Options of the parallel drafter.

        `mask_token`: the id that stands for a token not known yet (-1: as the model's config.json says).
        `prefill_rows`: the most rows of one catch-up pass over a prompt. `vocabulary`: the tokens that the model may
        draft, if not all: a number (the first ids), or a file of ids (JSON or one per line), as `sameseed vocabulary`
        makes; fewer cost less. `siblings`: how many other likely tokens may join the chain at each position, as leaves
        of a tree; `--k` then counts nodes.
        """

        mask_token: int = -1
        prefill_rows: int = within(512, 1)
        vocabulary: str = ""

    owns = "model"
    at_once = True

    def __init__(self, options: Options, parts: Parts) -> None:
        """Raises ConfigError for a model without a mask token."""
        super().__init__(options, parts)
        config = self.runner.model.config
        mask = config.mask_token if options.mask_token < 0 else options.mask_token
        if mask is None or mask >= config.vocab_size:
            said = "names no mask token" if mask is None else f"has {config.vocab_size} tokens, no mask_token {mask}"
            raise ConfigError(
                f"drafter 'parallel': the model {said}; take one trained for parallel drafting (sameseed train draft "
                "--parallel 8), or name the id that it was trained with: --draft-options '{\"mask_token\": ID}'"
            )
        self.mask = mask
        self.most = min(config.num_parallel or MAX_NODES, MAX_NODES)

    def propose(self, seqs: Seq[Sequence], num_draft: Seq[int]) -> Draft:
        """Chains for all sequences from one pass, with leaves if the option `siblings` is set."""
        lengths = self._heed_most(chain_lengths(seqs, num_draft, self.options.siblings), self.most)
        counts = [max(0, min(k, self.limit - len(seq))) for seq, k in zip(seqs, lengths, strict=True)]
        chains = [Chain() for _ in seqs]
        active = self.followers.follow(seqs, counts)
        if active:
            shadows = [self.followers[seqs[b]] for b in active]
            table, choices = self._logits(shadows, [counts[b] for b in active])
            row = 0
            for b, shadow in zip(active, shadows, strict=True):
                end = row + counts[b]
                drawn = choices[row:end] if choices is not None and drawable(shadow) else None
                self._read(chains[b], table[row:end], shadow, drawn)
                row = end
        return draft_of(chains, num_draft, self.policy.uses_confidence, self.options.siblings)

    def _logits(self, shadows: Seq[Sequence], counts: Seq[int]) -> tuple[Any, list[int] | None]:
        """Logits float32 [sum of counts, V]: per sequence, after its last token, then after each of its masks.

        Also returns the tokens chosen there, if the backend chose them.
        """
        alone = not self.options.siblings and not self.policy.uses_confidence
        num_pending = [s.num_pending for s in shadows]
        masks = Draft.chains([[self.mask] * (n - 1) for n in counts])
        out = self.runner.forward(shadows, masks, num_pending, drawer=drawer if alone else None)
        self.runner.commit(shadows, num_pending, [[] for _ in shadows], out)  # no mask's row is kept
        drawn = [out.choices is not None and drawable(s) for s in shadows]
        return on_host(out.logits, masks, out.wants_logits, drawn), out.choices

    def _read(self, chain: Chain, table: Any, seq: Sequence, drawn: Seq[int] | None) -> None:
        """Append the model's choice at each position to `chain`, with the target's own noise (coupled sampling).

        The chain ends early if the policy says so, and before a token that the target does not have.
        """
        eos, options, policy = self.runner.model.config.eos_token_ids, self.options, self.policy
        for i, row in enumerate(table):
            if drawn is None:
                found = likely_after(row, seq, chain.tokens, eos, options.siblings, policy.uses_confidence)
            else:
                found = [(drawn[i], 1.0)]
            chain.grow(found, policy, self.followers.vocab_limit)
            if chain.ended:
                return


DRAFTER = ParallelDrafter
