"""Training on another device: every stage runs on the pretended one, with the CPU's first weights and noise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures_device import Elsewhere, pretended_device
from safetensors.torch import load_file

from sameseed import devices, ops
from sameseed.errors import ConfigError
from sameseed_train import measure, trainer
from sameseed_train.checkpoint import read_tensors
from sameseed_train.draft import run_draft
from sameseed_train.head import run_head
from sameseed_train.learning import Sources
from sameseed_train.pipeline import run
from sameseed_train.recipe import DraftRecipe, HeadRecipe, LossSettings, SizeSettings, TextSettings, TrainSettings


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The pretended device, which passes every check; the ops are always the reference backend's."""
    plain = ops.resolve("reference")
    monkeypatch.setattr(ops, "resolve", lambda *args: plain)
    monkeypatch.setattr(devices, "check", lambda name: None)
    with pretended_device() as name:
        yield name


def test_a_pair_is_trained_there(
    recipe_path: Path, data: Path, tmp_path: Path, away: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = {"steps = 12": "steps = 3", "steps = 8": "steps = 2", "num_texts = 20": "num_texts = 4"}
    text = recipe_path.read_text()
    for old, new in steps.items():
        text = text.replace(old, new)
    recipe_path.write_text(text)
    for name, less in {"PROMPTS_PER_DOMAIN": 1, "DEMO_PROMPTS_PER_DOMAIN": 1}.items():
        monkeypatch.setattr(measure, name, less)
    documents = measure.corpus.held_out_documents
    monkeypatch.setattr(measure.corpus, "held_out_documents", lambda *args: documents(*args)[10:15])
    here = run(recipe_path, data=data, out=tmp_path / "here", quiet=True)
    seen: list[bool] = []
    step = trainer.one_step

    def watched(job: trainer.TrainJob, *more: object) -> object:
        seen.append(all(isinstance(p.data, Elsewhere) for p in job.model.parameters()))
        return step(job, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(trainer, "one_step", watched)
    there = run(recipe_path, data=data, out=tmp_path / "there", device=away, quiet=True)
    assert seen == [True] * 9
    for name in ("target", "draft"):
        one, other = (read_tensors(tmp_path / f / name / "model.safetensors")[0] for f in ("here", "there"))
        assert one.keys() == other.keys()
        assert all(torch.allclose(one[n].float(), other[n].float(), atol=1e-3) for n in one)
    assert there["acceptance"]["all"]["drafted"] > 0
    perplexity = [r["perplexity"]["target"]["talk"]["perplexity"] for r in (here, there)]
    assert perplexity[1] == pytest.approx(perplexity[0], rel=1e-2)


@pytest.mark.parametrize("kind", ["head", "draft"])
def test_a_head_and_a_draft_are_trained_there(
    pair_folders: tuple[Path, Path], tmp_path: Path, away: str, kind: str
) -> None:
    """Like `train head --device`: a target's texts and states, the head's own vocabulary, and the exported file."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"the sum of all parts {i}"}) + "\n" for i in range(4)))
    shared: dict[str, Any] = {"target": str(pair_folders[0]), "train": TrainSettings(2, rows=1, warmup=1), "batch": 2}
    shared |= {"texts": TextSettings(num_texts=2, new_tokens=3, prompt_tokens=8)}
    own = {"layers": (1, 2, 2), "size": SizeSettings(draft_vocab_size=64), "loss": LossSettings(unroll=2)}
    found = []
    for name, device in (("here", "cpu"), ("there", away)):
        how: dict[str, Any] = {"backend": "reference", "device": device, "quiet": True}
        if kind == "head":
            done = run_head(HeadRecipe(**shared, **own), Sources(prompts), tmp_path / name, **how)
        else:
            done = run_draft(DraftRecipe(**shared), Sources(prompts), tmp_path / name, **how)
        found.append(load_file(done.folder / "model.safetensors"))
    one, other = found
    assert one.keys() == other.keys() and (kind == "draft" or one["d2t"].equal(other["d2t"]))
    assert all(torch.allclose(one[n].float(), other[n].float(), atol=2e-2) for n in one)


def test_a_device_that_is_not_here_is_refused_first(recipe_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use cpu, cuda, or cuda:N"):
        run(tmp_path / "no recipe", data=tmp_path, out=tmp_path / "out", device="gpu")
