"""The native backend with threads, forks and wrong arguments: no bit changes, no access outside a tensor."""

import copy
import ctypes
import mmap
import multiprocessing
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from fixtures_cpu import ISAS, instructions
from fixtures_ops import LARGEST, Part, empty_layer, make_pass, randn, state_batch, threads

from sameseed import ops, scheme
from sameseed.batch import Rows, build_batch
from sameseed.errors import ConfigError
from sameseed.ops import _native_rows, cpu, plain_rows
from sameseed.ops._rows import StateLayer
from sameseed.scheme import KVLayer, QuantTensor


def big_linear():
    return randn(9, 300), scheme.get("bf16").encode(randn(700, 300, seed=1))


def test_workers_take_the_callers_rounding_mode():
    """Each thread has its own setting for flushing denormals; the worker that runs a task must not matter."""
    x, w = big_linear()
    tiny = x * 1e-38
    kept = cpu.product(plain_rows(tiny), w)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        flushed = cpu.product(plain_rows(tiny), w)
        with threads(2):
            assert all(cpu.product(plain_rows(tiny), w).equal(flushed) for _ in range(20))
    finally:
        torch.set_flush_denormal(False)
    with threads(2):
        assert all(cpu.product(plain_rows(tiny), w).equal(kept) for _ in range(20))
    assert not kept.equal(flushed)


def test_threads_with_limits_of_their_own_run_beside_each_other():
    """A limit holds only for the thread that sets it, also a limit above one, and changes no bit."""
    x, w = big_linear()
    wanted = cpu.product(plain_rows(x), w)

    def limited(limit):
        cpu.limit_threads(limit)
        try:
            return cpu.num_threads(), all(cpu.product(plain_rows(x), w).equal(wanted) for _ in range(200))
        finally:
            cpu.limit_threads(0)

    with threads(4), ThreadPoolExecutor(4) as pool:
        assert list(pool.map(limited, [1, 2, 3, 9])) == [(1, True), (2, True), (3, True), (4, True)]
        assert cpu.num_threads() == 4
        cpu.limit_threads(2)
        try:
            assert cpu.product(plain_rows(x), w).equal(wanted)  # makes this thread's own workers, which no child has
            child = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(not all(limited(2))))
            child.start()
            child.join(60)
            assert child.exitcode == 0
        finally:
            cpu.limit_threads(0)
    with pytest.raises(ConfigError, match=r"0 .* or more"):
        ops.limit_threads(-1)


@pytest.mark.parametrize("count", [0, -1, 100_000])
def test_number_of_threads_has_a_range(count):
    with pytest.raises(ConfigError, match="threads must be 1 to"):
        ops.set_num_threads(count)
    assert torch.get_num_threads() < 1024  # PyTorch would take it, and crash in its next call


def fenced(x):
    """A copy of `x` at the end of readable memory, so that reading on crashes; its few pages are never freed."""
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


@pytest.mark.parametrize("name", sorted(_native_rows.DTYPES))
@pytest.mark.parametrize(("T", "O", "K"), [(1, 1, 1), (1, 9, 33), (3, 7, 17), (8, 5, 15), (13, 25, 40)])
def test_kernels_stay_inside(name, T, O, K):  # noqa: E741
    dense = scheme.get(name).encode(randn(O, K)).parts["weight"]
    x, w = fenced(randn(T, K)), QuantTensor(name, (O, K), {"weight": fenced(dense)})
    layer = KVLayer(name, fenced(dense.view(O, 1, 1, K)), fenced(dense.view(O, 1, 1, K)), None, None)
    rows = [Rows([0], O - 1, [], [], range(O), True)]
    for isa in ISAS:
        with instructions(isa):
            cpu.product(plain_rows(x), w, fenced(randn(O)))
            cpu.embedding(torch.tensor([O - 1]), w)
            cpu.rms_norm(x, fenced(randn(K)), 1e-5)
            cpu.silu_mul(fenced(randn(T, 2 * K)))
            cpu.rope(fenced(randn(T, 1, 2 * K)), torch.zeros(T), fenced(randn(1, 2 * K)))
            cpu.attention(fenced(randn(1, 1, K)), layer, build_batch(rows, 1), 0.3)
            cpu.store_kv(x[:1, None], x[:1, None], layer, torch.tensor([O - 1]))


@pytest.mark.parametrize("name", sorted(LARGEST))
@pytest.mark.parametrize(
    ("slots", "D", "group"), [(1, 1, 1), (9, 33, 1), (7, 17, 5), (5, 15, 2), (25, 40, 4), (19, 64, 9)]
)
def test_scaled_caches_are_not_left(name, slots, D, group):
    codes, scales = (fenced(t) for t in scheme.kv_format(name).encode_kv(randn(slots, 1, D)) if t is not None)
    layer = KVLayer(
        name, *(codes.view(slots, 1, 1, D) for _ in range(2)), *(scales.view(slots, 1, 1) for _ in range(2))
    )
    for pending in {1, min(slots, 3), slots}:
        batch = build_batch([Rows([0] * pending, slots - pending, [], [], range(slots), True)], 1)
        for isa in ISAS:
            with instructions(isa):
                cpu.attention(fenced(randn(pending, group, D)), layer, batch, 0.3)
                cpu.store_kv(*(fenced(randn(1, 1, D)) for _ in range(2)), layer, torch.tensor([slots - 1]))


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

    def attend(**changes):
        batch = copy.copy(p.batch)
        for name, value in changes.items():
            object.__setattr__(batch, name, value)
        return cpu.attention(p.q, p.layer, batch, 0.3)

    for changes in (
        {"block_tables": torch.full_like(p.batch.block_tables, -1)},
        {"block_tables": torch.full_like(p.batch.block_tables, 99)},
        {"block_tables": p.batch.block_tables[:, :2]},
        {"tree_mask": torch.tensor([0, 1, 0])},
        {"tree_mask": None},
        {"row_offsets": torch.tensor([0, 9])},
        {"positions": p.batch.positions[:2]},
    ):
        with pytest.raises((IndexError, ValueError)):
            attend(**changes)


def test_a_convolution_stays_inside_its_log():
    layer, good = StateLayer(torch.empty(0), randn(2, 4, 8)), state_batch([(0, 3)], (1,))
    more = replace(good, row_offsets=torch.tensor([0, 9], dtype=torch.int32))
    for batch, taps in ((more, 3), (state_batch([(0, 3)], (2,)), 3), (state_batch([(-2, 1)], (1,)), 3), (good, 6)):
        with pytest.raises(IndexError):
            cpu.conv(randn(3, 24), randn(taps, 8), layer, batch)


def test_tensors_of_another_shape_or_type_are_refused():
    (x, w), row, at = big_linear(), randn(1, 1, 8), torch.tensor([0])
    plain, coded = empty_layer("fp32", 2, 4, 1, 8), empty_layer("int8", 2, 4, 1, 8)
    for call in (
        lambda: cpu.product(plain_rows(x.double()), w),
        lambda: cpu.product(plain_rows(x[:, :299]), w),
        lambda: cpu.product(plain_rows(x), w, randn(699)),
        lambda: cpu.product(plain_rows(x), QuantTensor("bf16", (700, 300), {"weight": randn(700, 300)})),
        lambda: cpu.rms_norm(x, randn(299), 1e-5),
        lambda: cpu.move_kv(replace(plain, k=plain.k[:, ::2], v=plain.v[:, ::2]), at, at),
        lambda: cpu.store_kv(row, row, replace(coded, k_scale=None, v_scale=None), at),
        lambda: cpu.move_kv(replace(coded, v_scale=torch.ones(2, 3, 1)), at, at + 1),
        lambda: cpu.attention(randn(1, 1, 9), plain, build_batch([], 4), 0.3),
    ):
        with pytest.raises((TypeError, ValueError)):
            call()


def test_a_copied_weight_is_found_at_its_own_place():
    """Addresses are cached per object: a copy, or a new tensor where another was freed, has its own."""
    x, w = big_linear()
    cpu.product(plain_rows(x), w)
    twin = copy.deepcopy(w)
    twin.parts["weight"].zero_()
    assert (cpu.product(plain_rows(x), twin) == 0).all() and not (cpu.product(plain_rows(x), w) == 0).all()
