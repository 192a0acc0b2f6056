"""parallel drafter (PARD: An et al., 2025): a small model drafts a whole chain in one pass, over mask tokens.

The pass reads the tokens that became certain since the last one, then a mask token for each draft token but the first.
The masks' rows are dropped: the next pass reads accepted tokens as themselves.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from sameseed.batch import MAX_NODES
from sameseed.drafters._chains import Chain, ChainDrafter, chain_lengths, draft_of, reading
from sameseed.drafters._followers import Following
from sameseed.errors import ConfigError
from sameseed.fields import setting
from sameseed.request import Sequence
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Parts
from sameseed.spec.sampling import drawer


class ParallelDrafter(Following, ChainDrafter):
    """A model trained to predict at mask tokens, with its own format and cache; a Shadow follows each sequence."""

    @dataclass(frozen=True)
    class Options(Following.Options, ChainDrafter.Options):
        mask_token: int = setting(-1, "the id that stands for a token not known yet; -1: as config.json says")

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
            self._draft(shadows, [chains[b] for b in active], [counts[b] for b in active])
        return draft_of(chains, num_draft, self.policy.uses_confidence, self.options.siblings)

    def _draft(self, shadows: Seq[Sequence], chains: Seq[Chain], counts: Seq[int]) -> None:
        """Append the model's choices after each sequence's last token, and after each of its masks, to `chains`."""
        siblings, policy, eos = self.options.siblings, self.policy, self.runner.model.config.eos_token_ids
        alone = not siblings and not policy.uses_confidence
        num_pending = [s.num_pending for s in shadows]
        masks = Draft.chains([[self.mask] * (n - 1) for n in counts])
        out = self.runner.forward(shadows, masks, num_pending, drawer=drawer if alone else None)
        self.runner.commit(shadows, num_pending, [[] for _ in shadows], out)  # no mask's row is kept
        find = reading(out, masks, shadows, eos, siblings, policy.uses_confidence)
        row = 0
        for b, (shadow, chain, count) in enumerate(zip(shadows, chains, counts, strict=True)):
            found = (find(b, row + i, chain.tokens) for i in range(count))
            chain.extend(found, policy.least_probability, self.followers.vocab_limit, shadow.params.ending(eos))
            row += count


DRAFTER = ParallelDrafter
