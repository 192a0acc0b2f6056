"""Shadow: a second Sequence with a target sequence's tokens and a cache of its own, for drafters that own a model.

To follow the target is to truncate to the common prefix; the rest is pending. That replaces all roll-back code.
"""

from __future__ import annotations

from collections.abc import Callable

from foretoken.models.runner import ModelRunner
from foretoken.request import Sequence


class Shadow:
    """Follows one target sequence in the cache of `runner`. `seq` holds the target's tokens, then drafted ones."""

    def __init__(self, target: Sequence, runner: ModelRunner) -> None:
        self.runner = runner
        self.seq = Sequence(target.seq_id, target.token_ids, target.params, target.seed, target.tenant)
        self.seq.num_prompt = target.num_prompt
        if target.grammar is not None:  # what the target may not write is not worth guessing
            self.seq.grammar = target.grammar.another()
        self.seq.context = runner.model.max_model_len
        self.num_agreed = len(target)  # of the target's tokens: these need no second look, unless it was rewound

    def follow(self, target: Sequence, rewind: Callable[[Sequence, int], None], keep: int = 0) -> None:
        """Take over the target's tokens; cached rows beyond the common prefix are forgotten.

        `keep` guessed tokens behind all of the target's stay. `rewind(seq, length)` is told before tokens of the shadow
        are taken back.
        """
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
