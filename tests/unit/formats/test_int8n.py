"""int8n: bytes whose upper halves are an int4 weight."""

from __future__ import annotations

import pytest
import torch
from fixtures_models import backends
from fixtures_ops import randn
from torch import Tensor

from sameseed import ops
from sameseed.formats.int8 import FORMAT as INT8
from sameseed.formats.int8n import FORMAT, high
from sameseed.quantize._grid import possible_codes
from sameseed.scheme import QuantArgs, QuantScheme, QuantTensor

every_group = pytest.mark.parametrize("group", [32, 64, 128, None])


def of(codes: Tensor) -> QuantTensor:
    return FORMAT.stored(codes, torch.full((codes.shape[0], 1), 0.5, dtype=torch.bfloat16))


def test_every_code_splits_into_two_halves_in_range() -> None:
    codes = torch.arange(-128, 120, dtype=torch.int8)
    upper = high(codes)
    lower = codes.int() - 16 * upper.int()
    assert upper.min() == lower.min() == -8 and upper.max() == lower.max() == 7
    assert (codes.float() / 16 - upper.float()).abs().max() <= 0.5  # the nearest int4 code
    assert possible_codes(of(codes[None])).equal(codes)


@every_group
def test_the_view_is_the_upper_half_under_the_same_scale(group: int | None) -> None:
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
def test_the_view_takes_no_memory(backend: str) -> None:
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


def test_other_weights_have_no_view() -> None:
    assert INT8.lower(INT8.encode(randn(4, 64))) is None
    whole = ops.resolve("cpu").pack(FORMAT.encode(randn(32, 64)))
    assert whole.layout == "cpu" and FORMAT.lower(whole) is None  # stored as whole bytes, for float rows


def test_one_sided_groups_use_the_longer_side() -> None:
    """Codes reach 128 steps below 0 and 119 above: a negative group has finer steps."""
    weight = randn(1, 128).abs()
    up, down = FORMAT.encode(weight), FORMAT.encode(-weight)
    assert up.parts["codes"].max() == 119 and down.parts["codes"].min() == -128
    assert down.parts["scales"].float() < up.parts["scales"].float()
