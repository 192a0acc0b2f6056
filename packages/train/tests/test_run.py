"""A toy recipe, from data to a pair that loads, in seconds; interrupted runs resume where they stopped."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from sameseed.cli import main
from sameseed_train import pipeline
from sameseed_train.checkpoint import read_tensors
from sameseed_train.pipeline import run
from sameseed_train.trainer import Log, TrainJob, train as real_train


def test_toy_recipe_end_to_end(
    recipe_path: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["train", str(recipe_path), "--data", str(data), "--out", str(out), "--json"]) == 0
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert said.err == ""
    for folder in (Path(result["target"]), Path(result["draft"])):
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"):
            assert (folder / name).stat().st_size > 0
        assert all(t.dtype == torch.bfloat16 for t in read_tensors(folder / "model.safetensors")[0].values())
    assert Path(result["loss_plot"]).stat().st_size > 1000
    assert set(result["results"]["perplexity"]["target"]) == {"sums", "talk", "prose", "small-sums"}
    assert 0 <= result["results"]["acceptance"]["all"]["rate"] <= 1
    assert 0 <= result["results"]["repeated"]["all"] <= 1 and result["results"]["right_sums"]["asked"] == 60
    domains = [
        {json.loads(line)["domain"] for line in (out / name).read_text(encoding="utf-8").splitlines()}
        for name in ("prompts.jsonl", "prompts_heldout.jsonl")
    ]
    assert "talk" not in domains[0] and "talk" in domains[1]
    assert json.loads((out / "results.json").read_text(encoding="utf-8")) == result["results"]
    lines = list(Log(out / "log.jsonl").rows())
    assert [row["step"] for row in lines if row["stage"] == "target"] == list(range(12))
    card = (out / "target" / "README.md").read_text(encoding="utf-8")
    assert [row["step"] for row in lines if row["stage"] == "unlikelihood"] == list(range(4))
    assert "| prose | `prose` | 1 | all | made up |" in card and "| 0.002 |" in card
    assert "made up" in card and "target.train.steps = 12" in card and "unlikelihood.ngram = 2" in card


def test_interrupted_run_equals_a_whole_one(
    recipe_path: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(recipe_path, data=data, out=tmp_path / "whole", quiet=True)
    argv = ["train", str(recipe_path), "--data", str(data), "--out", str(tmp_path / "parts")]

    def interrupted(job: TrainJob, log: Log, *, quiet: bool) -> None:
        real_train(job, log, quiet=quiet, stop_after=5)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "train", interrupted)
        assert main(argv) == 130
    assert "--resume goes on" in capsys.readouterr().err
    assert main(argv) == 2 and "add --resume" in capsys.readouterr().err
    assert main([*argv, "--resume"]) == 0
    assert str(tmp_path / "parts" / "draft") in capsys.readouterr().out
    for model in ("target", "draft"):
        whole, parts = (read_tensors(tmp_path / d / model / "model.safetensors")[0] for d in ("whole", "parts"))
        assert all(torch.equal(whole[n], parts[n]) for n in whole)


def test_more_steps_of_the_target_begin_the_later_stages_anew(recipe_path: Path, data: Path, tmp_path: Path) -> None:
    """A finished run that is resumed trains nothing."""
    out = tmp_path / "out"

    def steps() -> dict[str, list[int]]:
        rows = list(Log(out / "log.jsonl").rows())
        return {s: [row["step"] for row in rows if row["stage"] == s] for s in ("target", "unlikelihood", "draft")}

    first = run(recipe_path, data=data, out=out, quiet=True)
    once = {"target": [*range(12)], "unlikelihood": [*range(4)], "draft": [*range(8)]}
    assert run(recipe_path, data=data, out=out, resume=True, quiet=True) == first
    assert steps() == once
    text = recipe_path.read_text(encoding="utf-8")
    recipe_path.write_text(text.replace("steps = 12", "steps = 14"), encoding="utf-8")
    run(recipe_path, data=data, out=out, resume=True, quiet=True)
    assert steps() == {"target": [*range(14)], "unlikelihood": [*range(4)] * 2, "draft": [*range(8)] * 2}


def test_a_draft_begins_as_layers_of_its_target(recipe_path: Path, data: Path, tmp_path: Path) -> None:
    text = recipe_path.read_text(encoding="utf-8")
    text = re.sub(r"\[draft\.size\]\n.*?\n\n", "", text, flags=re.S).replace("[draft]", "[draft]\nbegin_layers = [1]")
    text = text.replace("steps = 8", "steps = 1").replace("warmup = 3\n\n[draft.t", "warmup = 1000000\n\n[draft.t")
    recipe_path.write_text(text, encoding="utf-8")
    run(recipe_path, data=data, out=tmp_path / "out", quiet=True)
    its, own_weights = (read_tensors(tmp_path / "out" / f / "model.safetensors")[0] for f in ("target", "draft"))
    for name, weight in own_weights.items():
        assert torch.allclose(weight.float(), its[name.replace("layers.0", "layers.1")].float(), atol=1e-2), name
