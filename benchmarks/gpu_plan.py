"""The plan of `make bench-gpu`: what to measure, the memory needed and each part's time, decided before work starts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from sameseed.errors import ConfigError
from sameseed.measure.passes import Pass, cache_bytes
from sameseed.models.config import ModelConfig
from sameseed.models.synthetic import RandomCheckpoint
from sameseed.models.weights import weight_bytes
from sameseed.scheme import QuantScheme

GIB = 2**30
KINDS = ("compiling", "limits", "costs", "micro", "speculation", "large", "transformers")  # in order of importance
WARM_BYTES = 8 * GIB  # memory of a process that compiles: one layer, embedding and head, a CUDA context


@dataclass(frozen=True)
class Sizes:
    """Shapes by name, formats, and the passes of a run. `seconds`: time of each kind of part ("costs": per format)."""

    shape: str
    draft_shape: str
    large_shape: str
    formats: tuple[str, ...]
    large_format: str
    kv_formats: tuple[str, ...]
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    batch_context: int
    prompts: tuple[int, ...]
    max_tokens: int
    num_prompts: int
    workspace: int
    minutes: float
    seconds: Mapping[str, float]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sizes:
        """The inverse of `asdict`, also after a round trip through JSON."""
        given: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in data.items()}
        return cls(**given)


# All parts end before `minutes`. Formats are in order of importance.
FULL = Sizes(
    shape="llama-3.1-8b",
    draft_shape="llama-3.2-1b",
    large_shape="llama-3.1-70b",
    formats=("w4a16", "bf16", "fp8-a8", "w8a8", "w4a8-qoq"),
    large_format="w4a16",
    kv_formats=("bf16", "fp8_e4m3", "int8"),
    rows=(1, 2, 4, 8, 16, 32, 64),
    contexts=(512, 8192, 32768),
    batches=(1, 4, 16, 64),
    batch_context=1024,
    prompts=(128, 2048),
    max_tokens=64,
    num_prompts=4,
    workspace=2 * GIB,
    minutes=8.5,
    seconds=dict(zip(KINDS, (60, 8, 18, 35, 30, 42, 24))),
)
DRY = Sizes(
    shape="embedded",
    draft_shape="embedded",
    large_shape="embedded",
    formats=("w4a16", "bf16"),
    large_format="w4a16",
    kv_formats=("bf16", "int8"),
    rows=(1, 2, 8),
    contexts=(32, 96),
    batches=(1, 4),
    batch_context=32,
    prompts=(16,),
    max_tokens=12,
    num_prompts=2,
    workspace=0,
    minutes=4.0,
    seconds=dict(zip(KINDS, (5, 20, 15, 10, 25, 25, 40))),
)


@dataclass(frozen=True)
class Part:
    """One part of the run, measured in its own process. `arguments`: of its function, besides the common ones."""

    kind: str
    name: str
    seconds: float
    arguments: Mapping[str, Any] = field(default_factory=dict)


def parts(sizes: Sizes, kinds: Seq[str]) -> list[Part]:
    """The parts of a run after `compiling`, in order of importance, because late parts are cut when time runs out."""
    s = sizes.seconds
    found = [Part("limits", "limits", s["limits"])]
    found += [Part("costs", f"costs of {f}", s["costs"], {"format": f}) for f in sizes.formats]
    found += [Part("micro", "micro", s["micro"])]
    spoken = list(dict.fromkeys((sizes.large_format, "bf16")))
    found += [Part("speculation", f"speculation in {f}", s["speculation"], {"format": f}) for f in spoken]
    found += [Part("large", "large", s["large"])]
    found += [Part("transformers", "transformers", s["transformers"])]
    return [p for p in found if p.kind in kinds]


def warm_ups(sizes: Sizes, kinds: Seq[str]) -> list[dict[str, Any]]:
    """Jobs that compile the kernels of all parts, each in its own process.

    One layer of each shape comes first, then the speculation parts, most of whose kernels are compiled by then.
    """
    jobs: list[dict[str, Any]] = []
    spoken = tuple(dict.fromkeys((sizes.large_format, "bf16")))
    if {"costs", "micro"} & set(kinds):
        jobs += [{"kind": "warm", "format": f} for f in sizes.formats]
    if "large" in kinds:
        jobs.append({"kind": "warm", "format": sizes.large_format, "shape": sizes.large_shape})
    if "speculation" in kinds:
        jobs += [{"kind": "warm", "format": f, "shape": sizes.draft_shape} for f in spoken]
    if "speculation" in kinds:
        jobs += [{"kind": "speculation", "format": f, "warm": True} for f in spoken]
    if "large" in kinds:
        jobs.append({"kind": "large", "warm": True})
    return jobs


def passes(sizes: Sizes) -> list[Pass]:
    """All passes of one format: chains as in verification, decode batches, prefills."""
    found = [Pass("chain", context, rows) for context in sizes.contexts for rows in sizes.rows]
    found += [Pass("batch", sizes.batch_context, batch) for batch in sizes.batches]
    return found + [Pass("prefill", 0, length) for length in sizes.prompts]


def check_memory(sizes: Sizes, shape: ModelConfig, format: str, kv_format: str, free: int) -> dict[str, int]:
    """Bytes that one format's part needs: weights, cache, workspace. Raises ConfigError if they are not free."""
    weights = weight_bytes(shape, RandomCheckpoint(shape), QuantScheme.parse(format))
    cache = cache_bytes(shape, kv_format, passes(sizes))
    needed = {"weights": weights, "cache": cache, "workspace": sizes.workspace}
    if sum(needed.values()) <= free:
        return needed
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in needed.items())
    raise ConfigError(
        f"{sizes.shape} in {format} takes {sum(needed.values()) / GIB:.1f} GiB ({parts}) and {free / GIB:.1f} GiB are "
        "free: set --batches and --contexts, or name a smaller --shape or other --formats"
    )


def twin_bytes(shape: ModelConfig, draft: ModelConfig, format: str, workspace: int) -> int:
    """Bytes of the twins of a target and a draft, plus `workspace`, which covers their small caches."""
    quant = QuantScheme.parse(format)
    return workspace + sum(weight_bytes(x, RandomCheckpoint(x), quant) for x in (shape, draft))


@dataclass
class Clock:
    """The time budget of a whole run, divided among the parts. `left_out`: what was not measured, and why."""

    minutes: float
    left_out: list[dict[str, str]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Seconds until the run must end."""
        return 60 * self.minutes - (time.monotonic() - self.started)

    def share(self, part: Part, later: Seq[Part]) -> float:
        """Seconds for a part: its planned time, plus up to as much again of unused time. 0: no time left."""
        spare = self.left() - part.seconds - sum(p.seconds for p in later)
        given = min(part.seconds + min(max(spare, 0.0), part.seconds), self.left())
        return given if given > 1 else 0.0

    def omit(self, what: str, why: str) -> None:
        """Record and print that something was not measured, and why."""
        self.left_out.append({"what": what, "why": why})
        print(f"  left out: {what}: {why}", flush=True)


def numbers(text: str) -> tuple[int, ...]:
    """Parse comma-separated whole numbers. Raises ConfigError."""
    try:
        found = tuple(int(x) for x in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ConfigError(f"{text!r} is no list of whole numbers from 1 on, such as 1,4,16")
    return found


def at_most(values: Seq[int], largest: int) -> tuple[int, ...]:
    """The values that are at most `largest`."""
    return tuple(v for v in values if v <= largest)
