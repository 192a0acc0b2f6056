"""KVCache: what it allocates, for each format."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from sameseed.engine.llm import LLM
from sameseed.errors import ConfigError, RegistryError
from sameseed.kvcache.cache import KVCache

MIB = 2**20
SHAPE = ([(2, 8)] * 3, 5, 4)  # KV heads and head size of each layer, blocks, block size


@pytest.mark.parametrize(
    ("format", "dtype", "scaled"),
    [
        ("fp32", torch.float32, False),
        ("bf16", torch.bfloat16, False),
        ("fp16", torch.float16, False),
        ("int8", torch.int8, True),
    ],
)
def test_storage(format: str, dtype: torch.dtype, scaled: bool) -> None:
    cache = KVCache(*SHAPE, format)
    assert len(cache.layers) == 3
    for i in range(3):
        layer = cache.layers[i]
        assert layer.format == format
        assert layer.k.shape == layer.v.shape == (5, 4, 2, 8)
        assert layer.k.dtype == layer.v.dtype == dtype
        for scale in (layer.k_scale, layer.v_scale):
            assert (scale is not None) == scaled
            if scale is not None:
                assert scale.shape == (5, 4, 2)
                assert scale.dtype == torch.float32
    a_row = 2 * 8 * dtype.itemsize + (2 * 4 if scaled else 0)
    assert cache.nbytes == 2 * 3 * 20 * a_row


def test_long_layers_begin_huge_pages_at_different_rows() -> None:
    cache = KVCache([(2, 64)] * 30, 1024, 16, "bf16")  # 4 MiB each, of which nothing is in memory
    assert len({layer.k.data_ptr() % 2**21 // 2**14 for layer in cache.layers}) == 30


def test_layers_may_differ_in_shape() -> None:
    cache = KVCache([(2, 8), (1, 16), (2, 8)], 5, 4)
    assert [layer.k.shape[2:] for layer in cache.layers] == [(2, 8), (1, 16), (2, 8)]
    assert [len(layers) for _, layers in cache.stacks] == [2, 1]
    assert len({t.data_ptr() for layer in cache.layers for t in (layer.k, layer.v)}) == 6
    assert cache.layers[2].k.data_ptr() == cache.stacks[0][0].k[1].data_ptr()


BAD = {"int9": "did you mean 'int8'", "bf16/int88": "did you mean 'int8'", "bf16+int88": "did you mean 'int8'"}
BAD |= {"bf16/nf4": "cache", "bf16+nf4": "cache", "bf16+int4+int4": "int4"}


@pytest.mark.parametrize("name", BAD)
def test_formats_that_no_cache_has_are_refused(name: str, pair_folders: tuple[Path, Path]) -> None:
    with pytest.raises((ConfigError, RegistryError), match=BAD[name]):
        LLM(str(pair_folders[0]), kv_format=name)


def resident() -> int:
    """Bytes of this process in memory."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGESIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("format", ["fp32", "int8", "int4", "int8/bf16", "bf16+int4"])
def test_rows_take_memory_once_they_are_stored(format: str) -> None:
    before = resident()
    cache = KVCache([(8, 64)] * 4, 8192, 16, format)
    assert cache.nbytes > 200 * MIB
    assert resident() - before < 16 * MIB
    for layer in cache.layers:
        for tensor in (layer.k, layer.v, layer.k_scale, layer.v_scale):
            if tensor is not None:
                assert not tensor[-1].any()
                tensor[:64] = 1
    assert resident() - before < 2 * cache.nbytes * 64 // 8192 + 16 * MIB
