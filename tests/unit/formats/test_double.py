"""nf4-dq: double quantization, against bitsandbytes where it is installed, and against its definition."""

from __future__ import annotations

import json

import pytest
import torch
from fixtures_formats import read_weight, write_weight
from fixtures_ops import randn

from sameseed import scheme
from sameseed.formats import _dynamic8
from sameseed.formats.nf4 import STATE, single
from sameseed.scheme import QuantArgs, QuantScheme

NF4 = scheme.get("nf4")
DQ = QuantScheme.parse("nf4-dq")


def test_the_dynamic_map():
    """A sign, leading zeros that count powers of ten, and a fraction; 0 and 1 are extra values (Dettmers, 2016)."""
    table = _dynamic8.TABLE
    assert table.shape == (256,) and (table.diff() > 0).all()
    assert table[-1] == 1.0 and table[127] == 0.0 and table[0] == pytest.approx(-0.99297, abs=1e-5)
    assert table[128] == pytest.approx(0.55e-6) and table[190] < 0.1 < table[191]
    assert table[128:-1].equal(-table[:127].flip(0))


@pytest.mark.parametrize("count", [1, 255, 256, 257, 1000])
def test_dynamic_codes_are_the_nearest(count):
    x = randn(count) * 3
    codes, sizes = _dynamic8.encode(x)
    assert sizes.shape == (-(-count // 256),) and sizes[0] == x[:256].abs().max()
    decoded = _dynamic8.decode(codes, sizes)
    choices = (_dynamic8.TABLE * sizes.repeat_interleave(256)[:count, None] - x[:, None]).abs().amin(1)
    torch.testing.assert_close((decoded - x).abs(), choices, rtol=1e-4, atol=1e-6)
    assert _dynamic8.decode(*_dynamic8.encode(torch.zeros(count))).equal(torch.zeros(count))


def test_codes_are_the_nearest_under_the_scales_that_are_stored():
    weight = randn(8, 256)
    weight[3] *= 1e-6  # the second quantization leaves little of this row
    q = DQ.encode(weight)
    again = NF4.decode(q)
    scales = single(q).parts["scales"].repeat_interleave(64, 1)
    known = scales[..., None] * NF4.values(torch.arange(16), None)
    nearest = (known - weight[..., None]).abs().amin(-1)
    torch.testing.assert_close((again - weight).abs(), nearest, rtol=1e-4, atol=1e-6)


# --- bitsandbytes ---


@pytest.mark.parametrize("shape", [(40, 640), (3, 64), (128, 256)])
@pytest.mark.parametrize("double", [False, True])
def test_bitsandbytes_reads_what_we_write(shape, double):
    functional = pytest.importorskip("bitsandbytes.functional")
    q = NF4.encode(randn(*shape), QuantArgs(64, variant="dq" if double else None))
    tensors = NF4.checkpoint("x", q)
    packed = tensors.pop("x.weight")
    state = functional.QuantState.from_dict(tensors, device=torch.device("cpu"))
    state.dtype = torch.float32
    got = functional.dequantize_4bit(packed, state)
    assert got.equal(NF4.decode(q))


@pytest.mark.parametrize("shape", [(40, 640), (3, 64), (128, 256)])
@pytest.mark.parametrize("double", [False, True])
def test_we_read_what_bitsandbytes_writes(shape, double, tmp_path):
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = randn(*shape)
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=double)
    tensors = {f"x.weight.{key}": value for key, value in state.as_dict(packed=True).items()} | {"x.weight": packed}
    own = NF4.encode(weight, QuantArgs(64, variant="dq" if double else None))
    write_weight(tmp_path, tensors, NF4.config(own))
    assert NF4.decode(read_weight(tmp_path, shape)).equal(functional.dequantize_4bit(packed, state))
    for key, value in NF4.checkpoint("x", own).items():
        if key.endswith(STATE):
            theirs, ours = (json.loads(bytes(t.tolist())) for t in (tensors[key], value))
            assert {**theirs, "dtype": "bfloat16"} == ours
        elif key != "x.weight" or not double:  # codes follow the stored scale, not the exact one
            assert tensors[key].equal(value), key
    if double:
        read = read_weight(tmp_path, shape)
        assert (own.parts["codes"] != read.parts["codes"]).float().mean() < 0.02
        assert (NF4.decode(own) - weight).norm() <= (NF4.decode(read) - weight).norm()
