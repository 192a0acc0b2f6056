"""The GPU's kernels without a GPU: their test cases in Triton's interpreter, their fallback, and their compilation."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from fixtures_interpreter import dot
from fixtures_ops import randn

from sameseed.ops import Then, gated_rows, normed_rows, plain_rows, reference
from sameseed.scheme import QuantScheme

triton = pytest.importorskip("triton", reason="Triton is not installed: no GPU kernel is tested")
from sameseed.ops import triton as gpu  # noqa: E402
from sameseed.ops.triton import dispatch, guard, kv  # noqa: E402

pytestmark = pytest.mark.triton
CASES = Path(__file__).parents[2] / "triton"
interpreted = guard.interpreted()
CPU_ONLY = ("test_chains.py", "test_graphs.py", "test_model.py", "test_rounds.py")
PREPARED = ("attention", "kv", "linear", "rows", "sampling", "rounds", "wide")


def run_cases(names: list[str], *more: str, **settings: str) -> None:
    """Run files of cases in one process: it imports PyTorch and Triton once."""
    environment = {**os.environ, **settings, "OMP_NUM_THREADS": "1"}
    quiet = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", *quiet, *(str(CASES / name) for name in names), *more]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=CASES.parents[1])
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


# Triton 3.6's interpreter makes numbers of one-element arrays, which NumPy 2.4 refuses; its compiler does not.
outdated = triton.__version__.startswith("3.6.") and tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4)


runs_interpreter = pytest.mark.skipif(
    outdated, reason="the interpreter of Triton 3.6 does not run with NumPy 2.4; take Triton 3.7"
)


@runs_interpreter
def test_in_the_interpreter():
    run_cases([p.name for p in sorted(CASES.glob("test_*.py")) if p.name != "test_rounds.py"], TRITON_INTERPRET="1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("name", sorted(p.name for p in CASES.glob("test_*.py") if p.name not in CPU_ONLY))
def test_on_the_gpu(name):
    run_cases([name], TRITON_INTERPRET="0", SAMESEED_TEST_GPU="1")


@pytest.mark.slow
@pytest.mark.parametrize("name", [f"test_{name}.py" for name in PREPARED])
def test_on_a_pretended_gpu(name):
    """The cases on a pretended GPU, whose tensors refuse what a GPU's refuse.

    This covers the code that prepares launches, and the test cases themselves, which are meant for machines with a GPU.
    """
    run_cases([name], TRITON_INTERPRET="1", SAMESEED_TEST_GPU="pretended")


def test_the_dot_of_the_interpreter_has_an_order_of_its_own():
    a, b = randn(16, 64).numpy(), randn(64, 32, seed=1).numpy()
    whole = dot(a, b)
    assert abs(whole - a.astype("float64") @ b).max() < 1e-5
    assert (dot(a[3:4], b[:, 5:9]) == whole[3:4, 5:9]).all()
    assert (dot(numpy.asfortranarray(a), b.T.copy().T) == whole).all()
    assert (dot(a.round(), b.round()) == a.round().astype(int) @ b.round().astype(int)).all()


# --- kernels that fail ---


@pytest.fixture
def failing(monkeypatch):
    """Kernels that raise `failing.error` when they are launched."""

    class Failing:
        error: Exception = guard.TritonError("tt.dot is not what it was")
        launches = 0

    def run(self: guard.Launch) -> None:
        Failing.launches += 1
        raise Failing.error

    monkeypatch.setattr(guard.Launch, "run", run)
    monkeypatch.setattr(guard, "broken", set())
    return Failing


@pytest.mark.parametrize("name", ["w4a16", "w8a8", "bf16"])
def test_a_kernel_that_does_not_compile_leaves_its_op_to_the_reference(name, failing, caplog):
    plain = QuantScheme.parse(name).encode(randn(6, 128, seed=1))
    w, x, norm = gpu.pack(plain), randn(3, 128), randn(128, seed=2)
    with caplog.at_level(logging.WARNING, "sameseed.ops"):
        assert gpu.product(plain_rows(x), w).equal(reference.product(plain_rows(x), plain))
        assert gpu.product(plain_rows(x), w).equal(reference.product(plain_rows(x), plain))
        assert gpu.product(normed_rows(x, norm, 1e-5), w).equal(
            reference.product(plain_rows(reference.rms_norm(x, norm, 1e-5)), plain)
        )
        wide = randn(3, 256)
        assert gpu.product(gated_rows(wide), w).equal(reference.product(plain_rows(reference.silu_mul(wide)), plain))
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 1 and "tt.dot" in said[0] and plain.format in said[0] and "using the reference" in said[0]
    assert failing.launches == 1  # tried once, not in every pass


def test_one_broken_op_leaves_the_others_alone(failing, caplog):
    x, norm = randn(3, 128), randn(128, seed=2)
    assert gpu.rms_norm(x, norm, 1e-5).equal(reference.rms_norm(x, norm, 1e-5))
    assert guard.broken == {"rms_norm"}
    assert gpu.silu_mul(x).equal(reference.silu_mul(x))
    positions, table = torch.zeros(3, dtype=torch.int32), torch.ones(4, 32)
    heads = x.view(3, 4, 32)
    assert gpu.rope(heads, positions, table).equal(reference.rope(heads, positions, table))
    assert failing.launches == 3


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.OutOfMemoryError("CUDA out of memory, said LLVM's PassManager"),
        RuntimeError("CUDA error: an illegal memory access"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        AssertionError("CUDA rows do not fit"),
    ],
)
def test_errors_of_a_gpu_at_work_are_not_hidden(error, failing):
    failing.error = error
    with pytest.raises(type(error), match="CUDA"):
        gpu.rms_norm(randn(3, 128), randn(128), 1e-5)
    assert not guard.broken


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler. Please specify via CC"),
        FileNotFoundError("ptxas"),
        RuntimeError("PassManager::run failed"),
        RuntimeError("failed to translate module to LLVM IR"),
        RuntimeError("LLVM ERROR: Cannot select: intrinsic"),
        RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
        AssertionError("libcuda.so cannot found!\nPossible files are located at"),
    ],
)
def test_a_missing_compiler_is_a_kernel_that_does_not_compile(error, failing):
    failing.error = error
    x = randn(3, 128)
    assert gpu.silu_mul(x).equal(reference.silu_mul(x)) and guard.broken == {"silu_mul"}


# --- old GPUs ---


# --- compiled for GPUs that need not be present ---

INSTRUCTIONS = {  # of tensor cores, by the form of rows
    "half": "m16n8k16.row.col.f32.f16.f16.f32",
    "bf16": "m16n8k16.row.col.f32.bf16.bf16.f32",
    "int8": "m16n8k32.row.col.satfinite.s32.s8.s8.s32",
    "fp8": "m16n8k16.row.col.f32.f16.f16.f32",
}
SOME = {("w4a16", 90), ("w4a8", 80), ("bf16", 90), ("fp8-a8", 89)}  # compiling takes seconds each: the rest is slow
KINDS = ("bf16", "fp16", "w8a16", "w8a8", "w4a16-g32-asym", "w4a16", "w4a8", "w4a8-qoq", "w8a8n", "fp8", "fp8-b128")
KINDS += ("fp8-a8", "fp8_e5m2", "nf4", "mxfp4")
ALL = [
    pytest.param(name, capability, marks=[] if (name, capability) in SOME else pytest.mark.slow)
    for name in KINDS
    for capability in (80, 89, 90)
]


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Triton's compiler with an empty cache."""
    if interpreted:
        pytest.skip("the interpreter compiles nothing")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


needs_compiler = pytest.mark.usefixtures("compiler")


def instructions(name: str, capability: int, num_rows: int) -> set[str]:
    """The tensor-core instructions of a product's kernels, which are compiled to machine code."""
    w = gpu.pack(QuantScheme.parse(name).encode(torch.ones(128, 512)))
    form = dispatch.form_for(w)
    launch, ready = dispatch.preparation(normed_rows(torch.empty(num_rows, 512), torch.ones(512), 1e-5), form, w.group)
    assert launch.compile(capability).asm["cubin"]
    launches = dispatch.multiplication(ready, w, None, None, torch.empty(num_rows, 128))
    compiled = [launch.compile(capability) for launch in launches]
    assert all(c.asm["cubin"] for c in compiled)
    assert "wgmma" not in compiled[0].asm["ptx"]
    return set(re.findall(r"mma\.sync\.aligned\.([\w.]+)", compiled[0].asm["ptx"]))


@needs_compiler
@pytest.mark.parametrize(("name", "capability"), ALL)
def test_products_compile_to_one_instruction_for_all_rows(name, capability):
    """The same instruction for 1, 2 and 4 tiles of rows, so a row's sums have the same order in each."""
    w = QuantScheme.parse(name).encode(torch.ones(1, 512))
    wanted = {INSTRUCTIONS[dispatch.form_for(w)]}
    assert all(instructions(name, capability, num_rows) == wanted for num_rows in (1, 32, 64))


@needs_compiler
def test_the_smallest_shapes_compile():
    """Triton makes sizes of 1 constants of a kernel; the kernels must compile with that."""
    w = gpu.pack(QuantScheme.parse("w4a8").encode(torch.ones(1, 64)))
    launch, ready = dispatch.preparation(plain_rows(torch.empty(1, 64)), "int8", w.group)
    launches = [launch, *dispatch.multiplication(ready, w, torch.ones(1), torch.ones(1, 1), torch.empty(1, 1))]
    launches.append(dispatch.preparation(normed_rows(torch.empty(1, 1), torch.ones(1), 1e-5), "single", 1)[0])
    launches.append(kv.rotation(torch.empty(1, 1, 2), torch.zeros(1, dtype=torch.int32), torch.empty(1, 2))[0])
    assert all(launch.compile(90).asm["cubin"] for launch in launches)


@needs_compiler
def test_kernels_are_not_compiled_for_numbers_of_rows():
    """Triton must not specialize on a launch's free arguments: one row, or a multiple of 16, would give other code."""
    w = gpu.pack(QuantScheme.parse("w4a16").encode(torch.ones(8, 4096)))
    launch, ready = dispatch.preparation(plain_rows(torch.empty(3, 4096)), "half", w.group)
    launches = [launch, *dispatch.multiplication(ready, w, None, None, torch.empty(3, 8))]
    assert len(launches) == 3
    for launch in launches:
        given = {p.name for p in launch.kernel.params if p.do_not_specialize}
        rows = {name for name, value in launch.arguments.items() if name == "num_rows"}
        assert given == launch.free == rows


@needs_compiler
@pytest.mark.parametrize("capability", [80, 90])
def test_small_ops_compile(capability):
    launches = [
        dispatch.preparation(gated_rows(torch.empty(3, 256)), "single", 1)[0],
        dispatch.preparation(gated_rows(torch.empty(3, 256)), "int8", 64)[0],
        kv.rotation(torch.empty(3, 2, 64), torch.zeros(3, dtype=torch.int32), torch.empty(9, 64))[0],
    ]
    assert all(launch.compile(capability).asm["cubin"] for launch in launches)


def normed(form: str, width: int, gather: bool, joined: bool = False) -> guard.Launch:
    """The launch that norms rows. joined: it first adds the partial sums of the product before."""
    group = {"int8": 64, "fp8": 128}.get(form, 1)
    x, norm = torch.empty(3, width), torch.ones(width)
    index = torch.zeros(2, dtype=torch.int32) if gather else None
    launch = dispatch.preparation(normed_rows(x, norm, 1e-5, index), form, group)[0]
    if joined:
        before = gpu.pack(QuantScheme.parse("w4a16").encode(torch.ones(width, 4096)))
        after = gpu.pack(QuantScheme.parse(NEXT[form]).encode(torch.ones(8, width)))
        ready = dispatch.preparation(plain_rows(torch.empty(3, 4096)), "half", before.group)[1]
        combine = dispatch.multiplication(ready, before, None, x, x)[1]
        both = dispatch.joined(combine, Then(norm, 1e-5, after), x)
        assert both is not None and launch.constants["FORM"] == both[0].constants["FORM"]
        launch = both[0]
    return launch


def layout_of_sum(launch: guard.Launch) -> str:
    """What decides the order of the mean's sum: the layouts of the adding reductions, and the number of warps."""
    text = launch.compile(90).asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg.*)$", text, re.M))
    found = re.findall(r'"tt\.reduce"[^\n]*\n[^\n]*\n\s*%\w+ = arith\.addf.*?\}\) : \((.*?)\) ->', text, re.S)
    assert len(found) == 2
    named = [re.sub(r"#(?!ttg)\w+", lambda m: layouts[m[0]], shape) for shape in found]
    return f"{named} {re.search(r'num-warps. = ([0-9]+)', text)[1]}"


NEXT = {"half": "w4a16", "bf16": "bf16", "int8": "w4a8-g64", "fp8": "fp8-a8"}  # weights that take rows of this form
EVERY_FORM = [(form, gather) for form in ("single", "half", "bf16", "int8", "fp8") for gather in (False, True)]
EVERY_FORM += [(form, False, True) for form in NEXT]


@needs_compiler
@pytest.mark.parametrize(
    ("width", "cases"),
    [
        (512, [("int8", True), ("half", False, True)]),
        *(pytest.param(w, EVERY_FORM, marks=pytest.mark.slow) for w in (512, 3072, 4096)),
    ],
)
def test_a_norm_is_summed_in_one_order_whatever_a_row_becomes(width, cases):
    """Fused norms must have the bits of the separate norm."""
    made = {case: layout_of_sum(normed(case[0], width, *case[1:])) for case in [("single", False), *cases]}
    assert len(set(made.values())) == 1, made
