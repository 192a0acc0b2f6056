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
from foretoken.spec.drafter import Drafter
from foretoken.spec.sampling import FAILED, choose, plain_greedy, probability
from foretoken.spec.shadow import Shadow


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

    def __init__(self, options: Options | None, runner: ModelRunner) -> None:
        self.options = options or self.Options()
        self.runner = runner
        self.vocab_limit = runner.model.config.vocab_size  # tokens from here on are padding, or unknown to one model
        self._shadows: dict[int, Shadow] = {}

    @classmethod
    def build(cls, options: Drafter.Options, runner: ModelRunner | None, vocab_size: int) -> DraftModelDrafter:
        assert isinstance(options, cls.Options) and runner is not None
        drafter = cls(options, runner)
        drafter.vocab_limit = min(vocab_size, drafter.vocab_limit)
        return drafter

    def propose(self, seqs: Seq[Sequence], num_draft: Seq[int]) -> Draft:
        """Chains for all sequences together: one pass of the draft model a token."""
        chains: list[list[int]] = [[] for _ in seqs]
        confidence: list[list[float]] = [[] for _ in seqs]
        limit = self.runner.model.max_model_len
        active = [b for b, k in enumerate(num_draft) if k > 0]
        self._make_room(seqs)
        active = [b for b in active if self._follow(seqs[b], min(len(seqs[b]) + num_draft[b], limit))]
        while active:
            tokens = self._next([self._shadows[seqs[b].seq_id].seq for b in active])
            going: list[int] = []
            for b, (token, sure) in zip(active, tokens, strict=True):
                shadow = self._shadows[seqs[b].seq_id]
                if token == FAILED or token >= self.vocab_limit:
                    continue
                chains[b].append(token)
                confidence[b].append(sure)
                shadow.seq.token_ids.append(token)
                more = len(chains[b]) < num_draft[b] and len(shadow.seq) < limit
                if more and not self.policy.stop(sure):
                    going.append(b)
            active = going
        return Draft.chains(chains, confidence if self.policy.uses_confidence else None)

    def release(self, seq: Sequence) -> None:
        shadow = self._shadows.pop(seq.seq_id, None)
        if shadow is not None:
            self.runner.blocks.release(shadow.seq)

    def _make_room(self, seqs: Seq[Sequence]) -> None:
        """If blocks run short, shadows of sequences that do not run now give theirs back (they can catch up again)."""
        if self.runner.blocks.num_free * 4 >= self.runner.blocks.num_blocks:
            return
        running = {seq.seq_id for seq in seqs}
        for seq_id, shadow in self._shadows.items():
            if seq_id not in running:
                self.runner.blocks.release(shadow.seq)

    def _follow(self, seq: Sequence, num_rows: int) -> bool:
        """Bring the sequence's shadow up to date and reserve its rows; False if the draft model cannot serve it now."""
        shadow = self._shadows.get(seq.seq_id)
        new = seq.token_ids[shadow.num_agreed if shadow is not None else 0 :]
        if len(seq) >= self.runner.model.max_model_len or max(new, default=0) >= self.vocab_limit:
            return False
        if shadow is None:
            shadow = self._shadows[seq.seq_id] = Shadow(seq, self.runner)
        shadow.follow(seq)
        return self.runner.blocks.reserve(shadow.seq, num_rows)

    def _next(self, shadows: list[Sequence]) -> list[tuple[int, float]]:
        """One pass: the draft model's choice after each shadow's last token; its probability where a policy asks."""
        self._catch_up(shadows)
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

    def _catch_up(self, shadows: list[Sequence]) -> None:
        """Run long pending prefixes (a prompt, a sequence that went undrafted) in passes of bounded size."""
        while sum(s.num_pending for s in shadows) > max(self.options.prefill_rows, 2 * len(shadows)):
            left = self.options.prefill_rows
            chunks: list[tuple[Sequence, int]] = []
            for seq in shadows:
                size = min(seq.num_pending - 1, left)
                if size > 0:
                    chunks.append((seq, size))
                    left -= size
            seqs, sizes = [c[0] for c in chunks], [c[1] for c in chunks]
            out = self.runner.forward(seqs, Draft.empty(len(seqs)), sizes)
            self.runner.commit(seqs, sizes, [[] for _ in seqs], out)


DRAFTER = DraftModelDrafter
