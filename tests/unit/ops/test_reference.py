"""The reference: threads, what it stands in for, and products of many outputs."""

import logging
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from fixtures_ops import Part, make_pass, randn

from sameseed import scheme
from sameseed.ops import Ops, plain_rows, reference
from sameseed.scheme import QuantTensor

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


def test_products_of_integers_add_up_with_one_rounding():
    """The exact sum lies just below a tie, to which float64 rounds it: a second rounding would go up."""
    a, b, c = 2.0**-12 * (1 + 2.0**-23), 2.0**-12 * (1 - 2.0**-23), 1 + 2.0**-23
    assert reference._fma(*(torch.tensor([x]) for x in (a, b, c))).item() == c
    for x in (torch.tensor([torch.inf]), torch.tensor([-torch.inf])):
        assert reference._fma(x, torch.ones(1), torch.ones(1)).equal(x)


def test_outputs_in_blocks():
    """More outputs than one block holds; int8 sums beyond the integers that float32 represents exactly."""
    codes = torch.full((4100, 2048), 127, dtype=torch.int8)
    codes[4099, 0] = 126
    w = QuantTensor("int8", (4100, 2048), {"codes": codes, "scales": torch.ones(4100, 1)})
    out = reference.product(plain_rows(torch.full((1, 2048), 127.0)), replace(w, activations="int8"))
    assert out.shape == (1, 4100)
    assert out[0, :4099].unique().tolist() == [127 * 127 * 2048]
    assert out[0, 4099].item() == torch.tensor(127 * 127 * 2048 - 127.0, dtype=torch.float64).float().item()
