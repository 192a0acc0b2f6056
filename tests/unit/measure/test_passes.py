"""Timed passes: a KV cache filled with noise, in every format that stores it."""

from __future__ import annotations

import pytest
from fixtures_models import tiny_model

from sameseed import registry, scheme
from sameseed.measure.passes import Pass, TimedModel, cache_bytes

KV_FORMATS = [name for name in registry.names("formats") if scheme.get(name).kv_dtype is not None]


@pytest.mark.parametrize("name", KV_FORMATS)
def test_a_cache_of_noise_in_every_format(name: str) -> None:
    job = Pass("chain", 20, 3)
    subject = TimedModel(tiny_model("reference"), name, [job])
    layer = subject.runner.cache.layers[0]
    assert layer.k.float().std() > 0
    assert subject.runner.cache.nbytes == cache_bytes(subject.config, name, [job])
    rows = scheme.kv_format(name).decode_kv(layer.k, layer.k_scale).flatten(0, 1)
    assert 0.7 < rows[:20].std() < 1.3, "noise, not what was never written"
