"""The native backend's instruction sets on this CPU, and checks of its attention with each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from fixtures_ops import Part, Pass, alone, flat, make_pass, threads
from torch import Tensor

from sameseed.ops import cpu

if cpu.unavailable() is not None:
    pytest.skip(f"the native backend: {cpu.unavailable()}", allow_module_level=True)

from sameseed import _native


@contextmanager
def instructions(name: str) -> Iterator[None]:
    """Compute with one instruction set in this context; the previous one is restored afterwards."""
    before = _native.isa()
    _native.set_isa(name)
    try:
        yield
    finally:
        _native.set_isa(before)


def here(name: str) -> bool:
    """Whether this CPU has the instruction set."""
    try:
        with instructions(name):
            return True
    except ValueError:
        return False


ISAS = [name for name in ("portable", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "amx") if here(name)]
every_isa = pytest.mark.parametrize("isa", ISAS)


Near = Callable[[Tensor, Pass, float, "int | None"], bool]


def hold_rows(isa: str, p: Pass, window: int | None, near: Near) -> None:
    """Check that attention is `near` the formula and row-invariant.

    A row's bits must be the same if it is alone, with two threads, and on the portable set.
    """
    scale = p.q.shape[2] ** -0.5
    with instructions(isa):
        got = cpu.attention(p.q, p.layer, p.batch, scale, window)
        assert near(got, p, scale, window)
        for b, part in enumerate(p.parts):
            count = part.pending + len(part.parents)
            for row in {(7 * b + 3) % count, count - 1}:
                single = alone(p, b, row, 3)
                lonely = cpu.attention(single.q, single.layer, single.batch, scale, window)
                assert lonely[0].equal(got[int(p.batch.row_offsets[b]) + row])
        with threads(2):
            assert cpu.attention(p.q, p.layer, p.batch, scale, window).equal(got)
    with instructions("portable"):
        assert cpu.attention(p.q, p.layer, p.batch, scale, window).equal(got)


def hold_long(isa: str, name: str, near: Near) -> None:
    """Check one row after 8,191 cached tokens.

    Attention must be `near` the formula. Three threads, and the portable set, must give the same bits.
    """
    p = make_pass([Part(8191, 1)], name, heads=3, kv_heads=1, dim=16, block_size=16)
    with instructions(isa):
        walked = cpu.attention(p.q, p.layer, p.batch, 0.4)
        with threads(3):
            assert cpu.attention(p.q, p.layer, p.batch, 0.4).equal(walked)
    assert near(walked, p, 0.4, None)
    with instructions("portable"):
        assert cpu.attention(p.q, p.layer, p.batch, 0.4).equal(walked)


def hold_order(isa: str, name: str, window: int | None, near: Near) -> None:
    """Check long sequences, whose keys are read in different orders.

    One or two threads read a block of keys for all heads, then the next block; sixteen threads take each head's keys
    separately. The 40 prompt rows need two tiles per head, so each of these tiles is computed as a whole. A prompt row
    alone is computed in parts.
    """
    parts = [Part(2300, 1), Part(1500, 1, [-1, 0, 1]), Part(1030, 2, [-1, -1, 0, 0, 3, 1]), Part(1100, 40), Part(3, 1)]
    p = make_pass(parts, name, heads=4, kv_heads=2, dim=32, block_size=16)
    with threads(1):
        hold_rows(isa, p, window, near)
    with instructions(isa), threads(1):
        one = cpu.attention(p.q, p.layer, p.batch, 0.2, window)
        with threads(16):
            assert cpu.attention(p.q, p.layer, p.batch, 0.2, window).equal(one)


def spoiled(name: str, slot: int, parents: list[int], broken: float, parts: slice) -> tuple[Pass, Tensor, int]:
    """A pass with `broken` in one row's part of the cache, attention before that, and the index of the row."""
    p = make_pass([Part(3, 1 if parents else 12, parents)], name, heads=8, block_size=16)
    first = min(slot - 3, len(p.batch.slots) - 1)
    clean = cpu.attention(p.q, p.layer, p.batch, 0.3)
    for rows in flat(p.layer)[parts]:
        rows[int(p.batch.slots[first])] = broken
    return p, clean, first
