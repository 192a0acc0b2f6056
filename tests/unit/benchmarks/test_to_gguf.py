"""A checkpoint folder written as a GGUF file for llama.cpp: sameseed's reader gets back its weights and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import to_gguf
import torch

from sameseed.models.config import ASSETS
from sameseed.models.loader import load_tokenizer, open_checkpoint

DRAFT = ASSETS / "draft"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gguf") / "draft.gguf"
    to_gguf.convert(DRAFT, made)
    return made


def test_the_tokenizer_goes_along(file: Path) -> None:
    theirs, ours = load_tokenizer(file), load_tokenizer(DRAFT)
    text = "Two coffees, please: that's 12 dollars and 50 cents."
    assert theirs.encode(text) == ours.encode(text)
    said = [{"role": "user", "content": "A tea."}]
    assert theirs.chat(said) == ours.chat(said)


def test_the_weights_are_those_of_the_folder(file: Path) -> None:
    with open_checkpoint(DRAFT) as folder, open_checkpoint(file) as made:
        for name in ("model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight", "model.norm.weight"):
            assert torch.equal(folder.tensor(name).float(), made.tensor(name).float())


def test_another_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    tokenizer = {"model": {"type": "Unigram"}, "decoder": {"type": "Metaspace"}, "added_tokens": []}
    (tmp_path / "config.json").write_bytes((DRAFT / "config.json").read_bytes())
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match="no byte-level BPE"):
        to_gguf.convert(tmp_path, tmp_path / "x.gguf")
