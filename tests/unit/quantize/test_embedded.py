"""What the embedded target loses, by held-out perplexity relative to the original: the aims, with room for the text."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest
import torch
from fixtures_models import need

from foretoken.models.loader import resolve_model
from foretoken.quantize._losses import token_losses
from foretoken.quantize.calibrate import read_calibration
from foretoken.quantize.run import Plan, quantize
from foretoken.tokenizer import Tokenizer

ASSETS = resolve_model("embedded").parent
pytestmark = pytest.mark.slow


@cache
def held_out() -> torch.Tensor:
    need(ASSETS / "target" / "model.safetensors")
    return read_calibration(ASSETS / "prompts.jsonl", Tokenizer.from_folder(ASSETS / "target"), 99, 128, seed=0).rows


@cache
def original() -> float:
    return float(token_losses(ASSETS / "target", held_out()).mean())


@pytest.fixture(scope="module")
def relative(tmp_path_factory: pytest.TempPathFactory):
    """Perplexity of a method and a scheme over the original's; each is quantized once."""
    folder = tmp_path_factory.mktemp("quantized")
    text: Path = ASSETS / "prompts_heldout.jsonl"

    @cache
    def measured(method: str, scheme: str) -> float:
        held_out()
        plan = Plan("embedded", folder / f"{method}-{scheme}", scheme, method, text, samples=32, length=128)
        return math.exp(float(token_losses(quantize(plan).folder, held_out()).mean()) - original())

    return measured


@pytest.mark.parametrize(("scheme", "most"), [("w8a8", 1.01), ("fp8", 1.02), ("w4a16-g128", 1.06)])
def test_rounding_keeps_within_the_aims(relative, scheme: str, most: float) -> None:
    assert relative("rtn", scheme) <= most


@pytest.mark.parametrize("method", ["gptq", "awq", "rotate+gptq"])
def test_calibrated_methods_beat_rounding(relative, method: str) -> None:
    assert relative(method, "w4a16-g128") < relative("rtn", "w4a16-g128")


def test_two_levels_with_rotation_are_near_one(relative) -> None:
    assert relative("rotate+gptq", "w4a8-qoq") <= 1.02 * relative("gptq", "w4a16-g128")
