"""draft_model drafter (Leviathan et al., 2023; Chen et al., 2023): a smaller model guesses a chain of tokens.

It draws with the target's own noise (coupled sampling), so a sampled guess agrees as often as a greedy one would.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from foretoken.errors import ConfigError
from foretoken.models.runner import ModelRunner
from foretoken.request import Sequence
from foretoken.spec.draft import Draft
from foretoken.spec.drafter import Drafter, Parts
from foretoken.spec.followers import Followers
from foretoken.spec.sampling import FAILED, choose, plain_greedy, probability


class DraftModelDrafter(Drafter):
    """A second model with its own format and cache; a Shadow follows each sequence."""

    @dataclass(frozen=True)
    class Options(Drafter.Options):
        """`prefill_rows`: the most rows of one pass while the draft model catches up with a prompt."""

        prefill_rows: int = 512

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
        return cls(options, parts.runner, parts.vocab_size)

    def propose(self, seqs: Seq[Sequence], num_draft: Seq[int]) -> Draft:
        """Chains for all sequences together: one pass of the draft model a token."""
        chains: list[list[int]] = [[] for _ in seqs]
        confidence: list[list[float]] = [[] for _ in seqs]
        limit = self.followers.limit
        active = self.followers.follow(seqs, num_draft)
        while active:
            tokens = self._next([self.followers[seqs[b]] for b in active])
            going: list[int] = []
            for b, (token, sure) in zip(active, tokens, strict=True):
                shadow = self.followers[seqs[b]]
                if token == FAILED or token >= self.followers.vocab_limit:
                    continue
                chains[b].append(token)
                confidence[b].append(sure)
                shadow.token_ids.append(token)
                more = len(chains[b]) < num_draft[b] and len(shadow) < limit
                if more and not self.policy.stop(sure):
                    going.append(b)
            active = going
        return Draft.chains(chains, confidence if self.policy.uses_confidence else None)

    def rewind(self, seq: Sequence, length: int) -> None:
        self.followers.rewind(seq, length)

    def release(self, seq: Sequence) -> None:
        self.followers.release(seq)

    def _next(self, shadows: list[Sequence]) -> list[tuple[int, float]]:
        """One pass: the draft model's choice after each shadow's last token; its probability where a policy asks."""
        self.followers.catch_up(shadows)
        num_pending = [s.num_pending for s in shadows]
        nothing = Draft.empty(len(shadows))
        out = self.runner.forward(shadows, nothing, num_pending)
        self.runner.commit(shadows, num_pending, [[] for _ in shadows], out)
        table = out.logits.numpy() if out.logits.device.type == "cpu" else out.logits.cpu().numpy()
        best: list[int] = table.argmax(axis=-1).tolist() if any(plain_greedy(s) for s in shadows) else []
        eos = self.runner.model.config.eos_token_ids
        guesses: list[tuple[int, float]] = []
        for b, seq in enumerate(shadows):
            token = best[b] if plain_greedy(seq) else choose(table[b], seq, [], eos)
            sure = probability(table[b], seq, token) if self.policy.uses_confidence and token != FAILED else 1.0
            guesses.append((token, sure))
        return guesses


DRAFTER = DraftModelDrafter
