"""Training resumed from a checkpoint equals training that was never interrupted, bit for bit."""

from __future__ import annotations

import os
import signal
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from sameseed.errors import SameseedError
from sameseed.train.checkpoint import read_tensors
from sameseed.train.model import LlamaForTraining, ModelShape
from sameseed.train.optim import OptimSettings
from sameseed.train.recipe import TrainSettings
from sameseed.train.trainer import Log, TrainJob, schedule, train

SHAPE = ModelShape(40, 16, 2, 2, 1, 8, 24)


def toy_job(folder: Path, steps: int = 10, matrix_lr: float = 0.02) -> TrainJob:
    model = LlamaForTraining(SHAPE, seed=0)
    settings = TrainSettings(steps, rows=2, row_tokens=8, warmup=2, optim=OptimSettings(matrix_lr=matrix_lr))

    def batch(step: int) -> torch.Tensor:
        return torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(step))

    def loss(rows: torch.Tensor) -> torch.Tensor:
        return model.loss(rows[:, :-1], rows[:, 1:])

    return TrainJob("toy", model, settings, batch, loss, folder)


def weights(job: TrainJob) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in job.model.named_parameters()}


def test_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    whole = toy_job(tmp_path / "whole")
    train(whole, Log(tmp_path / "whole.jsonl"), quiet=True)
    for stop in (3, 7, None):
        parts = toy_job(tmp_path / "parts")
        progress = train(parts, Log(tmp_path / "parts.jsonl"), quiet=True, stop_after=stop)
    assert progress["step"] == 10
    assert all(torch.equal(w, weights(parts)[n]) for n, w in weights(whole).items())
    first, second = (read_tensors(tmp_path / d / "toy.checkpoint.safetensors")[0] for d in ("whole", "parts"))
    assert first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    job = toy_job(tmp_path, steps=60)
    rows = job.batch(0)
    same = TrainJob("toy", job.model, job.settings, lambda _: rows, job.loss, tmp_path)
    before = job.loss(rows).item()
    train(same, Log(tmp_path / "log.jsonl"), quiet=True)
    assert job.loss(rows).item() < 0.5 * before


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread")
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint(tmp_path: Path, kind: signal.Signals) -> None:
    job = toy_job(tmp_path)
    plain = job.batch

    def batch(step: int) -> torch.Tensor:
        if step == 4:
            os.kill(os.getpid(), kind)
        return plain(step)

    with pytest.raises(KeyboardInterrupt):
        train(
            TrainJob("toy", job.model, job.settings, batch, job.loss, tmp_path), Log(tmp_path / "log.jsonl"), quiet=True
        )
    assert read_tensors(job.checkpoint)[1]["step"] == 5, "the step under way is finished, and kept"


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    job = toy_job(tmp_path)
    broken = TrainJob("toy", job.model, job.settings, job.batch, lambda rows: job.loss(rows) * float("nan"), tmp_path)
    with pytest.raises(SameseedError, match="lower matrix_lr and lr"):
        train(broken, Log(tmp_path / "log.jsonl"), quiet=True)


def test_damaged_and_foreign_checkpoints_are_refused(tmp_path: Path) -> None:
    job = toy_job(tmp_path)
    train(job, Log(tmp_path / "log.jsonl"), quiet=True, stop_after=1)
    other = LlamaForTraining(ModelShape(40, 24, 2, 2, 1, 8, 24), seed=0)
    with pytest.raises(SameseedError, match="another model shape"):
        train(
            TrainJob("toy", other, job.settings, job.batch, job.loss, tmp_path), Log(tmp_path / "log.jsonl"), quiet=True
        )
    job.checkpoint.write_bytes(job.checkpoint.read_bytes()[:100])
    with pytest.raises(SameseedError, match="delete it and run again"):
        train(job, Log(tmp_path / "log.jsonl"), quiet=True)


def test_schedule_warms_up_stays_and_falls() -> None:
    settings = TrainSettings(steps=100, warmup=10, decay=0.4)
    rates = [schedule(s, settings) for s in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9:60] == [1.0] * 51
    assert all(a > b for a, b in pairwise(rates[60:])) and rates[-1] == pytest.approx(1 / 40)
    # Fewer steps on resume begin the fall earlier, and never raise the rate.
    assert all(schedule(s, TrainSettings(steps=50, warmup=10, decay=0.4)) <= rates[s] for s in range(50))
