"""draft_model drafter (Leviathan et al., 2023; Chen et al., 2023): a smaller model guesses a chain of tokens.

It draws with the target's own noise (coupled sampling), so a sampled guess agrees as often as a greedy one would.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from foretoken.errors import ConfigError
from foretoken.models.runner import ModelRunner
from foretoken.models.vocabulary import with_tokens
from foretoken.request import Sequence
from foretoken.spec.chains import write_chains
from foretoken.spec.draft import Draft
from foretoken.spec.drafter import Drafter, Parts
from foretoken.spec.followers import Followers
from foretoken.spec.vocabulary import read_vocabulary


class DraftModelDrafter(Drafter):
    """A second model with its own format and cache; a Shadow follows each sequence."""

    @dataclass(frozen=True)
    class Options(Drafter.Options):
        """`prefill_rows`: the most rows of one pass while the draft model catches up with a prompt. `vocabulary`: the
        tokens that it may guess, where not all: a number (the first so many), or a file with their ids (JSON or lines),
        as `foretoken vocabulary` makes; fewer cost less.
        """

        prefill_rows: int = 512
        vocabulary: str = ""

        def __post_init__(self) -> None:
            if self.prefill_rows < 1:
                raise ConfigError(f"prefill_rows must be at least 1, got {self.prefill_rows}")

    needs_model = True

    def __init__(self, options: Options, runner: ModelRunner, vocab_size: int) -> None:
        self.options = options
        self.runner = runner
        self.followers = Followers(runner, options.prefill_rows, vocab_size)

    @classmethod
    def build(cls, options: Drafter.Options, parts: Parts) -> DraftModelDrafter:
        assert isinstance(options, cls.Options) and parts.runner is not None
        if options.vocabulary:
            parts.runner.model = with_tokens(parts.runner.model, read_vocabulary(options.vocabulary, parts.vocab_size))
        return cls(options, parts.runner, parts.vocab_size)

    def propose(self, seqs: Seq[Sequence], num_draft: Seq[int]) -> Draft:
        """Chains for all sequences together: one pass of the draft model a token."""
        followers = self.followers
        active = followers.follow(seqs, num_draft)
        shadows, counts = [followers[seqs[b]] for b in active], [num_draft[b] for b in active]
        written = write_chains(self.runner, shadows, counts, self.policy, followers.vocab_limit, followers.catch_up)
        chains: list[list[int]] = [[] for _ in seqs]
        confidence: list[list[float]] = [[] for _ in seqs]
        for b, chain, sure in zip(active, *written, strict=True):
            chains[b], confidence[b] = chain, sure
        return Draft.chains(chains, confidence if self.policy.uses_confidence else None)

    @property
    def limit(self) -> int:
        return self.followers.limit

    def rewind(self, seq: Sequence, length: int) -> None:
        self.followers.rewind(seq, length)

    def release(self, seq: Sequence) -> None:
        self.followers.release(seq)


DRAFTER = DraftModelDrafter
