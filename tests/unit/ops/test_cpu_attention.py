"""The KV cache and attention in the native backend: right values, and the same bits from every instruction set.

Attention is compared with float64 for the queries that the format computes with. int8_a8 (queries in int8, softmax
weights in 16 bits) and bf16_a16 (both rounded to bf16) err at most by `attention_rounding`, for noise far less.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
from fixtures_cpu import ISAS, instructions
from fixtures_ops import (
    FP8,
    KV_FORMATS,
    LARGEST,
    Part,
    alone,
    empty_layer,
    exact_attention,
    flat,
    make_pass,
    passes,
    randn,
    threads,
    unusual_rows,
)
from hypothesis import given, settings, strategies as st

from sameseed import scheme
from sameseed.batch import Rows, build_batch
from sameseed.ops import cpu, reference
from sameseed.scheme import KVLayer, QuantTensor

FOUR_BITS = ["int4", "int4_sparse"]
# Formats whose queries and softmax weights are rounded, and the error to expect of noise: of 256 keys, as many are
# rounded up as down.
ROUNDED = {"int8_a8": 5e-4, "bf16_a16": 1.0}
DIMS = [2, 10, 16, 32, 33, 80, 128]
every_kv_format = pytest.mark.parametrize("name", [*KV_FORMATS, *FOUR_BITS, *ROUNDED])
every_scaled_format = pytest.mark.parametrize("name", sorted(LARGEST))


def near(got, p, scale, window=None):
    """Whether the result is the formula's, up to the order of float32 sums and the rounding of softmax weights."""
    name, tolerance, largest = p.layer.format, 1e-5, 1.0
    if name in ROUNDED:
        values = scheme.get(name).decode_kv(*flat(p.layer)[1::2], *([None] if name == "bf16_a16" else []))
        largest = float(values.nan_to_num(0.0).abs().max())
        tolerance = min(ROUNDED[name], cpu.attention_rounding(name) + 1e-5)
    if name == "bf16_a16":
        p, scale = replace(p, q=(p.q * scale).bfloat16().float()), 1.0
    return bool((got.double() - exact_attention(p, scale, window)).abs().max() <= tolerance * largest)


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
def test_stored_numbers_round_to_nearest_even(name):
    bits = torch.randint(-(1 << 31), (1 << 31) - 1, (1 << 11, 2, 21), generator=torch.Generator().manual_seed(0))
    halves = torch.arange(1 << 11).reshape(-1, 2, 1) * 4096 + torch.tensor([0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000])
    x = torch.cat([bits.flatten(), (halves << 3).flatten()]).to(torch.int32).view(torch.float32)
    x = torch.cat([x, x.new_tensor([65519.0, 65520.0, 2.0**-24, 2.0**-25, 0.0, -0.0])])
    x = torch.cat([x, x.new_zeros(-len(x) % 42)]).view(-1, 2, 21)
    layer = empty_layer(name, len(x), 1, 2, 21)
    for isa in ISAS:
        with instructions(isa):
            cpu.store_kv(x, x.flip(0), layer, torch.arange(len(x), dtype=torch.int32))
            codes = QuantTensor(name, (len(x), 42), {"weight": flat(layer)[0].view(len(x), 42)})
            read = cpu.embedding(torch.arange(len(x), dtype=torch.int32), codes)
        for got, wanted in ((flat(layer)[0], x), (flat(layer)[1], x.flip(0))):
            torch.testing.assert_close(got, wanted.to(got.dtype), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(read, flat(layer)[0].float().view(len(x), 42), rtol=0, atol=0, equal_nan=True)
        for rows in flat(layer):
            rows.fill_(torch.nan)


def stored(name, x):
    """Codes and scales of k = x and v = x reversed, rows [T, Hk, D], after store_kv into shuffled slots."""
    layer = empty_layer(name, len(x), 1, *x.shape[1:])
    slots = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    cpu.store_kv(x, x.flip(0), layer, slots)
    return [t[slots] for t in flat(layer)]


def check_stored(name, x):
    """Check what each instruction set stores."""
    wanted = [scheme.kv_format(name).encode_kv(rows) for rows in (x, x.flip(0))]
    for isa in ISAS:
        with instructions(isa):
            got = stored(name, x)
        for i, (codes, scales) in enumerate(wanted):
            torch.testing.assert_close(got[2 + i], scales, rtol=0, atol=0, equal_nan=True)
            # In four bits, bytes of a row with a NaN scale are arbitrary.
            sound = ~scales.isnan() if name in FOUR_BITS else torch.ones_like(scales, dtype=torch.bool)
            assert got[i][sound].equal(codes[sound])


@every_scaled_format
@given(shape=st.tuples(*(st.integers(1, n) for n in (9, 3, 70))), size=st.integers(-38, 38), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_codes_and_scales_are_those_of_the_format(name, shape, size, seed):
    check_stored(name, randn(*shape, seed=seed) * 10.0**size)


@every_scaled_format
def test_every_step_of_a_code_rounds_to_nearest_even(name):
    """Points are all codes' values, the middles between neighbours (ties), and the floats next to these; both signs."""
    codes = torch.arange(256, dtype=torch.uint8)
    plain = codes.view(FP8[name]).float() if name in FP8 else codes.view(torch.int8).float()
    levels = plain[plain.isfinite() & (plain.abs() <= LARGEST[name])].unique()
    middles = (levels[1:] + levels[:-1]) / 2
    points = torch.cat([levels, middles])
    points = torch.cat([points, points.nextafter(torch.tensor(1e9)), points.nextafter(torch.tensor(-1e9))])
    points = points.clamp(-LARGEST[name], LARGEST[name])
    rows = torch.full((len(points), 1, 2), LARGEST[name])  # the scale is 1: points are codes
    rows[:, 0, 1] = points
    check_stored(name, rows)


@pytest.mark.parametrize(
    ("name", "dim"), [*product(LARGEST, (2, 21)), *product(FOUR_BITS, (2, 6, 32, 48, 64, 80, 128, 320, 512))]
)
def test_unusual_rows_are_stored_as_the_format_says(name, dim):
    check_stored(name, unusual_rows(dim))


@pytest.mark.parametrize("name", [*sorted(FP8), "int8", "bf16", "fp16"])
@pytest.mark.parametrize("queries", [1, 5])
def test_every_code_is_read_as_torch_reads_it(name, queries):
    """With one key, its weight is 1 and the result is the decoded value."""
    dtype = scheme.kv_format(name).kv_dtype
    codes = torch.arange(256, dtype=torch.uint8)
    if dtype.itemsize == 2:
        codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    codes = codes.view(dtype).view(-1, 1, 1, 32)
    ones = torch.ones(codes.shape[:3]) if name in LARGEST else None
    layer = KVLayer(name, torch.zeros_like(codes), codes, ones, ones)
    exact = scheme.kv_format(name).decode_kv(codes.view(-1, 32), torch.ones(len(codes)))
    batch = build_batch([Rows([0], 0, [], [], [b], True) for b in range(len(codes))], 1)
    for isa in ISAS:
        with instructions(isa):
            got = cpu.attention(torch.ones(len(codes), queries, 32), layer, batch, 1.0)
        for h in range(queries):
            torch.testing.assert_close(got[:, h], exact, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", sorted(LARGEST))
@pytest.mark.parametrize("queries", [1, 5])
def test_every_key_code_is_read_as_torch_reads_it(name, queries):
    """With two keys, one of them zero, the other's share is the logistic function of its score."""
    codes = torch.arange(256, dtype=torch.uint8).view(scheme.kv_format(name).kv_dtype)
    exact = scheme.kv_format(name).decode_kv(codes[:, None], torch.ones(256))[:, 0].double()
    keys = torch.zeros(256, 2, 1, 17, dtype=codes.dtype)
    keys[torch.arange(256), 0, 0, torch.arange(256) % 17] = codes
    values = torch.zeros(256, 2, 1, 17)
    values[:, 0] = 1.0
    value_codes, value_scales = scheme.kv_format(name).encode_kv(values.view(512, 1, 17))
    scale = 4.0 / LARGEST[name]
    layer = KVLayer(
        name, keys, value_codes.view(256, 2, 1, 17), torch.full((256, 2, 1), scale), value_scales.view(256, 2, 1)
    )
    batch = build_batch([Rows([0], 1, [], [], [b], True) for b in range(256)], 2)
    share = torch.where(exact == torch.inf, torch.nan, (exact * scale).sigmoid())  # infinity minus infinity
    wanted = share[:, None, None].expand(256, queries, 17)
    for isa in ISAS:
        with instructions(isa):
            got = cpu.attention(torch.ones(256, queries, 17), layer, batch, 1.0)
        torch.testing.assert_close(got.double(), wanted, rtol=3e-6, atol=0, equal_nan=True)


def hold_rows(p, window, more_threads=(2,)):
    """A row's bits must be the same alone, with more threads, and on every instruction set."""
    scale = p.q.shape[2] ** -0.5

    def attend(x):
        return cpu.attention(x.q, x.layer, x.batch, scale, window)

    with instructions("portable"):
        wanted = attend(p)
    assert near(wanted, p, scale, window)
    singles = []  # rows and each as the only one of a pass
    for b, part in enumerate(p.parts):
        count = part.pending + len(part.parents)
        singles += [(int(p.batch.row_offsets[b]) + i, alone(p, b, i, 3)) for i in {(7 * b + 3) % count, count - 1}]
    for isa in ISAS:
        with instructions(isa):
            assert attend(p).equal(wanted)
            assert all(attend(single)[0].equal(wanted[row]) for row, single in singles)
            for count in more_threads:
                with threads(count):
                    assert attend(p).equal(wanted)


@given(drawn=passes([*KV_FORMATS, *ROUNDED], DIMS, FOUR_BITS))
@settings(max_examples=100, deadline=None)
def test_attention_is_right_and_its_bits_belong_to_the_row(drawn):
    hold_rows(*drawn)


@every_kv_format
@pytest.mark.parametrize("window", [None, 1200])
def test_the_order_of_a_walk_leaves_no_trace(name, window):
    """Long sequences, whose keys are read in different orders.

    One or two threads read a block of keys for all heads, then the next block; sixteen threads take each head's keys
    separately. The 40 prompt rows need two tiles per head, so each of these tiles is computed as a whole. A prompt row
    alone is computed in parts.
    """
    parts = [Part(2300, 1), Part(1500, 1, [-1, 0, 1]), Part(1030, 2, [-1, -1, 0, 0, 3, 1]), Part(1100, 40), Part(3, 1)]
    p = make_pass(parts, name, heads=4, kv_heads=2, dim=32, block_size=16)
    hold_rows(p, window, more_threads=(2, 16))


@every_kv_format
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("parents", [[], [-1, 0, 0, 2]])
@pytest.mark.parametrize("slot", [9, 14])
def test_what_a_row_does_not_see_cannot_touch_it(name, broken, parents, slot):
    """Rows of a chunk share tiles and pairs of keys; a NaN or infinity must not change the rows before it.

    The same holds for a query: a bad value spoils only its own row and head.
    """
    p = make_pass([Part(3, 1 if parents else 12, parents)], name, heads=8, block_size=16)
    first = min(slot - 3, len(p.batch.slots) - 1)

    def on_every_isa():
        for isa in ISAS:
            with instructions(isa):
                found = cpu.attention(p.q, p.layer, p.batch, 0.3)
            yield found

    clean = list(on_every_isa())
    for rows in flat(p.layer):
        if rows.is_floating_point():
            rows[int(p.batch.slots[first])] = broken
    for got, wanted in zip(on_every_isa(), clean, strict=True):
        assert got[:first].equal(wanted[:first]) and not got[first].isfinite().any()
    p.q[first, 2, 0] = broken
    for worse, wanted in zip(on_every_isa(), clean, strict=True):
        assert worse[:first].equal(wanted[:first]) and not worse[first, 2].isfinite().any()


def test_the_largest_sums_fit():
    """All codes are 127 and all weights equal: sums of 256 times 32767 times 127, and 512 times 127 times 127."""
    p = make_pass([Part(300, 1)], "int8_a8", heads=2, kv_heads=1, dim=512, block_size=16)
    for codes in flat(p.layer)[:2]:
        codes.fill_(127)
    for scales in flat(p.layer)[2:]:
        scales.fill_(1.0)
    for isa in ISAS:
        with instructions(isa):
            assert cpu.attention(p.q.fill_(-3.0), p.layer, p.batch, 1.0).sub(127).abs().max() < 1e-4


@pytest.mark.parametrize("name", ROUNDED)
def test_the_reference_rounds_queries_alike(name):
    p = make_pass([Part(40, 3)], name, heads=4, kv_heads=2, dim=32)
    wanted = reference.attention(p.q, p.layer, p.batch, 0.2)
    assert near(wanted, p, 0.2) and not wanted.equal(cpu.attention(p.q, p.layer, p.batch, 0.2))
