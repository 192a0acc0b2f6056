"""Blocks that hold a known prefix: which sequences find them, which must not, and which blocks are evicted first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sameseed.kvcache import prefix
from sameseed.kvcache.blocks import BlockManager
from sameseed.request import SamplingParams, Sequence

SIZE = 4


def sequence(tokens: list[int], tenant: str = "") -> Sequence:
    return Sequence(0, tokens, SamplingParams(), 0, tenant)


def computed(blocks: BlockManager, tokens: list[int], tenant: str = "") -> Sequence:
    """A sequence whose rows are all certain and stored."""
    seq = sequence(tokens, tenant)
    assert blocks.reserve(seq, len(seq))
    seq.num_cached = len(seq)
    blocks.enter(seq, len(seq))
    return seq


def test_full_blocks_are_found_while_in_use_and_afterwards() -> None:
    blocks = BlockManager(10, SIZE)
    first = computed(blocks, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    second = sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert blocks.adopt(second) == 8
    assert second.blocks == first.blocks[:2], "the third is not full"
    assert (second.num_cached, blocks.num_free) == (8, 7)
    blocks.release(first)
    assert blocks.num_free == 8, "two have another user"
    blocks.release(second)
    assert blocks.num_free == 10
    third = sequence([1, 2, 3, 4, 5, 6, 7, 0])
    assert blocks.adopt(third) == 4, "alike to the first block's end"


def test_the_last_token_is_always_computed() -> None:
    blocks = BlockManager(10, SIZE)
    computed(blocks, [1, 2, 3, 4, 5, 6, 7, 8])
    same = sequence([1, 2, 3, 4, 5, 6, 7, 8])
    assert blocks.adopt(same) == 4
    assert same.num_pending == 4
    assert blocks.adopt(sequence([1])) == 0


@pytest.mark.parametrize(("mine", "its"), [("a", "b"), ("", "a"), ("a", "a:1"), ("\udcff", "\udcfe")])
def test_tenants_share_nothing(mine: str, its: str) -> None:
    blocks = BlockManager(10, SIZE)
    computed(blocks, [1, 2, 3, 4, 5], mine)
    assert blocks.adopt(sequence([1, 2, 3, 4, 5], its)) == 0
    assert blocks.adopt(sequence([1, 2, 3, 4, 5], mine)) == 4


def test_a_block_depends_on_all_before_it() -> None:
    blocks = BlockManager(10, SIZE)
    computed(blocks, [1, 1, 1, 1, 7, 7, 7, 7, 0])
    other = sequence([2, 2, 2, 2, 7, 7, 7, 7, 0])
    blocks.reserve(other, 4)
    other.num_cached = 4
    assert blocks.adopt(other) == 0


def test_an_equal_digest_is_not_believed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    alike: Any = SimpleNamespace(sha256=lambda data: SimpleNamespace(digest=lambda: b"the same"))
    monkeypatch.setattr(prefix, "hashlib", alike)
    blocks = BlockManager(10, SIZE)
    computed(blocks, [1, 2, 3, 4, 5])
    assert blocks.adopt(sequence([9, 9, 9, 9, 5])) == 0


def test_a_sequence_takes_over_what_others_have_computed_since() -> None:
    blocks = BlockManager(10, SIZE)
    late = sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])
    blocks.reserve(late, 6)
    late.num_cached = 6  # in the middle of its second block
    own = list(late.blocks)
    first = computed(blocks, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert blocks.adopt(late) == 2
    assert late.blocks == [own[0], first.blocks[1]], "its own second block is free again"
    assert blocks.num_free == 10 - 4


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


def test_fits_counts_shared_blocks_once() -> None:
    blocks = BlockManager(4, SIZE)
    first = computed(blocks, [1] * 9)
    other = sequence([1] * 10)
    assert blocks.fits(other, 12), "two of three are there, one is free"
    assert not blocks.fits(other, 13)
    blocks.release(first)
    assert blocks.fits(other, 16)
    assert not blocks.fits(other, 17), "known blocks that nobody uses are free ones too"


def test_rows_that_are_written_anew_are_nobody_elses() -> None:
    blocks = BlockManager(10, SIZE)
    first = computed(blocks, [1] * 9)
    second = sequence([1] * 9)
    blocks.adopt(second)
    blocks.rewind(second, 6)
    assert (second.num_cached, len(second.blocks)) == (4, 1), "others read the block that it would write to"
    assert first.num_cached == 9
    blocks.release(second)
    blocks.rewind(first, 6)
    assert (first.num_cached, len(first.blocks)) == (6, 3), "its own again, and no longer known"
    assert blocks.adopt(sequence([1] * 9)) == 4


def test_tokens_that_were_taken_back_leave_no_digest() -> None:
    blocks = BlockManager(10, SIZE)
    seq = computed(blocks, [1, 2, 3, 4, 5, 6, 7, 8])
    del seq.token_ids[5:]
    blocks.retract(seq, 5)
    seq.token_ids += [0, 0, 0]
    seq.num_cached = 8
    blocks.enter(seq, 8)
    assert blocks.adopt(sequence([1, 2, 3, 4, 5, 0, 0, 0, 9])) == 8
    assert blocks.adopt(sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])) == 4


def test_what_failed_is_not_found_again() -> None:
    blocks = BlockManager(10, SIZE)
    computed(blocks, [5] * 9)
    good = computed(blocks, [1] * 9)
    bad = sequence([1] * 4 + [2] * 5)
    blocks.adopt(bad)
    blocks.reserve(bad, 9)
    bad.num_cached = 9
    blocks.enter(bad, 9)
    blocks.forget(bad)
    blocks.release(bad)
    assert good.num_cached == 9, "who shares a block with it goes on"
    assert blocks.adopt(sequence([1] * 9)) == 0
    assert blocks.adopt(sequence([1] * 4 + [2] * 5)) == 0
    assert blocks.adopt(sequence([5] * 9)) == 8
