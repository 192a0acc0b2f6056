"""The block manager shares blocks of equal prefixes and no others; the state machine catches wrong versions of it."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from prefixkit import ACTIONS, Watched, shake
from proof.mutants import Mutant

from sameseed.kvcache.blocks import BlockManager
from sameseed.kvcache.prefix import Prefixes

ROUNDS = 400


class PrefixMachine(RuleBasedStateMachine):
    """Hypothesis runs the actions of a watched block manager."""

    @initialize(num_blocks=st.integers(3, 14), block_size=st.integers(1, 4))
    def begin(self, num_blocks: int, block_size: int) -> None:
        self.watched = Watched(num_blocks, block_size)

    @rule(name=st.sampled_from(list(ACTIONS)), data=st.data())
    def act(self, name: str, data: st.DataObject) -> None:
        self.watched.act(name, **{k: data.draw(st.integers(*span), k) for k, span in ACTIONS[name].items()})

    def teardown(self) -> None:
        if hasattr(self, "watched"):
            self.watched.leave()


TestPrefixBlocks = PrefixMachine.TestCase
TestPrefixBlocks.settings = settings(max_examples=80, stateful_step_count=40)


MUTANTS: dict[str, tuple[Any, str, str]] = {  # name -> function, a part of its source, the wrong replacement
    "the salt is ignored": (Prefixes._digests, 'seq.tenant.encode("utf-8", "surrogatepass")', 'b""'),
    "a digest ignores its parent": (Prefixes._digests, "sha256(parent + self", "sha256(self"),
    "a digest ignores the tokens": (
        Prefixes._digests,
        "sha256(parent + self._pack(seq.token_ids, i))",
        "sha256(parent)",
    ),
    "the last token is found too": (Prefixes.find, "(len(seq) - 1) //", "len(seq) //"),
    "a block that is not full is shared": (
        BlockManager.enter,
        "num_rows // self.block_size",
        "min(self.blocks_for(num_rows), len(seq.blocks))",
    ),
    "guesses are entered": (BlockManager.enter, "num_rows // self.block_size", "len(seq.blocks)"),
    "an owner is not counted": (BlockManager.adopt, "self._num_users[block] += 1", "pass"),
    "a block in use stays idle": (BlockManager.adopt, "self._idle.pop(block, None)", "pass"),
    "what was begun is kept": (BlockManager.adopt, "self.trim(seq, first * self.block_size)", "pass"),
    "an evicted block stays known": (BlockManager.reserve, "self.prefixes.drop(block)", "pass"),
    "rows are written anew in a known block": (BlockManager.rewind, "self.prefixes.drop(seq.blocks[i])", "pass"),
    "rows are written anew in another's block": (BlockManager.rewind, "self._num_users[seq.blocks[i]] > 1", "False"),
    "a shared block is given away": (BlockManager.trim, "if not self._num_users[block]:", "if True:"),
    "what failed is remembered": (BlockManager.forget, "self.prefixes.drop(block)", "pass"),
    "shared blocks are asked for twice": (BlockManager.fits, "blocks_for(num_rows) - shared", "blocks_for(num_rows)"),
}


def test_the_manager_passes() -> None:
    assert shake(ROUNDS) > 1000, "rows were shared"


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_manager_does_not(name: str) -> None:
    with Mutant(name, *MUTANTS[name]).alive(), pytest.raises((AssertionError, IndexError, KeyError)):
        shake(ROUNDS)
