"""Parts of `make bench-gpu` with random weights: the device's limits, and passes in each number format."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gpu_clock import STAND_IN, busy, device_time, is_fault
from gpu_models import forget, random_model
from gpu_plan import Sizes, passes

from sameseed import ops as backends
from sameseed.batch import Batch
from sameseed.engine.calibrate import measure_curve
from sameseed.measure import limits as machine, usage as memory
from sameseed.measure.limits import Limits
from sameseed.measure.passes import Pass, TimedModel
from sameseed.measure.shapes import get_shape
from sameseed.models.config import ModelConfig
from sameseed.ops import Ops
from sameseed.scheme import QuantScheme

Tell = Callable[[Mapping[str, Any]], None]  # writes one record
REPEATS, FEWEST = 7, 3
LONG = 0.4  # seconds: a pass that takes longer is repeated only FEWEST times
SIDE = 8192  # rows and columns of the matrices whose products are timed as limits


@contextmanager
def attempted(what: str, tell: Tell) -> Iterator[None]:
    """Run one measurement of many. A failure (e.g. out of memory) is recorded, and the next measurement can go on.

    A fault of the device is re-raised.
    """
    try:
        yield
    except Exception as error:
        if is_fault(error):
            raise
        said = str(error).strip().splitlines()
        tell({"omit": what, "why": f"{type(error).__name__}: {said[0] if said else ''}"[:300]})
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def measure_limits(sizes: Sizes, ops: Ops, device: str, tell: Tell) -> None:
    """Measure the rates of PyTorch's copy and matrix products; then, on a GPU, of its 8-bit products."""
    found = machine.measure_limits(backends.num_threads(), repeats=3, device=device).as_dict()
    tell({"part": "limits", **found})  # first: the other parts report shares of these limits
    if device != "cpu":
        tell({"part": "products", **more_products(device)})


def more_products(device: str) -> dict[str, Any]:
    """Operations per second of PyTorch's fp8 and int8 products; None and the reason if they do not run here."""
    found: dict[str, Any] = {}
    one = torch.ones((), device=device)
    a, b = (torch.randn(SIDE, SIDE, device=device) for _ in range(2))
    coded = {
        "fp8": (a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()),
        "int8": (a.mul(30).to(torch.int8), b.mul(30).to(torch.int8).t()),
    }
    multiply: dict[str, Callable[..., torch.Tensor]] = {
        "fp8": lambda x, y: torch._scaled_mm(x, y, scale_a=one, scale_b=one, out_dtype=torch.bfloat16),
        "int8": torch._int_mm,
    }
    for kind, (x, y) in coded.items():
        try:
            seconds, _ = device_time(partial(multiply[kind], x, y), device, 3)
            found[f"{kind}_product_ops_per_s"] = 2.0 * SIDE**3 / seconds
        except Exception as error:
            found[f"{kind}_product_ops_per_s"] = None
            found[f"{kind}_product_why"] = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return found


def one_layer(config: ModelConfig) -> ModelConfig:
    """The shape with one layer only; it launches the same kernels as the whole model."""
    return replace(config, num_layers=1, windows=config.windows[:1])


def warm_up(sizes: Sizes, ops: Ops, device: str, tell: Tell, format: str, shape: str | None = None) -> None:
    """Run every pass of a format once through one layer, so that kernels are compiled before anything is timed."""
    start, jobs = time.perf_counter(), passes(sizes)
    subject = subject_of(sizes, one_layer(get_shape(shape or sizes.shape)), format, ops, device)
    for job in jobs:
        subject.seconds(job)
    tell({"part": "compiling", "shape": shape or sizes.shape, "format": format, "seconds": time.perf_counter() - start})


def subject_of(sizes: Sizes, config: ModelConfig, format: str, ops: Ops, device: str) -> TimedModel:
    """A model with random weights and a KV cache for all passes."""
    jobs = passes(sizes)
    longest = max(p.context + p.new_tokens for p in jobs)
    return TimedModel(random_model(config, ops, QuantScheme.parse(format), longest, device), "auto", jobs)


def timed(subject: TimedModel, job: Pass) -> list[float]:
    """Milliseconds of several runs of a pass, after one warm-up run."""
    once = subject.seconds(job)
    return [1e3 * subject.seconds(job) for _ in range(REPEATS if once < LONG else FEWEST)]


def measure_costs(
    sizes: Sizes, ops: Ops, device: str, tell: Tell, format: str, limits: Mapping[str, Any] | None = None
) -> None:
    """Write one record per pass of one format: milliseconds, c(M), and shares of the machine's limits.

    "read_share": least seconds at the measured bandwidth (of a copy, which counts reading and writing), divided by the
    median seconds. "compute_share": the same with the rate of PyTorch's bf16 products. A "prefill" pass gives the TTFT.
    """
    forget(device)
    begin = time.perf_counter()
    subject = subject_of(sizes, get_shape(sizes.shape), format, ops, device)
    loaded = time.perf_counter() - begin
    known = None
    with attempted("shares of the limits", tell):  # measured again if the part "limits" did not finish
        known = Limits.from_dict(limits) if limits else machine.measure_limits(backends.num_threads(), 3, device)
    subject.seconds(passes(sizes)[0])
    shared = {"shape": sizes.shape, "format": format, "kv_format": subject.kv_format}
    base: dict[int, float] = {}
    walls: dict[Pass, float] = {}
    for job in passes(sizes):
        with attempted(f"{job.kind} of {job.rows} at {job.context}", tell):
            taken = timed(subject, job)
            ms = walls[job] = statistics.median(taken)
            if job.kind == "chain" and job.rows == 1:
                base[job.context] = ms
            of_one = base.get(job.context) if job.kind == "chain" else None  # missing if the one-row pass failed
            tell(
                {
                    "part": "costs", **shared, "kind": job.kind, "context": job.context, "rows": job.rows,
                    "ms": taken, "median_ms": ms, "c": None if of_one is None else ms / of_one,
                    "tokens_per_s": 1e3 * job.rows / ms, **shares(subject, job, known, ms),
                    "weight_bytes": subject.weight_bytes, "peak_bytes": memory.peak(device), "load_s": loaded,
                }
            )  # fmt: skip
    with attempted("the costs that goodput decides by", tell):
        tell_curve(subject, shared, tell)
    with attempted("passes as graphs", tell):
        tell_device(subject, device, [job for job in walls if job.kind != "prefill"], known, shared, tell)
    with attempted("the host's share", tell):
        tell_host(subject, device, walls, shared, tell)


def shares(subject: TimedModel, job: Pass, limits: Limits | None, ms: float) -> dict[str, float | None]:
    """The shares of the memory and compute limits that a pass of `ms` milliseconds reached; None without limits."""
    if limits is None:
        return {"read_share": None, "compute_share": None}
    work = subject.work(job)
    return {"read_share": 1e3 * work.memory_s(limits) / ms, "compute_share": 1e3 * work.compute_s(limits, "bf16") / ms}


def tell_curve(subject: TimedModel, shared: Mapping[str, Any], tell: Tell) -> None:
    """Record the cost curve that the policy goodput uses, as an engine measures it before serving."""
    curve = measure_curve(subject.runner, 1.0)
    points = [[int(m), 1e3 * s] for m, s in zip(curve.rows, curve.seconds)]
    more = {"ms_per_cached_token": 1e3 * curve.per_token, "ms_per_row_and_token": 1e3 * curve.per_row}
    tell({"part": "goodput", **shared, "context": curve.context, "points_ms": points, **more})


class _Catch:
    """A stand-in for a model that keeps the batch instead of computing it."""

    batch: Batch

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def run(self, batch: Batch, cache: Any, captures: Any) -> tuple[Any, None, None]:
        self.batch = batch.without_chains().on(self.device)  # the form that passes by CUDA graphs use
        return None, None, None


@contextmanager
def forward_of(subject: TimedModel, job: Pass) -> Any:
    """A callable that runs only the model's forward pass, with its batch already on the device."""
    runner, model = subject.runner, subject.runner.model
    catch = runner.model = _Catch(model.device)  # type: ignore[assignment]
    try:
        subject.seconds(job)
    finally:
        runner.model = model
    yield lambda: model.forward(catch.batch, runner.cache)


def tell_host(
    subject: TimedModel, device: str, walls: Mapping[Pass, float], shared: Mapping[str, Any], tell: Tell
) -> None:
    """Record the share of a pass's time in which the device is idle, and the slowest kernels of the rest."""
    chains = [job for job in walls if job.kind == "chain"]
    chosen = [job for job in chains if job.context == chains[0].context and job.rows in (1, 8)]
    chosen += [job for job in walls if job.kind == "batch"] + [job for job in walls if job.kind == "prefill"][-1:]
    for job in chosen:
        with forward_of(subject, job) as forward:
            found = busy(forward, device)
        ms = 1e3 * found.seconds
        share = None if found.source == STAND_IN else 1 - ms / walls[job]
        tell(
            {
                "part": "host", **shared, "kind": job.kind, "context": job.context, "rows": job.rows,
                "device_ms": ms, "median_ms": walls[job], "host_share": share, "timed_by": found.source,
                "launches": sum(count for _, count in found.kernels.values()), "kernels": found.top(),
            }
        )  # fmt: skip


def tell_device(
    subject: TimedModel, device: str, jobs: list[Pass], limits: Limits | None, shared: Mapping[str, Any], tell: Tell
) -> None:
    """Record passes as CUDA graphs: the kernels' time without host launches, that is, the possible gain of graphs."""
    contexts = [job.context for job in jobs if job.kind == "chain"]
    base: dict[int, float] = {}
    for job in jobs:
        if job.kind == "chain" and job.context not in (min(contexts), max(contexts)):
            continue
        with forward_of(subject, job) as forward:
            seconds, how = device_time(forward, device)
        ms = 1e3 * seconds
        if job.kind == "chain" and job.rows == 1:
            base[job.context] = ms
        of_one = base.get(job.context) if job.kind == "chain" else None  # missing if there was no one-row pass
        tell(
            {
                "part": "device", **shared, "kind": job.kind, "context": job.context, "rows": job.rows,
                "median_ms": ms, "timed_by": how, "c": None if of_one is None else ms / of_one,
                **shares(subject, job, limits, ms),
            }
        )  # fmt: skip
