"""The block manager shares what is the same and nothing else; wrong versions of it do not get past the machine."""

from __future__ import annotations

import inspect
import sys
import textwrap
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from prefixkit import ACTIONS, Watched, shake

from sameseed.kvcache.blocks import BlockManager
from sameseed.kvcache.prefix import Prefixes

ROUNDS = 400


class PrefixMachine(RuleBasedStateMachine):
    """Hypothesis at the levers of a watched block manager."""

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


@dataclass(frozen=True)
class Mutant:
    """`owner.name` with `old` replaced by `new`."""

    owner: Any
    name: str
    old: str
    new: str

    def install(self, patch: pytest.MonkeyPatch) -> None:
        function = getattr(self.owner, self.name)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, "the code has changed: write this mutant anew"
        scope = dict(vars(sys.modules[function.__module__]))
        exec("from __future__ import annotations\n" + source.replace(self.old, self.new), scope)
        patch.setattr(self.owner, self.name, scope[self.name])


MUTANTS = {
    "the salt is ignored": Mutant(Prefixes, "_digests", 'seq.tenant.encode("utf-8", "surrogatepass")', 'b""'),
    "a digest ignores its parent": Mutant(Prefixes, "_digests", "sha256(parent + self", "sha256(self"),
    "a digest ignores the tokens": Mutant(
        Prefixes, "_digests", "sha256(parent + self._pack(seq.token_ids, i))", "sha256(parent)"
    ),
    "the last token is found too": Mutant(Prefixes, "find", "(len(seq) - 1) //", "len(seq) //"),
    "a block that is not full is shared": Mutant(
        BlockManager, "enter", "num_rows // self.block_size", "min(self.blocks_for(num_rows), len(seq.blocks))"
    ),
    "guesses are entered": Mutant(BlockManager, "enter", "num_rows // self.block_size", "len(seq.blocks)"),
    "an owner is not counted": Mutant(BlockManager, "adopt", "self._owners[block] += 1", "pass"),
    "a block in use stays idle": Mutant(BlockManager, "adopt", "self._idle.pop(block, None)", "pass"),
    "what was begun is kept": Mutant(BlockManager, "adopt", "self.trim(seq, first * self.block_size)", "pass"),
    "an evicted block stays known": Mutant(BlockManager, "_take", "self.prefixes.drop(block)", "pass"),
    "rows are written anew in a known block": Mutant(
        BlockManager, "rewind", "self.prefixes.drop(seq.blocks[i])", "pass"
    ),
    "rows are written anew in another's block": Mutant(
        BlockManager, "rewind", "self._owners[seq.blocks[i]] > 1", "False"
    ),
    "a shared block is given away": Mutant(BlockManager, "trim", "if not self._owners[block]:", "if True:"),
    "what failed is remembered": Mutant(BlockManager, "forget", "self.prefixes.drop(block)", "pass"),
    "shared blocks are asked for twice": Mutant(
        BlockManager, "fits", "blocks_for(num_rows) - shared", "blocks_for(num_rows)"
    ),
}


def test_the_manager_passes() -> None:
    assert shake(ROUNDS) > 1000, "rows were shared"


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_manager_does_not(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    MUTANTS[name].install(monkeypatch)
    with pytest.raises((AssertionError, IndexError, KeyError)):
        shake(ROUNDS)
