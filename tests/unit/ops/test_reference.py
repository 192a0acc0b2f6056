"""The reference: threads, what it stands in for, and integer products written in plain Python."""

import logging
import math
from dataclasses import replace
from fractions import Fraction
from types import ModuleType

import pytest
import torch
from fixtures_ops import Part, make_pass, randn
from hypothesis import example, given, strategies as st

from sameseed import ops, scheme
from sameseed.errors import ConfigError
from sameseed.ops import Ops, plain_rows, reference
from sameseed.scheme import QuantScheme, QuantTensor, quantize_rows

pytestmark = pytest.mark.bits


def dense(values):
    return scheme.get("fp32").encode(torch.tensor(values))


def test_the_caller_s_number_of_threads_stays():
    """The reference computes on one thread and restores the number of threads, also after an error."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        reference.product(plain_rows(randn(2, 3)), dense([[1.0, 2.0, 3.0]]))
        assert torch.get_num_threads() == 2
        with pytest.raises(RuntimeError):
            reference.product(plain_rows(randn(2, 4)), dense([[1.0, 2.0, 3.0]]))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def backend(**members):
    """A backend module with the given members."""
    module = ModuleType("sameseed.ops.partial")
    declared = {"row_invariant": True, "LINEAR_FORMATS": frozenset(), "KV_FORMATS": frozenset()}
    for name, value in {**declared, **members}.items():
        setattr(module, name, value)
    return module


def test_what_a_backend_lacks_falls_through_said_once(caplog):
    with caplog.at_level(logging.WARNING, logger="sameseed.ops"):
        table = Ops(backend())
        p = make_pass([Part(2, 1)])
        for _ in range(3):
            q = dense([[1.0, 2.0]])
            assert table.product(plain_rows(torch.ones(1, 2)), q).tolist() == [[3.0]]
            assert table.attention(p.q, p.layer, p.batch, 1.0).equal(reference.attention(p.q, p.layer, p.batch, 1.0))
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == len(set(said))
    assert any("'partial' kernel for weights in 'fp32'" in m and "sameseed info" in m for m in said)
    assert any("'partial' kernel for a KV cache in 'fp32'" in m for m in said)
    assert any("no silu_mul" in m for m in said)


def test_what_a_backend_has_is_used_for_its_formats_only():
    calls = []

    def product(rows, w, bias=None, residual=None):
        calls.append(w.format)
        return reference.product(rows, w, bias)

    def embedding(token_ids, w):
        calls.append("embedding " + w.format)
        return reference.embedding(token_ids, w)

    table = Ops(backend(product=product, embedding=embedding, LINEAR_FORMATS=frozenset({"bf16"})))
    for name in ("fp32", "bf16", "int8"):
        q = scheme.get(name).encode(torch.ones(2, 4))
        table.product(plain_rows(torch.ones(1, 4)), q)
        table.embedding(torch.tensor([0], dtype=torch.int32), q)
    assert calls == ["bf16", "embedding bf16"]


def test_a_backend_that_cannot_run_is_refused_with_its_reason(monkeypatch):
    module = pytest.importorskip("sameseed.ops.cpu")
    monkeypatch.setattr(module, "unavailable", lambda: "the native module is not built; run `make build`")
    ops.resolve.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"'cpu' cannot run here: .*make build"):
            ops.resolve("cpu")
        assert ops.resolve("auto").name == "reference"  # slow, but available
    finally:
        ops.resolve.cache_clear()


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def nearest_float(exact):
    """The exact value rounded once to float32, ties to even (infinite beyond the range)."""
    if exact == 0:
        return 0.0
    size = abs(exact)
    exponent = max(math.floor(math.log2(size)) if size > Fraction(1, 2**1000) else -149, -126) - 23
    while size >= Fraction(2) ** (exponent + 24):
        exponent += 1
    while exponent > -149 and size < Fraction(2) ** (exponent + 23):
        exponent -= 1
    unit = Fraction(2) ** exponent
    rounded = round(size / unit) * unit  # Python rounds ties to even
    value = math.inf if rounded >= Fraction(2) ** 128 else float(rounded)
    return math.copysign(value, exact)


digits = st.integers(2**23, 2**24 - 1)  # all digits of a float32 count
products = st.builds(
    lambda a, b, c, place: (float(a), float(b), c * 2.0**place), digits, digits, digits, st.integers(-60, 60)
)


@given(st.tuples(floats, floats, floats) | products)
# 2^-24 - 2^-70 added to 1 + 2^-23 stays below a tie; rounded to a double it is the tie, which goes up.
@example((2.0**-12 * (1 + 2.0**-23), 2.0**-12 * (1 - 2.0**-23), 1 + 2.0**-23))
def test_fma_rounds_once(numbers):
    a, b, c = map(Fraction, numbers)
    got = reference._fma(*(torch.tensor([v]) for v in numbers)).item()
    assert got == nearest_float(a * b + c)  # as numbers: the sign of zero does not matter


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_fma_of_no_numbers(value):
    x = torch.tensor([value])
    for args in ((x, torch.ones(1), torch.ones(1)), (torch.ones(1), torch.ones(1), x)):
        got = reference._fma(*args)
        assert got.isnan().item() if math.isnan(value) else got.equal(x)


@pytest.mark.parametrize("name", ["w8a8", "w8a8-g32", "w4a8-g32", "w4a8-g64-asym"])
def test_the_product_in_plain_python(name):
    generator = torch.Generator().manual_seed(4)
    x, weight = torch.randn(3, 128, generator=generator), torch.randn(5, 128, generator=generator)
    bias, residual = torch.randn(5, generator=generator), torch.randn(3, 5, generator=generator)
    w = QuantScheme.parse(name).encode(weight)
    got = reference.product(plain_rows(x), w, bias, residual)
    group = w.group
    codes, row_scales = quantize_rows(x, group)
    zeros = w.parts.get("zeros")
    middle = 8 if w.format == "int4" else 0
    f32 = lambda v: torch.tensor(v, dtype=torch.float32).item()  # noqa: E731
    for t in range(3):
        for o in range(5):
            f = 0.0
            for g in range(128 // group):
                zero = middle if zeros is None else int(zeros[o, g])
                columns = range(g * group, (g + 1) * group)
                total = sum((int(w.parts["codes"][o, k]) - zero) * int(codes[t, k]) for k in columns)
                scale = f32(w.parts["scales"][o, g].item() * row_scales[t, g].item())
                f = nearest_float(Fraction(f32(total)) * Fraction(scale) + Fraction(f))
            assert got[t, o].item() == f32(f32(f + bias[o].item()) + residual[t, o].item())


def test_outputs_in_blocks(monkeypatch):
    """More outputs than one block holds; int8 sums beyond the integers that float32 represents exactly."""
    codes = torch.full((4100, 2048), 127, dtype=torch.int8)
    codes[4099, 0] = 126
    w = QuantTensor("int8", (4100, 2048), {"codes": codes, "scales": torch.ones(4100, 1)})
    out = reference.product(plain_rows(torch.full((1, 2048), 127.0)), replace(w, activations="int8"))
    assert out.shape == (1, 4100)
    assert out[0, :4099].unique().tolist() == [127 * 127 * 2048]
    assert out[0, 4099].item() == nearest_float(Fraction(127 * 127 * 2048 - 127))
