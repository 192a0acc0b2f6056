"""Quantizing on another device: the same file if nothing is learned from text, otherwise nearly the same."""

from dataclasses import replace

import pytest
import torch
from fixtures_device import Elsewhere, pretended_device
from fixtures_quantize import write_text
from lawkit import write_model
from safetensors.torch import load_file

from sameseed import devices
from sameseed.errors import ConfigError
from sameseed.quantize import _walk
from sameseed.quantize._run import QuantizePlan, quantize


@pytest.fixture
def away(monkeypatch):
    """The pretended device, which passes every check."""
    monkeypatch.setattr(devices, "check", lambda name: None)
    with pretended_device() as name:
        yield name


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    root = tmp_path_factory.mktemp("device")
    write_model(root / "model", hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    text = write_text(root / "text.jsonl")
    return QuantizePlan(str(root / "model"), root / "out", "w4a16-g32", "rtn", text, samples=2, length=16)


def weights(folder):
    return load_file(folder / "model.safetensors")


SCHEMES = ["w8a8", "fp8", "nf4-dq", "mxfp4", "qoq", "w4a16-g32-asym"]  # and, below, one with rules
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("scheme", "learns"),
    [
        *((s, False) for s in SCHEMES),
        ("w4a16-g32,lm_head=w8a16,model.embed_tokens=bf16", True),
        *(pytest.param(s, True, marks=slow) for s in SCHEMES),
    ],
)
def test_rounding_to_nearest_gives_the_same_file(plan, away, tmp_path, scheme, learns):
    """`learns`: with calibration text, on which rtn measures its errors."""
    asked = replace(plan, scheme=scheme, calibration=plan.calibration if learns else None)
    here = quantize(replace(asked, out=tmp_path / "here"))
    there = quantize(replace(asked, out=tmp_path / "there", device=away))
    a, b = weights(here.folder), weights(there.folder)
    assert a.keys() == b.keys()
    assert all(a[n].view(torch.uint8).equal(b[n].view(torch.uint8)) for n in a)
    assert there.quantization["device"] == away and here.quantization["device"] == "cpu"


@pytest.mark.parametrize(
    "method", ["smooth+gptq", "rotate+awq", *(pytest.param(m, marks=slow) for m in ("gptq", "awq+gptq", "rotate+gptq"))]
)
def test_methods_that_learn_from_text_run_there(plan, away, tmp_path, method, monkeypatch):
    """Runs complete there, also after an interruption, as good as on the CPU; every layer is computed there."""
    computed = []
    error = _walk.module_error

    def watched(*args):
        computed.append(isinstance(args[2], Elsewhere) and isinstance(args[3], Elsewhere))
        return error(*args)

    options = {"rotate+awq": {"grid": 2}, "smooth+gptq": {"clip": False}}
    asked = replace(plan, method=method, options=options.get(method, {}))
    here = quantize(replace(asked, out=tmp_path / "here"))
    monkeypatch.setattr(_walk, "module_error", watched)

    def stop(*told):
        raise KeyboardInterrupt

    asked = replace(asked, out=tmp_path / "there", device=away)
    with pytest.raises(KeyboardInterrupt):
        quantize(asked, stop)
    with pytest.raises(ConfigError, match="begun with device"):
        quantize(replace(asked, device="cpu", resume=True))
    there = quantize(replace(asked, resume=True))
    assert len(computed) == 7 and all(computed)
    for a, b in zip(here.quantization["modules"], there.quantization["modules"], strict=True):
        assert b["module"] == a["module"] and b["relative"] == pytest.approx(a["relative"], rel=0.02)
