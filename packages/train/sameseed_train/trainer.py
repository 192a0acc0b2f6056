"""The training loop for all models, which differ only in their batches and their loss."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sameseed.cli.console import progress as progress_bar
from sameseed.errors import SameseedError
from sameseed_train.checkpoint import load_checkpoint, save_checkpoint
from sameseed_train.optim import MuonAdamW
from sameseed_train.recipe import TrainSettings


def schedule(step: int, settings: TrainSettings) -> float:
    """The factor of the learning rate at a step: warmup, constant, linear decay to almost 0 (WSD: Hu et al., 2024)."""
    falling = max(1, round(settings.steps * settings.decay))
    return min(1.0, (step + 1) / max(1, settings.warmup), max(0.0, (settings.steps - step) / falling))


@dataclass(frozen=True)
class TrainJob:
    """One model to train: its batches, the loss of a batch, and the folder of its checkpoint."""

    name: str
    model: nn.Module
    settings: TrainSettings
    batch: Callable[[int], Any]  # step -> what `loss` takes, rows [B, S+1] or a head's batch, or a list of such parts
    loss: Callable[[Any], Tensor]  # batch -> a scalar
    folder: Path
    count: Callable[[Any], int] = lambda rows: rows[:, 1:].numel()  # tokens that a batch trains on
    begun: Mapping[str, Any] | None = None  # what the run began with, kept in the checkpoint

    @property
    def checkpoint(self) -> Path:
        return checkpoint_path(self.folder, self.name)


def checkpoint_path(folder: Path, name: str) -> Path:
    """The checkpoint file of the job with this name."""
    return folder / f"{name}.checkpoint.safetensors"


def precision(job: TrainJob) -> AbstractContextManager[Any]:
    """The context of a job's passes and updates: matrix products in its precision, weights and sums in float32."""
    if job.settings.precision == "float32":
        return nullcontext()
    return torch.autocast(next(job.model.parameters()).device.type, torch.bfloat16)


class Log:
    """A log file of JSON lines, one per step, each appended and flushed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, **values: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows so far; a line that was cut off when its run was killed is left out."""
        for line in self.path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                yield json.loads(line)


@contextmanager
def deferred_interrupts() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in the yielded list instead of ending the run, so that no step is cut short."""
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    kinds = (signal.SIGINT, signal.SIGTERM)
    old = {kind: signal.signal(kind, lambda number, _: noted.append(number)) for kind in kinds}
    try:
        yield noted
    finally:
        for kind, handler in old.items():
            signal.signal(kind, handler)


def one_step(job: TrainJob, optimizer: MuonAdamW, progress: dict[str, Any], log: Log) -> tuple[dict[str, Any], float]:
    """Forward, backward, clip, update, log; returns progress and tokens/s. Raises SameseedError for NaN, infinity."""
    started, step, rate = time.monotonic(), progress["step"], schedule(progress["step"], job.settings)
    batch = job.batch(step)
    parts = batch if isinstance(batch, list) else [batch]
    counts = [job.count(part) for part in parts]
    value, tokens = 0.0, sum(counts)
    for part, count in zip(parts, counts, strict=True):  # one after another, so that memory is that of one part
        with precision(job):
            loss = job.loss(part) * (count / max(1, tokens))
        value += loss.detach().item()
        loss.backward()  # type: ignore[no-untyped-call]
    norm = float(torch.nn.utils.clip_grad_norm_(job.model.parameters(), job.settings.clip))
    for what, number in (("loss", value), ("gradient", norm)):  # neither may reach the weights, and so a checkpoint
        if not math.isfinite(number):
            raise SameseedError(f"{job.name}: {what} {number} at step {step}; lower matrix_lr and lr, then resume")
    with precision(job):
        optimizer.step(rate)
    job.model.zero_grad(set_to_none=True)
    seconds = time.monotonic() - started
    progress = {
        "step": step + 1,
        "tokens": progress["tokens"] + tokens,
        "seconds": progress["seconds"] + seconds,
        "loss": value if step == 0 else 0.95 * progress["loss"] + 0.05 * value,
    }
    log.write(
        stage=job.name,
        step=step,
        loss=round(value, 5),
        norm=round(norm, 4),
        lr=round(rate, 5),
        tokens=progress["tokens"],
        tokens_per_s=round(tokens / seconds, 1),
        time=round(time.time(), 1),
    )
    return progress, tokens / seconds


def train(job: TrainJob, log: Log, *, quiet: bool, stop_after: int | None = None) -> dict[str, Any]:
    """Train up to `settings.steps`, from the last checkpoint if there is one; returns the progress.

    `stop_after` ends the run with a checkpoint once that many steps are done, like an interruption. Raises
    KeyboardInterrupt after an interruption, once the checkpoint is saved.
    """
    settings = job.settings
    optimizer = MuonAdamW(job.model, settings.optim)
    progress: dict[str, Any] = {"step": 0, "tokens": 0, "seconds": 0.0, "loss": 0.0}
    if job.checkpoint.exists():
        progress = load_checkpoint(job.checkpoint, job.model, optimizer)
        progress.pop("begun", None)
    last = min(settings.steps, stop_after if stop_after is not None else settings.steps)
    job.model.train()
    saved = time.monotonic()
    with progress_bar(job.name, quiet) as (update, _), deferred_interrupts() as interrupts:
        update(total=settings.steps, completed=progress["step"])
        while progress["step"] < last and not interrupts:
            progress, rate = one_step(job, optimizer, progress, log)
            update(completed=progress["step"], note=f"loss {progress['loss']:.3f}  {rate:.0f} tokens/s")
            if time.monotonic() - saved > 60 * settings.checkpoint_minutes:
                save_checkpoint(job.checkpoint, job.model, optimizer, {**progress, "begun": job.begun})
                saved = time.monotonic()
    save_checkpoint(job.checkpoint, job.model, optimizer, {**progress, "begun": job.begun})
    if interrupts:
        raise KeyboardInterrupt
    return progress
