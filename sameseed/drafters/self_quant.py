"""self_quant drafter: the target's own weights in a lower precision draft a chain (QSpec: Zhao et al., 2024).

The drafter reads the target's own cache, and writes rows of its own for tokens that the target has not verified yet,
which the target's pass overwrites before it reads them. It may attend to the first tokens and the latest ones only
(StreamingLLM: Xiao et al., 2024; for drafting, MagicDec: Chen et al., 2024, and TriForce: Sun et al., 2024).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from sameseed.drafters._chains import Chain, ChainDrafter, ChainWriter, chain_lengths
from sameseed.drafters._followers import Guide
from sameseed.drafters._vocabulary import Reducible
from sameseed.fields import within
from sameseed.request import Sequence
from sameseed.spec.draft import Draft, LateDraft
from sameseed.spec.drafter import Parts


class SelfQuantDrafter(Reducible, ChainDrafter):
    """The target in a lower format (`--draft-format`): `nested`, the lower weights inside its own, or a low-bit copy.

    Without a given format: nested if the target's format has nested weights (w8a8n), else 4-bit weights.
    """

    @dataclass(frozen=True)
    class Options(Reducible.Options, ChainDrafter.Options):
        """With a `kv_window` the text stays the same, the acceptance rate may fall, and a draft's pass is shorter."""

        kv_window: int = within(
            0, 0, help="a draft attends to so many of the context's last tokens (0: all), in whole cache blocks"
        )
        kv_sink: int = within(16, 0, help="with a kv_window: and to so many of the first tokens")

    owns = "target"

    def __init__(self, options: Options, parts: Parts) -> None:
        assert parts.runner is not None
        vocab_size = parts.runner.model.config.vocab_size
        super().__init__(parts.runner.beside(unseen=self._unseen), options.vocabulary, vocab_size)
        self.options, self.policy = options, parts.policy
        self.writer = ChainWriter(self.runner, self.policy, vocab_size, options.siblings)
        self.branches = self.branches_with(options)
        self._guides: dict[int, Guide] = {}  # by request

    def propose(self, seqs: Seq[Sequence], num_draft: Seq[int]) -> Draft | LateDraft:
        """Chains for all sequences together, one pass of the low-format model per token, with leaves for `siblings`."""
        # The rows of all draft tokens but the last are stored, in blocks reserved for the target's pass.
        size = self.runner.cache.block_size
        lengths = chain_lengths(seqs, num_draft, self.options.siblings)
        counts = [min(k, len(s.blocks) * size - len(s) + 1) for s, k in zip(seqs, lengths, strict=True)]
        copies = list(seqs)
        for b, seq in enumerate(seqs):
            if counts[b] > 0:
                copies[b] = copy = Sequence(seq.seq_id, seq.token_ids, seq.params, seq.seed, seq.tenant)
                copy.num_prompt, copy.num_cached, copy.blocks = seq.num_prompt, seq.num_cached, seq.blocks
                if seq.grammar is not None:  # forbidden tokens are not worth drafting
                    if seq.seq_id not in self._guides:
                        self._guides[seq.seq_id] = Guide(seq.grammar.another())
                    guide = self._guides[seq.seq_id]
                    copy.grammar = None if guide.failed else guide  # as in a shadow: unguided drafts cost no more
        return self.writer.draft(dict(enumerate(copies)), [Chain() for _ in seqs], counts, num_draft)

    def release(self, seq: Sequence) -> None:
        self._guides.pop(seq.seq_id, None)

    def _unseen(self, seq: Sequence) -> tuple[int, int]:
        """The range of blocks between the first tokens and the latest ones, to which drafts do not attend."""
        if self.options.kv_window == 0:
            return 0, 0
        size = self.runner.cache.block_size
        first, end = -(-self.options.kv_sink // size), (seq.num_cached - self.options.kv_window) // size
        return (first, end) if first < end else (0, 0)


DRAFTER = SelfQuantDrafter
