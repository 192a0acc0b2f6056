"""Caches in 4 bits in the native backend: the format's own bytes, attention over what they mean, on every ISA."""

from __future__ import annotations

import pytest
import torch
from fixtures_cpu import ISAS, every_isa, instructions
from fixtures_ops import Part, make_pass, randn, threads
from torch import Tensor

from sameseed import scheme
from sameseed.batch import Batch
from sameseed.kvcache.cache import KVCache
from sameseed.ops import cpu, reference
from sameseed.scheme import KVLayer

NAMES = ["int4", "int4_sparse"]
every_name = pytest.mark.parametrize("name", NAMES)
DIMS = [2, 6, 32, 48, 64, 80, 128, 320, 512]


def layer_of(name: str, rows: int, heads: int, dim: int) -> KVLayer:
    return KVCache(1, rows, 1, heads, dim, name).layer(0)


def hard_rows(dim: int) -> Tensor:
    """[T, 2, D]: noise, outliers, ties, zeros, tiny, huge, constant rows, NaN and infinity."""
    x = randn(12, 2, dim)
    x[1, 0, dim // 2] = 1e4
    x[2] = x[2].round()
    x[3] = 0
    x[4] *= 1e-31
    x[5] *= 1e38
    x[6] = 3.25
    x[7, 1, 0] = torch.nan
    x[8, 0, -1] = torch.inf
    x[9] = -x[9].abs()
    x[10] = x[10].abs() + 100
    return x


@every_isa
@every_name
@pytest.mark.parametrize("dim", DIMS)
def test_rows_are_stored_as_the_format_says(name, dim, isa):
    x = hard_rows(dim)
    layer = layer_of(name, len(x), 2, dim)
    with instructions(isa):
        cpu.store_kv(x, x.flip(0), layer, torch.arange(len(x), dtype=torch.int32))
    for got, scales, rows in ((layer.k, layer.k_scale, x), (layer.v, layer.v_scale, x.flip(0))):
        codes, wanted = scheme.kv_format(name).encode_kv(rows)
        assert wanted is not None and scales is not None
        torch.testing.assert_close(scales[:, 0], wanted, rtol=0, atol=0, equal_nan=True)
        sound = ~wanted.isnan()  # bytes of a poisoned row mean nothing: its scale says so
        assert got[:, 0][sound].equal(codes[sound])


PARTS = [
    [Part(3, 1, []), Part(300, 1, [-1, 0, 0, 1])],
    [Part(0, 20, []), Part(600, 2, [-1, -1, 1])],
    [Part(255, 3, []), Part(17, 1, [-1, 0, 1, 2, 3])],
]


def cached(name: str, parts: list[Part], heads: int, kv_heads: int, dim: int) -> tuple[Tensor, KVLayer, KVLayer, Batch]:
    """Queries, a layer in the format, the same decoded to fp32, and the batch."""
    made = make_pass(parts, "fp32", heads, kv_heads, dim, 16, 0)
    blocks, block_size = made.layer.k.shape[:2]
    layer = KVCache(1, blocks, block_size, kv_heads, dim, name).layer(0)
    fmt = scheme.kv_format(name)
    for into, scales, x in ((layer.k, layer.k_scale, made.layer.k), (layer.v, layer.v_scale, made.layer.v)):
        codes, found = fmt.encode_kv(x.reshape(-1, kv_heads, dim))
        assert found is not None and scales is not None
        into.copy_(codes.view(into.shape))
        scales.copy_(found.view(scales.shape))
    assert layer.k_scale is not None and layer.v_scale is not None
    k, v = fmt.decode_kv(layer.k, layer.k_scale), fmt.decode_kv(layer.v, layer.v_scale)
    return made.q, layer, KVLayer("fp32", k, v, None, None), made.batch


@every_isa
@every_name
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (6, 1, 48), (8, 8, 64), (3, 3, 6)])
def test_attention_reads_what_is_stored(name, parts, heads, kv_heads, dim, isa):
    q, layer, decoded, batch = cached(name, parts, heads, kv_heads, dim)
    with instructions(isa):
        got = cpu.attention(q, layer, batch, dim**-0.5)
    torch.testing.assert_close(got, reference.attention(q, decoded, batch, dim**-0.5), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got, reference.attention(q, layer, batch, dim**-0.5), rtol=1e-4, atol=1e-5)


@every_name
def test_all_instruction_sets_and_threads_give_the_same_bits(name):
    q, layer, _, batch = cached(name, [Part(700, 2, [-1, 0, 0, 1]), Part(33, 1, [])], 8, 2, 64)
    results = []
    for isa in ISAS:
        for count in (1, 2, 3):
            with instructions(isa), threads(count):
                results.append(cpu.attention(q, layer, batch, 0.125, 400))
    assert all(r.equal(results[0]) for r in results)


@every_name
def test_rows_move_whole(name):
    x = randn(6, 2, 48)
    layer = layer_of(name, 6, 2, 48)
    cpu.store_kv(x, -x, layer, torch.arange(6, dtype=torch.int32))
    before = [t.clone() for t in (layer.k, layer.v, layer.k_scale, layer.v_scale)]
    cpu.move_kv(layer, torch.tensor([5, 1]), torch.tensor([1, 0]))
    for t, old in zip((layer.k, layer.v, layer.k_scale, layer.v_scale), before):
        assert t.equal(old[[1, 5, 2, 3, 4, 5]])


@every_name
def test_a_width_that_no_head_has_is_refused(name):
    layer = layer_of(name, 4, 1, 32)
    broken = KVLayer(name, layer.k[..., :1].contiguous(), layer.v[..., :1].contiguous(), layer.k_scale, layer.v_scale)
    with pytest.raises(ValueError, match="no head dimension"):
        cpu.move_kv(broken, torch.tensor([0]), torch.tensor([1]))
