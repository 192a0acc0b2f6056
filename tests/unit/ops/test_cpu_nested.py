"""Products of int8n weights and of their int4 views: the reference's bits, on every instruction set."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fixtures_cpu import every_isa, instructions
from fixtures_ops import randn, threads
from hypothesis import given, settings, strategies as st

from sameseed.formats.int8n import FORMAT
from sameseed.ops import cpu, plain_rows, resolve
from sameseed.scheme import QuantArgs, QuantScheme, QuantTensor

REFERENCE = resolve("reference")


def nested(O: int, K: int, G: int, seed: int = 0) -> QuantTensor:  # noqa: E741
    """A weight of random codes of the full range."""
    rng = torch.Generator().manual_seed(seed)
    scales = ((torch.rand(O, K // G, generator=rng) + 0.1) * 0.01).to(torch.bfloat16)
    q = FORMAT.stored(torch.randint(-128, 120, (O, K), generator=rng).to(torch.int8), scales)
    return replace(q, activations="int8")


@every_isa
@given(st.data())
@settings(max_examples=40)
def test_products_are_those_of_the_reference(isa: str, data: st.DataObject) -> None:
    group = data.draw(st.sampled_from([None, 32, 64, 128]))
    K = data.draw(st.integers(1, 150)) if group is None else group * data.draw(st.integers(1, 5))
    O, T = data.draw(st.integers(1, 70)), data.draw(st.integers(0, 40))  # noqa: E741
    w = nested(O, K, group or K, seed=K)
    if data.draw(st.booleans()):
        w = FORMAT.lower(w) or w
    x, bias, residual = randn(T, K, seed=K), randn(O, seed=1), randn(T, O, seed=2)
    wanted = REFERENCE.product(plain_rows(x), w, bias, residual)
    with instructions(isa):
        assert cpu.product(plain_rows(x), cpu.pack(w), bias, residual).equal(wanted)


@every_isa
@pytest.mark.parametrize("lower", [False, True])
def test_rows_in_any_number_have_the_same_bits(isa: str, lower: bool) -> None:
    """One tile, two, and so many that weights are unpacked for all of them; split groups, and many blocks."""
    for depth, group in ((1536, 128), (1280, 1280)):
        w = cpu.pack(nested(161, depth, group))
        w = (FORMAT.lower(w) or w) if lower else w
        x = randn(61, depth, seed=3)
        with instructions(isa), threads(2):
            whole = cpu.product(plain_rows(x), w)
            assert whole.equal(cpu.product(plain_rows(x), w))
            for count in (1, 2, 3, 5, 8, 13, 25, 37):
                assert cpu.product(plain_rows(x[:count].clone()), w).equal(whole[:count])


@every_isa
def test_rows_of_an_embedding_and_of_its_view(isa: str) -> None:
    ids = torch.tensor([4, 0, 1, 3], dtype=torch.int32)
    for w in (nested(70, 256, 64), nested(33, 384, 384), nested(5, 40, 40)):
        with instructions(isa):
            for stored in (cpu.pack(w), FORMAT.lower(cpu.pack(w))):
                assert stored is not None
                assert cpu.embedding(ids, stored).equal(FORMAT.decode(cpu.unpack(stored))[ids.long()])


def test_weights_that_are_no_numbers_show() -> None:
    weight = randn(8, 128)
    weight[2, 5] = torch.nan
    quant = QuantScheme("int8n", activations="int8")
    made = cpu.encode(weight, quant)
    assert made is not None and cpu.product(plain_rows(randn(1, 128)), made)[0].isnan().tolist() == [
        i == 2 for i in range(8)
    ]
    assert FORMAT.encode(weight, QuantArgs(128)).parts["scales"][2].isnan().all()


def test_planes_that_do_not_fit_are_refused() -> None:
    w = cpu.pack(nested(40, 128, 64))
    for name in ("high", "low"):
        bad = replace(w, parts={**w.parts, name: w.parts[name][:1]})
        with pytest.raises(ValueError, match=f"{name} .* must be .* pack it again"):
            cpu.product(plain_rows(randn(1, 128)), bad)
