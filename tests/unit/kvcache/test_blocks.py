"""BlockManager by example; its laws are in property/test_blocks_scheduler.py."""

from __future__ import annotations

from sameseed.kvcache.blocks import BlockManager
from sameseed.request import SamplingParams, Sequence


def sequence() -> Sequence:
    return Sequence(0, [1], SamplingParams(), 0)


def test_reserve_is_all_or_nothing() -> None:
    blocks, a, b = BlockManager(3, 4), sequence(), sequence()
    assert (blocks.num_free, blocks.reservable(a)) == (3, 12)
    assert blocks.reserve(a, 5)
    assert (len(a.blocks), blocks.num_free) == (2, 1)
    assert not blocks.reserve(b, 5)
    assert (b.blocks, blocks.num_free) == ([], 1)
    assert blocks.reserve(a, 8), "what it has already is enough"
    assert blocks.num_free == 1
    assert (blocks.reservable(a), blocks.reservable(b)) == (12, 4)


def test_trim_and_release() -> None:
    blocks, a = BlockManager(3, 4), sequence()
    blocks.reserve(a, 12)
    a.num_cached = 9
    held = list(a.blocks)
    blocks.trim(a, 9)
    assert a.blocks == held
    blocks.trim(a, 8)
    assert (a.blocks, a.num_cached) == (held[:2], 9)
    blocks.release(a)
    assert (a.blocks, a.num_cached, blocks.num_free) == ([], 0, 3)
    blocks.release(a)
    assert blocks.num_free == 3, "to release twice frees nothing twice"


def test_the_block_freed_last_is_taken_first() -> None:
    blocks, a, b = BlockManager(4, 1), sequence(), sequence()
    blocks.reserve(a, 3)
    last = a.blocks[-1]
    blocks.trim(a, 2)
    blocks.reserve(b, 1)
    assert b.blocks == [last]
