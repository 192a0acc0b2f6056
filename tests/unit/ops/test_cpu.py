"""The native backend: instruction sets, its choice, encoding in one pass, and its stub."""

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fixtures_cpu import ISAS, instructions
from fixtures_ops import randn, threads
from hypothesis import given, settings, strategies as st

import sameseed
from sameseed import _native
from sameseed.models.config import RopeConfig
from sameseed.models.layers import rope_table
from sameseed.ops import cpu
from sameseed.scheme import QuantScheme

EPS = 2.0**-24  # half a unit in the last place of 1: the error of one rounding


@given(T=st.integers(0, 5), width=st.integers(1, 70), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_small_ops_agree_with_the_portable_ones(T, width, seed):
    x, weight = 5 * randn(T, 2 * width, seed=seed), randn(2 * width, seed=1)
    table, positions = rope_table(RopeConfig(), 2 * width, T + 1), torch.arange(T, dtype=torch.int32)

    def results():
        normed = cpu.rms_norm(x, weight, 1e-6)
        return [normed, cpu.silu_mul(x), cpu.rope(x[:, None], positions, table)]

    with instructions("portable"):
        wanted = results()
    for isa in ISAS:
        with instructions(isa):
            assert all(a.equal(b) for a, b in zip(results(), wanted, strict=True))


def test_exponential_errs_by_few_units():
    """silu(x) = x / (1 + exp(-x)) is about x exp(x) for large negative x, so its error there is the exponential's."""
    x = torch.cat([torch.linspace(-86, 88, 1 << 16), torch.logspace(-30, 1.9, 999), -torch.logspace(-30, 1.9, 999)])
    exact = x.double() / (1 + (-x.double()).exp())
    ends = torch.tensor([[float("nan"), float("inf"), -200.0, -3.4e38, 3.4e38, 1, 1, 1, 1, 1]])
    for isa in ISAS:
        with instructions(isa):
            got = cpu.silu_mul(torch.stack([x, torch.ones_like(x)], dim=1)).double()[:, 0]
            tails = cpu.silu_mul(ends)[0]
        assert ((got - exact).abs() / exact.abs()).max() < 6 * EPS
        assert tails[0].isnan() and tails[1:].tolist() == [float("inf"), 0.0, 0.0, ends[0, 4].item()]


def ask(isa):
    """The answer to SAMESEED_ISA of a process that loads only this module's file."""
    code = (
        "import sys, importlib.util as u\n"
        "spec = u.spec_from_file_location('sameseed._native', sys.argv[1])\n"
        "native = u.module_from_spec(spec)\n"
        "spec.loader.exec_module(native)\n"
        "try: print(native.isa())\nexcept ValueError as error: print(error)"
    )
    command, environment = [sys.executable, "-c", code, _native.__file__], os.environ | {"SAMESEED_ISA": isa}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def test_the_environment_chooses():
    assert [ask(isa) for isa in ISAS] == ISAS
    sets = "avx512bf16, avx512vnni, avx512, avxvnni, avx2, portable or amx"
    assert ask("avx9000") == f"unknown instruction set 'avx9000'; choose auto, {sets}"


@pytest.mark.skipif("avx512" in ISAS, reason="this CPU has every instruction set")
def test_an_instruction_set_that_the_cpu_lacks_is_refused():
    with pytest.raises(ValueError, match="avx512"):
        _native.set_isa("avx512")


def test_a_wrong_choice_makes_the_backend_unavailable(monkeypatch):
    def refuse():
        raise ValueError("unknown instruction set 'avx9000'")

    monkeypatch.setattr(cpu._native, "isa", refuse)
    assert cpu.unavailable() == "unknown instruction set 'avx9000'; mend or unset SAMESEED_ISA"


def test_a_missing_module_tells_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "sameseed._native", None)
    monkeypatch.delattr("sameseed._native")
    spec = importlib.util.spec_from_file_location("cpu_without_native", cpu.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert "run `make build`" in module.unavailable()


KINDS = [("int8", True), ("int4", True), ("int4", False), ("int8n", True)]


def check(weight, quant):
    wanted = cpu.pack(quant.encode(weight))
    for isa in ISAS:
        with instructions(isa):
            hold(cpu.encode(weight, quant), wanted)


def hold(got, wanted):
    assert (got.format, got.shape, got.activations, got.layout) == (wanted.format, wanted.shape, "int8", "cpu")
    assert got.parts.keys() == wanted.parts.keys()
    for name, part in wanted.parts.items():
        torch.testing.assert_close(got.parts[name], part, rtol=0, atol=0, equal_nan=True)


@given(
    kind=st.sampled_from(KINDS),
    O=st.integers(1, 70),
    group=st.sampled_from([None, 32, 64, 128]),
    width=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    size=st.sampled_from([1e-37, 2.0**-100, 1e-4, 1.0, 1e4]),
)
@settings(max_examples=60)
def test_one_pass_gives_the_bits_of_encode_then_pack(kind, O, group, width, dtype, size):  # noqa: E741
    """In half precision many values lie half-way between two codes; both ways must round them alike."""
    weight = (randn(O, width * (group or 17), seed=O) * size).to(dtype)
    weight[0] = 0
    check(weight, QuantScheme(kind[0], group, kind[1], "int8"))


@pytest.mark.parametrize(("name", "symmetric"), KINDS)
@pytest.mark.parametrize("group", [None, 32])
def test_ends_of_the_range(name, symmetric, group):
    """Constant, one-sided, half-way, NaN and tiny groups; strides; threads."""
    rows = [torch.full((64,), v) for v in (1.0, -1.0, 2.0**-101, 3e38, float("nan"), float("inf"), 0.0)]
    rows += [
        torch.arange(64) / 7.5, -torch.arange(64) / 15, torch.arange(-32, 32) / 254,
        torch.tensor([1.0, float("nan")] * 32),
    ]  # fmt: skip
    weight = torch.stack([r.float() for r in rows]).repeat(20, 2)[:, :64]
    with threads(2):
        check(weight, QuantScheme(name, group, symmetric, "int8"))


def names(text):
    """Signatures by the name of the function or method."""
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{x.name}": ast.unparse(x.args) for x in node.body if isinstance(x, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, ast.unparse(node.args))
    return found


def test_the_stub_is_up_to_date():
    """If not: python -m nanobind.stubgen -m sameseed._native -o sameseed/_native.pyi"""
    made = pytest.importorskip("nanobind.stubgen", reason="nanobind writes the stub").StubGen(_native)
    made.put(_native)
    committed = Path(sameseed.__file__).with_name("_native.pyi").read_text()
    assert names(committed) == names(made.get())
