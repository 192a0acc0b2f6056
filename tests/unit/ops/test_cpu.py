"""The native backend from inside: instruction sets, threads, refusals. What all backends keep, tests/contract holds."""

from __future__ import annotations

import copy
import ctypes
import gc
import importlib.util
import mmap
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from fixtures_ops import Part, Pass, alone, empty_layer, exact_attention, flat, make_pass, randn, threads
from hypothesis import given, settings, strategies as st
from torch import Tensor

from foretoken.batch import Rows, build_batch
from foretoken.errors import ConfigError
from foretoken.formats import scheme
from foretoken.formats.scheme import KVLayer, QuantTensor
from foretoken.models.config import RopeConfig
from foretoken.models.layers import rope_table
from foretoken.ops import cpu

if cpu.unavailable() is not None:
    pytest.skip(f"the native backend: {cpu.unavailable()}", allow_module_level=True)

from foretoken import _native

EPS = 2.0**-24  # half a unit in the last place of 1: one rounding


@contextmanager
def instructions(name: str) -> Iterator[None]:
    """Compute with one instruction set; afterwards with the one from before."""
    before = _native.isa()
    _native.set_isa(name)
    try:
        yield
    finally:
        _native.set_isa(before)


def here(name: str) -> bool:
    """Whether this CPU has the instruction set."""
    try:
        with instructions(name):
            return True
    except ValueError:
        return False


ISAS = [name for name in ("portable", "avx2", "avx512") if here(name)]
every_isa = pytest.mark.parametrize("isa", ISAS)
formats = st.sampled_from(sorted(cpu.LINEAR_FORMATS))


@st.composite
def passes(draw: st.DrawFn) -> tuple[Pass, int | None]:
    """A random pass: chains, trees, chunks, odd head dims, any block size; and a window."""
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        pending = draw(st.integers(1, 20))
        nodes = draw(st.integers(0, 12) | st.just(64)) if pending < 3 else 0
        parents = [draw(st.integers(-1, i - 1)) if nodes < 64 else i - 1 - i % 3 for i in range(nodes)]
        parts.append(Part(draw(st.integers(0, 140)), pending, [max(-1, p) for p in parents]))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 4, 7, 17]))
    dim, block_size = draw(st.sampled_from([2, 10, 16, 32, 33, 80, 128])), draw(st.sampled_from([1, 5, 16, 64]))
    made = make_pass(parts, draw(formats), kv_heads * group, kv_heads, dim, block_size, draw(st.integers(0, 99)))
    return made, draw(st.none() | st.integers(1, 100))


# --- values, and the same bits from every instruction set ---


@every_isa
@given(T=st.integers(0, 20), O=st.integers(1, 70), K=st.integers(1, 100), name=formats, biased=st.booleans())
@settings(max_examples=60)
def test_linear_is_right_and_its_bits_belong_to_the_row(isa, T, O, K, name, biased):  # noqa: E741
    x = randn(T, K + 3, seed=K)[:, 1 : K + 1]
    q, bias = scheme.get(name).encode(randn(O, K, seed=O)), randn(O, seed=1) if biased else None
    weight = q.parts["weight"].double()
    exact = x.double() @ weight.T + (bias if biased else 0)
    bound = (K + 2) * EPS * (x.double().abs() @ weight.abs().T + (bias.abs() if biased else 0))
    with instructions(isa):
        got = cpu.linear(x, q, bias)
        assert ((got.double() - exact).abs() <= bound).all()
        for t in range(T):
            assert cpu.linear(x[t : t + 1].clone(), q, bias).equal(got[t : t + 1])
    with instructions("portable"):
        assert cpu.linear(x, q, bias).equal(got)


@every_isa
@given(drawn=passes())
@settings(max_examples=40)
def test_attention_is_right_and_its_bits_belong_to_the_row(isa, drawn):
    p, window = drawn
    scale = p.q.shape[2] ** -0.5
    with instructions(isa):
        got = cpu.attention(p.q, p.layer, p.batch, scale, window)
        assert (got.double() - exact_attention(p, scale, window)).abs().max() < 1e-5
        for b, part in enumerate(p.parts):
            row = (7 * b + 3) % (part.pending + len(part.parents))
            single = alone(p, b, row, 3)
            lonely = cpu.attention(single.q, single.layer, single.batch, scale, window)
            assert lonely[0].equal(got[int(p.batch.row_offsets[b]) + row])
    with instructions("portable"):
        assert cpu.attention(p.q, p.layer, p.batch, scale, window).equal(got)


@every_isa
@given(T=st.integers(0, 5), width=st.integers(1, 70), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_small_ops_agree_with_the_portable_ones(isa, T, width, seed):
    x, weight = 5 * randn(T, 2 * width, seed=seed), randn(2 * width, seed=1)
    table, positions = rope_table(RopeConfig(), 2 * width, T + 1), torch.arange(T, dtype=torch.int32)

    def results() -> list[Tensor]:
        normed = cpu.rms_norm(x, weight, 1e-6)
        return [normed, cpu.silu_mul(x), cpu.rope(x[:, None], positions, table)]

    with instructions(isa):
        got = results()
    with instructions("portable"):
        assert all(a.equal(b) for a, b in zip(got, results(), strict=True))


@every_isa
def test_exponential_errs_by_few_units(isa):
    """silu(x) = x / (1 + exp(-x)); for large negative x that is x exp(x), so that its error is the exponential's."""
    x = torch.cat([torch.linspace(-86, 88, 1 << 16), torch.logspace(-30, 1.9, 999), -torch.logspace(-30, 1.9, 999)])
    with instructions(isa):
        got = cpu.silu_mul(torch.stack([x, torch.ones_like(x)], dim=1)).double()[:, 0]
        ends = torch.tensor([[float("nan"), float("inf"), -200.0, -3.4e38, 3.4e38, 1, 1, 1, 1, 1]])
        tails = cpu.silu_mul(ends)[0]
    exact = x.double() / (1 + (-x.double()).exp())
    assert ((got - exact).abs() / exact.abs()).max() < 6 * EPS
    assert tails[0].isnan() and tails[1:].tolist() == [float("inf"), 0.0, 0.0, ends[0, 4].item()]


@every_isa
@pytest.mark.parametrize("name", sorted(cpu.KV_FORMATS))
def test_stored_numbers_round_to_nearest_even(isa, name):
    bits = torch.randint(-(1 << 31), (1 << 31) - 1, (1 << 11, 2, 21), generator=torch.Generator().manual_seed(0))
    halves = torch.arange(1 << 11).reshape(-1, 2, 1) * 4096 + torch.tensor([0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000])
    x = torch.cat([bits.flatten(), (halves << 3).flatten()]).to(torch.int32).view(torch.float32)
    x = torch.cat([x, x.new_tensor([65519.0, 65520.0, 2.0**-24, 2.0**-25, 0.0, -0.0])])
    x = torch.cat([x, x.new_zeros(-len(x) % 42)]).view(-1, 2, 21)
    layer = empty_layer(name, len(x), 1, 2, 21)
    with instructions(isa):
        cpu.store_kv(x, x.flip(0), layer, torch.arange(len(x), dtype=torch.int32))
        codes = QuantTensor(name, (len(x), 42), {"weight": flat(layer)[0].view(len(x), 42)})
        read = cpu.embedding(torch.arange(len(x), dtype=torch.int32), codes)
    for got, wanted in ((flat(layer)[0], x), (flat(layer)[1], x.flip(0))):
        torch.testing.assert_close(got, wanted.to(got.dtype), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(read, flat(layer)[0].float().view(len(x), 42), rtol=0, atol=0, equal_nan=True)


@every_isa
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_every_code_is_read_as_torch_reads_it(isa, name):
    codes = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(cpu._DTYPES[name]).view(256, 256)
    with instructions(isa):
        got = cpu.embedding(torch.arange(256, dtype=torch.int32), QuantTensor(name, (256, 256), {"weight": codes}))
    torch.testing.assert_close(got, codes.float(), rtol=0, atol=0, equal_nan=True)


@every_isa
def test_a_key_that_a_row_does_not_see_cannot_touch_it(isa):
    """The rows of a chunk share tiles; a NaN in one must stay out of the rows before it."""
    p = make_pass([Part(3, 12)], block_size=16)
    slot = int(p.batch.slots[9])
    with instructions(isa):
        clean = cpu.attention(p.q, p.layer, p.batch, 0.3)
        for rows in flat(p.layer):
            rows[slot] = float("nan")
        got = cpu.attention(p.q, p.layer, p.batch, 0.3)
    assert got[:9].equal(clean[:9]) and got[9:].isnan().all()


# --- threads ---


def big_linear() -> tuple[Tensor, QuantTensor]:
    return randn(9, 300), scheme.get("bf16").encode(randn(700, 300, seed=1))


@pytest.mark.parametrize("count", [2, 3, 8])
def test_threads_change_no_bit(count):
    x, w = big_linear()
    p = make_pass([Part(500, 1, [-1, 0, 1]), Part(0, 70)], heads=8, kv_heads=4, dim=32)
    alone_linear, alone_attention = cpu.linear(x, w), cpu.attention(p.q, p.layer, p.batch, 0.2)
    wide = 3 * randn(400, 400)
    alone_silu = cpu.silu_mul(wide)
    with threads(count):
        for _ in range(20):
            assert cpu.linear(x, w).equal(alone_linear)
            assert cpu.attention(p.q, p.layer, p.batch, 0.2).equal(alone_attention)
            assert cpu.silu_mul(wide).equal(alone_silu)


def test_workers_take_the_callers_rounding_mode():
    """Flushing of denormals belongs to a thread; who runs a task must not show."""
    x, w = big_linear()
    tiny = x * 1e-38
    kept = cpu.linear(tiny, w)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        flushed = cpu.linear(tiny, w)
        with threads(2):
            assert all(cpu.linear(tiny, w).equal(flushed) for _ in range(20))
    finally:
        torch.set_flush_denormal(False)
    with threads(2):
        assert all(cpu.linear(tiny, w).equal(kept) for _ in range(20))
    assert not kept.equal(flushed)


def test_python_threads_may_call_at_once():
    x, w = big_linear()
    wanted = cpu.linear(x, w)
    with threads(2), ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda _: cpu.linear(x, w).equal(wanted), range(200)))


def test_a_forked_child_computes():
    x, w = big_linear()
    with threads(2):
        wanted = cpu.linear(x, w)
        child = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(not cpu.linear(x, w).equal(wanted)))
        child.start()
        child.join(60)
        assert child.exitcode == 0


@pytest.mark.parametrize("count", [0, -1, 100_000])
def test_number_of_threads_has_a_range(count):
    with pytest.raises(ConfigError, match="threads must be 1 to"):
        cpu.set_num_threads(count)


# --- nothing is read or written outside the tensors ---


def fenced(x: Tensor) -> Tensor:
    """A copy of `x` that ends where readable memory ends: whoever reads on is killed. (Never freed: a few pages.)"""
    libc = ctypes.CDLL(None, use_errno=True)
    size = x.numel() * x.element_size()
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    start = libc.mmap(None, pages + mmap.PAGESIZE, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    assert libc.mprotect(start + pages, mmap.PAGESIZE, 0) == 0
    buffer = (ctypes.c_char * size).from_address(start + pages - size)
    return torch.frombuffer(buffer, dtype=x.dtype).view(x.shape).copy_(x)


@every_isa
@pytest.mark.parametrize("name", sorted(cpu.LINEAR_FORMATS))
@pytest.mark.parametrize(("T", "O", "K"), [(1, 1, 1), (1, 9, 33), (3, 7, 17), (8, 5, 15), (13, 25, 40)])
def test_kernels_stay_inside(isa, name, T, O, K):  # noqa: E741
    dense = scheme.get(name).encode(randn(O, K)).parts["weight"]
    x, w = fenced(randn(T, K)), QuantTensor(name, (O, K), {"weight": fenced(dense)})
    layer = KVLayer(name, fenced(dense.view(O, 1, 1, K)), fenced(dense.view(O, 1, 1, K)), None, None)
    rows = [Rows([0], O - 1, [], [], range(O), True)]
    with instructions(isa):
        cpu.linear(x, w, fenced(randn(O)))
        cpu.embedding(torch.tensor([O - 1]), w)
        cpu.rms_norm(x, fenced(randn(K)), 1e-5)
        cpu.silu_mul(fenced(randn(T, 2 * K)))
        cpu.rope(fenced(randn(T, 1, 2 * K)), torch.zeros(T), fenced(randn(1, 2 * K)))
        cpu.attention(fenced(randn(1, 1, K)), layer, build_batch(rows, 1), 0.3)
        cpu.store_kv(x[:1, None], x[:1, None], layer, torch.tensor([O - 1]))


def test_indices_outside_are_refused():
    layer = empty_layer("fp32", 2, 4, 1, 8)
    row = randn(1, 1, 8)
    for slot in (-1, 8):
        with pytest.raises(IndexError, match=f"slot {slot} is outside 0..7"):
            cpu.store_kv(row, row, layer, torch.tensor([slot], dtype=torch.int32))
        with pytest.raises(IndexError, match="slot"):
            cpu.move_kv(layer, torch.tensor([0]), torch.tensor([slot]))
    with pytest.raises(IndexError, match="token id 5"):
        cpu.embedding(torch.tensor([5]), scheme.get("fp32").encode(randn(5, 4)))
    with pytest.raises(IndexError, match="position 3"):
        cpu.rope(row, torch.tensor([3]), randn(3, 8))


def test_batches_that_contradict_themselves_are_refused():
    p = make_pass([Part(20, 1, [-1, 0])])

    def attend(**changes: Tensor) -> Tensor:
        batch = copy.copy(p.batch)
        for name, value in changes.items():
            object.__setattr__(batch, name, value)
        return cpu.attention(p.q, p.layer, batch, 0.3)

    for block in (-1, 99):
        with pytest.raises(IndexError, match=f"block {block} is outside"):
            attend(block_tables=torch.full_like(p.batch.block_tables, block))
    with pytest.raises(IndexError, match="block index"):
        attend(block_tables=p.batch.block_tables[:, :2])
    with pytest.raises(ValueError, match="does not fit its position"):
        attend(tree_mask=torch.tensor([0, 1, 0]))
    with pytest.raises(ValueError, match="does not fit its position"):
        object.__setattr__(p.batch, "tree_mask", None)
        attend()
    with pytest.raises(IndexError, match="do not ascend"):
        attend(row_offsets=torch.tensor([0, 9]))
    with pytest.raises(ValueError, match="the batch 2 rows"):
        attend(positions=p.batch.positions[:2])


def test_tensors_of_another_shape_or_type_are_refused():
    x, w = big_linear()
    with pytest.raises(TypeError, match="float32"):
        cpu.linear(x.double(), w)
    with pytest.raises(ValueError, match="does not fit a weight"):
        cpu.linear(x[:, :299], w)
    with pytest.raises(ValueError, match="bias"):
        cpu.linear(x, w, randn(699))
    with pytest.raises(TypeError, match="cannot be"):
        cpu.linear(x, QuantTensor("bf16", (700, 300), {"weight": randn(700, 300)}))
    with pytest.raises(ValueError, match="norm weight"):
        cpu.rms_norm(x, randn(299), 1e-5)
    layer = empty_layer("fp32", 2, 4, 1, 8)
    with pytest.raises(TypeError, match="contiguous"):
        cpu.move_kv(KVLayer("fp32", layer.k[:, ::2], layer.v[:, ::2], None, None), torch.tensor([0]), torch.tensor([1]))
    with pytest.raises(ValueError, match="does not fit a cache"):
        cpu.attention(randn(1, 1, 9), layer, build_batch([], 4), 0.3)


def test_a_copied_weight_is_found_at_its_own_place():
    """Addresses are kept by object; a copy, or another tensor in a freed one's place, has its own."""
    x, w = big_linear()
    cpu.linear(x, w)
    twin = copy.deepcopy(w)
    twin.parts["weight"].zero_()
    assert (cpu.linear(x, twin) == 0).all() and not (cpu.linear(x, w) == 0).all()
    kept, key = len(cpu._weights), id(twin)
    del twin
    gc.collect()
    assert len(cpu._weights) == kept - 1 and key not in cpu._weights


# --- the choice of an instruction set ---


def ask(isa: str) -> str:
    """What the module, alone in a process, says to FORETOKEN_ISA."""
    code = "from foretoken import _native\ntry: print(_native.isa())\nexcept ValueError as error: print(error)"
    environment = os.environ | {"FORETOKEN_ISA": isa}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def test_the_environment_chooses():
    assert [ask(isa) for isa in ISAS] == ISAS
    assert ask("avx9000") == "unknown instruction set 'avx9000'; choose auto, avx512, avx2 or portable"


@pytest.mark.skipif(len(ISAS) == 3, reason="this CPU has every instruction set")
def test_an_instruction_set_that_the_cpu_lacks_is_refused():
    with pytest.raises(ValueError, match="this CPU lacks the instruction set 'avx512'"):
        _native.set_isa("avx512")


def test_a_wrong_choice_makes_the_backend_unavailable(monkeypatch):
    def refuse() -> str:
        raise ValueError("unknown instruction set 'avx9000'")

    monkeypatch.setattr(cpu._native, "isa", refuse)
    assert cpu.unavailable() == "unknown instruction set 'avx9000'; mend or unset FORETOKEN_ISA"


def test_a_missing_module_tells_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "foretoken._native", None)
    monkeypatch.delattr("foretoken._native")
    spec = importlib.util.spec_from_file_location("cpu_without_native", cpu.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert "run `make build`" in module.unavailable()
