"""`sameseed profile --device` as a whole on a pretended device, with the device's own memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fixtures_device import pretended_device

from sameseed import devices, ops
from sameseed.measure import costs, profiler
from sameseed.measure.limits import from_rates
from sameseed.measure.shapes import get_shape


@pytest.mark.slow
def test_a_profile_is_the_device_s(monkeypatch):
    """Goodput and predictions read the device's costs; no part of the model stays on the CPU."""
    reference = ops.resolve("reference")
    for name, found in {
        "memory_allocated": 1 << 20,
        "max_memory_allocated": 3 << 20,
        "reset_peak_memory_stats": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, found=found: found)
    monkeypatch.setattr(devices, "free_memory", lambda name: 1 << 34)
    small = replace(get_shape("embedded"), num_layers=1, windows=(None,), vocab_size=256)
    monkeypatch.setattr(profiler, "get_shape", lambda name: small)
    limits = from_rates(1, {"read": (1e9,), "fp32": (1e9,), "bf16": (2e9,)}, {}, "a test")
    monkeypatch.setattr(profiler, "measure_limits", lambda *_, device: limits)
    with pretended_device() as name:
        monkeypatch.setattr(ops, "resolve", lambda backend, device: reference)
        monkeypatch.setattr(devices, "check", lambda device: None)
        found = costs.profile(
            "embedded", formats=("w8a8",), rows=(1, 2), contexts=(8,), prefill_tokens=4, batch_sizes=(2,), repeats=1,
            seconds=0.1, threads=1, device=name,
        )  # fmt: skip
    assert found.costs and found.peak_memory_bytes == 3 << 20
    assert {c.rows for c in found.costs} == {1, 2}
