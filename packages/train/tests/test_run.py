"""A toy recipe, from data to a pair that loads, in seconds; interrupted runs resume where they stopped."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from sameseed.cli import main
from sameseed_train import pipeline, run
from sameseed_train.checkpoint import read_tensors
from sameseed_train.data import encode
from sameseed_train.distill import PROMPT_BIT, draft_batch, draft_job, training_prompts
from sameseed_train.model import LlamaForTraining
from sameseed_train.recipe import load_recipe
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
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["step"] for row in lines if row["stage"] == "target"] == list(range(12))
    card = (out / "target" / "README.md").read_text(encoding="utf-8")
    assert [row["step"] for row in lines if row["stage"] == "unlikelihood"] == list(range(4))
    assert "made up" in card and "12 steps" in card and "4 steps against repetition" in card


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


def test_prompts_for_the_draft_come_from_training_data_only(recipe_path: Path, data: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_path)
    tokenizer = pipeline.tokenizer_stage(recipe, data, tmp_path)
    held_out = [encode(tokenizer, d) for d in pipeline.corpus.held_out_documents(recipe, data)]
    prompts = training_prompts(recipe, data, tokenizer)
    assert len(prompts) > 10
    assert not any(ids[: len(p)] == p for p in prompts for ids in held_out if len(p) > 12)


def test_a_draft_begins_as_layers_of_its_target(recipe_path: Path, tmp_path: Path) -> None:
    text = recipe_path.read_text(encoding="utf-8")
    size = re.search(r"\[target\.shape\]\n(.*?)\n\n", text, re.S)
    assert size is not None
    own = "[draft]\nlayers = [1]\n[draft.shape]\n" + size[1].replace("num_layers = 2", "num_layers = 1")
    recipe_path.write_text(re.sub(r"\[draft\.shape\]\n.*?\n\n", own + "\n\n", text, flags=re.S), encoding="utf-8")
    recipe = load_recipe(recipe_path)
    target, rows = LlamaForTraining(recipe.target.shape, 1), torch.zeros(4, 65, dtype=torch.int32)
    draft = draft_job(recipe, target, rows, rows, 0, tmp_path).model
    its = target.state_dict()
    for name, weight in draft.state_dict().items():
        assert weight.equal(its[name.replace("layers.0", "layers.1")]), name


def test_draft_batches_mix_corpus_and_rollouts(recipe_path: Path) -> None:
    recipe = load_recipe(recipe_path)  # one of 4 rows is from the corpus
    rows, rollouts = torch.zeros(7, 65, dtype=torch.int32), torch.full((5, 65), PROMPT_BIT + 1, dtype=torch.int32)
    for step in range(6):
        marked = (draft_batch(recipe, rollouts, rows, step) >= PROMPT_BIT).all(dim=1)
        assert marked.shape == (4,) and int(marked.sum()) == 3
