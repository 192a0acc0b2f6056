"""Followers: keeps a drafter's own model up to date with the target's sequences, with one Shadow per sequence.

A shadow is a second Sequence with the target sequence's tokens and a cache of its own. To follow, it is truncated to
the common prefix, and the target's further tokens become pending.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sameseed.cost.running import PROMPT_ROWS, PromptCost
from sameseed.drafters._vocabulary import Reducible
from sameseed.errors import RequestError
from sameseed.fields import within
from sameseed.lengths.fixed import FixedLength
from sameseed.models.runner import ModelRunner
from sameseed.request import Grammar, Sequence
from sameseed.spec.drafter import Below, NoDrafter, Parts
from sameseed.spec.step import decode_step

if TYPE_CHECKING:
    from sameseed.drafters._eagle_context import Context

log = logging.getLogger("sameseed")
_NOTHING = np.zeros(0, np.bool_)


class CatchUp:
    """Reads long pending stretches (a prompt, or tokens decided without drafts) in passes of at most `max_rows` rows.

    A round delays other sequences by at most their `max_delay`, or the time of `PROMPT_ROWS` rows. A sequence that is
    not read to its end then has `num_unread` tokens, and gets no draft.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self._cost = PromptCost(math.inf)

    def __call__(
        self, seqs: Seq[Sequence], states: Mapping[int, Sequence | Context], read: Callable[[dict[int, int]], object]
    ) -> list[int]:
        """Those of `states` (by index in `seqs`) that can draft now. `read` reads rows: their number, by index."""
        able = sorted(states, key=lambda b: states[b].num_pending)
        while (total := sum(states[b].num_pending for b in able)) > 2 * len(able):
            others = (seq.max_delay for b, seq in enumerate(seqs) if b != able[-1] and seq.num_output > 0)
            limit, left = min(others, default=math.inf), self.max_rows
            if limit < math.inf:
                self._cost.limit, known = limit, states[able[-1]].num_cached
                fitting = bisect_right(range(1, left + 1), limit, key=lambda n: self._cost.seconds(n, known))
                left = max(min(PROMPT_ROWS, left), fitting)
            if total <= left:
                break
            sizes = dict[int, int]()
            for b in able:
                if size := min(states[b].num_pending - 1, left):
                    sizes[b], left = size, left - size
            chunks, start = [(n, states[b].num_cached) for b, n in sizes.items()], time.perf_counter()
            read(sizes)
            self._cost.learn(chunks, time.perf_counter() - start)
            if limit < math.inf:
                able = [b for b in able if states[b].num_pending <= 2]
                break
        for b, state in states.items():
            seqs[b].num_unread = 0 if b in able else state.num_pending
        return sorted(able)


class Guide:
    """A shadow's copy of the target's grammar. Once it has failed, it allows no token and is not asked again."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self.failed = False

    def allowed(self, output: Seq[int], path: Seq[int]) -> Any:
        """The allowed tokens, bool [V]; empty (no token) once the grammar has failed, so that other sequences go on."""
        if not self.failed:
            try:
                return self._grammar.allowed(output, path)
            except Exception as error:
                self.failed = True
                log.debug("a drafter goes on without a grammar", exc_info=not isinstance(error, RequestError))
        return _NOTHING

    def another(self) -> Guide:
        return Guide(self._grammar.another())


class Shadow:
    """Follows one target sequence in the cache of `runner`. `seq` holds the target's tokens, then drafted ones."""

    def __init__(self, target: Sequence, runner: ModelRunner) -> None:
        self.runner = runner
        self.seq = Sequence(target.seq_id, target.token_ids, target.params, target.seed, target.tenant)
        self.seq.num_prompt, self.seq.max_delay = target.num_prompt, target.max_delay
        # Tokens that the target's grammar forbids are not worth drafting.
        self._guide = None if target.grammar is None else Guide(target.grammar.another())
        self.seq.grammar = self._guide
        self.seq.context = runner.model.max_model_len
        self.seq.num_certain = 0
        self.num_agreed = len(target)  # leading target tokens that need no comparison, unless it is rewound

    def follow(self, target: Sequence, rewind: Callable[[Sequence, int], None], keep: int = 0) -> None:
        """Take over the target's tokens; cached rows beyond the common prefix are dropped.

        If the shadow agrees with all of them, up to `keep` drafted tokens after them stay. `rewind(seq, length)` is
        called before tokens of the shadow are taken back.
        """
        if self._guide is not None and self._guide.failed:
            self.seq.grammar = None  # unguided drafts cost no more than having none
        mine, its = self.seq.token_ids, target.token_ids
        same = min(self.num_agreed, len(its))
        while same < min(len(mine), len(its)) and mine[same] == its[same]:
            same += 1
        end = min(same + keep, len(mine)) if same == len(its) else same
        if end < len(mine):
            rewind(self.seq, end)
            del mine[end:]
            self.runner.blocks.retract(self.seq, end)
            self.seq.state = None  # penalty counts may hold a dropped token
        mine += its[end:]
        self.num_agreed = len(its)
        # A state (kvcache/state.py) must not cover tokens that may be taken back.
        self.seq.num_certain = min(len(its), len(its) if target.num_certain is None else target.num_certain) - 1
        # At least one token stays pending: the next draft token comes from its logits.
        self.runner.truncate(self.seq, min(end, len(mine) - 1))


class Followers:
    """The Shadows of all sequences, in the cache of `runner`. `below`: a drafter that drafts for the shadows' model."""

    def __init__(self, runner: ModelRunner, prefill_rows: int, vocab_size: int, below: Below | None = None) -> None:
        """`prefill_rows`: the most rows of one catch-up pass; `vocab_size`: the target's."""
        self.runner = runner
        self.catch_up = CatchUp(prefill_rows)
        self.vocab_limit = min(vocab_size, runner.model.config.vocab_size)  # ids from here on: padding, or in one only
        self.below = below.drafter if below else NoDrafter()
        self._policy = below.policy if below else FixedLength(0)
        self._shadows: dict[int, Shadow] = {}

    @property
    def limit(self) -> int:
        return self.runner.model.max_model_len

    def __len__(self) -> int:
        return len(self._shadows)

    def __getitem__(self, seq: Sequence) -> Sequence:
        """The shadow's own sequence: the target's tokens, then drafted ones."""
        return self._shadows[seq.seq_id].seq

    def num_read(self, seq: Sequence) -> int:
        shadow = self._shadows.get(seq.seq_id)
        return 0 if shadow is None else shadow.seq.num_cached

    def follow(self, seqs: Seq[Sequence], num_rows: Seq[int], keep: Seq[int] | None = None) -> list[int]:
        """Update the shadows to the target's tokens, with blocks for num_rows[b] more; indices of those that can draft.

        keep[b] <= num_rows[b]: drafted tokens that a shadow keeps after the target's, if it agrees with all of those.
        """
        blocks = self.runner.blocks
        if blocks.num_free * 4 < blocks.num_blocks:  # sequences that do not run free theirs, and catch up later
            running = {seq.seq_id for seq in seqs}
            for seq_id, idle in self._shadows.items():
                if seq_id not in running:
                    blocks.release(idle.seq)
        able: dict[int, Sequence] = {}
        for b, (seq, n) in enumerate(zip(seqs, num_rows, strict=True)):
            if n <= 0:
                continue
            shadow = self._shadows.get(seq.seq_id)
            new = seq.token_ids[shadow.num_agreed if shadow is not None else 0 :]
            if len(seq) >= self.limit or max(new, default=0) >= self.vocab_limit:
                continue
            if shadow is None:
                shadow = self._shadows[seq.seq_id] = Shadow(seq, self.runner)
            shadow.follow(seq, self.below.rewind, keep[b] if keep else 0)
            mine = shadow.seq
            blocks.enter(mine, min(mine.num_cached, len(seq)))  # drafted tokens are not certain
            if mine.num_pending > blocks.block_size:
                blocks.adopt(mine)
            if blocks.reserve(mine, min(len(seq) + n, self.limit)):
                able[b] = mine

        def read(sizes: dict[int, int]) -> object:
            seqs = [able[b] for b in sizes]
            return decode_step(self.runner, self.below, seqs, list(sizes.values()), [0] * len(sizes))

        return self.catch_up(seqs, able, read)

    def rewind(self, seq: Sequence, length: int) -> None:
        shadow = self._shadows.get(seq.seq_id)
        if shadow is not None:
            shadow.num_agreed = min(shadow.num_agreed, length)

    def release(self, seq: Sequence) -> None:
        shadow = self._shadows.pop(seq.seq_id, None)
        if shadow is not None:
            self.below.release(shadow.seq)
            self._policy.release(shadow.seq)
            self.runner.blocks.release(shadow.seq)


class Holding(Reducible):
    """Base of drafters whose only state per sequence is in `followers`."""

    @dataclass(frozen=True)
    class Options(Reducible.Options):
        prefill_rows: int = within(512, 1, help="the most rows of one catch-up pass over a prompt")

    must_read = True
    followers: Any  # its `rewind` and `release` forget tokens, or a sequence; `num_read` is that of the drafter

    def num_read(self, seq: Sequence) -> int:
        return min(int(self.followers.num_read(seq)), len(seq))

    def rewind(self, seq: Sequence, length: int) -> None:
        self.followers.rewind(seq, length)

    def release(self, seq: Sequence) -> None:
        self.followers.release(seq)


class Following(Holding):
    """Base of drafters with a model of their own, in which shadows follow the sequences."""

    followers: Followers

    def __init__(self, options: Any, parts: Parts, below: Below | None = None) -> None:
        assert parts.runner is not None
        super().__init__(parts.runner, options.vocabulary, parts.vocab_size)
        self.options, self.policy = options, parts.policy
        self.followers = Followers(self.runner, options.prefill_rows, parts.vocab_size, below)
        self.branches = self.branches_with(options)

    @property
    def limit(self) -> int:
        return self.followers.limit
