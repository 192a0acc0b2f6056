"""Parts of `make bench-gpu`, whole on a pretended device: what forgets to move a tensor there fails."""

from __future__ import annotations

import json
from dataclasses import replace

import gpu_clock
import gpu_laws
import gpu_micro
import gpu_parts
import gpu_plan
import gpu_twins
import pytest
import torch
from fixtures_device import pretended_device
from gpu_models import shape_of

from foretoken import ops

SIZES = replace(
    gpu_plan.DRY, formats=("w8a8",), large_format="w8a8", kv_formats=("int8",), rows=(1,), contexts=(4,), batches=(1,),
    batch_context=4, prompts=(2,), max_tokens=3, num_prompts=1, law_tokens=2,
)  # fmt: skip
LIMITS = {"threads": 1, "read_bytes_per_s": 1e9, "instructions": {}, "source": "a test",
          "repetitions": {"read": [1e9], "fp32": [1e9], "bf16": [2e9]}}  # fmt: skip


@pytest.fixture
def told(monkeypatch):
    """Records; calls of a real GPU are counted at most."""
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 1 << 20)
    monkeypatch.setattr(gpu_clock, "graphed", lambda job, device, repeats: [(job(), 1e-3)[1]] * repeats)
    monkeypatch.setattr(gpu_micro, "MOST", 2)
    for module, name in ((gpu_parts, "REPEATS"), (gpu_parts, "FEWEST")):
        monkeypatch.setattr(module, name, 1)
    small = replace(shape_of("embedded"), num_layers=1, windows=(None,), vocab_size=256)
    for module in (gpu_parts, gpu_micro, gpu_laws):
        monkeypatch.setattr(module, "shape_of", lambda name: small)
    for module in (gpu_parts, gpu_micro, gpu_twins):
        monkeypatch.setattr(module, "busy", busy)
    lines = []
    return lines, lambda found: lines.append(json.loads(json.dumps(found)))


def busy(job, device):
    job()
    return gpu_clock.Busy(1e-4, "a test", {"kernel": (1e-4, 3)})


def there(part, tell, **arguments):
    with pretended_device() as name:
        part(SIZES, ops.resolve("reference"), name, tell, **arguments)


def test_costs(told):
    lines, tell = told
    there(gpu_parts.measure_costs, tell, format="w8a8", limits=LIMITS)
    kinds = [x["part"] for x in lines]
    assert kinds.count("costs") == len(gpu_plan.passes(SIZES)) and "goodput" in kinds
    assert all(
        x["timed_by"] == "a test" and x["host_share"] < 1 and x["launches"] == 3 for x in lines if x["part"] == "host"
    )
    assert all(x["median_ms"] == 1 and x["read_share"] > 0 for x in lines if x["part"] == "device")


def test_products_and_attention_by_themselves(told):
    lines, tell = told
    there(gpu_micro.measure_micro, tell, limits=LIMITS)
    assert {x["op"] for x in lines} == {"qkv", "o", "gate_up", "down", "lm_head", "attention"}
    assert all(x["median_us"] == 500 and x["read_share"] > 0 for x in lines if x["op"] == "down")  # two copies


def test_kernels_against_the_reference(told):
    lines, tell = told
    there(gpu_laws.check_kernels, tell)
    assert {"linear", "norm_linear", "silu_linear", "rms_norm", "rope", "attention", "store_kv"} <= {
        x["op"] for x in lines
    }
    assert all(x.get("within", True) and x.get("rows_alone_equal", True) for x in lines)


def test_a_kernel_that_is_wrong_is_told(told, monkeypatch):
    lines, tell = told
    backend = ops.resolve("reference")
    right = backend._linear
    monkeypatch.setattr(backend, "_linear", lambda x, w, *rest: right(x, w, *rest) * (1 + 1e-3 * len(x)))
    there(gpu_laws.check_kernels, tell)
    wrong = [x for x in lines if x["op"] == "linear"]
    assert wrong and not any(x["within"] or x["rows_alone_equal"] for x in wrong)


@pytest.mark.slow
def test_texts_and_speculation(told):
    lines, tell = told
    there(gpu_laws.check_laws, tell, formats=["w8a8"])
    assert {"none", "cascade", "eagle", "self_quant"} <= {x["arm"] for x in lines} and all(x["equal"] for x in lines)
    lines.clear()
    there(gpu_twins.measure_speculation, tell, format="w8a8")
    assert all(x["equals_plain"] and x["host_share"] < 1 and x["timed_by"] == "a test" for x in lines)
    assert {x["arm"] for x in lines} == {"plain", "eagle", "draft_model"}
