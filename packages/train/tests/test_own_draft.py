"""Drafts that learn from a target's own texts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lawkit import write_model

from sameseed import LLM, SamplingParams
from sameseed.cli import main
from sameseed.models.loader import read_config
from sameseed_train.draft import DraftRecipe, DraftSize, components, run_draft
from sameseed_train.own import Sources
from sameseed_train.recipe import TrainSettings
from sameseed_train.seeds import TextSettings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("draft")
    write_model(root / "target")
    prompts = [{"prompt": f"the loop ends when {i}"} for i in range(6)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    return root


def recipe_for(folder: Path) -> DraftRecipe:
    return DraftRecipe(
        target=str(folder / "target"),
        size=DraftSize(num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=1),
        texts=TextSettings(num_texts=8, prompt_tokens=32, new_tokens=24),
        train=TrainSettings(12, rows=4, row_tokens=64, warmup=2),
    )


def test_a_draft_learns_and_runs(folder: Path, tmp_path: Path) -> None:
    recipe = recipe_for(folder)
    longer = replace(recipe, train=replace(recipe.train, steps=40))
    done = run_draft(longer, Sources(folder / "prompts.jsonl"), tmp_path / "out", quiet=True)
    rows = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["stage"] == "draft"]
    assert len(losses) == 40
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    config, target = read_config(done.folder), read_config(folder / "target")
    assert (config.num_layers, config.hidden_size, config.num_heads) == (1, 16, 2)
    assert (config.vocab_size, config.eos_token_ids) == (target.vocab_size, target.eos_token_ids)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    plain = LLM(str(folder / "target")).generate(["the sum of"], params)[0]
    drafted = LLM(str(folder / "target"), draft=str(done.folder), policy="fixed").generate(["the sum of"], params)[0]
    assert drafted.token_ids == plain.token_ids
    assert drafted.metrics.spec.num_draft_tokens > 0


def test_components_keep_what_tells_tokens_apart() -> None:
    """Products of rows equal the original's if its rank is at most the number of kept dimensions."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(40, 6, generator=generator) @ torch.randn(6, 24, generator=generator)
    embedding = torch.zeros(40, 8)
    components(embedding, weight)
    torch.testing.assert_close(embedding @ embedding.T, weight @ weight.T, atol=1e-3, rtol=1e-3)


# --- the command line ---

SMALL = ["--num-texts", "8", "--new-tokens", "16", "--steps", "2", "--rows", "4"]


def test_train_draft_from_flags(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["train", "draft", "--target", str(folder / "target"), "--prompts", str(folder / "prompts.jsonl")]
    sizes = ["--num-layers", "1", "--hidden-size", "16", "--head-dim", "4"]
    assert main([*argv, "--out", str(tmp_path / "out"), *SMALL, *sizes, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert read_config(Path(found["draft"])).head_dim == 4
    assert found["results"]["training"]["step"] == 2
    assert main([*argv, "--out", str(tmp_path / "out"), *SMALL, "--json"]) == 2
    assert "add --resume" in capsys.readouterr().err


def test_train_head_from_flags(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["train", "head", "--target", str(folder / "target"), "--prompts", str(folder / "prompts.jsonl")]
    own = ["--layers", "1", "1", "2", "--draft-vocab-size", "100", "--unroll", "2", "--measure", argv[-1]]
    assert main([*argv, "--out", str(tmp_path / "out"), *SMALL, *own]) == 0
    text = capsys.readouterr().out
    assert "drafts accepted" in text and f"--draft {tmp_path / 'out' / 'head'}" in text
    card = (tmp_path / "out" / "head" / "README.md").read_text()
    assert "| all |" in card and "layers 1, 1, 2" in card and "100 of the target's" in card
    assert main(["train", "head", "--target", str(folder / "target"), "--prompts", argv[-1]]) == 2
    assert "--out is missing" in capsys.readouterr().err
    assert main([*argv, "--out", str(tmp_path / "new"), "--unroll", "0"]) == 2
    assert "unroll" in capsys.readouterr().err


def test_train_head_by_a_recipe_names_the_near_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "head.toml").write_text('target = "embedded"\n[loss]\nunrol = 3\n')
    assert main(["train", "head", str(tmp_path / "head.toml"), "--out", str(tmp_path / "out")]) == 2
    assert "did you mean 'unroll'" in capsys.readouterr().err
