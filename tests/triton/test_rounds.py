"""Rounds of the whole engine on the GPU's kernels, on a pretended GPU: the CPU's texts, and what the host waits for."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from fixtures_device import DEVICE, Elsewhere, counted_waits
from fixtures_eagle import fit_head
from lawkit import Pair, load_pair, make_engine, run, texts, write_model

from sameseed import SamplingParams, devices, ops
from sameseed.models.eagle_loader import load_head
from sameseed.models.loader import load_model
from sameseed.scheme import QuantScheme

pytestmark = pytest.mark.skipif(os.environ.get("SAMESEED_TEST_GPU") != "pretended", reason="of the pretended GPU")
IN, OUT = "copy to the device", "copy to the host"
ROWS, CHECK = (IN, "devices.put"), (OUT, "spec.verify.verify")
# What a round may wait for at most, besides the end of each pass; k is 2.
MOST: dict[str, Counter[tuple[str, str]]] = {
    "none": Counter({ROWS: 1, CHECK: 1}),
    # A pass of the target, two of the draft model.
    "draft_model": Counter({ROWS: 3, CHECK: 1, (OUT, "drafters._chains._next"): 2}),
    # A pass of the target, one of the draft.
    "parallel": Counter({ROWS: 2, CHECK: 1, (OUT, "drafters.parallel._logits"): 1}),
    # A pass of the target, one of the head for what became certain and one a level; what is kept of the target's pass.
    "eagle": Counter(
        {
            ROWS: 4,
            CHECK: 1,
            (OUT, "drafters._eagle_guesses.rows"): 2,
            (IN, "drafters.eagle._grow"): 1,
        }
    ),
}


@pytest.mark.parametrize("method", MOST)
def test_a_round_waits_for_little(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_default_device(None)
    for folder, noise in (("target", 0.0), ("draft", 0.1)):
        write_model(tmp_path / folder, noise=noise, num_hidden_layers=1, pard_token=9)
    backend, quant, place = ops.resolve("triton"), QuantScheme.parse("w4a16"), str(DEVICE)
    if method == "eagle":
        fit_head(tmp_path / "head", load_model(tmp_path / "target", ops.resolve("reference")))
    here = load_pair(tmp_path / "target", tmp_path / "draft", "triton", "w4a16")
    target, draft = (load_model(tmp_path / f, backend, quant, device=place) for f in ("target", "draft"))
    head = load_head(tmp_path / "head", target, backend, device=place) if method == "eagle" else None
    there = Pair(target, draft, here.tokenizer, None, head)
    monkeypatch.setattr(devices, "wait", lambda device: None)
    params = SamplingParams(max_tokens=4, temperature=0.8, seed=1, ignore_eos=True)
    wanted = texts(run(make_engine(here), [[5, 6, 7]], params))
    engine = make_engine(there, method, k=2)
    assert isinstance(engine.runner.cache.layers[0].k, Elsewhere)
    steps: list[Counter[tuple[str, str]]] = []
    step = engine.step

    def counted() -> object:
        with counted_waits() as found:
            done = step()
        steps.append(found)
        return done

    monkeypatch.setattr(engine, "step", counted)
    assert texts(run(engine, [[5, 6, 7]], params)) == wanted
    for found in steps:
        assert found <= MOST[method], found - MOST[method]
    assert any(found[("copy to the host", "spec.verify.verify")] == 1 for found in steps)
