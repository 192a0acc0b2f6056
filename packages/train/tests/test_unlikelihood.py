"""Unlikelihood makes repetitions rarer; its loss equals the plain formula; precision and compilation change little."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from sameseed.errors import ConfigError
from sameseed_train.model import LlamaForTraining, ModelShape
from sameseed_train.recipe import TrainSettings, UnlikelihoodSettings, load_recipe
from sameseed_train.states import TextStates
from sameseed_train.trainer import Log, TrainJob, precision, train
from sameseed_train.unlikelihood import LEAST_REST, marked, repeated, unlikelihood, unlikelihood_job

SHAPE = ModelShape(40, 16, 2, 2, 1, 8, 24, max_positions=128)
PAD = 0


def text_of(prompt: list[int], new: list[int]) -> TextStates:
    return TextStates(torch.tensor(prompt + new, dtype=torch.int32), len(prompt), torch.zeros(0))


def test_an_ngram_counts_from_its_second_time_on() -> None:
    assert repeated([1, 2, 3, 1, 2, 3], 2) == [False, False, False, False, True, True]
    assert repeated([1, 1, 1], 1) == [False, True, True]
    assert repeated([1, 2], 3) == [False, False] and repeated([], 2) == []
    ids, targets = marked([text_of([5, 6], [7, 8, 7, 8]), text_of([7], [7, 9])], 1, PAD)
    assert ids.tolist() == [[5, 6, 7, 8, 7, 8], [7, 7, 9, PAD, PAD, PAD]]
    assert targets.tolist() == [[-1, -1, -1, -1, 7, 8], [-1] * 6], "a prompt's tokens are not the model's"


def test_the_loss_is_steep_and_then_straight() -> None:
    """-log(1 - p), and below a rest of LEAST_REST its tangent."""
    p = torch.tensor([0.1, 0.5, 0.9, 0.96, 0.999], dtype=torch.float64)
    rest = 1 - p
    logits = torch.stack((p, rest), dim=1).log()
    tangent = (LEAST_REST - rest) / LEAST_REST - torch.tensor(LEAST_REST).log()
    wanted = torch.where(rest < LEAST_REST, tangent, -rest.log()).mean()
    assert torch.allclose(unlikelihood(logits, torch.zeros(5, dtype=torch.long)), wanted)
    assert float(unlikelihood(logits[:0], torch.zeros(0, dtype=torch.long))) == 0.0


def test_the_stage_makes_loops_rarer(recipe_path: Path, tmp_path: Path) -> None:
    """A model that was trained to repeat one token expects it less after this stage."""
    steps = TrainSettings(40, rows=2, row_tokens=16, warmup=1)
    settings = UnlikelihoodSettings(steps, prompts=1, prompt_tokens=4, new_tokens=12, ngram=2, weight=5.0)
    recipe = dataclasses.replace(load_recipe(recipe_path), unlikelihood=settings)
    model, log = LlamaForTraining(SHAPE, 0), Log(tmp_path / "log.jsonl")
    loop = torch.full((4, 17), 9)
    taught = TrainJob(
        "loop", model, TrainSettings(40), lambda _: loop, lambda b: model.loss(b[:, :-1], b[:, 1:]), tmp_path
    )
    train(taught, log, quiet=True)

    @torch.no_grad()
    def surprise() -> float:
        return float(model.loss(loop[:, :-1], loop[:, 1:]))

    before = surprise()
    texts = [text_of([9, 9], [9] * 12)] * 40
    train(unlikelihood_job(recipe, model, torch.randint(3, 40, (8, 17)), lambda: texts, PAD, tmp_path), log, quiet=True)
    assert surprise() > before + 1.0


def test_low_precision_is_near_and_its_gradients_are_float32() -> None:
    model, ids = LlamaForTraining(SHAPE, 0), torch.randint(3, 40, (2, 33))
    losses = []
    for name in ("float32", "bfloat16"):
        settings = TrainSettings(1, precision=name)
        job = TrainJob("toy", model, settings, lambda _: ids, lambda b: model.loss(b[:, :-1], b[:, 1:]), Path())
        with precision(job):
            losses.append(job.loss(ids))
    assert losses[0] != losses[1] and torch.allclose(*losses, rtol=1e-2)
    losses[1].backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    with pytest.raises(ConfigError, match="bfloat16"):
        TrainSettings(1, precision="half")


def test_compiled_layers_need_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sameseed_train.model.shutil.which", lambda _: None)
    with pytest.raises(ConfigError, match="compile = false"):
        LlamaForTraining(SHAPE, 0).compile_layers()


@pytest.mark.slow  # half a minute of a C++ compiler
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="there is no C++ compiler here")
def test_compiled_layers_compute_the_same() -> None:
    model, ids = LlamaForTraining(SHAPE, 0), torch.randint(3, 40, (2, 33))
    plain = model(ids)
    model.compile_layers()
    assert torch.allclose(model(ids), plain, atol=1e-4)
