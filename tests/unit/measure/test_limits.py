from __future__ import annotations

import pytest

from sameseed import registry
from sameseed.measure import limits
from sameseed.measure.limits import Limits, from_rates, measure_limits

RATES = {"read": (1.0, 3.0), "fp32": (5.0,), "int8": (7.0,)}


def test_a_limit_is_the_best_of_its_repetitions() -> None:
    found = from_rates(2, RATES, {}, "native")
    assert (found.read, found.fp32, found.int8, found.bf16) == (3.0, 5.0, 7.0, None)
    assert found.peak("int8") == 7.0
    assert found.peak("bf16") == 5.0, "without an instruction of its own, float32 does the work"
    better = found.merged(from_rates(2, {"read": (4.0,), "fp32": (2.0,)}, {}, "native"))
    assert (better.read, better.fp32, better.int8) == (4.0, 5.0, 7.0)
    assert better.rates["read"] == (1.0, 3.0, 4.0)
    assert Limits.from_dict(better.as_dict()) == better


def test_every_source_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BYTES", 4 << 20)
    monkeypatch.setattr(limits, "SECONDS", 1e-3)
    native = registry.load("ops", "cpu").unavailable() is None
    found = measure_limits(1, repeats=2)
    assert found.source == ("native" if native else "torch")
    assert found.read > 0 and found.fp32 > 0
    if native:
        assert found.int8 is not None and found.int8 > 0
        assert len(found.rates["read"]) == 4 and len(found.rates["fp32"]) == 2
        assert (found.bf16 is None) == ("bf16" not in found.instructions)
    monkeypatch.setattr(registry.load("ops", "cpu"), "unavailable", lambda: "not built")
    found = measure_limits(1, repeats=2)
    assert found.source == "torch" and found.read > 0 and found.int8 is None


def test_the_native_loops_refuse_nonsense() -> None:
    native = pytest.importorskip("sameseed._native")
    for call in (
        lambda: native.read_rates(0, 1),
        lambda: native.read_rates(1, 0),
        lambda: native.peak_rates("fp32", 0.0, 1),
        lambda: native.peak_rates("fp32", 1e-3, 0),
        lambda: native.peak_rates("int3", 1e-3, 1),
    ):
        with pytest.raises(ValueError):
            call()
