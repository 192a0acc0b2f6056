"""The held-out perplexity of the quantized embedded target, relative to the original: the aims, with some margin."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fixtures_models import all_logits, need

from sameseed import ops
from sameseed.models.loader import load_model, resolve_model
from sameseed.quantize._calibrate import read_calibration
from sameseed.quantize._plan import QuantizePlan
from sameseed.quantize._run import quantize
from sameseed.tokenizer import Tokenizer

ASSETS = resolve_model("embedded").parent
pytestmark = pytest.mark.slow


@cache
def held_out() -> torch.Tensor:
    need(ASSETS / "target" / "model.safetensors")
    return read_calibration(ASSETS / "prompts.jsonl", Tokenizer.from_folder(ASSETS / "target"), 99, 128, seed=0).rows


def token_losses(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihoods in nats of every token of ids [B, S], except each row's first."""
    model = load_model(folder, ops.resolve())
    losses = [F.cross_entropy(all_logits(model, row.tolist())[:-1], row[1:], reduction="none") for row in ids]
    return torch.cat(losses).double()


@cache
def original() -> torch.Tensor:
    return token_losses(ASSETS / "target", held_out())


@pytest.fixture(scope="module")
def change(tmp_path_factory: pytest.TempPathFactory):
    """The changes of tokens' losses by a method and a scheme; each is quantized once."""
    folder = tmp_path_factory.mktemp("quantized")
    text: Path = ASSETS / "prompts_heldout.jsonl"

    @cache
    def measured(method: str, scheme: str) -> torch.Tensor:
        held_out()
        plan = QuantizePlan("embedded", folder / f"{method}-{scheme}", scheme, method, text, samples=16, length=128)
        return token_losses(quantize(plan).folder, held_out()) - original()

    return measured


def relative(change: torch.Tensor) -> float:
    """The perplexity divided by the original's."""
    return math.exp(float(change.mean()))


def spread(change: torch.Tensor) -> float:
    """The mean square of the changes, in whichever direction. It is far less noisy than their mean."""
    return float(change.square().mean())


@pytest.mark.parametrize(("scheme", "most"), [("w8a8", 1.01), ("fp8", 1.02), ("w4a16-g128", 1.06)])
def test_rounding_keeps_within_the_aims(change, scheme: str, most: float) -> None:
    assert relative(change("rtn", scheme)) <= most


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_calibrated_methods_beat_rounding(change, method: str) -> None:
    found = change(method, "w4a16-g128")
    assert relative(found) <= 1.06
    assert spread(found) < 0.9 * spread(change("rtn", "w4a16-g128"))


def test_two_levels_with_rotation_are_near_one(change) -> None:
    assert relative(change("rotate+gptq", "w4a8-qoq")) <= 1.02 * relative(change("gptq", "w4a16-g128"))
