"""The GPU's kernels without a GPU: their test cases in Triton's interpreter, their fallback, and their compilation."""

import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from fixtures_ops import Part, empty_layer, make_pass, randn

from sameseed.batch import Draw, Draws
from sameseed.ops import gated_rows, normed_rows, plain_rows, reference
from sameseed.scheme import QuantScheme
from sameseed.spec.sampling import noise_key

triton = pytest.importorskip("triton", reason="Triton is not installed: no GPU kernel is tested")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import type_canonicalisation_dict as TYPES  # noqa: E402

from sameseed.ops import triton as gpu  # noqa: E402
from sameseed.ops.triton import dispatch, guard, kv  # noqa: E402
from sameseed.ops.triton.attention import launches as attention_launches  # noqa: E402
from sameseed.ops.triton.sampling import launches as sampling_launches, marking  # noqa: E402

pytestmark = pytest.mark.triton
CASES = Path(__file__).parents[2] / "triton"
interpreted = guard.interpreted()
CPU_ONLY = ("test_graphs.py",)
PREPARED = ("attention", "kv", "linear", "rows", "sampling", "wide")


def run_cases(names, *more, **settings):
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
    run_cases([p.name for p in sorted(CASES.glob("test_*.py"))], TRITON_INTERPRET="1")


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


@pytest.fixture
def failing(monkeypatch):
    """Kernels that raise `failing.error` when they are launched."""

    class Failing:
        error: Exception = guard.TritonError("tt.dot is not what it was")
        launches = 0

    def run(self):
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


AT_WORK = [
    torch.OutOfMemoryError("CUDA out of memory, said LLVM's PassManager"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    AssertionError("CUDA rows do not fit"),
]  # fmt: skip
COMPILING = [
    RuntimeError("Failed to find C compiler. Please specify via CC"), FileNotFoundError("ptxas"),
    RuntimeError("PassManager::run failed"), RuntimeError("LLVM ERROR: Cannot select: intrinsic"),
    RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
    AssertionError("libcuda.so cannot found!\nPossible files are located at"),
]  # fmt: skip


@pytest.mark.parametrize("error", AT_WORK + COMPILING)
def test_only_a_kernel_that_does_not_compile_is_left_to_the_reference(error, failing):
    failing.error = error
    x = randn(3, 128)
    if error in AT_WORK:
        with pytest.raises(type(error), match="CUDA"):
            gpu.silu_mul(x)
        assert not guard.broken
    else:
        assert gpu.silu_mul(x).equal(reference.silu_mul(x)) and guard.broken == {"silu_mul"}


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
BY_16 = [["tt.divisibility", 16]]


def compiled(launch, capability):
    """The kernel for a compute capability (90: 9.0), specialized as by `Launch.run`. Needs no GPU."""
    signature, aligned = {}, {}
    able = {"FLOAT8": capability >= 89, "EARLY": launch.constants.get("EARLY") and capability >= 90}
    constants = {name: able.get(name, value) for name, value in launch.constants.items()}
    for place, name in enumerate(launch.kernel.arg_names):
        value, bound = launch.arguments.get(name), name not in launch.free
        if isinstance(value, torch.Tensor):
            signature[name], aligned[(place,)] = "*" + TYPES[str(value.dtype).removeprefix("torch.")], BY_16
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value is None or (bound and value == 1):
            signature[name] = "constexpr"
            constants.setdefault(name, value)
        else:
            signature[name] = "i32"
            if bound and value % 16 == 0:
                aligned[(place,)] = BY_16
    source = ASTSource(launch.kernel, signature, constants, aligned)
    options = replace(launch, constants=constants).options
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def product(name, num_rows, outputs=128, depth=512):
    """The launches of a product of normed rows."""
    w = gpu.pack(QuantScheme.parse(name).encode(torch.ones(outputs, depth)))
    rows = normed_rows(torch.empty(num_rows, depth), torch.ones(depth), 1e-5)
    launch, ready = dispatch.preparation(rows, dispatch.form_for(w), w.group)
    return [launch, *dispatch.multiplication(ready, w, None, None, torch.empty(num_rows, outputs))]


@needs_compiler
@pytest.mark.parametrize(("name", "capability"), ALL)
def test_products_compile_for_any_number_of_rows(name, capability):
    made = [compiled(launch, capability) for num_rows in (1, 64) for launch in product(name, num_rows)]
    assert all(c.asm["cubin"] and "wgmma" not in c.asm["ptx"] for c in made)


def test_kernels_are_not_compiled_for_numbers_of_rows():
    """Triton must not specialize on a launch's free arguments: one row, or a multiple of 16, would give other code."""
    launches = product("w4a16", 3, outputs=8, depth=4096)
    assert len(launches) == 3  # of the rows, of the product in parts, and of their sums
    for launch in launches:
        given = {p.name for p in launch.kernel.params if p.do_not_specialize}
        assert given == launch.free == {"num_rows"} & set(launch.arguments)


def paged(name, parts=None):
    return make_pass(parts or [Part(40, 1, [-1, 0])], name, 8, 2, 128, 16)


@needs_compiler
@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "int8", "fp8_e4m3", "fp8_e5m2"])
def test_attention_and_the_cache_compile(name, capability):
    p, k, slots = paged(name), randn(3, 2, 128), torch.tensor([5, 9, 3], dtype=torch.int32)
    layer, batch = empty_layer(name, 4, 16, 2, 128), make_pass([Part(2, 3)]).batch
    launches = [kv.turning(None, (k, k, layer, slots), None)[0], *kv.moving(layer, slots, slots)]
    launches += kv.turning(randn(3, 4, 128), (k, k, layer, slots), (batch.positions, randn(9, 128)))[:1]
    if name == "bf16":  # attention takes seconds
        launches += attention_launches(p.q, p.layer, p.batch, 0.1, None, torch.empty_like(p.q), "stretch")
    assert all(compiled(launch, capability).asm["cubin"] for launch in launches)


@needs_compiler
def test_small_ops_sampling_and_the_smallest_shapes_compile():
    """Triton makes sizes of 1 constants of a kernel; the kernels must compile with that."""
    launches = [
        dispatch.preparation(gated_rows(torch.empty(3, 256)), form, group)[0]
        for form, group in (("single", 1), ("int8", 64))
    ]
    launches.append(dispatch.preparation(normed_rows(torch.empty(1, 1), torch.ones(1), 1e-5), "single", 1)[0])
    w = gpu.pack(QuantScheme.parse("w4a8").encode(torch.ones(1, 64)))
    launch, ready = dispatch.preparation(plain_rows(torch.empty(1, 64)), "int8", w.group)
    launches += [launch, *dispatch.multiplication(ready, w, torch.ones(1), torch.ones(1, 1), torch.empty(1, 1))]
    for shape in ((3, 2, 64), (1, 1, 2)):
        turn = torch.zeros(shape[0], dtype=torch.int32), torch.empty(9, shape[2])
        launches.append(kv.turning(torch.empty(shape), None, turn)[0])
    logits = randn(2, 3000)
    draws = Draws.of([Draw(noise_key(1, i), 0.8, -9.0, False, 0, 0.9) for i in range(2)])
    launches += sampling_launches(logits, draws)[0]
    row, order = logits[0].double(), torch.arange(3000)
    launches.append(marking(row, order, row.sum(), torch.zeros(3000, dtype=torch.uint8)))
    assert all(compiled(launch, 90).asm["cubin"] for launch in launches)


def test_one_configuration_for_every_number_of_rows():
    """The model and the cache decide what is compiled; rows only decide the grid, the start and the split of keys."""
    found = set()
    for rows in (1, 2, 16, 17, 64, 65):
        p = paged("bf16", [Part(40, rows)])
        tree = paged("bf16", [Part(40, 1, list(range(-1, rows - 2)))])
        for x in (p, tree):
            launches = attention_launches(x.q, x.layer, x.batch, 0.1, None, torch.empty_like(x.q), "all")
            for launch in launches:
                cut = tuple((name, value) for name, value in launch.constants.items() if name != "EARLY")
                found.add((launch.kernel.__name__, cut, launch.warps, launch.stages))
                assert launch.free >= {"num_seqs", "has_tree", "num_parts", "table_width"}  # these vary with the batch
    assert len(found) == 1
