"""The profiler: loads a shape in several formats and interleaves timed passes, so that drift affects all alike."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence as Seq
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sameseed import devices, ops
from sameseed.cost.experts import counted
from sameseed.errors import ConfigError, ModelLoadError, nearest
from sameseed.measure import shapes, usage
from sameseed.measure.costs import BatchDecode, Cost, Prefill, Profile, Report, ShapeCosts, StoredModel
from sameseed.measure.limits import Limits, measure_limits
from sameseed.measure.passes import Pass, PassWork, ProfileGrid, TimedModel, cache_bytes
from sameseed.measure.shapes import get_shape, shape_as_dict
from sameseed.memory import available_memory
from sameseed.models.config import ModelConfig
from sameseed.models.head_config import is_head
from sameseed.models.loader import load_model, open_checkpoint, read_config, resolve_model, target_scheme
from sameseed.models.synthetic import RandomCheckpoint, random_model
from sameseed.models.weights import dense_format, expected_shapes, weight_bytes
from sameseed.report import record
from sameseed.scheme import QuantScheme, cache_format

MIN_REPEATS = 3
OVERDRAFT = 3.0  # after this many times the budget, and PATIENCE, one run of each pass is enough
PATIENCE = 30.0  # seconds
SLOW = 1.0  # seconds: the warm-up run of a slower pass counts as a sample
CURVE_SHARE = 0.7  # of the time budget, for the cost curve; the rest is for prefill and batch passes
LOADING_BYTES = 512 << 20  # generous bound on the memory that loading needs besides the weights


Visit = tuple[dict[Pass, list[float]], TimedModel, Pass]  # where the seconds go, the model, the pass


class Candidate:
    """A shape or a model in one format: what to load, and later the measurements."""

    def __init__(self, grid: ProfileGrid, role: str, config: ModelConfig, folder: Path | None, format: str) -> None:
        """`role`: "target" or "draft". `folder` None: random weights. Raises ConfigError for a context too long."""
        self.role, self.config, self.folder, self.format = role, config, folder, format
        self.chains, self.others = grid.passes(config, role)
        self.passes = self.chains + self.others
        self.quant = QuantScheme.parse(format)
        if role == "target":  # as an engine stores it
            self.quant = self.quant.with_head() if folder is None else target_scheme(format, folder)
        with nullcontext(RandomCheckpoint(config)) if folder is None else open_checkpoint(folder) as source:
            if not isinstance(source, RandomCheckpoint):
                source.check(config)
            self.num_bytes = weight_bytes(config, source, self.quant, device=grid.device)  # and the cache; estimated
            dense = dense_format(source, self.quant, expected_shapes(config))
        self.num_bytes += cache_bytes(config, cache_format(grid.kv_format, dense), self.passes)
        self.samples: dict[Pass, list[float]] = {}  # seconds
        self.work: dict[Pass, PassWork] = {}
        self.stored: StoredModel | None = None


def _found(model: str) -> Path:
    try:
        folder = resolve_model(model)
    except ModelLoadError as error:
        raise ModelLoadError(f"{error}{nearest(model.lower(), shapes.NAMES)}") from None
    if is_head(folder):
        raise ConfigError(f"{model} is a draft head, no model by itself; `sameseed bench --drafts` measures it")
    return folder


class Profiler:
    """One profile measurement. The constructor checks the settings and the memory before anything is loaded."""

    def __init__(self, grid: ProfileGrid, shape: str | None = None, model: str | None = None) -> None:
        """`shape` is a name, `model` a folder or hub id; give exactly one. Raises what `profile` raises."""
        if (shape is None) == (model is None):
            raise ConfigError("give either a shape by name or a model, e.g. --shape llama-3.2-1b")
        self.grid = grid
        self.ops = ops.resolve(grid.backend, grid.device)
        self.names: dict[str, str] = {}  # by role
        self.candidates = self._candidates("target", shape, model, grid.formats)
        if grid.draft is not None:
            is_shape = grid.draft.lower() in (*shapes.SHAPES, "embedded")
            shape, model = (grid.draft, None) if is_shape else (None, grid.draft)
            self.candidates += self._candidates("draft", shape, model, grid.draft_formats)
        self.interleaved = self._fits_together()
        self.peak_memory = 0

    def _candidates(self, role: str, shape: str | None, model: str | None, formats: Seq[str]) -> list[Candidate]:
        """A shape or a model in each format."""
        folder = None if shape is not None else _found(model or "")
        config = get_shape(shape or "") if folder is None else counted(read_config(folder), folder)
        self.names[role] = (shape or "").lower() if folder is None else record.model_name(model or "")
        if role == "target" and self.grid.layers is not None:
            config = replace(config, num_layers=self.grid.layers, windows=config.windows[: self.grid.layers])
        return [Candidate(self.grid, role, config, folder, format) for format in formats]

    def _fits_together(self) -> bool:
        """Whether all formats fit in memory at once. Raises ConfigError if one does not even fit alone."""
        device = self.grid.device
        free = available_memory() - LOADING_BYTES if device == "cpu" else devices.memory_room(device)[1]
        for x in self.candidates:
            if x.num_bytes > free:
                raise ConfigError(
                    f"the {x.role} takes about {x.num_bytes / 2**30:.1f} GiB in {x.format} and "
                    f"{max(free, 0) / 2**30:.1f} GiB are free: take fewer bits a weight, a shorter context or a "
                    "smaller shape"
                )
        return sum(x.num_bytes for x in self.candidates) <= free

    def run(self, report: Report | None = None) -> Profile:
        """Measure and return the profile. A KeyboardInterrupt ends it early; re-raised if nothing was measured."""
        tell: Report = report or (lambda stage, done, total: None)
        threads = self.grid.threads or devices.native_threads()
        ops.set_num_threads(threads)
        here = record.machine()  # now, so that the recorded load is the load before this measurement
        tell("machine limits", 0, 1)
        limits = measure_limits(threads, device=self.grid.device)
        groups, interrupted = ([self.candidates] if self.interleaved else [[x] for x in self.candidates]), False
        try:
            for group in groups:
                self._measure(group, self.grid.seconds / len(groups), tell)
            tell("machine limits", 0, 1)
            limits = limits.merged(measure_limits(threads, device=self.grid.device))
        except KeyboardInterrupt:
            interrupted = True
            if not any(x.samples for x in self.candidates):
                raise
        found = {}
        for role, name in self.names.items():
            mine = [x for x in self.candidates if x.role == role]
            found[role] = results(shape_as_dict(name, mine[0].config), mine, limits)
        return Profile(
            **vars(found["target"]),
            limits=limits,
            machine=here,
            threads=threads,
            backend=self.ops.name,
            interleaved=self.interleaved,
            interrupted=interrupted,
            peak_memory_bytes=self.peak_memory,
            commit=record.commit(),
            date=record.now(),
            draft=found.get("draft"),
        )

    def _measure(self, group: Seq[Candidate], seconds: float, tell: Report) -> None:
        """Load a group of candidates and time their passes; the models are freed again."""
        gc.collect()
        loaded = [(x, self._load(x, tell)) for x in group]
        gc.disable()  # timings must not include a collection
        try:
            chains = [(x.samples, subject, job) for x, subject in loaded for job in x.chains]
            self._rounds(chains, seconds * CURVE_SHARE, "c(M)", tell)
            others = [(x.samples, subject, job) for x, subject in loaded for job in x.others]
            self._rounds(others, seconds * (1 - CURVE_SHARE), "prefill and batch", tell)
        finally:
            gc.enable()
        self.peak_memory = max(self.peak_memory, usage.peak(self.grid.device))

    def _load(self, x: Candidate, tell: Report) -> TimedModel:
        longest = max(job.context + job.new_tokens for job in x.passes)
        before = usage.resident(self.grid.device)
        usage.reset_peak(self.grid.device)
        start, progress = time.perf_counter(), partial(tell, f"loading {x.format}")
        progress(0, 1)
        if x.folder is None:
            model = random_model(x.config, self.ops, x.quant, longest, device=self.grid.device, progress=progress)
        else:
            model = load_model(x.folder, self.ops, x.quant, longest, self.grid.device, progress)
        took = time.perf_counter() - start
        subject = TimedModel(model, self.grid.kv_format, x.passes)
        subject.seconds(x.chains[-1])  # one pass before the peak is read, so that the peak includes scratch memory
        self.peak_memory = max(self.peak_memory, usage.peak(self.grid.device))
        x.work = {job: subject.work(job) for job in x.passes}
        x.stored = StoredModel(
            x.format,
            subject.kv_format,
            subject.weight_bytes,
            x.work[x.chains[0]].num_bytes,
            subject.runner.cache.nbytes,
            None,
            subject.peak,
            took,
            max(0, usage.peak(self.grid.device) - before),
        )
        return subject

    def _rounds(self, visits: Seq[Visit], seconds: float, stage: str, tell: Report) -> None:
        """Warm up, then run every pass once per round, until the time budget or the repeats are used up."""
        for i, (samples, subject, job) in enumerate(visits):
            tell(f"{stage}, warm-up", i, len(visits))
            took = subject.seconds(job)
            if took > SLOW:  # a warm-up makes no visible difference here, and a second run would be expensive
                samples[job] = [took]
        start = time.perf_counter()
        for done in range(self.grid.repeats):
            spent = time.perf_counter() - start
            least = MIN_REPEATS if spent < max(OVERDRAFT * seconds, PATIENCE) else 1
            enough = all(len(samples.get(job, ())) >= least for samples, _, job in visits)
            if not visits or (enough and spent * (done + 1) / max(done, 1) > seconds):
                break
            expected = max(spent, min(seconds, spent / done * self.grid.repeats) if done else seconds)
            for i in range(len(visits)):
                samples, subject, job = visits[(i + done) % len(visits)]  # the first pass of a round rotates
                tell(stage, min(time.perf_counter() - start, expected), expected)
                took = subject.seconds(job)
                samples.setdefault(job, []).append(took)


def results(shape: Mapping[str, Any], candidates: Seq[Candidate], limits: Limits) -> ShapeCosts:
    """The measurements of a shape in each format, from the seconds of every pass."""
    costs, prefill, batch, stored = list[Cost](), list[Prefill](), list[BatchDecode](), list[StoredModel]()
    for x in candidates:
        if x.stored is None:
            continue
        names = (x.format, x.stored.kv_format)
        bandwidth = None
        for job, seconds in sorted(x.samples.items(), key=lambda item: (item[0].context, item[0].rows)):
            p10, ms, p90 = (np.quantile(seconds, (0.1, 0.5, 0.9)) * 1e3).tolist()
            memory_ms = x.work[job].memory_s(limits) * 1e3
            compute_ms = x.work[job].compute_s(limits, x.stored.peak) * 1e3
            timing: dict[str, Any] = {"ms": ms, "p10": p10, "p90": p90, "repeats": len(seconds)}
            speed = job.rows / ms * 1e3
            if job.kind == "prefill":
                prefill.append(Prefill(*names, job.rows, **timing, tokens_per_s=speed, peak_share=compute_ms / ms))
            elif job.kind == "batch":
                batch.append(BatchDecode(*names, job.context, job.rows, **timing, tokens_per_s=speed))
            elif (one := x.samples.get(replace(job, rows=1))) is not None:
                timing |= {"c": ms / (float(np.median(one)) * 1e3), "memory_ms": memory_ms, "compute_ms": compute_ms}
                costs.append(Cost(*names, job.context, job.rows, **timing))
                if job == x.chains[0]:
                    bandwidth = memory_ms / ms
        peak = x.stored.peak if x.stored.peak in limits.rates else "fp32"
        stored.append(replace(x.stored, bandwidth_share=bandwidth, peak=peak))
    return ShapeCosts(shape, tuple(costs), tuple(prefill), tuple(batch), tuple(stored))


def profile(
    shape: str | None = None, *, model: str | None = None, report: Report | None = None, **grid: Any
) -> Profile:
    """Measure a shape by name (random weights) or a model (folder or hub id). `grid`: the fields of `ProfileGrid`.

    `report(stage, done, total)` is called on progress. Raises ConfigError, RegistryError or ModelLoadError before any
    work. A KeyboardInterrupt ends the measurement and returns the profile so far, marked `interrupted`; it is re-raised
    if nothing was measured.
    """
    return Profiler(ProfileGrid(**grid), shape, model).run(report)
