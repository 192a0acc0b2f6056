import os

from sameseed.engine.llm import LLM
from sameseed.measure import usage
from sameseed.measure.usage import Meter, Usage, packages_j, tree_s
from sameseed.ops import _native
from sameseed.request import SamplingParams


def test_a_process_and_its_share():
    own, tree = Meter(), Meter(os.getpid())
    sum(i * i for i in range(300_000))  # work
    found = own.read()
    assert found.cpu_s is not None and found.cpu_s > 0
    assert found.as_dict(1)["cpu_share"] > 0
    if tree_s(os.getpid()) is not None:
        assert (tree.read().cpu_s or 0) >= 0
    assert tree_s(2**30) is None
    assert Meter(2**30).read().as_dict(5)["cpu_share"] is None


def test_what_one_stretch_lacks_both_lack():
    whole = Usage()
    whole.add(Usage(2.0, 1.0, 10.0, None, 0.5, 90))
    whole.add(Usage(2.0, 1.0, 20.0, None, None, 30))
    told = whole.as_dict(60)
    assert told["cpu_j_per_token"] == 0.5 and told["launches_per_token"] == 2.0
    assert told["gpu_share"] is None and told["gpu_j_per_token"] is None


def test_launches_of_kernels(pair_folders):
    """Two passes more launch as many kernels as two passes more did before; the reference has none to count."""
    llm = LLM(str(pair_folders[0]))
    meters = []
    for tokens in (1, 3, 5):
        meter = Meter()
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=tokens, ignore_eos=True))
        meters.append(meter.read().launches)
    first, second, third = meters
    if _native() is None:
        assert first == second == third == 0, "the reference has no kernels of its own"
    else:
        assert first and second and third and third - second == second - first > 0
    assert Meter(os.getpid()).read().launches is None, "those of another process are unknown"


def test_energy_of_the_packages(tmp_path, monkeypatch):
    monkeypatch.setattr(usage, "POWERCAP", tmp_path)
    assert packages_j() is None, "no such folder: not readable"
    for name, value in (("intel-rapl:0", "3000000"), ("intel-rapl:1", "1500000"), ("intel-rapl:0:0", "7")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{value}\n")
    assert packages_j() == 4.5, "packages, without the parts inside them"
    meter = Meter()
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("5000000")
    assert meter.read().cpu_j == 2.0
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("0")
    assert meter.read().cpu_j is None, "the counter began anew"
