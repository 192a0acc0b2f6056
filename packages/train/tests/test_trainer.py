"""Training resumed from a checkpoint equals training that was never interrupted, bit for bit."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from sameseed.errors import SameseedError
from sameseed_train.checkpoint import read_tensors, save_tensors
from sameseed_train.model import LlamaForTraining, ModelShape
from sameseed_train.recipe import TrainSettings
from sameseed_train.trainer import Log, TrainJob, schedule, train

SHAPE = ModelShape(40, 16, 2, 2, 1, 8, 24)


def toy_job(folder: Path, steps: int = 10) -> TrainJob:
    model = LlamaForTraining(SHAPE, seed=0)
    settings = TrainSettings(steps, rows=2, row_tokens=8, warmup=2)

    def batch(step: int) -> torch.Tensor:
        return torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(step))

    def loss(rows: torch.Tensor) -> torch.Tensor:
        return model.loss(rows[:, :-1], rows[:, 1:])

    return TrainJob("toy", model, settings, batch, loss, folder)


def go(job: TrainJob, **how: Any) -> dict[str, Any]:
    job.folder.mkdir(exist_ok=True)
    return train(job, Log(job.folder / "log.jsonl"), quiet=True, **how)


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread")
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint(tmp_path: Path, kind: signal.Signals) -> None:
    job = toy_job(tmp_path)

    def batch(step: int) -> torch.Tensor:
        if step == 4:
            os.kill(os.getpid(), kind)
        rows: torch.Tensor = job.batch(step)
        return rows

    with pytest.raises(KeyboardInterrupt):
        go(replace(job, batch=batch))
    assert read_tensors(job.checkpoint)[1]["step"] == 5, "the step under way is finished, and kept"


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_what_is_no_number_never_reaches_the_weights(tmp_path: Path, kind: str) -> None:
    job = toy_job(tmp_path)

    def loss(rows: torch.Tensor) -> torch.Tensor:
        if kind == "loss":
            return job.loss(rows) * float("nan")
        return job.loss(rows) + (0 * next(job.model.parameters())).sum().sqrt()  # the gradient of the root is infinite

    with pytest.raises(SameseedError, match="lower matrix_lr and lr"):
        go(replace(job, loss=loss, settings=replace(job.settings, checkpoint_minutes=0.0)))
    assert all(weight.isfinite().all() for weight in job.model.parameters()) and not job.checkpoint.exists()


def test_damaged_and_foreign_checkpoints_are_refused(tmp_path: Path) -> None:
    job = toy_job(tmp_path)
    go(job, stop_after=1)
    other = LlamaForTraining(ModelShape(40, 24, 2, 2, 1, 8, 24), seed=0)
    with pytest.raises(SameseedError, match="another model shape"):
        go(replace(job, model=other))
    tensors, progress = read_tensors(job.checkpoint)
    save_tensors({n: t for n, t in tensors.items() if n.startswith("model.")}, job.checkpoint, progress)
    with pytest.raises(SameseedError, match="delete it"):
        go(job)
    job.checkpoint.write_bytes(job.checkpoint.read_bytes()[:100])
    with pytest.raises(SameseedError, match="delete it and run again"):
        go(job)


def test_schedule_warms_up_stays_and_falls() -> None:
    settings = TrainSettings(steps=100, warmup=10, decay=0.4)
    rates = [schedule(s, settings) for s in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9:60] == [1.0] * 51
    assert all(a > b for a, b in pairwise(rates[60:])) and rates[-1] == pytest.approx(1 / 40)
    # With fewer steps on resume, the decay begins earlier and never raises the rate.
    assert all(schedule(s, TrainSettings(steps=50, warmup=10, decay=0.4)) <= rates[s] for s in range(50))


def test_parts_of_a_batch_train_like_the_whole(tmp_path: Path) -> None:
    """A list of parts gives one update, by their tokens, in less memory."""
    whole, parts = toy_job(tmp_path / "whole", 3), toy_job(tmp_path / "parts", 3)
    cut = replace(parts, batch=lambda step: [parts.batch(step)[:1], parts.batch(step)[1:]])
    go(whole)
    go(cut)
    for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)
