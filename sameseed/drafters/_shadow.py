"""Shadow: a second Sequence with a target sequence's tokens and a cache of its own, for drafters that own a model.

To follow the target is to truncate to the common prefix; the rest is pending. That replaces all roll-back code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence as Seq
from typing import Any

import numpy as np

from sameseed.errors import RequestError
from sameseed.models.runner import ModelRunner
from sameseed.request import Grammar, Sequence

log = logging.getLogger("sameseed")
_NOTHING = np.zeros(0, np.bool_)


class Guide:
    """A target's grammar as its shadow follows it: where that fails, nothing is guessed, and it is not asked again."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self.failed = False

    def allowed(self, output: Seq[int], path: Seq[int]) -> Any:
        """bool [V]; empty, which allows no token, once the grammar has failed: the sequences beside it go on."""
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
        self.seq.num_prompt = target.num_prompt
        # What the target may not write is not worth guessing.
        self._guide = None if target.grammar is None else Guide(target.grammar.another())
        self.seq.grammar = self._guide
        self.seq.context = runner.model.max_model_len
        self.num_agreed = len(target)  # of the target's tokens: these need no second look, unless it was rewound

    def follow(self, target: Sequence, rewind: Callable[[Sequence, int], None], keep: int = 0) -> None:
        """Take over the target's tokens; cached rows beyond the common prefix are forgotten.

        `keep` guessed tokens behind all of the target's stay. `rewind(seq, length)` is told before tokens of the shadow
        are taken back.
        """
        if self._guide is not None and self._guide.failed:
            self.seq.grammar = None  # a guess that the target may not write costs no more than none
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
        # At least one token stays pending: its logits are the next guess.
        self.runner.truncate(self.seq, min(end, len(mine) - 1))
