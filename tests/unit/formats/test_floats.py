"""Float formats: all codes of fp8 and mxfp4, their scales and what rounds to them."""

import math

import pytest
import torch
from fixtures_ops import randn

from sameseed import scheme
from sameseed.errors import ConfigError
from sameseed.formats._fp8 import choose
from sameseed.formats.mxfp4 import TABLE, to_e8m0
from sameseed.scheme import DENSE, QuantArgs, QuantScheme


def test_a_weight_beyond_fp16_is_refused_instead_of_becoming_infinite():
    scheme.get("fp16").encode(torch.tensor([[65504.0, -65504.0]]))
    with pytest.raises(ConfigError, match=r"use bf16"):
        scheme.get("fp16").encode(torch.tensor([[1.0, -70000.0]]))


@pytest.mark.parametrize("dtype", DENSE, ids=str)
def test_auto_keeps_what_the_checkpoint_stores(dtype):
    weight = torch.randn(3, 8).to(dtype)
    q = QuantScheme().encode(weight)
    assert q.format == DENSE[dtype] and q.parts["weight"].equal(weight)


KINDS = {"fp8_e4m3": (4, 3, 448.0, torch.float8_e4m3fn), "fp8_e5m2": (5, 2, 57344.0, torch.float8_e5m2)}
every_kind = pytest.mark.parametrize("name", KINDS)


@every_kind
def test_scales_of_weights_and_cache_rows(name):
    largest = KINDS[name][2]
    q = scheme.get(name).encode(torch.tensor([[1.0, -2.0], [0.0, 0.0], [1e-31, 0.0]]))
    assert q.parts["scales"].tolist() == [[torch.tensor(2.0 / largest).item()], [0.0], [0.0]]
    assert q.parts["codes"].dtype == torch.uint8 and q.parts["scales"].dtype == torch.float32
    codes, scales = scheme.get(name).encode_kv(torch.tensor([[[1.0, 3.0], [math.nan, 1.0]], [[math.inf, 1.0], [0, 0]]]))
    assert scales[0, 0] == torch.tensor(3.0) / largest and scales[0, 1].isnan() and scales[1, 0].isnan()
    assert scales[1, 1] == 0 and not codes[0, 1].any() and not codes[1].any()


def test_checkpoints_are_of_e4m3_only():
    """e5m2 is not written: no other engine reads it, and none may take it for e4m3."""
    fmt, other = scheme.get("fp8_e4m3"), scheme.get("fp8_e5m2")
    q = fmt.encode(randn(6, 8))
    tensors = fmt.checkpoint("x", q)
    assert tensors["x.weight"].dtype == torch.float8_e4m3fn and tensors["x.weight_scale"].shape == (6, 1)
    assert fmt.config(q)["format"] == "float-quantized" and other.config(other.encode(randn(2, 8))) == {}


@every_kind
def test_saturation_subnormals_and_what_is_no_number(name):
    """With scale 1: values beyond the largest saturate, subnormals have equal steps, NaN spoils its own row."""
    _, mantissa_bits, largest, dtype = KINDS[name]
    fmt = scheme.get(name)
    tiny = torch.finfo(dtype).tiny  # the smallest normal number
    step = tiny / (1 << mantissa_bits)
    row = torch.tensor([largest, -largest, tiny, step, step * 0.49, step * 1.51, -step, 0.0, -0.0])
    got = fmt.decode(fmt.encode(row[None]))[0]
    assert got.tolist() == [largest, -largest, tiny, step, 0.0, 2 * step, -step, 0.0, 0.0]
    assert fmt.decode(fmt.encode(row[None] * 1e30)).isfinite().all()
    broken = torch.stack([row, row.masked_fill(row == tiny, torch.nan), row])
    decoded = fmt.decode(fmt.encode(broken))
    assert decoded[1].isnan().all() and decoded[[0, 2]].isfinite().all()


@pytest.mark.parametrize(("height", "width"), [(256, 256), (130, 192), (1, 128), (129, 200), (5, 40), (128, 129)])
def test_blocks_share_a_scale(height, width):
    weight = randn(height, width) * torch.linspace(0.1, 10, height)[:, None]
    fmt = scheme.get("fp8_e4m3")
    q = fmt.encode(weight, QuantArgs(variant="b128"))
    assert width % q.group == 0 and (q.group == width if width <= 128 else 128 % q.group == 0)
    scales = q.parts["scales"].repeat_interleave(q.group, 1)  # the scale of each weight
    for i in range(0, height, 128):
        for j in range(0, width, 128):
            block = weight[i : i + 128, j : j + 128]
            assert (scales[i : i + 128, j : j + 128] == block.abs().max() / 448).all()
            alone = fmt.decode(fmt.encode(block, QuantArgs(variant="b128")))
            assert fmt.decode(q)[i : i + 128, j : j + 128].equal(alone)
    tensors = fmt.checkpoint("x", q)
    rows = height if width <= 128 else -(-height // 128)
    assert tensors["x.weight_scale"].shape == (rows, -(-width // 128))


def test_joined_blocks_are_not_written():
    fmt = scheme.get("fp8_e4m3")
    q = fmt.encode(randn(100, 256), QuantArgs(variant="b128"))
    with pytest.raises(ConfigError, match="by itself"):
        fmt.checkpoint("x", fmt.concat([q, fmt.encode(9 * randn(100, 256), QuantArgs(variant="b128"))]))


def test_the_chooser_takes_e5m2_only_for_a_wide_range():
    """e4m3 has the finer steps; e5m2 still represents values of 2^-18 and less of a row's largest."""
    normal = randn(64, 256)
    heavy = normal.sign() * normal.abs() ** 3
    wide = 1e-6 * randn(64, 256, seed=1)
    wide[:, 0] = 1.0
    for weight, name in ((normal, "fp8_e4m3"), (heavy, "fp8_e4m3"), (1e-9 * normal, "fp8_e4m3"), (wide, "fp8_e5m2")):
        assert choose(weight) == name
        assert QuantScheme.parse("fp8-auto").encode(weight).format == name
        assert QuantScheme.parse("fp8-a8-auto").settled(weight) == QuantScheme(name, activations="fp8")
    assert choose(torch.zeros(2, 8)) == "fp8_e4m3"


MXFP4 = scheme.get("mxfp4")


def by_hand_of_e2m1(code):
    """The value of an e2m1 code (OCP MX 1.0, 5.3.3): bias 1, one bit of mantissa, no infinity and no NaN."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if sign else size


def test_all_codes_of_e2m1():
    assert TABLE.tolist() == [by_hand_of_e2m1(c) for c in range(16)]


def test_all_scales():
    scales = 2.0 ** (torch.arange(256, dtype=torch.float64) - 127)
    scales[255] = torch.nan
    assert to_e8m0(scales.to(torch.bfloat16)).equal(torch.arange(256, dtype=torch.uint8))


def test_ties_go_to_the_even_code():
    row = torch.zeros(1, 32)
    halfway = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    row[0, :7], row[0, 7:14], row[0, 14] = torch.tensor(halfway), -torch.tensor(halfway), 6.0
    codes = MXFP4.encode(row).parts["codes"][0]
    assert codes[:7].tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert codes[7:14].tolist() == [0, 10, 10, 12, 12, 14, 14]  # rounding never gives a negative zero
    row[0, :7] += 1e-6
    assert MXFP4.encode(row).parts["codes"][0, :7].tolist() == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("absmax", [1.0, 1.99, 2.0, 6.0, 6.1, 7.99, 8.0, 1e-20, 3e38, 2.0**-100])
def test_scales_are_the_specification_s(absmax):
    """Section 6.3: the largest power of two not above absmax, divided by that of e2m1 (4); beyond 6 it saturates."""
    row = torch.zeros(1, 32)
    row[0, 3] = absmax
    q = MXFP4.encode(row)
    exact = torch.tensor(absmax).double()
    power = 2.0 ** torch.floor(torch.log2(exact))
    assert q.parts["scales"].double().item() == power / 4
    steps = min(exact / (power / 4), 6.0)
    nearest = min(TABLE.tolist(), key=lambda v: abs(v - steps))
    assert MXFP4.decode(q)[0, 3].item() == nearest * power / 4


def test_better_scales_never_err_more():
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    plain, better = (MXFP4.encode(weight, QuantArgs(32, variant=v)) for v in (None, "mse"))
    errors = [(MXFP4.decode(q) - weight).view(64, 8, 32).square().sum(-1) for q in (plain, better)]
    assert (errors[1] <= errors[0]).all() and errors[1].sum() < 0.97 * errors[0].sum()
    ratio = better.parts["scales"].float() / plain.parts["scales"].float()
    assert sorted(ratio.unique().tolist()) == [1.0, 2.0]


def test_zeros_and_what_is_no_number():
    weight = torch.zeros(3, 32)
    weight[1, 5], weight[2, 5] = torch.nan, -torch.inf
    q = MXFP4.encode(weight)
    decoded = MXFP4.decode(q)
    assert (decoded[0] == 0).all() and decoded[1:].isnan().all()
    assert MXFP4.checkpoint("x", q)["x.weight_scale"].flatten().tolist() == [0, 255, 255]


def test_checkpoint_layout():
    q = MXFP4.encode(torch.randn(4, 64, generator=torch.Generator().manual_seed(0)))
    codes = q.parts["codes"]
    packed = MXFP4.checkpoint("x", q)["x.weight_packed"]
    assert packed.equal(codes[:, ::2] + 16 * codes[:, 1::2])  # the first code is in the low half
    with pytest.raises(ConfigError, match="rows of 40, no multiple of 32"):
        MXFP4.checkpoint("x", MXFP4.encode(torch.ones(2, 40)))
