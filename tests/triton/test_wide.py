"""Larger tiles of rows: they give the bits of tiles of 16 rows, and when they are used."""

from dataclasses import replace

import pytest
import torch
from fixtures_ops import randn

from sameseed import ops
from sameseed.ops import plain_rows
from sameseed.ops.triton import dispatch as host, guard, tiling as cuts
from sameseed.scheme import QuantScheme

FORMATS = ["bf16", "fp16", "w8a16", "w8a8", "w4a16-g32-asym", "w4a8-g32", "fp8", "fp8-a8", "mxfp4", "w8a8n-g32"]
DEVICE = "cpu" if guard.interpreted() else "cuda"
backend = ops.resolve("triton", DEVICE)
pytestmark = pytest.mark.usefixtures("small_programs")


def packed(name, O, K):  # noqa: E741
    return backend.pack(QuantScheme.parse(name).encode(randn(O, K, seed=1)))


def chosen(w, num_rows, capability=(9, 0)):
    return cuts.way_for(cuts.tiling(w), host.form_for(w), w.group != w.shape[1], num_rows, capability)


@pytest.mark.parametrize(("name", "split"), [*((name, 2) for name in FORMATS), ("bf16", 1), ("w4a16-g32-asym", 1)])
def test_larger_tiles_have_the_bits_of_small_ones(name, split, monkeypatch):
    """Shares are added in ascending order with any tile. Some rows belong to a second wide tile."""
    monkeypatch.setattr(cuts, "SHORTEST", 1)
    monkeypatch.setattr(cuts, "SPLITS", (split,))
    w = packed(name, 40, 192 if name == "bf16" else 256)
    many = 130 if name == "bf16" else 66
    x, bias, residual = randn(many, w.shape[1]), randn(40, seed=2), randn(many, 40, seed=3)
    x[:, 3] *= 1e4
    for rows in (20, 40, many):
        way = chosen(w, rows)
        assert (way is None) == (rows < many and host.form_for(w) == "int8")
        got = backend.product(plain_rows(x[:rows]), w, bias, residual[:rows])
        with monkeypatch.context() as without:
            without.setattr(host, "way_for", lambda *_: None)
            small = backend.product(plain_rows(x[:rows]), w, bias, residual[:rows])
        assert got.view(torch.int32).equal(small.view(torch.int32))


def test_zeros_keep_their_signs(monkeypatch):
    """A sum that starts with 0.0 would lose -0.0, which a share has if a scale makes a tiny negative sum underflow."""
    monkeypatch.setattr(cuts, "SHORTEST", 1)
    monkeypatch.setattr(cuts, "SPLITS", (2,))
    w = packed("bf16", 32, 256)
    w = replace(w, parts={"weight": torch.full((32, 256), -(2.0**-133), dtype=torch.bfloat16)})
    x = torch.full((70, 256), 2.0**-60)
    got = backend.product(plain_rows(x), w)
    alone = backend.product(plain_rows(x[:1]), w).expand(70, 32).contiguous()
    assert got.view(torch.int32).equal(alone.view(torch.int32))


@pytest.fixture
def asked(monkeypatch):
    """Make the kernels be compared, as on a GPU."""
    monkeypatch.setattr(cuts, "interpreted", lambda: False)
    monkeypatch.setattr(cuts, "_proven", {})


def test_a_device_must_show_equal_bits_first(asked, caplog):
    """Asked once per kernel. If bits differ, or it does not compile, tiles of 16 rows are used, and the log says so."""
    there, one = torch.device("cpu"), torch.ones(2)
    calls = []

    def fails():
        raise guard.TritonError("out of resource: shared memory")

    def slower():
        calls.append(1)
        return one

    assert cuts.same_bits("equal", there, slower, one.clone) and cuts.same_bits("equal", there, slower, fails)
    assert len(calls) == 1 and not caplog.records
    assert not cuts.same_bits("other", there, slower, lambda: one + 2.0**-23)
    assert not cuts.same_bits("signs", there, lambda: 0 * one, lambda: -0.0 * one)
    assert not cuts.same_bits("broken", there, slower, fails)
    assert ["other bits" in r.getMessage() for r in caplog.records] == [True, True, False]
