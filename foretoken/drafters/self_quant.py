"""self_quant drafter: the target's own weights in a lower precision guess a chain (QSpec: Zhao et al., 2024).

It reads the target's own cache, so it needs no second cache and no pass over the prompt: of the rows that the target
has not checked yet it writes its own, into places that the target's pass writes again before it reads them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from foretoken.models.runner import ModelRunner
from foretoken.models.vocabulary import with_tokens
from foretoken.request import Sequence
from foretoken.spec.chains import write_chains
from foretoken.spec.draft import Draft
from foretoken.spec.drafter import Drafter, Parts
from foretoken.spec.vocabulary import read_vocabulary


class SelfQuantDrafter(Drafter):
    """A low-bit copy of the target; the format is the draft's (`--draft-format`), 4-bit weights if none is said."""

    @dataclass(frozen=True)
    class Options(Drafter.Options):
        """`vocabulary`: the tokens that may be guessed, where not all: a number (the first so many), or a file with
        their ids (JSON or lines), as `foretoken vocabulary` makes; fewer cost less.
        """

        vocabulary: str = ""

    needs_model = True
    of_target = True

    def __init__(self, options: Options, runner: ModelRunner) -> None:
        self.options = options
        self.runner = runner

    @classmethod
    def build(cls, options: Drafter.Options, parts: Parts) -> SelfQuantDrafter:
        assert isinstance(options, cls.Options) and parts.runner is not None
        if options.vocabulary:
            parts.runner.model = with_tokens(parts.runner.model, read_vocabulary(options.vocabulary, parts.vocab_size))
        return cls(options, parts.runner)

    def attach(self, target: ModelRunner) -> None:
        self.runner = ModelRunner(self.runner.model, target.cache, blocks=target.blocks)

    def propose(self, seqs: Seq[Sequence], num_draft: Seq[int]) -> Draft:
        """Chains for all sequences together: one pass of the copy a token."""
        counts = [min(k, self._room(seq)) for seq, k in zip(seqs, num_draft, strict=True)]
        copies = [self._copy(seq) if k > 0 else seq for seq, k in zip(seqs, counts, strict=True)]
        vocab_size = self.runner.model.config.vocab_size
        chains, confidence = write_chains(self.runner, copies, counts, self.policy, vocab_size)
        return Draft.chains(chains, confidence if self.policy.uses_confidence else None)

    def _room(self, seq: Sequence) -> int:
        """Tokens that may be guessed: the rows of all but the last are stored, in blocks of the sequence."""
        return len(seq.blocks) * self.runner.cache.block_size - len(seq) + 1

    def _copy(self, seq: Sequence) -> Sequence:
        """A sequence in the same cache blocks, which the target's pass has reserved for as many drafted tokens."""
        copy = Sequence(seq.seq_id, seq.token_ids, seq.params, seq.seed, seq.tenant)
        copy.num_prompt, copy.num_cached, copy.blocks = seq.num_prompt, seq.num_cached, seq.blocks
        return copy


DRAFTER = SelfQuantDrafter
