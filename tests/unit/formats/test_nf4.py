"""nf4: the nearest of sixteen values, in bitsandbytes' layout; nf4-dq, whose scales are quantized again."""

import json

import pytest
import torch
from fixtures_formats import read_weight, write_weight
from fixtures_ops import randn

from sameseed import scheme
from sameseed.formats import _dynamic8
from sameseed.formats.nf4 import STATE, TABLE, single
from sameseed.scheme import QuantArgs, QuantScheme

NF4 = scheme.get("nf4")


def test_the_table_is_that_of_normal_quantiles():
    """Means of neighbouring quantiles of each half, scaled to 1 (appendix E of Dettmers et al., 2023); 0 is exact."""
    normal = torch.distributions.Normal(0.0, 1.0)
    offset = 0.9677083
    upper = normal.icdf(torch.linspace(offset, 0.5, 9))[:-1]
    lower = -normal.icdf(torch.linspace(offset, 0.5, 8))[:-1]
    wanted = torch.cat([lower, torch.zeros(1), upper]).sort().values
    torch.testing.assert_close(TABLE, wanted / wanted.max(), rtol=1e-5, atol=1e-6)


def test_absmax_scales_of_64():
    weight = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    q = NF4.encode(weight)
    assert q.group == 64 and q.parts["scales"].dtype == torch.bfloat16
    assert q.parts["scales"].equal(weight.view(3, 2, 64).abs().amax(-1).to(torch.bfloat16))


def test_checkpoint_layout_is_that_of_bitsandbytes():
    q = NF4.encode(torch.randn(2, 64, generator=torch.Generator().manual_seed(0)))
    tensors = NF4.checkpoint("x", q)
    codes = q.parts["codes"].flatten().tolist()
    assert tensors["x.weight"].shape == (64, 1)
    assert tensors["x.weight"].flatten().tolist() == [a * 16 + b for a, b in zip(codes[::2], codes[1::2], strict=True)]
    assert tensors["x.weight.absmax"].dtype == torch.float32 and tensors["x.weight.absmax"].shape == (2,)
    state = json.loads(bytes(tensors["x.weight.quant_state.bitsandbytes__nf4"].tolist()))
    assert (state["quant_type"], state["blocksize"], state["shape"]) == ("nf4", 64, [2, 64])


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
