"""A toy recipe on made-up data: a few thousand tokens, and models of a few thousand weights."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from sameseed_train.tokenizer import train_tokenizer

RECIPE = """
name = "toy"
seed = 3
threads = 1

[tokenizer]
vocab_size = 320
sample_mb = 0.1

[[source]]
domain = "sums"
kind = "chat"
file = "sums.jsonl.gz"
names = ["made-*"]
epochs = 1.5
licence = "made up"

[[source]]
domain = "talk"
kind = "dialog"
shown = false
file = "talk.jsonl.gz"
names = ["talk"]
licence = "made up"

[[source]]
domain = "prose"
kind = "text"
file = "prose.jsonl.gz"
names = ["prose"]
licence = "made up"

[[source]]
domain = "small-sums"
kind = "sums"
max_mb = 0.002
licence = "made up"

[target.shape]
vocab_size = 320
hidden_size = 32
num_layers = 2
num_heads = 4
num_kv_heads = 2
head_dim = 8
intermediate_size = 48
max_positions = 512

[target.train]
steps = 12
rows = 4
row_tokens = 64
warmup = 3

[unlikelihood]
prompts = 3
prompt_tokens = 40
new_tokens = 12
ngram = 2

[unlikelihood.train]
steps = 4
rows = 2
row_tokens = 64
warmup = 1

[draft]
batch = 8

[draft.size]
hidden_size = 16
num_layers = 1
num_heads = 2
num_kv_heads = 1
head_dim = 8
intermediate_size = 24

[draft.train]
steps = 8
rows = 4
row_tokens = 64
warmup = 3

[draft.texts]
num_texts = 20
prompt_tokens = 40
new_tokens = 12
corpus_share = 0.25
greedy = 0.75
"""


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def sum_row(i: int) -> dict[str, object]:
    text = f"User: What is {i} plus {i + 1}?\n\nAssistant: The sum is {2 * i + 1}.\n"
    return {"text": text, "source": "made-sums", "id": str(i), "answer_start": text.index("The sum")}


def talk_row(i: int) -> dict[str, object]:
    text = f"User: a tea no {i}\nAssistant: with milk?\nUser: yes\nAssistant: done.\n"
    return {"text": text, "source": "talk", "id": i}


def prose_row(i: int) -> dict[str, object]:
    return {"text": f"Chapter {i}\n\n" + f"The cat number {i} sat on the mat. " * 40, "source": "prose", "id": str(i)}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    write_rows(folder / "sums.jsonl.gz", [sum_row(i) for i in range(150)])
    write_rows(folder / "talk.jsonl.gz", [talk_row(i) for i in range(60)])
    write_rows(folder / "prose.jsonl.gz", [prose_row(i) for i in range(8)])
    held_out = [sum_row(i) for i in range(900, 912)] + [talk_row(i) for i in range(90, 94)] + [prose_row(99)]
    for row in held_out:
        row.pop("answer_start", None)  # held-out rows have none: the answer is found by its marker
    write_rows(folder / "valid.jsonl.gz", held_out)
    return folder


@pytest.fixture
def recipe_path(tmp_path: Path) -> Path:
    path = tmp_path / "toy.toml"
    path.write_text(RECIPE, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A small tokenizer of sums and cats."""
    return train_tokenizer([str(sum_row(i)["text"]) + str(prose_row(i)["text"])[:80] for i in range(60)], 320)
