"""mxfp4: every code, ties to even, the specification's scales and the scales with the least error."""

from __future__ import annotations

import pytest
import torch

from sameseed import scheme
from sameseed.errors import ConfigError
from sameseed.formats.mxfp4 import TABLE, to_e8m0
from sameseed.scheme import QuantArgs

MXFP4 = scheme.get("mxfp4")


def by_hand(code: int) -> float:
    """The value of an e2m1 code (OCP MX 1.0, 5.3.3): bias 1, one bit of mantissa, no infinity and no NaN."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if sign else size


def test_all_codes():
    assert TABLE.tolist() == [by_hand(c) for c in range(16)]


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
    tensors = MXFP4.checkpoint("x", q)
    codes = q.parts["codes"]
    assert tensors["x.weight_packed"].equal(codes[:, ::2] + 16 * codes[:, 1::2])  # the first code is in the low half
    assert tensors["x.weight_scale"].shape == (4, 2) and tensors["x.weight_scale"].dtype == torch.uint8
    with pytest.raises(ConfigError, match="rows of 40, no multiple of 32"):
        MXFP4.checkpoint("x", MXFP4.encode(torch.ones(2, 40)))
