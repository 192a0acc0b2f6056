"""Certificates of another device: every check computes there, or says that its arithmetic is the host's."""

import json
from pathlib import Path

import pytest
from fixtures_device import Elsewhere, pretended_device

from sameseed import ops
from sameseed.config import EngineConfig, SpecConfig
from sameseed.engine.build import Loaded
from sameseed.laws import acceptance, closeness, kernels, law, logits
from sameseed.laws.check import FAILED, Effort
from sameseed.laws.checks import CHECKS, chosen
from sameseed.laws.subject import Subject
from sameseed.measure import certificate as suite
from sameseed.measure.certificate import render
from sameseed.models.loader import load_model
from sameseed.ops import Ops
from sameseed.request import SamplingParams
from sameseed.scheme import QuantScheme
from sameseed.tokenizer import Tokenizer

LEAST = Effort(1e-9, 0.01)


def subject_on(device, folders, weights="w8a16"):
    chosen, quant = ops.resolve("reference"), QuantScheme.parse(weights)
    target, draft = (load_model(f, chosen, quant, device=device) for f in folders)
    spec = SpecConfig("draft_model", "draft", num_draft_tokens=3)
    config = EngineConfig(backend="reference", device=device, format=weights, spec=spec)
    loaded = Loaded(config, Tokenizer.from_folder(folders[0]), 0, target, (draft,))
    params = SamplingParams(temperature=0.8, max_tokens=8, ignore_eos=True)
    subject = Subject(loaded, [(3, 1, 4), (9, 2)], params, max_tokens=8, batch=2)
    subject.digest = acceptance.weights_digest(subject)
    return subject


@pytest.fixture
def small(monkeypatch):
    """The smallest sizes: these tests look only at where checks compute; what they find is tested elsewhere."""
    monkeypatch.setattr(kernels, "NUM_ROWS", 4)
    monkeypatch.setattr(kernels, "SIZES", (1, 2, 3))
    monkeypatch.setattr(kernels, "PASSES", 1)
    monkeypatch.setattr(kernels, "LAST", 2)
    monkeypatch.setattr(kernels, "WIDTHS", (32,))
    monkeypatch.setattr(kernels, "PRESETS", {"w8a8": None})
    monkeypatch.setattr(kernels, "OUTPUTS", (3,))
    monkeypatch.setattr(closeness, "LENGTHS", (1, 5))
    monkeypatch.setattr(law, "LENGTH", 1)
    monkeypatch.setattr(law, "FEW", 3)
    monkeypatch.setattr(law, "PLACES", ((0,),))
    monkeypatch.setattr(law, "LAWS", {"top-k": law.LAWS["top-k"]})
    few = ("prefill at once", "tree of drafted tokens")
    monkeypatch.setattr(logits, "WAYS", {name: way for name, way in logits.WAYS.items() if name in few})


# Checks that make tensors of their own; the others only run engines, as test_devices.py does for every drafter.
OWN = ("L1", "L1a", "B1", "L2", "C1", "L5", "L10")
OTHERS = tuple(c.id for c in CHECKS if c.id not in OWN)


@pytest.mark.parametrize("checks", [OWN, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["own tensors", "engines"])
def test_every_check_runs_where_the_models_are(checks, pair_folders, small, monkeypatch):
    seen = []
    with pretended_device() as name:
        plain = Ops.product

        def product(self, rows, *more, **named):
            seen.append(isinstance(rows.x, Elsewhere))
            return plain(self, rows, *more, **named)

        monkeypatch.setattr(Ops, "product", product)
        subject = subject_on(name, pair_folders)
        asked = suite.Asked("tiny", Path("p.jsonl"), None, 8, 2, LEAST)
        certificate = suite.certify(subject, asked, chosen(checks))
    assert {r.check.id: r.found.findings for r in certificate.results if r.status == FAILED} == {}
    assert seen and all(seen)
    found = json.loads(json.dumps(certificate.as_dict()))
    assert found["config"]["device"] == name and found["config"]["backend"] == "reference"
    text = render(found)
    assert f"backend reference, device {name}" in text
