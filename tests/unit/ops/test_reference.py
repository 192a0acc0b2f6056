"""The reference keeps its callers' threads; the op table through which every backend falls back to it."""

from __future__ import annotations

import logging
from types import ModuleType

import pytest
import torch
from fixtures_ops import Part, make_pass, randn

from sameseed import ops, scheme
from sameseed.errors import ConfigError, RegistryError
from sameseed.ops import Ops, plain_rows, reference

pytestmark = pytest.mark.bits


def dense(values: list[list[float]]):
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


def backend(**members: object) -> ModuleType:
    """A backend module with the given members."""
    module = ModuleType("sameseed.ops.partial")
    declared = {"row_invariant": True, "LINEAR_FORMATS": frozenset(), "KV_FORMATS": frozenset()}
    for name, value in {**declared, **members}.items():
        setattr(module, name, value)
    return module


def test_what_a_backend_lacks_falls_through_said_once(caplog):
    ops._say_once.cache_clear()
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


def test_a_backend_that_varies_says_so():
    assert not Ops(backend(row_invariant=False)).row_invariant
    assert Ops(backend()).row_invariant


def test_an_unknown_backend():
    with pytest.raises(RegistryError, match="did you mean 'reference'"):
        ops.resolve("referense")


def test_a_backend_that_cannot_run_is_refused_with_its_reason(monkeypatch):
    module = pytest.importorskip("sameseed.ops.cpu")
    monkeypatch.setattr(module, "unavailable", lambda: "the native module is not built; run `make build`")
    ops.resolve.cache_clear()
    ops._say_once.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"'cpu' cannot run here: .*make build"):
            ops.resolve("cpu")
        assert ops.resolve("auto").name == "reference"  # slow, but available
    finally:
        ops.resolve.cache_clear()
