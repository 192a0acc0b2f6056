"""Rounds of the whole engine on the GPU's kernels, on a pretended GPU: the CPU's texts, and what the host waits for."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
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
ROWS, CHOICES = (IN, "devices.put"), (OUT, "devices.read")
# What a round may wait for at most; k is 2. The end of a pass is waited for by reading its choices.
MOST: dict[str, Counter[tuple[str, str]]] = {
    "none": Counter({ROWS: 1, CHOICES: 1}),
    # Two passes of the draft model, whose tokens the target takes unread, and one of the target.
    "draft_model": Counter({ROWS: 3, CHOICES: 1}),
    # A pass of the target, one of the draft.
    "parallel": Counter({ROWS: 2, CHOICES: 2}),
    # A pass of the target, one of the head for what became certain and one a level, with its parents; what is kept of
    # the target's pass.
    "eagle": Counter({ROWS: 5, CHOICES: 1, (OUT, "drafters._eagle_guesses.rows"): 2}),
    # The same as a chain, which the target takes unread: how the first token is drawn is another copy.
    "eagle chain": Counter({ROWS: 6, CHOICES: 1}),
    # Where a policy looks at confidences the draft is read first.
    "draft_model, confidence": Counter({ROWS: 3, CHOICES: 2}),
}


@pytest.mark.parametrize("name", MOST)
def test_a_round_waits_for_little(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method = name.split(",")[0].split()[0]
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
    waited: list[torch.device] = []
    monkeypatch.setattr(devices, "wait", waited.append)
    params = SamplingParams(max_tokens=4, temperature=0.8, seed=1, ignore_eos=True)
    wanted = texts(run(make_engine(here), [[5, 6, 7]], params))
    options = {"top_k": 1} if "chain" in name else {}
    engine = make_engine(there, method, 2, 0.01 if "confidence" in name else None, options=options)
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
        assert found <= MOST[name], found - MOST[name]
    assert any(found[CHOICES] for found in steps) and not waited


def test_who_is_chosen_for_does_not_hang_on_company(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests whose logits the host needs beside those whose tokens the device chooses."""
    torch.set_default_device(None)
    write_model(tmp_path, num_hidden_layers=1)
    backend, quant = ops.resolve("triton"), QuantScheme.parse("w4a16")
    here = load_pair(tmp_path, tmp_path, "triton", "w4a16")
    target = load_model(tmp_path, backend, quant, device=str(DEVICE))
    monkeypatch.setattr(devices, "wait", lambda device: None)
    plain = SamplingParams(max_tokens=4, temperature=0.8, top_p=0.9, seed=1, ignore_eos=True)
    many = [plain, replace(plain, repetition_penalty=1.2), replace(plain, top_k=5), replace(plain, logprobs=1)]
    prompts = [[5, 6, 7], [8, 9], [3], [4, 4]]
    wanted = [texts(run(make_engine(here), [p], one))[0] for p, one in zip(prompts, many, strict=True)]
    engine = make_engine(Pair(target, target, here.tokenizer, None, None), "ngram", k=2)
    assert texts(run(engine, prompts, many)) == wanted
