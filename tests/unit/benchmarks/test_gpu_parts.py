"""Whole parts of `make bench-gpu` on a pretended device: code that forgets to move a tensor there fails."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import gpu_clock
import gpu_micro
import gpu_parts
import gpu_plan
import gpu_twins
import pytest
import torch
from fixtures_device import pretended_device

from sameseed import ops
from sameseed.config import SpecConfig
from sameseed.request import FinishReason
from sameseed.study.shapes import get_shape

SIZES = replace(
    gpu_plan.DRY, formats=("w8a8",), large_format="w8a8", kv_formats=("int8",), rows=(1,), contexts=(4,), batches=(1,),
    batch_context=4, prompts=(2,), max_tokens=3, num_prompts=1,
)  # fmt: skip
LIMITS = {"threads": 1, "read_bytes_per_s": 1e9, "instructions": {}, "source": "a test",
          "repetitions": {"read": [1e9], "fp32": [1e9], "bf16": [2e9]}}  # fmt: skip


@pytest.fixture
def told(monkeypatch):
    """The list of records and the function that adds one; CUDA calls do nothing, sizes and repeats are the smallest."""
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 1 << 20)
    monkeypatch.setattr(gpu_clock, "graphed", lambda job, device, repeats: [(job(), 1e-3)[1]] * repeats)
    monkeypatch.setattr(gpu_micro, "MOST", 2)
    for module, name in ((gpu_parts, "REPEATS"), (gpu_parts, "FEWEST")):
        monkeypatch.setattr(module, name, 1)
    small = replace(get_shape("embedded"), num_layers=1, windows=(None,), vocab_size=256)
    for module in (gpu_parts, gpu_micro):
        monkeypatch.setattr(module, "get_shape", lambda name: small)
    for module in (gpu_parts, gpu_micro, gpu_twins):
        monkeypatch.setattr(module, "busy", busy)
    lines = []
    return lines, lambda found: lines.append(json.loads(json.dumps(found)))


def busy(job, device):
    job()
    return gpu_clock.Busy(1e-4, "a test", {"kernel": (1e-4, 3)})


@pytest.fixture
def stage(monkeypatch):
    """A stage whose arms write the completions in `stage.writes`."""
    lines = []
    made = gpu_twins.Stage(SIZES, "a shape", None, "w8a8", "cpu", lines.append)
    made.lines, made.writes = lines, {}
    monkeypatch.setattr(gpu_twins, "run_batch", lambda engine, jobs, run: run.completions.extend(made.writes[engine]))
    monkeypatch.setattr(made, "engine", lambda arm, batch, jobs: arm.name)
    monkeypatch.setattr(made, "host", lambda engine, short: {})
    return made


def completed(*token_ids, reason=FinishReason.LENGTH):
    metrics = SimpleNamespace(time_to_first_token=1.0)
    return [SimpleNamespace(token_ids=token_ids, finish_reason=reason, metrics=metrics)]


def test_arms_are_compared_with_plain_decoding_alone(stage):
    """The baseline is plain decoding, not the first arm; a failed arm has no speedup, however early it failed."""
    stage.writes = {
        "plain": completed(1, 2, 3),
        "eagle": completed(1, 2, 3),
        "ngram": completed(1, 2, reason=FinishReason.ERROR),
    }
    arms = {name: gpu_twins.Arm(name, SpecConfig(name)) for name in ("eagle", "ngram")}
    arms["plain"] = gpu_twins.Arm("plain", SpecConfig())
    for name in ("eagle", "plain", "eagle", "ngram"):
        stage.run(arms[name], 1)
    got = [(x["arm"], x["failed"], x["equals_plain"]) for x in stage.lines]
    assert got == [("eagle", 0, None), ("plain", 0, True), ("eagle", 0, True), ("ngram", 1, None)]
    assert [x["speedup"] is None for x in stage.lines] == [True, False, False, True]


@pytest.mark.slow
def test_costs_are_those_of_one_row_or_of_none(told, monkeypatch):
    """If the pass over one row fails, costs relative to it are missing; the pass over two rows does not replace it."""
    lines, tell = told
    timed = gpu_parts.timed

    def failing(subject, job):
        if job.rows == 1 and job.kind == "chain":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return timed(subject, job)

    monkeypatch.setattr(gpu_parts, "timed", failing)
    for name in ("tell_curve", "tell_host", "tell_device"):
        monkeypatch.setattr(gpu_parts, name, lambda *_: None)
    there(gpu_parts.measure_costs, tell, sizes=replace(SIZES, rows=(1, 2)), format="w8a8", limits=LIMITS)
    chains = [x for x in lines if x.get("part") == "costs" and x["kind"] == "chain"]
    assert [(x["rows"], x["c"]) for x in chains] == [(2, None)]


def test_limits_are_told_before_what_may_break_the_device(monkeypatch):
    told = []
    found = SimpleNamespace(as_dict=lambda: {"read_bytes_per_s": 1.0})
    monkeypatch.setattr(gpu_parts.machine, "measure_limits", lambda *_, **__: found)
    monkeypatch.setattr(gpu_parts, "SIDE", 8)
    randn, ones = torch.randn, torch.ones
    monkeypatch.setattr(torch, "randn", lambda *shape, device: randn(*shape))
    monkeypatch.setattr(torch, "ones", lambda *shape, device: ones(*shape))

    def silent(*_):
        assert told
        raise RuntimeError

    monkeypatch.setattr(gpu_parts, "device_time", silent)
    gpu_parts.measure_limits(SIZES, None, "cuda", told.append)
    assert [x["part"] for x in told] == ["limits", "products"]
    assert told[1]["fp8_product_why"] == "RuntimeError" and told[1]["int8_product_ops_per_s"] is None


def there(part, tell, sizes=SIZES, **arguments):
    with pretended_device() as name:
        part(sizes, ops.resolve("reference"), name, tell, **arguments)


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
    assert all(x["median_us"] == 500 and x["read_share"] > 0 for x in lines if x["op"] == "down")  # 1 ms for two copies


@pytest.mark.slow
def test_speculation(told):
    lines, tell = told
    there(gpu_twins.measure_speculation, tell, format="w8a8")
    assert all(x["equals_plain"] and x["host_share"] < 1 and x["timed_by"] == "a test" for x in lines)
    assert {x["arm"] for x in lines} == {"plain", "eagle", "draft_model"}
