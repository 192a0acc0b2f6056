"""qoq: two levels of integer quantization that stay within int8, and what kernels multiply."""

from __future__ import annotations

import torch
from hypothesis import given, settings, strategies as st

from sameseed import scheme
from sameseed.formats.qoq import PROTECTED
from sameseed.scheme import QuantArgs, QuantTensor

QOQ = scheme.get("qoq")
rows = st.lists(st.floats(-1e4, 1e4, width=32), min_size=64, max_size=64)


def steps(q: QuantTensor) -> torch.Tensor:
    """The integer steps [O, K / G]: scales divided by the channel's scale."""
    found = q.parts["scales"] / q.parts["channel"].float()
    return found.where(q.parts["scales"] > 0, 0.0)


@given(rows, st.sampled_from([32, 64, None]), st.sampled_from([None, "mse"]))
@settings(max_examples=200)
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


@given(rows, st.sampled_from([32, 64, None]))
@settings(max_examples=200)
def test_errors_are_within_half_a_step_of_each_level(values, group):
    weight = torch.tensor([values])
    q = QOQ.encode(weight, QuantArgs(group, False))
    error = (QOQ.decode(q).double() - weight.double()).abs().view(1, -1, q.group)
    bound = (steps(q).double() + 1) / 2 * q.parts["channel"].double()
    assert (error <= bound[..., None] * (1 + 1e-5) + 2.0**-99).all()


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


def test_a_row_of_nothing():
    q = QOQ.encode(torch.zeros(2, 64))
    assert not QOQ.decode(q).any() and not steps(q).any()
    broken = torch.zeros(2, 64)
    broken[0, 3] = torch.nan
    decoded = QOQ.decode(QOQ.encode(broken))
    assert decoded[0].isnan().all() and not decoded[1].any()
