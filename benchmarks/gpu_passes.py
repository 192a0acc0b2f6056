"""Parts of `make bench-gpu` with random weights: the device's limits, passes in each format, transformers' passes."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from gpu_models import forget, random_model
from gpu_sizes import Sizes

from sameseed import ops as backends
from sameseed.batch import Batch
from sameseed.measure import limits as machine, usage as memory
from sameseed.measure.limits import Limits
from sameseed.measure.passes import Pass, TimedModel
from sameseed.measure.shapes import SHAPES, get_shape
from sameseed.models.loader import resolve_model
from sameseed.models.save import source_config
from sameseed.ops import Ops
from sameseed.scheme import QuantScheme

Tell = Callable[[Mapping[str, Any]], None]  # writes one record
REPEATS, FEWEST, LONG = 7, 3, 0.4  # runs of a pass; of one that takes longer than so many seconds


@contextmanager
def attempted(what: str, tell: Tell) -> Iterator[None]:
    """Run one measurement of many: a failure is recorded and the next goes on. A fault of the device is re-raised."""
    try:
        yield
    except Exception as error:
        said = str(error)
        if "CUDA error" in said or ("[CUDA]" in said and "out of memory" not in said):
            raise
        tell({"omit": what, "why": f"{type(error).__name__}: {(said.strip().splitlines() or [''])[0]}"[:300]})
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def wall(job: Callable[[], object], device: str) -> float:
    """Seconds of a job, until the device has finished its work."""
    if device != "cpu":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    job()
    if device != "cpu":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def device_time(job: Callable[[], object], device: str) -> tuple[float, str]:
    """Median seconds of a job on the device as a CUDA graph, without the host; on the CPU its wall time."""
    if device == "cpu":
        return wall(job, device), "wall clock on the CPU: a stand-in"
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):  # warm-up: a capture must not compile or allocate anything
        job()
        job()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        job()
    graph.replay()
    return statistics.median(wall(lambda: [graph.replay() for _ in range(8)], device) / 8 for _ in range(5)), "graph"


def measure_limits(sizes: Sizes, ops: Ops, device: str, tell: Tell) -> None:
    """Measure the rates of PyTorch's copy and matrix products."""
    found = machine.measure_limits(backends.num_threads(), repeats=3, device=device).as_dict()
    tell({"part": "limits", **found})


def measure_costs(
    sizes: Sizes, ops: Ops, device: str, tell: Tell, format: str, limits: Mapping[str, Any] | None, warm: bool = False
) -> None:
    """Write one record per pass of one format: milliseconds, c(M), and shares of the machine's limits.

    "read_share": least seconds at the measured bandwidth over the median seconds; "compute_share": the same at the rate
    of PyTorch's bf16 products. A "prefill" pass gives the time to first token. Records of the part "device" have the
    pass without its host, as a CUDA graph. `warm`: only compile the kernels, with one layer.
    """
    forget(device)
    config, jobs = get_shape(sizes.shape), sizes.passes()
    config = replace(config, num_layers=1, windows=config.windows[:1]) if warm else config
    begin, longest = time.perf_counter(), max(p.context + p.new_tokens for p in jobs)
    subject = TimedModel(random_model(config, ops, QuantScheme.parse(format), longest, device), "auto", jobs)
    loaded = time.perf_counter() - begin
    if warm:
        for job in jobs:
            subject.seconds(job)
        return
    known = Limits.from_dict(limits) if limits else machine.measure_limits(backends.num_threads(), 3, device)
    shared = {"shape": sizes.shape, "format": format, "kv_format": subject.kv_format}
    of_one: dict[tuple[str, int], float] = {}  # by part and context: a pass over one row

    def record(part: str, job: Pass, median: float, **more: Any) -> None:
        if job.kind == "chain" and job.rows == 1:
            of_one[part, job.context] = median
        base, work = of_one.get((part, job.context)) if job.kind == "chain" else None, subject.work(job)
        shares = {
            "read_share": 1e3 * work.memory_s(known) / median,
            "compute_share": 1e3 * work.compute_s(known, "bf16") / median,
        }
        what = {"kind": job.kind, "context": job.context, "rows": job.rows, "median_ms": median}
        tell({"part": part, **shared, **what, "c": None if base is None else median / base, **shares, **more})

    subject.seconds(jobs[0])
    for job in jobs:
        with attempted(f"{job.kind} of {job.rows} at {job.context}", tell):
            once = subject.seconds(job)
            taken = [1e3 * subject.seconds(job) for _ in range(REPEATS if once < LONG else FEWEST)]
            more = {"weight_bytes": subject.weight_bytes, "peak_bytes": memory.peak(device), "load_s": loaded}
            median = statistics.median(taken)
            record("costs", job, median, ms=taken, tokens_per_s=1e3 * job.rows / median, **more)
    for job in (
        job for job in jobs if job.kind == "batch" or (job.kind == "chain" and job.context == min(sizes.contexts))
    ):
        with attempted(f"{job.kind} of {job.rows} as a graph", tell):
            seconds, how = device_time(forward_of(subject, job), device)
            record("device", job, 1e3 * seconds, timed_by=how)


def forward_of(subject: TimedModel, job: Pass) -> Callable[[], object]:
    """The model's forward pass alone, with its batch already on the device."""
    runner, model = subject.runner, subject.runner.model
    batches: list[Batch] = []

    def run(batch: Batch, *rest: Any) -> Any:
        batches.append(batch.without_chains().on(model.device))  # the form that passes by CUDA graphs use
        return type(model).run(model, batch, *rest)

    model.run = run  # type: ignore[method-assign]
    try:
        subject.seconds(job)
    finally:
        del model.run
    return lambda: model.run(batches[-1], runner.cache)


@torch.inference_mode()
def measure_transformers(sizes: Sizes, ops: Ops, device: str, tell: Tell) -> None:
    """Measure decode steps of transformers' own forward, in bf16 with sdpa attention, at the same shape."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    try:
        import transformers
    except ImportError:
        tell({"omit": "transformers", "why": "it is not installed"})
        return
    raw = dict(SHAPES[sizes.shape]) if sizes.shape in SHAPES else dict(source_config(resolve_model(sizes.shape)))
    config = transformers.AutoConfig.for_model("llama", **{k: v for k, v in raw.items() if k != "model_type"})
    with torch.device(device):
        make = transformers.AutoModelForCausalLM.from_config
        model = make(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    shared = {"part": "peers", "engine": "transformers", "version": transformers.__version__, "format": "bf16"}
    for batch in sorted(sizes.batches, key=lambda b: (b not in (1, 16), b)):
        cache = transformers.DynamicCache(config=config)
        ids = torch.randint(config.vocab_size, (batch, sizes.batch_context), device=device)
        model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        step = [1e3 * wall(lambda: model(ids[:, :1], past_key_values=cache, use_cache=True), device) for _ in range(24)]  # noqa: B023
        line = {"mode": "sdpa", "kind": "decode", "batch": batch, "context": sizes.batch_context, "ms": step[4:]}
        tell({**shared, **line, "median_ms": statistics.median(step[4:])})
