"""When requests are sent: by a number of clients, each after its last answer (closed), or as they arrive (open)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence as Seq
from dataclasses import dataclass
from typing import TypeVar

from sameseed.errors import ConfigError

T = TypeVar("T")
B = TypeVar("B")


@dataclass(frozen=True)
class LoadLevel:
    """How hard: `concurrency` clients, or `rate` requests a second with this `burstiness`."""

    concurrency: int | None = None
    rate: float | None = None
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise ConfigError("a level is a number of clients or a rate; give one of them")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"--concurrency must be at least 1, got {self.concurrency}")
        if self.rate is not None and not self.rate > 0:
            raise ConfigError(f"--rates must be above 0 requests a second, got {self.rate}")
        if not self.burstiness > 0:
            raise ConfigError(f"--burstiness must be above 0 (1 is a Poisson process), got {self.burstiness}")

    @property
    def label(self) -> str:
        return f"{self.concurrency}" if self.rate is None else f"{self.rate:g}/s"


def arrivals(level: LoadLevel, count: int, seed: int, seconds: float | None = None) -> list[float]:
    """Seconds after the start at which requests of an open level arrive: `count`, or those of the first `seconds`.

    Gaps follow a gamma distribution of shape `burstiness` and mean 1 / rate: 1 is a Poisson process, less is burstier,
    more is more even.
    """
    assert level.rate is not None
    noise = random.Random(f"arrivals {seed}")
    moments, now = [], 0.0
    for _ in range(count):
        if seconds is not None and now >= seconds:
            break
        moments.append(now)
        now += noise.gammavariate(level.burstiness, 1 / (level.rate * level.burstiness))
    return moments


async def closed(
    send: Callable[[B], Awaitable[T]], bodies: Seq[B], concurrency: int, seconds: float | None = None
) -> list[T]:
    """Answers in the order of `bodies`; each client sends its next request when it has its answer.

    After `seconds` none is sent any more, and the answers are of the first bodies; each client sends one at least.
    """
    results: dict[int, T] = {}
    waiting, start = iter(enumerate(bodies)), time.perf_counter()

    async def client() -> None:
        for index, body in waiting:
            results[index] = await send(body)
            if seconds is not None and time.perf_counter() - start >= seconds:
                return

    await asyncio.gather(*(client() for _ in range(min(concurrency, len(bodies)))))
    return [results[i] for i in range(len(results))]


async def opened(
    send: Callable[[B, float], Awaitable[T]], bodies: Seq[B], moments: Seq[float]
) -> tuple[list[T], float]:
    """Answers in the order of `bodies`, each sent at its moment; and by how much the latest was sent too late, in s.

    Of fewer moments than bodies, the first bodies are sent. `send` is told when each was due, by `time.perf_counter`.
    """
    start = time.perf_counter()
    late = 0.0
    tasks = []
    for body, moment in zip(bodies, moments, strict=False):  # fewer moments: the first bodies
        ahead = start + moment - time.perf_counter()
        await asyncio.sleep(max(0.0, ahead))
        late = max(late, time.perf_counter() - start - moment)
        tasks.append(asyncio.ensure_future(send(body, start + moment)))
    return list(await asyncio.gather(*tasks)), late
