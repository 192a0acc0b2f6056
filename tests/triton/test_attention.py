"""Attention in Triton against the float64 formula, and rows compared with themselves in other batches."""

import importlib
from dataclasses import replace

import pytest
import torch
from fixtures_ops import Part, alone, exact_attention, flat, make_pass, randn, slot_lists

from sameseed.ops.triton.guard import Launch

kernels = importlib.import_module("sameseed.ops.triton.attention")

# Largest difference from the float64 formula: queries and weights are split into two terms of the cache's type.
TOLERANCE = {"fp32": 2e-5, "bf16": 5e-4}  # others 2e-5, since they keep 22 bits
FORMATS = ["fp32", "bf16", "fp16", "int8", "fp8_e4m3", "fp8_e5m2"]
MIXED = [Part(0, 1), Part(70, 1, [-1, 0, 1]), Part(126, 2, [-1, 0, -1, 2]), Part(0, 5)]


@pytest.fixture(autouse=True)
def _short_spans(monkeypatch):
    """Stretches of eight spans, spans of one block. A program takes all of them unless a test says so: fastest here."""
    monkeypatch.setattr(kernels, "FEW", 0)
    monkeypatch.setattr(kernels, "ENOUGH", 0)
    monkeypatch.setattr(kernels, "SPAN", 64)
    monkeypatch.setattr(kernels, "STRETCH", 512)


def attend(p, window=None, taken=None, scale=0.3):
    out = torch.full(p.q.shape, torch.nan)
    for launch in kernels.launches(p.q, p.layer, p.batch, scale, window, out, taken):
        launch.run()
    return out


@pytest.mark.parametrize("name", FORMATS)
def test_values(name):
    p = make_pass(MIXED if name == "bf16" else [Part(63, 1, [-1, -1, 0]), Part(0, 3)], name)
    got = kernels.attention(p.q, p.layer, p.batch, 0.3)
    assert (got.double() - exact_attention(p, 0.3)).abs().max() <= TOLERANCE.get(name, 2e-5)


@pytest.mark.parametrize("window", [1, 65])
def test_windows(window):
    p = make_pass(MIXED[1:3], "fp16")
    assert (attend(p, window).double() - exact_attention(p, 0.3, window)).abs().max() <= 2e-5


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page"), [(3, 3, 8, 1), (7, 1, 10, 100), (6, 2, 33, 16), (20, 1, 16, 5)]
)
def test_shapes(heads, kv_heads, dim, page):
    """Groups of 1, 7, 3 and 20 query heads; head dimensions that are not powers of two."""
    p = make_pass([Part(20, 2, [-1, -1, 0]), Part(3, 4)], "fp16", heads, kv_heads, dim, page, seed=3)
    assert (attend(p).double() - exact_attention(p, 0.3)).abs().max() <= 2e-5


@pytest.mark.parametrize("name", ["bf16", pytest.param("int8", marks=pytest.mark.slow)])
def test_rows_do_not_know_their_company(name):
    """The bits are the same alone, in another cache, with another block size, and in a chain instead of a tree."""
    p = make_pass(MIXED, name)
    whole = attend(p)
    for b, row in [(1, 3), (2, 1), (2, 5)]:
        single = alone(p, b, row, 16)
        assert attend(single)[0].equal(whole[int(p.batch.row_offsets[b]) + row]), (b, row)


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 70])
def test_who_walks_the_spans_changes_no_bit(window):
    p = make_pass([Part(540, 1, [-1, 0]), Part(2, 2)], "fp16", 2, 1)
    whole, *rest = (attend(p, window, taken) for taken in ("all", "stretch", "span"))
    assert all(whole.equal(x) for x in rest)
    assert (whole.double() - exact_attention(p, 0.3, window)).abs().max() <= 2e-5


@pytest.mark.parametrize("spans", [1, 8])
def test_who_merges_which_parts_changes_no_bit(spans):
    """Merging stretches in parallel, with some or all dimensions per program, gives the bits of merging one by one.

    Partial results outside the bounds are NaN, so reading them would show.
    """
    bounds = [(3, 5), (7, 9), (0, 64), (13, 97), (64, 89)]  # spans of a row
    rows, heads, dim, num_parts = len(bounds), 1, 40, -(-100 // spans)
    part, sums = (torch.full((rows, heads, num_parts, n), torch.nan) for n in (dim, 2))
    for t, (low, high) in enumerate(bounds):
        there = slice(low // spans, -(-high // spans))
        part[t, :, there] = randn(heads, there.stop - there.start, dim, seed=t)
        sums[t, :, there] = 9 * randn(heads, there.stop - there.start, 2, seed=50 + t).abs()
    results = {"part_ptr": part, "sums_ptr": sums, "bounds_ptr": torch.tensor(bounds, dtype=torch.int32)}

    def merged(lines, width):
        out = torch.full((rows, heads, dim), torch.nan)
        given = {**results, "out_ptr": out, "num_parts": num_parts, "num_heads": heads}
        sizes = {"SPANS": spans, "PARTS": 8 // spans, "LINES": lines, "DIM": dim, "BLOCK": width, "EARLY": False}
        Launch(kernels.combine, (rows, heads, -(-dim // width)), given, sizes, warps=lines).run()
        return out

    one_by_one = merged(1, 64)
    assert not one_by_one.isnan().any()
    assert all(merged(lines, width).equal(one_by_one) for lines, width in ((2, 32), (8, 32), (8, 64)))


def test_the_last_level_of_a_full_tree():
    """64 nodes: bit 63 is an int64's sign, and a path of 64 crosses a block of keys. Upper nodes are cached before."""
    p = make_pass([Part(30, 1, [*range(-1, 63)])], "fp16", 2, 2, 16)
    last = {name: getattr(p.batch, name)[-3:] for name in ("token_ids", "positions", "slots", "tree_mask")}
    offsets, pending = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
    level = replace(p, batch=replace(p.batch, **last, row_offsets=offsets, num_pending=pending), q=p.q[-3:].clone())
    assert (attend(level).double() - exact_attention(p, 0.3)[-3:]).abs().max() <= 2e-5


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3"])
def test_a_broken_draft_leaves_no_trace(name):
    """NaN in the values of one branch must reach neither the known token nor the other branch."""
    part = Part(60, 1, [-1, 0, -1])  # nodes 0 and 1 are one branch, node 2 the other
    p = make_pass([part], name)
    clean = attend(p)
    slot = slot_lists([part], p.batch, 5)[0][part.kv_len + 1]  # the row of node 1
    for x in flat(p.layer)[2:] or flat(p.layer):
        x[slot] = torch.nan
    got = attend(p)
    assert got[[0, 1, 3]].equal(clean[[0, 1, 3]])
    assert got[2].isnan().all()


def test_slices_of_wider_rows_and_an_empty_pass():
    p = make_pass([Part(0, 6)], "bf16")
    sliced = torch.cat([p.q, p.q], dim=1)[:, 4:]
    assert not sliced.is_contiguous()
    assert kernels.attention(sliced, p.layer, p.batch, 0.3).equal(kernels.attention(p.q, p.layer, p.batch, 0.3))
    odd = make_pass([Part(0, 2)], "int8", dim=9)
    with pytest.raises(ValueError, match="use a KV cache in bf16"):
        kernels.attention(odd.q, odd.layer, odd.batch, 0.3)
