"""A run resumes as it was begun: other settings and prompts are refused, more texts are added."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lawkit import write_model
from safetensors.torch import load_file

from sameseed.errors import ConfigError
from sameseed_train.head import run_head
from sameseed_train.learning import Sources
from sameseed_train.optim import OptimSettings
from sameseed_train.recipe import HeadRecipe, LossSettings, SizeSettings, TextSettings, TrainSettings
from sameseed_train.states import StoredTexts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("resume")
    write_model(root / "target", num_hidden_layers=3)
    for name, word in (("prompts", "loop"), ("others", "list")):
        rows = [{"prompt": f"the {word} ends when {i}"} for i in range(6)]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return root


def head_recipe(folder: Path, **changes: Any) -> HeadRecipe:
    recipe = HeadRecipe(
        target=str(folder / "target"),
        layers=(1, 2, 3),
        size=SizeSettings(draft_vocab_size=60),
        texts=TextSettings(num_texts=8, prompt_tokens=32, new_tokens=12),
        loss=LossSettings(unroll=2, alone=0.0),
        train=TrainSettings(4, rows=4, row_tokens=64, warmup=1, optim=OptimSettings(0.02, 0.002)),
    )
    return replace(recipe, **changes)


def train_head(folder: Path, out: Path, prompts: str = "prompts", stop: int | None = 2, **changes: Any) -> Path:
    sources = Sources(folder / f"{prompts}.jsonl")
    done = run_head(head_recipe(folder, **changes), sources, out, quiet=True, resume=out.exists(), stop_after=stop)
    return done.folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def begun(folder: Path, tmp_path: Path) -> Path:
    train_head(folder, tmp_path / "out")
    return tmp_path / "out"


def test_a_checkpoint_of_other_settings_is_refused(folder: Path, begun: Path) -> None:
    """Nothing is written or loaded; the message has both values and the remedy."""
    before = content(begun)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"layers": (1, 1, 2)}, r"layers \[1, 2, 3\] \(now \[1, 1, 2\]\)"),
        ({"format": "w4a8"}, r"format auto \(now w4a8\)"),
        ({"kv_format": "int8"}, "kv_format"),
        ({"seed": 2}, "seed 1"),
        ({"size": SizeSettings(draft_vocab_size=60, num_kv_heads=4)}, "size.num_kv_heads 0"),
        ({"loss": LossSettings(unroll=3, alone=0.0)}, "loss.unroll 2"),
        ({"texts": TextSettings(8, 32, 16)}, "texts.new_tokens 12"),
        ({"texts": TextSettings(7, 32, 12)}, "may grow on a resume, not fall to 7"),
        ({"prompts": "others"}, "other prompts"),
    ]
    for change, words in cases:
        with pytest.raises(ConfigError, match=words) as caught:
            train_head(folder, begun, **change)
        assert "--out" in str(caught.value)
    assert content(begun) == before


def test_what_may_be_edited_is_accepted(folder: Path, begun: Path) -> None:
    """Card and results get the new note, and the weights are kept."""
    train = TrainSettings(6, rows=4, row_tokens=64, warmup=1, optim=OptimSettings(0.01, 0.001))
    head = train_head(folder, begun, stop=None, train=train, note="Mind the gap.", threads=1, batch=4, name="other")
    results = json.loads((begun / "results.json").read_text())
    assert results["training"]["step"] == 6
    weights = (head / "model.safetensors").read_bytes()
    train_head(folder, begun, stop=None, train=train, note="Mind the step.")
    assert (head / "model.safetensors").read_bytes() == weights
    words = json.loads((begun / "results.json").read_text())["recipe"]["note"]
    assert words == "Mind the step."
    assert f"## Limits\n\n{words}\n" in (head / "README.md").read_text()
    shutil.rmtree(head)  # as if the run had been interrupted before it first wrote it
    train_head(folder, begun, stop=None, train=replace(train, steps=1))
    assert (head / "model.safetensors").read_bytes() == weights, "of the steps that were done, which are more"


def test_texts_may_become_more(folder: Path, begun: Path) -> None:
    """Existing texts stay, only the new ones are written, and the head's own tokens stay the same."""
    before = {p: p.read_bytes() for p in (begun / "texts").rglob("*.safetensors")}
    tokens = load_file(str(begun / "head" / "model.safetensors"))["d2t"]
    for number in (20, 20, 25):
        train_head(folder, begun, stop=None, texts=TextSettings(number, 32, 12))
        assert json.loads((begun / "results.json").read_text())["texts"] == number
    assert all(path.read_bytes() == old for path, old in before.items())
    assert torch.equal(load_file(str(begun / "head" / "model.safetensors"))["d2t"], tokens)
    assert [len(StoredTexts([p])) for p in sorted((begun / "texts").rglob("*.safetensors"))] == [8, 12, 5]


def test_without_a_checkpoint_a_run_begins_anew(folder: Path, begun: Path) -> None:
    (begun / "head.checkpoint.safetensors").unlink()
    head = train_head(folder, begun, layers=(1, 1, 2))
    config = json.loads((head / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 1, 2]
