"""The contract of every backend: the values of float64 formulas, and rows whose bits do not depend on other rows."""

import math
from itertools import cycle, product

import pytest
import torch
from fixtures_models import backends
from fixtures_ops import (
    Part,
    alone,
    check_moves,
    empty_layer,
    exact_attention,
    flat,
    make_pass,
    randn,
    state_batch,
    threads,
)

from sameseed import ops, registry, scheme
from sameseed.models.config import RopeConfig
from sameseed.models.layers import rope_table
from sameseed.ops import plain_rows
from sameseed.ops._rows import StateLayer

pytestmark = pytest.mark.bits

# Law 4 in numbers: the largest difference from the float64 formula, relative to the size of the summed values.
TOLERANCE = 2e-6

KV_FORMATS = [n for n in registry.names("formats") if scheme.get(n).kv_dtype is not None]
INVARIANT = [b for b in backends() if ops.resolve(b).row_invariant]
every_backend = pytest.mark.parametrize("backend", backends())
every_invariant_backend = pytest.mark.parametrize("backend", INVARIANT)
every_format = pytest.mark.parametrize("name", [n for n in registry.names("formats") if scheme.get(n).weights])
every_kv_format = pytest.mark.parametrize("kv_format", KV_FORMATS)

MIXED = [
    Part(0, 1),
    Part(70, 1, [-1, 0, 1, 2]),  # decode with a chain, past one block of 64 keys
    Part(63, 2, [-1, -1, 0, 0, 3, 1]),  # a tree across the end of that block
    Part(0, 9),
    Part(11, 3),
    Part(130, 1, [*range(-1, 63)]),  # the longest possible draft
]


def close(got, wanted, size=1.0):
    assert got.dtype == torch.float32 and got.shape == wanted.shape
    assert (got.double() - wanted).abs().max() <= TOLERANCE * size


@every_backend
def test_a_backend_says_what_it_is(backend):
    module = registry.load("ops", backend)
    assert isinstance(module.row_invariant, bool)
    assert module.unavailable() is None
    assert set(registry.names("formats")) >= module.LINEAR_FORMATS
    assert set(KV_FORMATS) >= module.KV_FORMATS
    assert ops.resolve(backend).name == backend


@every_backend
@every_format
@pytest.mark.parametrize(("T", "O", "K"), [(1, 1, 16), (3, 33, 96), (17, 130, 48), (64, 5, 272), (0, 8, 16)])
def test_linear(T, O, K, name, backend):  # noqa: E741 - O x K is the weight
    x, fmt = randn(T, K), scheme.get(name)
    q, bias = fmt.encode(randn(O, K, seed=1)), randn(O, seed=2)
    wanted = x.double() @ fmt.decode(q).double().T
    chosen = ops.resolve(backend)
    close(chosen.product(plain_rows(x), q), wanted, 3 * math.sqrt(K)) if T else None
    close(chosen.product(plain_rows(x), q, bias), wanted + bias, 3 * math.sqrt(K)) if T else None
    assert chosen.product(plain_rows(x), q, bias).shape == (T, O)


@every_backend
@pytest.mark.parametrize(("T", "C"), [(1, 1), (5, 33), (64, 96), (2, 1024)])
@pytest.mark.parametrize("size", [0.0, 1e-4, 1.0, 1e4])
def test_rms_norm(T, C, size, backend):
    x, weight = randn(T, C) * size, randn(C, seed=1)
    exact = x.double()
    wanted = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    close(ops.resolve(backend).rms_norm(x, weight, 1e-5), wanted, 4.0)


@every_backend
@pytest.mark.parametrize(("T", "half"), [(1, 1), (3, 17), (33, 64)])
def test_silu_mul(T, half, backend):
    x = 6 * randn(T, 2 * half)
    gate, up = x.double().chunk(2, -1)
    close(ops.resolve(backend).silu_mul(x), gate / (1 + (-gate).exp()) * up, 300.0)


@every_backend
@pytest.mark.parametrize(("T", "half"), [(1, 1), (3, 17), (33, 64)])
def test_gelu_mul_and_softcap(T, half, backend):
    x, chosen = 6 * randn(T, 2 * half), ops.resolve(backend)
    gate, up = x.double().chunk(2, -1)
    close(chosen.gelu_mul(x), torch.nn.functional.gelu(gate, approximate="tanh") * up, 300.0)
    close(chosen.softcap(x, 8.0), (x.double() / 8).tanh() * 8, 30.0)
    assert all(chosen.gelu_mul(x)[t].equal(chosen.gelu_mul(x[t : t + 1])[0]) for t in range(T))


@every_backend
def test_silu_of_extremes(backend):
    gate = torch.tensor([[-1e30, -100.0, -88.0, -0.0, 0.0, 88.0, 100.0, 1e30]])
    got = ops.resolve(backend).silu_mul(torch.cat([gate, torch.ones_like(gate)], dim=1))
    wanted = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 88.0, 100.0, 1e30]])
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-35)


@every_backend
@pytest.mark.parametrize(("T", "H", "D"), [(1, 1, 2), (7, 3, 20), (40, 8, 64)])
def test_rope_turns_pairs(T, H, D, backend):
    """Checked as a product of complex numbers: (x1 + i x2) e^(i p f)."""
    x, table = randn(T, H, D), rope_table(RopeConfig(), D, 500)
    positions = torch.randint(0, 500, (T,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    rows = table[positions.long()].double()[:, None]
    turn = torch.complex(rows[..., : D // 2], rows[..., D // 2 :])
    turned = torch.complex(x[..., : D // 2].double(), x[..., D // 2 :].double()) * turn
    got = ops.resolve(backend).rope(x, positions, table)
    close(got, torch.cat([turned.real, turned.imag], -1), 5.0)
    assert ops.resolve(backend).rope(x, torch.zeros_like(positions), table).equal(x)


@every_backend
@pytest.mark.parametrize(
    ("kv_format", "window"),
    [*product(KV_FORMATS, [None]), *zip(KV_FORMATS, cycle((64, 3, 65))), *product(["fp32"], [1, 3, 64, 65, 1000])],
)
def test_attention(window, kv_format, backend):
    p, chosen = make_pass(MIXED, kv_format), ops.resolve(backend)
    got = chosen.attention(p.q, p.layer, p.batch, 12**-0.5, window)
    lost = max(0.0, chosen.kv_rounding(kv_format) - chosen.kv_rounding("fp32"))  # error of rounded softmax weights
    values = scheme.kv_format(kv_format).decode_kv(p.layer.v, p.layer.v_scale) if lost else torch.zeros(1)
    largest = float(values.nan_to_num(0.0).abs().max())
    close(got, exact_attention(p, 12**-0.5, window), 10.0 + lost * largest / TOLERANCE)


@every_backend
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 2), (3, 3, 8), (7, 1, 10), (8, 2, 64), (6, 3, 33)])
@pytest.mark.parametrize("block_size", [1, 16, 100])
def test_attention_shapes(heads, kv_heads, dim, block_size, backend):
    p = make_pass([Part(20, 2, [-1, -1, 0]), Part(3, 4)], "fp32", heads, kv_heads, dim, block_size, seed=3)
    got = ops.resolve(backend).attention(p.q, p.layer, p.batch, 0.3, None)
    close(got, exact_attention(p, 0.3), 10.0)


@every_backend
def test_attention_with_large_scores(backend):
    """Softmax of scores around +-1e4 does not overflow and keeps rows apart."""
    p = make_pass([Part(90, 1, [-1, 0])])
    got = ops.resolve(backend).attention(100 * p.q, p.layer, p.batch, 3.0, None)
    assert got.isfinite().all()
    exact = exact_attention(type(p)(p.parts, p.batch, p.layer, 100 * p.q), 3.0)
    torch.testing.assert_close(got.double(), exact, rtol=1e-3, atol=1e-2)


@every_backend
@every_kv_format
def test_stored_rows_are_the_format_s_codes(kv_format, backend):
    fmt = scheme.kv_format(kv_format)
    layer = empty_layer(kv_format, 4, 5, 2, 12)
    before = [t.clone() for t in flat(layer)]
    k, v = randn(3, 2, 12), randn(3, 2, 12, seed=1)
    slots = torch.tensor([19, 0, 7], dtype=torch.int32)
    ops.resolve(backend).store_kv(k, v, layer, slots)
    encoded = [fmt.encode_kv(k), fmt.encode_kv(v)]
    wanted = [encoded[0][0], encoded[1][0], encoded[0][1], encoded[1][1]]
    for tensor, old, new in zip(flat(layer), before, wanted, strict=False):
        assert new is not None and tensor[slots.long()].equal(new)
        others = [i for i in range(20) if i not in (19, 0, 7)]
        assert tensor[others].view(torch.uint8).equal(old[others].view(torch.uint8))  # as bytes, since NaN != NaN


@every_backend
@every_kv_format
def test_moved_rows_are_read_before_they_are_overwritten(kv_format, backend):
    check_moves(ops.resolve(backend).move_kv, kv_format)


@every_backend
def test_slices_of_wider_rows(backend):
    """q, k and v are slices of one projection's rows."""
    chosen = ops.resolve(backend)
    wide = randn(6, 8, 12)
    q, k, v = wide[:, :4], wide[:, 4:6], wide[:, 6:]
    table, positions = rope_table(RopeConfig(), 12, 50), torch.arange(6, dtype=torch.int32)
    assert chosen.rope(q, positions, table).equal(chosen.rope(q.contiguous(), positions, table))
    layers = [empty_layer("fp32", 2, 5, 2, 12) for _ in range(2)]
    slots = torch.arange(6, dtype=torch.int32)
    chosen.store_kv(k, v, layers[0], slots)
    chosen.store_kv(k.contiguous(), v.contiguous(), layers[1], slots)
    for a, b in zip(flat(layers[0]), flat(layers[1]), strict=True):
        assert a[:6].equal(b[:6])
    p = make_pass([Part(0, 6)])
    sliced = torch.cat([p.q, p.q], dim=1)[:, 4:]
    assert not sliced.is_contiguous()
    assert chosen.attention(sliced, p.layer, p.batch, 0.3).equal(chosen.attention(p.q, p.layer, p.batch, 0.3))
    rows = randn(5, 40)[:, 3:35]
    weight = scheme.get("fp32").encode(randn(7, 32))
    assert chosen.product(plain_rows(rows), weight).equal(chosen.product(plain_rows(rows.contiguous()), weight))
    assert chosen.rms_norm(rows, torch.ones(32), 1e-5).equal(chosen.rms_norm(rows.contiguous(), torch.ones(32), 1e-5))
    assert chosen.silu_mul(rows).equal(chosen.silu_mul(rows.contiguous()))


@every_invariant_backend
@pytest.mark.parametrize("width", [2, 18, 96, 344])
def test_rows_of_small_ops_do_not_know_their_company(width, backend):
    chosen = ops.resolve(backend)
    x, weight = 3 * randn(37, width), randn(width, seed=1)
    table, positions = rope_table(RopeConfig(), width, 99), torch.arange(37, dtype=torch.int32)
    normed, gated = chosen.rms_norm(x, weight, 1e-6), chosen.silu_mul(x)
    turned = chosen.rope(x[:, None], positions, table)
    for count in (1, 2, 7, 16):
        for start in (0, 1, 37 - count):
            part = slice(start, start + count)
            assert chosen.rms_norm(x[part].clone(), weight, 1e-6).equal(normed[part])
            assert chosen.silu_mul(x[part].clone()).equal(gated[part])
            assert chosen.rope(x[part, None].clone(), positions[part], table).equal(turned[part])
    with threads(2):
        assert chosen.rms_norm(x, weight, 1e-6).equal(normed) and chosen.silu_mul(x).equal(gated)


@every_invariant_backend
@pytest.mark.parametrize(("kv_format", "window"), [*zip(KV_FORMATS, cycle((None, 5, 64))), *product(["fp32"], [5, 64])])
def test_attention_rows_do_not_know_their_company(window, kv_format, backend):
    """The bits are the same alone, in another cache, with another block size, and in a chain instead of a tree."""
    chosen = ops.resolve(backend)
    p = make_pass(MIXED, kv_format)
    whole = chosen.attention(p.q, p.layer, p.batch, 0.3, window)
    for b, part in enumerate(p.parts):
        first = int(p.batch.row_offsets[b])
        count = part.pending + len(part.parents)
        for row in {0, 1, 2, 5, count - 1, count // 2} & set(range(count)):
            for block_size in (1, 16):
                single = alone(p, b, row, block_size)
                got = chosen.attention(single.q, single.layer, single.batch, 0.3, window)
                assert got[0].equal(whole[first + row]), (b, row, block_size)
    with threads(2):
        assert chosen.attention(p.q, p.layer, p.batch, 0.3, window).equal(whole)


@every_invariant_backend
@pytest.mark.parametrize(("taps", "width"), [(3, 33), (4, 16), (1, 5)])
def test_a_short_convolution(taps, width, backend):
    """Of two sequences in passes of several sizes, with rows taken back; a log may be shorter than a pass."""
    x, w, conv = randn(2, 40, 3 * width), randn(taps, width, seed=1), ops.resolve(backend).conv
    gates, scales, values = x.double().split(width, dim=2)
    known = torch.nn.functional.pad(gates * values, (0, 0, taps - 1, 0))
    wanted = scales * sum(w[j].double() * known[:, j : j + 40] for j in range(taps))
    layer, found, ends = StateLayer(torch.empty(0), randn(5, 12, width, seed=2)), torch.empty(2, 40, width), [0, 0]
    for counts, kept in (((1, 7), (1, 4)), ((6, 1), (2, 1)), ((20, 1), (20, 1)), ((17, 34), (17, 34))):
        spans = [(begin, begin + n) for begin, n in zip(ends, counts)]
        done = conv(
            torch.cat([x[s, slice(*span)] for s, span in enumerate(spans)]), w, layer, state_batch(spans, (3, 1))
        )
        for s, rows in enumerate(done.split(counts)):
            found[s, slice(*spans[s])] = rows
        ends = [end + n for end, n in zip(ends, kept)]
    assert ends == [40, 40]
    close(found, wanted, 10.0)
    alone = state_batch([(0, 40)], (3,))
    assert torch.equal(conv(x[0], w, layer, alone), found[0])
    alone.positions[5] = 4
    with pytest.raises((IndexError, ValueError), match="branches"):
        conv(x[0], w, layer, alone)
