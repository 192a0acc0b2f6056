"""Integer formats: int4 and its packed files; int8n, whose upper halves are an int4 weight; qoq's two levels."""

import pytest
import torch
from fixtures_models import backends
from fixtures_ops import randn
from hypothesis import given, settings, strategies as st

from sameseed import ops, scheme
from sameseed.formats.int8n import FORMAT, high
from sameseed.formats.qoq import PROTECTED
from sameseed.quantize._grid import possible_codes
from sameseed.scheme import QuantArgs, QuantScheme

INT4 = scheme.get("int4")


def test_codes_by_hand():
    weight = torch.tensor([[0.0, 1.0, -1.0, 7.0, -7.5, 7.5, 0.5, 1.5]])  # scale 1: ties go to even
    q = INT4.encode(weight, QuantArgs(8))
    assert q.parts["scales"].tolist() == [[1.0]]
    assert q.parts["codes"].tolist() == [[8, 9, 7, 15, 0, 15, 8, 10]]
    assert INT4.decode(q).tolist() == [[0, 1, -1, 7, -8, 7, 0, 2]]
    assert "zeros" not in q.parts


def test_zero_points_by_hand():
    weight = torch.tensor([[-3.0, 12.0, 0.0, 1.0], [1.0, 15.0, 2.0, 4.0], [-15.0, -1.0, -2.0, -4.0]])
    q = INT4.encode(weight, QuantArgs(4, symmetric=False))
    assert q.parts["zeros"].tolist() == [[3], [0], [15]]  # a range on one side of 0 is extended to 0
    assert q.parts["codes"].tolist() == [[0, 15, 3, 4], [1, 15, 2, 4], [0, 14, 13, 11]]
    assert INT4.decode(q).equal(weight)


def test_the_scale_is_rounded_before_the_codes():
    weight = torch.linspace(-1, 1, 32)[None]
    q = INT4.encode(weight, QuantArgs(32))
    scale = torch.tensor(1 / 7.5).to(torch.bfloat16).float()
    assert q.parts["scales"].float().item() == scale.item() != 1 / 7.5
    assert q.parts["codes"].equal(((weight / scale).round().clamp(-8, 7) + 8).to(torch.uint8))


every_group = pytest.mark.parametrize("group", [32, 64, 128, None])


def of(codes):
    return FORMAT.stored(codes, torch.full((codes.shape[0], 1), 0.5, dtype=torch.bfloat16))


def test_every_code_splits_into_two_halves_in_range():
    codes = torch.arange(-128, 120, dtype=torch.int8)
    upper = high(codes)
    lower = codes.int() - 16 * upper.int()
    assert upper.min() == lower.min() == -8 and upper.max() == lower.max() == 7
    assert (codes.float() / 16 - upper.float()).abs().max() <= 0.5  # the nearest int4 code
    assert possible_codes(of(codes[None])).equal(codes)


@every_group
def test_the_view_is_the_upper_half_under_the_same_scale(group):
    q = FORMAT.encode(randn(9, 256), QuantArgs(group))
    view = FORMAT.lower(q)
    assert view is not None and view.shape == q.shape and view.group == q.group
    codes = q.parts["codes"].double().view(9, -1, q.group)
    wanted = 16 * torch.floor(codes / 16 + 0.5) * q.parts["scales"].double()[..., None]
    assert FORMAT.decode(view).double().equal(wanted.flatten(1))
    step = q.parts["scales"].float().repeat_interleave(q.group, 1)
    assert ((FORMAT.decode(view) - FORMAT.decode(q)).abs() <= 8 * step).all()
    assert FORMAT.decode_rows(view, torch.tensor([3, 0])).equal(FORMAT.decode(view)[[3, 0]])


@pytest.mark.parametrize("backend", backends())
def test_the_view_takes_no_memory(backend):
    chosen = ops.resolve(backend)
    q = chosen.pack(QuantScheme.parse("w8a8n").encode(randn(70, 256)))
    view = FORMAT.lower(q)
    assert view is not None and view.activations == "int8" and view.layout == q.layout
    theirs = {t.data_ptr(): t.nbytes for t in q.parts.values()}
    assert all(theirs[t.data_ptr()] == t.nbytes for t in view.parts.values())
    if q.layout != "plain":  # the view has half of each code
        assert view.nbytes - view.parts["scales"].nbytes == (q.nbytes - q.parts["scales"].nbytes) / 2
    plain = chosen.unpack(view)
    assert FORMAT.decode(plain).equal(FORMAT.decode(FORMAT.lower(chosen.unpack(q)) or q))
    again = FORMAT.lower(view)
    assert again is not None and again.parts["high"].data_ptr() == view.parts["high"].data_ptr()


def test_one_sided_groups_use_the_longer_side():
    """Codes reach 128 steps below 0 and 119 above: a negative group has finer steps."""
    weight = randn(1, 128).abs()
    up, down = FORMAT.encode(weight), FORMAT.encode(-weight)
    assert up.parts["codes"].max() == 119 and down.parts["codes"].min() == -128
    assert down.parts["scales"].float() < up.parts["scales"].float()


QOQ = scheme.get("qoq")
rows = st.lists(st.floats(-1e4, 1e4, width=32), min_size=64, max_size=64)


def steps(q):
    """The integer steps [O, K / G]: scales divided by the channel's scale."""
    found = q.parts["scales"] / q.parts["channel"].float()
    return found.where(q.parts["scales"] > 0, 0.0)


@given(rows, st.sampled_from([32, 64, None]), st.sampled_from([None, "mse"]))
@settings(max_examples=60)
def test_no_product_leaves_int8(values, group, variant):
    """For any weights, (code - zero) * step stays within -127..127, and the first level within -119..119."""
    weight = torch.tensor([values])
    q = QOQ.encode(weight, QuantArgs(group, False, variant))
    found = steps(q)
    assert found.max() <= 16 and q.parts["zeros"].max() <= 15 and q.parts["codes"].max() <= 15
    codes = q.parts["codes"].view(1, -1, q.group).int() - q.parts["zeros"][..., None].int()
    products = codes * found[..., None].int()
    assert products.abs().max() <= 127
    # Decoding equals these integers times the channel's scale, and the scales are exact products.
    channel = q.parts["channel"].double()
    assert QOQ.decode(q).double().equal((products.double() * channel[..., None]).flatten(1))
    assert q.parts["scales"].double().equal(found.double() * channel)


def test_by_hand():
    """Channel 2 / 119; the group of small values has its own step."""
    weight = torch.cat([torch.linspace(-2, 2, 32), torch.linspace(0, 0.25, 32)])[None]
    q = QOQ.encode(weight, QuantArgs(32, False))
    channel = torch.tensor(2 / PROTECTED).to(torch.bfloat16)
    assert q.parts["channel"].dtype == torch.bfloat16 and q.parts["channel"].item() == channel.item()
    assert steps(q).tolist() == [[16, 1]]  # 238 / 15 rounded up; 0.25 is 15 steps of the first level
    assert q.parts["zeros"].tolist() == [[7, 0]]
    assert q.parts["scales"].tolist() == [[16 * channel.item(), channel.item()]]
    assert q.parts["codes"][0, 32:].tolist() == (torch.linspace(0, 0.25, 32) / channel.float()).round().int().tolist()


def test_the_smaller_step_is_taken_where_it_errs_less():
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    plain, better = (QOQ.encode(weight, QuantArgs(128, False, v)) for v in (None, "mse"))
    errors = [(QOQ.decode(q) - weight).view(64, 2, 128).square().sum(-1) for q in (plain, better)]
    taken = steps(better) < steps(plain)
    assert taken.any() and not taken.all()
    assert errors[1].sum() < 0.95 * errors[0].sum()
