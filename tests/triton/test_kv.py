"""The KV cache in Triton: codes and scales equal the formats' own bit for bit, and rows are moved as a whole."""

import importlib

import pytest
import torch
from fixtures_ops import KV_FORMATS, Part, check_moves, empty_layer, flat, make_pass, randn, unusual_rows

from sameseed import ops, scheme
from sameseed.kvcache.cache import KVCache

kernels = importlib.import_module("sameseed.ops.triton.kv")


def same(a, b):
    return a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", KV_FORMATS)
def test_stored_rows_are_the_format_s_codes(name):
    layer = empty_layer(name, 5, 5, 2, 12)
    before = [t.clone() for t in flat(layer)]
    wide = torch.cat([unusual_rows(12), unusual_rows(12).flip(0)], dim=1)  # k and v are slices of one projection
    slots = torch.tensor([19, 0, 7, 3, 1, 24, *range(8, 19), 20], dtype=torch.int32)
    kernels.store_kv(wide[:, :2], wide[:, 2:], layer, slots)
    k, v = (scheme.kv_format(name).encode_kv(x) for x in (wide[:, :2], wide[:, 2:]))
    others = [i for i in range(25) if i not in slots.tolist()]
    for tensor, old, new in zip(flat(layer), before, (k[0], v[0], k[1], v[1]), strict=False):
        got, wanted = tensor[slots.long()], new
        if got.is_floating_point():  # NaN != NaN, and its bits may differ
            assert got.isnan().equal(wanted.isnan())
            got, wanted = got.nan_to_num(nan=0.0), wanted.nan_to_num(nan=0.0)
        assert same(got, wanted)
        assert same(tensor[others], old[others])


@pytest.mark.parametrize("name", KV_FORMATS)
def test_moved_rows_are_read_before_they_are_overwritten(name):
    check_moves(kernels.move_kv, name)


@pytest.mark.parametrize("name", ["bf16", "int8", "int8/bf16"])
def test_rows_of_all_layers_move_at_once(name):
    """Rows of all layers move as moves in each layer would, in two launches if one kernel moves keys and values."""
    gpu = ops.Ops(importlib.import_module("sameseed.ops.triton"))
    cache = KVCache([(2, 12)] * 3, 4, 5, name, str(torch.get_default_device()))
    for i, layer in enumerate(cache.layers):
        gpu.store_kv(unusual_rows(12) + i, unusual_rows(12) * (i + 1), layer, torch.arange(18, dtype=torch.int32))
    wanted = [[t.clone() for t in flat(layer)] for layer in cache.layers]
    src, dst = torch.tensor([3, 9, 1], dtype=torch.int32), torch.tensor([2, 3, 19], dtype=torch.int32)
    for layer in wanted:
        for tensor in layer:
            tensor[dst.long()] = tensor[src.long()]
    assert "/" in name or len(kernels.moving(cache.stacks[0][0], src, dst)) == 2
    gpu.move_all(cache.stacks, src, dst)
    for layer, tensors in zip(cache.layers, wanted, strict=True):
        assert all(same(a, b) for a, b in zip(flat(layer), tensors, strict=True))


@pytest.mark.parametrize(("name", "normed"), [*((name, False) for name in KV_FORMATS), ("bf16", True)])
def test_rotated_and_stored_at_once_is_one_after_the_other(name, normed):
    """The fused kernel's codes, scales and queries equal those of separate ops, also for NaN; no other row changes."""
    gpu = ops.Ops(importlib.import_module("sameseed.ops.triton"))
    heads, dim, table = 3, 12, randn(40, 12, seed=8)
    some = unusual_rows(12)[[0, 1, 9, 13, 15]]
    qkv = torch.cat([randn(5, 3, dim, seed=2), some, some.flip(0)], dim=1).view(5, -1)  # [T, (H + 2 Hk) D]
    batch = make_pass([Part(20, 5)]).batch
    norms = (randn(dim, seed=3), randn(dim, seed=4)) if normed else None
    layers = [empty_layer(name, 10, 5, 2, dim) for _ in range(2)]
    fused = gpu.rope_store(qkv, heads, layers[0], batch, table, norms, 1e-5)
    gpu._rope_store = None
    assert same(fused, gpu.rope_store(qkv, heads, layers[1], batch, table, norms, 1e-5))
    assert all(same(a, b) for a, b in zip(flat(layers[0]), flat(layers[1]), strict=True))
    assert not same(layers[0].k, empty_layer(name, 10, 5, 2, dim).k)
