"""w8a8-outliers: numbers of a row above 6 in size stay floats, the others are int8 (LLM.int8(), row by row)."""

import pytest
import torch
from fixtures_models import backends
from fixtures_ops import randn

from sameseed import ops
from sameseed.ops import plain_rows
from sameseed.scheme import QuantScheme

K = 256
every_backend = pytest.mark.parametrize("backend", backends())


def planted():
    """Rows [6, K] within 6, except column 7 of three rows, which is a hundred times as large."""
    x = randn(6, K).clamp(-5, 5)
    x[:, 7] = 1.0
    x[::2, 7] *= 100.0
    return x


@every_backend
def test_an_outlier_costs_the_others_nothing(backend):
    chosen, weight, x = ops.resolve(backend), randn(40, K, seed=1), planted()
    wanted = x.double() @ weight.double().T

    def error(name):
        got = chosen.product(plain_rows(x), chosen.encode(weight, QuantScheme.parse(name)))
        return float((got - wanted)[::2].norm() / wanted[::2].norm())

    assert error("w8a8") > 0.03  # steps of 100 / 127 for numbers of size 1
    # What remains is the error of the weights and the other numbers, as in rows without an outlier.
    assert error("w8a8-outliers") < min(0.3 * error("w8a8"), 1.2 * error("w8a16"))


@every_backend
@pytest.mark.parametrize("suffix", ["", "-g64"])
def test_rows_without_one_have_the_bits_of_w8a8(backend, suffix):
    """Also if other rows of the pass have outliers (law 1)."""
    chosen, weight, x = ops.resolve(backend), randn(33, K, seed=1), planted()
    bias, residual = randn(33, seed=2), randn(6, 33, seed=3)
    mixed, integers = (chosen.encode(weight, QuantScheme.parse(name + suffix)) for name in ("w8a8-outliers", "w8a8"))
    got = chosen.product(plain_rows(x), mixed, bias, residual)
    wanted = chosen.product(plain_rows(x), integers, bias, residual)
    same = (got.view(torch.int32) == wanted.view(torch.int32)).all(1)
    assert same.tolist() == [False, True] * 3
