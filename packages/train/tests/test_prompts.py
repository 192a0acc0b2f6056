"""Prompts from the sources of a recipe: the same beginning whatever their number, none from a held-out document."""

from __future__ import annotations

import gzip
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lawkit import write_model

from sameseed.errors import ConfigError
from sameseed.models.loader import load_tokenizer
from sameseed.tokenizer import Tokenizer
from sameseed_train.checkpoint import save_tensors
from sameseed_train.head import run_head
from sameseed_train.learning import Sources
from sameseed_train.optim import OptimSettings
from sameseed_train.prompts import conversations, file_seeds, recipe_held_out, recipe_seeds
from sameseed_train.recipe import HeadRecipe, SizeSettings, SourceSettings, TextSettings, TrainSettings

SOURCES = (
    SourceSettings("sums", "sums", "MIT", max_mb=0.02),
    SourceSettings("code", "stdlib", "PSF-2.0", max_mb=0.3),
    SourceSettings("prose", "text", "MIT", "rows.jsonl.gz", ("books",), share=2.0),
    SourceSettings("talk", "dialog", "MIT", "rows.jsonl.gz", ("talks",)),
)
TEXTS = TextSettings(num_texts=8, prompt_tokens=120, new_tokens=8, corpus_share=0.2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    prose = [f"Chapter of a river {i}\n\n" + f"The river {i} is long, and its mouth is wide. " * 4 for i in range(120)]
    talks = [f"User: is it {i}?\nAssistant: yes\nUser: and {i + 1}?\nAssistant: no\n" for i in range(120)]
    rows = [{"source": "books", "text": t} for t in prose] + [{"source": "talks", "text": t} for t in talks]
    with gzip.open(folder / "rows.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts") / "target"
    write_model(folder, num_hidden_layers=3)
    return folder


@pytest.fixture(scope="module")
def tokenizer(target: Path) -> Tokenizer:
    return load_tokenizer(target)


def test_more_seeds_begin_like_fewer(data: Path, target: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """All kinds are asked; whole documents have no prompt; the end asks for an answer, or the prompt is left out."""
    few, many = (list(itertools.islice(recipe_seeds(SOURCES, data, tokenizer, TEXTS, 3), n)) for n in (20, 60))
    assert many[:20] == few
    assert {seed.num_new for seed in many} == {0, TEXTS.new_tokens}
    asks = tuple(tokenizer.chat([{"role": "user", "content": "x"}], True))[-3:]
    assert all(seed.ids[-3:] == asks and len(seed.ids) <= 120 for seed in many if seed.num_new)
    lines = [{"prompt": f"the list {i} is"} for i in range(5)] + [{"text": f"the loop ends when {i}"} for i in range(3)]
    lines += [{"messages": [{"role": "user", "content": "the sum " * 200}]}, {"text": "a"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    few, many = (list(itertools.islice(file_seeds(tmp_path / "p.jsonl", tokenizer, TEXTS, 3), n)) for n in (6, 30))
    assert many[:6] == few and len(many) == 30
    assert len({seed.ids for seed in many}) == 8, "too long a conversation and too short a text are left out"


def test_held_out_documents_give_no_training_prompt(data: Path, tokenizer: Tokenizer) -> None:
    asked = itertools.islice(conversations(SOURCES, data, 3, held_out=False), 600)
    held = itertools.islice(conversations(SOURCES, data, 3, held_out=True), 300)
    trained, measured = {d.text for _, d, *_ in asked}, {d.text for _, d, *_ in held}
    assert trained and measured and not trained & measured
    prompts = recipe_held_out(SOURCES, data, tokenizer, TEXTS, 3, 12)
    assert len({ids for ids, _ in prompts}) == len(prompts) == 12


def test_sources_that_give_nothing_are_refused(data: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"raise texts\.prompt_tokens"):
        next(recipe_seeds(SOURCES[2:], data, tokenizer, TextSettings(prompt_tokens=2, corpus_share=0.0), 3))
    with pytest.raises(ConfigError, match="--data"):
        next(recipe_seeds(SOURCES, tmp_path / "none", tokenizer, TEXTS, 3))
    with pytest.raises(ConfigError, match="share must be above 0"):
        replace(SOURCES[0], share=0.0)


def test_a_head_of_a_recipe_has_a_curve(data: Path, target: Path, tmp_path: Path) -> None:
    """Without a file of held-out prompts those of the recipe's sources are measured; the card has curve and sources."""
    how = {"quiet": True, "measured_tokens": 12}
    recipe = HeadRecipe(
        target=str(target),
        layers=(1, 2, 3),
        source=SOURCES,
        size=SizeSettings(draft_vocab_size=60),
        texts=TEXTS,
        train=TrainSettings(2, rows=4, row_tokens=128, warmup=1, optim=OptimSettings(0.02, 0.002)),
    )
    done = run_head(recipe, Sources(data=data), tmp_path / "out", **how, stop_after=1)
    done = run_head(recipe, Sources(data=data), tmp_path / "out", **how, resume=True)
    assert [point["step"] for point in done.results["curve"]] == [1, 2]
    assert done.results["curve"][-1]["rate"] == done.results["acceptance"]["all"]["rate"]
    card = (done.folder / "README.md").read_text(encoding="utf-8")
    assert all(word in card for word in ("PSF-2.0", "different tokens", "texts.num_texts = "))


def test_a_file_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="free space on the disk, then --resume"):
        save_tensors({"a": torch.zeros(2)}, tmp_path / "file" / "x.safetensors", {})
