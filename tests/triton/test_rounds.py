"""Rounds of the whole engine on a pretended GPU: the texts of the CPU, and how often the host waits for the device."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fixtures_device import DEVICE, Elsewhere, counted_waits
from fixtures_eagle import fit_head
from fixtures_graph import fake_graphs
from lawkit import Pair, load_pair, make_engine, run, texts, write_model

from sameseed import SamplingParams, devices, ops
from sameseed.models.eagle_loader import load_head
from sameseed.models.loader import load_model
from sameseed.ops.triton import graphs
from sameseed.scheme import QuantScheme

pytestmark = pytest.mark.skipif(os.environ.get("SAMESEED_TEST_GPU") != "pretended", reason="of the pretended GPU")
IN, OUT = "copy to the device", "copy to the host"
ROWS, BATCH, CHOICES = (IN, "devices.put"), (IN, "devices.put_into"), (OUT, "devices.read")
# Most waits of a round with k = 2. The host waits for the end of a pass by reading its choices.
MOST: dict[str, Counter[tuple[str, str]]] = {
    "none": Counter({ROWS: 1, CHOICES: 1}),
    # Two passes of the draft model, whose tokens the target takes on the device, and one of the target.
    "draft_model": Counter({ROWS: 3, CHOICES: 1}),
    # A pass of the target and one of the draft model.
    "parallel": Counter({ROWS: 2, CHOICES: 2}),
    # A pass of the target; one of the head for accepted tokens and one per level, with its parents; the kept rows of
    # the target's pass.
    "eagle": Counter({ROWS: 5, CHOICES: 1, (OUT, "drafters._eagle_guesses.rows"): 2}),
    # The same as a chain, which the target takes on the device; how the first token is drawn is one more copy.
    "eagle chain": Counter({ROWS: 6, CHOICES: 1}),
    # If a policy needs confidences, the draft is read first.
    "draft_model, confidence": Counter({ROWS: 3, CHOICES: 2}),
}
# The same by graphs with k = 4. A chain is a pass and one graph for the others: two batches for any length.
BY_GRAPHS: dict[str, Counter[tuple[str, str]]] = {
    "draft_model": Counter({BATCH: 3, CHOICES: 1}),
    "draft_model, confidence": Counter({BATCH: 3, CHOICES: 2}),
    "eagle chain": Counter({BATCH: 3, ROWS: 1, CHOICES: 1}),
}


@pytest.mark.parametrize("name", MOST)
def test_a_round_waits_for_little(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for found, _ in rounds(name, 2, 4, tmp_path, monkeypatch, by_graphs=False):
        assert found <= MOST[name], found - MOST[name]


@pytest.mark.parametrize("name", BY_GRAPHS)
def test_a_chain_by_graphs_is_two_batches(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "NARROWEST", 64)
    steady = [found for found, new in rounds(name, 4, 14, tmp_path, monkeypatch, by_graphs=True) if not new]
    for found in steady:
        assert found <= BY_GRAPHS[name], found - BY_GRAPHS[name]
    assert BY_GRAPHS[name] in steady


def rounds(
    name: str, k: int, length: int, folder: Path, monkeypatch: pytest.MonkeyPatch, by_graphs: bool
) -> list[tuple[Counter[tuple[str, str]], int]]:
    """What each round of a text waits for, and how many graphs it recorded. The text must be the CPU's."""
    method = name.split(",")[0].split()[0]
    torch.set_default_device(None)
    for own, noise in (("target", 0.0), ("draft", 0.1)):
        write_model(folder / own, noise=noise, num_hidden_layers=1, pard_token=9)
    backend, quant, place = ops.resolve("triton"), QuantScheme.parse("w4a16"), str(DEVICE)
    if method == "eagle":
        fit_head(folder / "head", load_model(folder / "target", ops.resolve("reference")))
    here = load_pair(folder / "target", folder / "draft", "triton", "w4a16")
    target, draft = (load_model(folder / own, backend, quant, device=place) for own in ("target", "draft"))
    head = load_head(folder / "head", target, backend, device=place) if method == "eagle" else None
    there = Pair(target, draft, here.tokenizer, None, head)
    waited: list[torch.device] = []
    monkeypatch.setattr(devices, "wait", waited.append)
    params = SamplingParams(max_tokens=length, temperature=0.8, seed=1, ignore_eos=True)
    wanted = texts(run(make_engine(here), [[5, 6, 7]], params))
    options = {"top_k": 1} if "chain" in name else {}
    engine = make_engine(there, method, k, 0.01 if "confidence" in name else None, options=options)
    assert isinstance(engine.runner.cache.layers[0].k, Elsewhere)
    made = fake_graphs(monkeypatch) if by_graphs else []
    steps: list[tuple[Counter[tuple[str, str]], int]] = []
    step = engine.step

    def counted() -> object:
        before = len(made)
        with counted_waits() as found:
            done = step()
        steps.append((found, len(made) - before))
        return done

    monkeypatch.setattr(engine, "step", counted)
    assert texts(run(engine, [[5, 6, 7]], params)) == wanted
    assert any(found[CHOICES] for found, _ in steps) and not waited and bool(made) == by_graphs
    return steps


def test_who_is_chosen_for_does_not_hang_on_company(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests whose logits the host needs, in one batch with requests whose tokens the device chooses."""
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
