"""Caches whose keys and values have different formats."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sameseed import scheme
from sameseed.engine.memory import block_bytes
from sameseed.kvcache.cache import KVCache
from sameseed.models.loader import read_config
from sameseed.ops import reference

PAIRS = ["int8/bf16", "bf16/int4", "fp8_e4m3/fp32", "int4/int8"]


def test_one_name_is_both() -> None:
    assert [f.name for f in scheme.kv_formats("int8")] == ["int8", "int8"]
    assert [f.name for f in scheme.kv_formats("int8/bf16")] == ["int8", "bf16"]
    assert scheme.cache_format("int8/int8", "bf16") == "int8", "kernels know it by one name"
    assert (
        scheme.cache_format("int8/bf16", "bf16") == "int8/bf16" and scheme.cache_format("auto/auto", "fp16") == "fp16"
    )


@pytest.mark.parametrize("name", PAIRS)
def test_each_half_is_stored_in_its_own(name: str) -> None:
    keys, values = name.split("/")
    both = KVCache([(2, 32)], 4, 8, name)
    assert both.nbytes == sum(KVCache([(2, 32)], 4, 8, half).nbytes for half in (keys, values)) // 2
    x = torch.randn(2, 5, 2, 32, generator=torch.Generator().manual_seed(1))
    slots = torch.tensor([3, 9, 30, 0, 17], dtype=torch.int32)
    reference.store_kv(x[0], x[1], both.layers[0], slots)
    for half, mine in ((keys, "k"), (values, "v")):
        alone = KVCache([(2, 32)], 4, 8, half)
        reference.store_kv(x[0], x[1], alone.layers[0], slots)
        for part in (mine, f"{mine}_scale"):
            got, want = getattr(both.layers[0], part), getattr(alone.layers[0], part)
            assert (got is None and want is None) or got.view(torch.uint8).equal(want.view(torch.uint8))
    reference.move_kv(both.layers[0], slots[:1], slots[1:2])
    k, v = both.layers[0].k.flatten(0, 1), both.layers[0].v.flatten(0, 1)
    assert k[9].equal(k[3]) and v[9].equal(v[3])


def test_memory_is_that_of_both_halves(pair_folders: tuple[Path, Path]) -> None:
    config = read_config(pair_folders[0])
    apart, eight, sixteen = (block_bytes(config, name, 16) for name in ("int8/bf16", "int8", "bf16"))
    assert apart == (eight + sixteen) // 2
