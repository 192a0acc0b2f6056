"""What `make bench-gpu` measures, what that takes, and how long each part may take: decided before work starts."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from foretoken.errors import ConfigError
from foretoken.formats.scheme import QuantScheme
from foretoken.models.config import ModelConfig
from foretoken.models.synthetic import RandomCheckpoint
from foretoken.models.weights import weight_bytes
from foretoken.study.passes import Pass, cache_bytes

GIB = 2**30


@dataclass(frozen=True)
class Sizes:
    """Shapes by name, formats, and the passes of a run. `seconds`: of each part, whose sum is below `minutes`."""

    shape: str
    draft_shape: str
    large_shape: str
    formats: tuple[str, ...]
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    batch_context: int
    prompts: tuple[int, ...]
    max_tokens: int
    num_prompts: int
    workspace: int
    minutes: float
    seconds: dict[str, float]


# The costs are a part for each format; all together end before `minutes`, with room for the plot.
FULL = Sizes(
    shape="llama-3.1-8b",
    draft_shape="llama-3.2-1b",
    large_shape="llama-3.1-70b",
    formats=("bf16", "fp8-a8", "w4a16", "w8a8"),
    rows=(1, 2, 4, 8, 16, 32, 64),
    contexts=(512, 8192, 32768),
    batches=(1, 4, 16, 64),
    batch_context=1024,
    prompts=(128, 2048),
    max_tokens=96,
    num_prompts=4,
    workspace=2 * GIB,
    minutes=8.8,
    seconds={
        "limits": 10,
        "compiling": 60,
        "costs": 35,
        "transformers": 45,
        "vllm": 60,
        "speculation": 105,
        "large": 100,
    },
)
DRY = Sizes(
    shape="embedded",
    draft_shape="embedded",
    large_shape="embedded",
    formats=("bf16", "w4a16"),
    rows=(1, 2, 8),
    contexts=(32, 96),
    batches=(1, 4),
    batch_context=32,
    prompts=(16,),
    max_tokens=12,
    num_prompts=2,
    workspace=0,
    minutes=0.9,
    seconds={"limits": 5, "compiling": 3, "costs": 4, "transformers": 20, "vllm": 2, "speculation": 8, "large": 8},
)


def passes(sizes: Sizes) -> list[Pass]:
    """All passes of one format: chains that verification would run, batches of decoding, prompts."""
    found = [Pass("chain", context, rows) for context in sizes.contexts for rows in sizes.rows]
    found += [Pass("batch", sizes.batch_context, batch) for batch in sizes.batches]
    return found + [Pass("prefill", 0, length) for length in sizes.prompts]


def _cache(shape: ModelConfig, kv_format: str, *jobs: Pass) -> int:
    return cache_bytes(shape, kv_format, jobs)


def check_memory(sizes: Sizes, shape: ModelConfig, format: str, kv_format: str, free: int) -> dict[str, int]:
    """Bytes that one format's part will take: weights, cache, workspace.

    Raises ConfigError where they are not free, with the largest batch and the longest context that would fit.
    """
    weights = weight_bytes(shape, RandomCheckpoint(shape), QuantScheme.parse(format))
    jobs = passes(sizes)
    needed = {"weights": weights, "cache": _cache(shape, kv_format, *jobs), "workspace": sizes.workspace}
    if sum(needed.values()) <= free:
        return needed
    room = free - weights - sizes.workspace
    if room < _cache(shape, kv_format, Pass("batch", 1, 1)):
        raise ConfigError(
            f"weights of {sizes.shape} in {format} take {weights / GIB:.1f} GiB and {free / GIB:.1f} GiB are free: "
            "name a smaller --shape, or other --formats"
        )
    batch = _largest(lambda b: _cache(shape, kv_format, Pass("batch", sizes.batch_context, b)) <= room)
    context = _largest(lambda c: _cache(shape, kv_format, Pass("chain", c, max(sizes.rows))) <= room)
    raise ConfigError(
        f"{sizes.shape} in {format} takes {sum(needed.values()) / GIB:.1f} GiB and {free / GIB:.1f} GiB are free. The "
        f"largest that would fit: batches of {batch} at context {sizes.batch_context}, or contexts of {context} at "
        "batch 1; set --batches and --contexts"
    )


def twin_bytes(shape: ModelConfig, draft: ModelConfig, format: str, workspace: int) -> int:
    """Bytes that twins of a target and a draft in these shapes take; caches of some hundred tokens are workspace."""
    quant = QuantScheme.parse(format)
    return workspace + sum(weight_bytes(x, RandomCheckpoint(x), quant) for x in (shape, draft))


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest number up to a million for which `fits` holds; 0 for none."""
    low, high = 0, 1 << 20
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


class TimeUp(BaseException):  # no handler of faults on the way may swallow it
    """A part's time is over: what it measured stands, the rest is left out."""


@dataclass
class Clock:
    """The time of a whole run, shared out to parts. What got no time, or not enough, is in `left_out`."""

    minutes: float
    left_out: list[dict[str, str]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Seconds until the run must have ended."""
        return 60 * self.minutes - (time.monotonic() - self.started)

    def omit(self, what: str, why: str) -> None:
        """Say that something was not measured."""
        self.left_out.append({"what": what, "why": why})
        print(f"  left out: {what}: {why}", flush=True)

    @contextmanager
    def part(self, name: str, seconds: float) -> Iterator[float]:
        """Run a part for at most so many seconds; gives how many it has. An alarm ends it, an error is reported."""
        given = min(seconds, self.left())
        print(f"{name} (at most {max(given, 0):.0f} s)", flush=True)

        def ring(signum: int, frame: FrameType | None) -> None:
            raise TimeUp

        before = signal.signal(signal.SIGALRM, ring)
        try:
            signal.setitimer(signal.ITIMER_REAL, max(given, 1e-3))
            yield given
        except TimeUp:
            self.omit(
                name, f"its {given:.0f} s were over; what is recorded was done before" if given > 0 else "no time"
            )
        except Exception as error:  # one part's fault must not cost the others' numbers
            self.omit(name, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"[:300])
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers by commas. Raises ConfigError."""
    try:
        found = tuple(int(x) for x in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ConfigError(f"{text!r} is no list of whole numbers from 1 on, such as 1,4,16")
    return found


def at_most(values: Seq[int], largest: int) -> tuple[int, ...]:
    """Those of `values` that a model can take."""
    return tuple(v for v in values if v <= largest)
