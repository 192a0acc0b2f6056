"""Unlikelihood makes repetitions rarer; its loss equals the plain formula; sums are right, some are held out."""

from __future__ import annotations

import dataclasses
import shutil
from itertools import islice
from pathlib import Path

import pytest
import torch

from sameseed.errors import ConfigError
from sameseed_train.losses import LEAST_REST, fused_unlikelihood
from sameseed_train.model import LlamaForTraining, ModelShape
from sameseed_train.recipe import TrainSettings, UnlikelihoodSettings, load_recipe
from sameseed_train.sums import sum_texts, sums, value
from sameseed_train.trainer import Log, TrainJob, precision, train
from sameseed_train.unlikelihood import marked_texts, repeated, unlikelihood_job

SHAPE = ModelShape(40, 16, 2, 2, 1, 8, 24, max_positions=128)
END, PAD = 2, 0


def test_an_ngram_counts_from_its_second_time_on() -> None:
    assert repeated([1, 2, 3, 1, 2, 3], 2) == [False, False, False, False, True, True]
    assert repeated([1, 1, 1], 1) == [False, True, True]
    assert repeated([1, 2], 3) == [False, False]


@pytest.mark.parametrize("num_rows", [5, 1500])  # within a chunk, and over a chunk's edge
def test_fused_unlikelihood_equals_the_plain_one(num_rows: int) -> None:
    g = torch.Generator().manual_seed(0)
    h, w = (torch.randn(n, 12, generator=g, dtype=torch.float64, requires_grad=True) for n in (num_rows, 30))
    targets = torch.randint(-1, 30, (num_rows,), generator=g)
    targets[0] = 3
    p = (h @ w.T).softmax(-1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
    rest = 1 - p
    steep = -rest.clamp(min=LEAST_REST).log()
    plain = torch.where(rest < LEAST_REST, steep + (LEAST_REST - rest) / LEAST_REST, steep)[targets >= 0].mean()
    fused = fused_unlikelihood(h, w, targets)
    assert torch.allclose(plain, fused)
    for x in (h, w):
        assert torch.allclose(*(torch.autograd.grad(loss, x, retain_graph=True)[0] for loss in (plain, fused)))


def test_texts_are_marked_where_they_repeat() -> None:
    settings = UnlikelihoodSettings(TrainSettings(1), prompt_tokens=4, new_tokens=20, ngram=1)
    ids, targets = marked_texts(LlamaForTraining(SHAPE, 0), [[5, 6], [7, 8, 9]], settings, END, PAD)
    assert ids.shape == targets.shape == (2, 24)
    assert ids[0, :2].tolist() == [5, 6] and (targets[:, :2] == -1).all()
    marked = targets >= 0
    assert marked.any() and torch.equal(ids[marked], targets[marked])


def test_the_stage_makes_loops_rarer(recipe_path: Path, tmp_path: Path) -> None:
    """A model that was trained to repeat one token repeats less after this stage."""
    recipe = load_recipe(recipe_path)
    settings = UnlikelihoodSettings(
        TrainSettings(80, rows=2, row_tokens=16, warmup=1), 4, 4, new_tokens=12, ngram=2, weight=5.0
    )
    recipe = dataclasses.replace(recipe, unlikelihood=settings)
    model = LlamaForTraining(SHAPE, 0)
    loop = torch.full((4, 17), 9)
    taught = TrainJob(
        "loop", model, TrainSettings(40), lambda _: loop, lambda b: model.loss(b[:, :-1], b[:, 1:]), tmp_path
    )
    train(taught, Log(tmp_path / "log.jsonl"), quiet=True)
    prompts, rows = [[9, 9], [9]], torch.randint(3, 40, (8, 17))

    def marked() -> int:
        return int((marked_texts(model, prompts, settings, END, PAD)[1] >= 0).sum())

    before = marked()
    train(unlikelihood_job(recipe, model, rows, prompts, END, PAD, tmp_path), Log(tmp_path / "log.jsonl"), quiet=True)
    assert before == 2 * 10 and marked() < 0.8 * before
    with pytest.raises(ConfigError, match="raise prompt_tokens"):
        unlikelihood_job(recipe, model, rows, [[3] * 99], END, PAD, tmp_path)


def test_sums_are_right_and_held_out_ones_are_not_trained_on() -> None:
    kept, held = set(sums(False)), set(sums(True))
    assert kept and held and not kept & held
    texts = [*islice(sum_texts(1, held_out=False), 3000), *sum_texts(1, held_out=True)]
    for question, answer in texts:
        a, sign, b, _, result = answer.split(".")[0].split()
        assert int(result) == value(int(a), sign, int(b)) and f"The answer is {result}" in answer
        assert question.index(a) <= question.rindex(b)
    assert len(list(sum_texts(1, held_out=True))) == 60


@pytest.mark.parametrize("kind", ["sums", "records"])
def test_endless_kinds_need_a_size(recipe_path: Path, kind: str) -> None:
    text = recipe_path.read_text().replace("max_mb = 0.002\n", "").replace('kind = "sums"', f'kind = "{kind}"')
    recipe_path.write_text(text)
    with pytest.raises(ConfigError, match="max_mb"):
        load_recipe(recipe_path)


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
