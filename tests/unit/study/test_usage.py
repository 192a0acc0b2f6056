from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from sameseed.study import usage
from sameseed.study.usage import Meter, Usage, packages_j, tree_s


def work() -> int:
    return sum(i * i for i in range(300_000))


def test_a_process_and_its_share() -> None:
    own, tree = Meter(), Meter(os.getpid())
    work()
    found = own.read()
    assert found.cpu_s is not None and found.cpu_s > 0
    assert found.as_dict(1)["cpu_share"] > 0  # type: ignore[operator]
    if tree_s(os.getpid()) is not None:
        assert (tree.read().cpu_s or 0) >= 0
    assert tree_s(2**30) is None
    assert Meter(2**30).read().as_dict(5)["cpu_share"] is None


def test_what_one_stretch_lacks_both_lack() -> None:
    whole = Usage()
    whole.add(Usage(2.0, 1.0, 10.0, None, 0.5))
    whole.add(Usage(2.0, 1.0, 20.0, None, None))
    told = whole.as_dict(60)
    assert told["cpu_j_per_token"] == 0.5
    assert told["gpu_share"] is None and told["gpu_j_per_token"] is None


def test_energy_of_the_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "POWERCAP", tmp_path)
    usage._zones.cache_clear()
    try:
        assert packages_j() is None, "no such folder: not readable"
        for name, value in (("intel-rapl:0", "3000000"), ("intel-rapl:1", "1500000"), ("intel-rapl:0:0", "7")):
            (tmp_path / name).mkdir()
            (tmp_path / name / "energy_uj").write_text(f"{value}\n")
        usage._zones.cache_clear()
        assert packages_j() == 4.5, "packages, without the parts inside them"
        meter = Meter()
        (tmp_path / "intel-rapl:0" / "energy_uj").write_text("5000000")
        assert meter.read().cpu_j == 2.0
        (tmp_path / "intel-rapl:0" / "energy_uj").write_text("0")
        assert meter.read().cpu_j is None, "the counter began anew"
    finally:
        usage._zones.cache_clear()


def test_a_gpu_that_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        used: Any = type("U", (), {"gpu": 50})

        def nvmlDeviceGetTotalEnergyConsumption(self, _: object) -> int:  # noqa: N802
            return 4000

        def nvmlDeviceGetUtilizationRates(self, _: object) -> Any:  # noqa: N802
            return self.used

    monkeypatch.setattr(usage, "_nvml", lambda: (Library(), None))
    found = Meter().read()
    assert found.gpu_j == 0.0 and found.gpu_share == 0.5
    monkeypatch.setattr(usage, "_nvml", lambda: (object(), None))
    found = Meter().read()
    assert found.gpu_j is None and found.gpu_share is None, "a library that cannot say is as good as none"
