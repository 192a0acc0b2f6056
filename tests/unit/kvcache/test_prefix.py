"""Which blocks are evicted or taken first. Who owns and who finds a block: property/test_prefix_blocks.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sameseed.kvcache import prefix
from sameseed.kvcache.blocks import BlockManager
from sameseed.request import SamplingParams, Sequence

SIZE = 4


def sequence(tokens: list[int]) -> Sequence:
    return Sequence(0, tokens, SamplingParams(), 0)


def computed(blocks: BlockManager, tokens: list[int]) -> Sequence:
    """A sequence whose rows are all certain and stored."""
    seq = sequence(tokens)
    assert blocks.reserve(seq, len(seq))
    seq.num_cached = len(seq)
    blocks.enter(seq, len(seq))
    return seq


def test_an_equal_digest_is_not_believed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    alike: Any = SimpleNamespace(sha256=lambda data: SimpleNamespace(digest=lambda: b"the same"))
    monkeypatch.setattr(prefix, "hashlib", alike)
    blocks = BlockManager(10, SIZE)
    computed(blocks, [1, 2, 3, 4, 5])
    assert blocks.adopt(sequence([9, 9, 9, 9, 5])) == 0


def test_the_block_unused_for_longest_goes_first_and_ends_before_beginnings() -> None:
    blocks = BlockManager(4, SIZE)
    old, new = computed(blocks, [1] * 8), computed(blocks, [2] * 8)
    order = [old.blocks[1], old.blocks[0], new.blocks[1], new.blocks[0]]
    blocks.release(old)
    blocks.release(new)
    assert blocks.free_blocks == order
    again = sequence([1] * 5)
    assert blocks.adopt(again) == 4
    blocks.release(again)
    taker = sequence([3] * 12)
    blocks.reserve(taker, 12)
    assert taker.blocks == [order[0], order[2], order[3]], "what was used again stays"
    assert len(blocks.prefixes) == 1
    assert blocks.adopt(sequence([2] * 9)) == 0


def test_what_nobody_may_share_is_never_known() -> None:
    blocks = BlockManager(10, SIZE, shares=False)
    computed(blocks, [1, 2, 3, 4, 5])
    assert blocks.adopt(sequence([1, 2, 3, 4, 5])) == 0
    assert len(blocks.prefixes) == 0


def test_the_block_freed_last_is_taken_first() -> None:
    blocks, a, b = BlockManager(4, 1), sequence([1]), sequence([1])
    blocks.reserve(a, 3)
    last = a.blocks[-1]
    blocks.trim(a, 2)
    blocks.reserve(b, 1)
    assert b.blocks == [last]
