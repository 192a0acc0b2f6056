"""A twin that is made on another device equals the CPU's byte for byte, and so does a head's twin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures_device import Elsewhere, pretended_device
from fixtures_eagle import random_head, raw_config, write_head
from fixtures_models import llama_shape
from lawkit import MODEL_VOCAB, write_model

from sameseed import devices
from sameseed.models.head_config import parse_head_config
from sameseed.models.synthetic import RandomCheckpoint
from sameseed_lab.twin import make_head_twin, make_twin
from sameseed_lab.twin.source import TwinSource

HEADS = (8, 4, 16)


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The pretended device, which stands for any other."""
    monkeypatch.setattr(devices, "check", lambda name: None)
    with pretended_device() as name:
        yield name


def same_bytes(here: Path, there: Path) -> bool:
    """Whether both folders have the same files with the same bytes."""
    names = sorted(p.name for p in here.iterdir())
    assert names == sorted(p.name for p in there.iterdir()) and "model.safetensors" in names
    return all((here / n).read_bytes() == (there / n).read_bytes() for n in names)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_s_twin(tied: bool, tmp_path: Path, away: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "small", model_type="llama", tie_word_embeddings=tied)
    shape = llama_shape(65, HEADS, layers=3, tied=tied)
    made: list[bool] = []
    rows = TwinSource.rows

    def watched(self: Any, *place: Any) -> torch.Tensor:
        out = rows(self, *place)
        made.append(isinstance(out, Elsewhere))
        return out

    monkeypatch.setattr(TwinSource, "rows", watched)
    here = make_twin(shape, str(tmp_path / "small"), tmp_path / "here")
    there = make_twin(shape, str(tmp_path / "small"), tmp_path / "there", device=away)
    assert same_bytes(here.folder, there.folder)
    assert made == sorted(made) and made.count(True) == made.count(False) > 10


def test_a_head_s_twin(tmp_path: Path, away: str) -> None:
    shape = llama_shape(65, HEADS, layers=7)
    head, target = str(tmp_path / "head"), str(tmp_path / "target")
    write_model(tmp_path / "target", num_hidden_layers=3)
    raw = raw_config("eagle3", MODEL_VOCAB, [1, 2, 3], draft_vocab_size=130)
    write_head(tmp_path / "head", raw, random_head(parse_head_config(raw), 3))
    here, there = (make_head_twin(shape, head, target, tmp_path / d, device=d) for d in ("cpu", away))
    assert same_bytes(here.folder, there.folder)


def test_random_models_have_the_same_bits_everywhere(away: str) -> None:
    config = llama_shape(64, HEADS, layers=3)
    for name in ("lm_head.weight", "model.layers.1.mlp.down_proj.weight"):
        here, there = (RandomCheckpoint(config, 3, device=d).rows(name, 5, 60) for d in ("cpu", away))
        assert isinstance(there, Elsewhere) and there.cpu().equal(here)
