"""Shadow: a second Sequence with a target sequence's tokens and a cache of its own, for drafters that own a model.

To follow the target, a shadow is truncated to the common prefix, and the target's further tokens become pending. No
other roll-back code is needed.
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

        If the shadow agrees with all of the target's tokens, up to `keep` drafted tokens after them stay.
        `rewind(seq, length)` is called before tokens of the shadow are taken back.
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
