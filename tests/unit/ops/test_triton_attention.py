"""Attention, the cache and sampling in Triton, compiled for GPUs that need not be present."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re

import pytest
import torch
from fixtures_ops import Part, empty_layer, make_pass, randn

from sameseed.batch import Draw, Draws
from sameseed.spec import sampling as spec

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
FORMATS = ["fp32", "bf16", "fp16", "int8", "fp8_e4m3", "fp8_e5m2"]
NEEDS_COMPILER = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is chosen")


def module(name):
    """A module of the backend; some have the name of an op."""
    return importlib.import_module(f"sameseed.ops.triton.{name}")


def compiled(launch, capability):
    made = launch.compile(capability)
    assert f".target sm_{capability}" in made.asm["ptx"] and len(made.asm["cubin"]) > 1000
    return made


def paged(name, parts=None, heads=8, kv_heads=2, dim=128, page=16):
    return make_pass(parts or [Part(40, 1, [-1, 0])], name, heads, kv_heads, dim, page)


# Compiling takes seconds each: the rest is for `make test-full`.
ATTENTION = [
    pytest.param(name, capability, marks=[] if (name, capability) == ("bf16", 90) else pytest.mark.slow)
    for name in FORMATS
    for capability in (80, 89, 90)
]


@NEEDS_COMPILER
@pytest.mark.parametrize(("name", "capability"), ATTENTION)
def test_attention_compiles(name, capability):
    attention = module("attention")

    p = paged(name)
    for taken in ("all", "stretch", "span") if (name, capability) != ("bf16", 90) else ("stretch",):
        found = attention.launches(p.q, p.layer, p.batch, 0.1, None, torch.empty_like(p.q), taken)
        assert len(found) == 1 + (taken != "all")
        made = [compiled(launch, capability) for launch in found]
        assert made[0].metadata.shared <= 96 << 10  # per program: two programs fit into a multiprocessor's memory
        # Tensor cores multiply 16-bit codes, in one shape for all numbers of rows; fp32 uses plain fma.
        assert ("mma.sync.aligned.m16n8k16" in made[0].asm["ptx"]) == (name != "fp32")
        assert "wgmma" not in made[0].asm["ptx"]
        if name != "fp32":
            # Products and sums have one layout: in the loop over all rows, in a node's own, and however keys are
            # divided.
            layouts = set(re.findall(r"tt\.dot .*-> tensor<16x\d+xf32, (#\w+)>", made[0].asm["ttgir"]))
            pattern = r"^(#mma\d*) = .*warpsPerCTA = \[1, 4\], instrShape = \[16, 8\]"
            kinds = re.findall(pattern, made[0].asm["ttgir"], re.M)
            assert layouts == set(kinds) and len(kinds) == 1


@NEEDS_COMPILER
@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
@pytest.mark.parametrize("name", FORMATS)
def test_the_cache_s_kernels_compile(name, capability):
    kv = module("kv")

    layer = empty_layer(name, 4, 16, 2, 128)
    k, slots = randn(3, 2, 128), torch.tensor([5, 9, 3], dtype=torch.int32)
    compiled(kv.storing(k, k, layer, slots), capability)
    batch = make_pass([Part(2, 3)]).batch
    compiled(kv.rotating(randn(3, 4, 128), k, k, layer, batch, randn(9, 128))[0], capability)
    for launch in kv.moving(layer, slots, slots):
        compiled(launch, capability)


@NEEDS_COMPILER
@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_sampling_compiles(capability):
    sampling = module("sampling")

    logits = randn(2, 3000)
    draws = Draws.of([Draw(spec.noise_key(1, i), 0.8, -9.0, False, 0, 0.9) for i in range(2)])
    found, _, _ = sampling.launches(logits, draws)
    row, order = logits[0].double(), torch.arange(3000)
    found.append(sampling.marking(row, order, row.sum(), torch.zeros(3000, dtype=torch.uint8)))
    for launch in found:
        compiled(launch, capability)


def test_one_configuration_for_every_number_of_rows():
    """The model and the cache decide what is compiled; rows only decide the grid, the start and the split of keys."""
    attention = module("attention")

    found = set()
    for rows in range(1, 66):
        p = paged("bf16", [Part(40, rows)])
        tree = paged("bf16", [Part(40, 1, list(range(-1, rows - 2)))])
        for x in (p, tree):
            for launch in attention.launches(x.q, x.layer, x.batch, 0.1, None, torch.empty_like(x.q), "all"):
                cut = tuple((name, value) for name, value in launch.constants.items() if name != "EARLY")
                found.add((launch.kernel.__name__, cut, launch.warps, launch.stages))
                assert launch.free >= {"num_seqs", "has_tree", "num_parts", "table_width"}  # these vary with the batch
    assert len(found) == 1
