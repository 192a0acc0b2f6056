"""When requests are sent: by so many clients, each after its last answer (closed), or as they arrive (open)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence as Seq
from dataclasses import dataclass
from typing import TypeVar

from foretoken.errors import ConfigError

T = TypeVar("T")
B = TypeVar("B")


@dataclass(frozen=True)
class Level:
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


def arrivals(level: Level, count: int, seed: int) -> list[float]:
    """Seconds after the start at which requests of an open level arrive.

    Gaps follow a gamma distribution of shape `burstiness` and mean 1 / rate: 1 is a Poisson process, less is burstier,
    more is more even.
    """
    assert level.rate is not None
    noise = random.Random(f"arrivals {seed}")
    moments, now = [], 0.0
    for _ in range(count):
        moments.append(now)
        now += noise.gammavariate(level.burstiness, 1 / (level.rate * level.burstiness))
    return moments


async def closed(send: Callable[[B], Awaitable[T]], bodies: Seq[B], concurrency: int) -> list[T]:
    """Answers in the order of `bodies`; each client sends its next request when it has its answer."""
    results: dict[int, T] = {}
    waiting = iter(enumerate(bodies))

    async def client() -> None:
        for index, body in waiting:
            results[index] = await send(body)

    await asyncio.gather(*(client() for _ in range(min(concurrency, len(bodies)))))
    return [results[i] for i in range(len(bodies))]


async def opened(
    send: Callable[[B, float], Awaitable[T]], bodies: Seq[B], moments: Seq[float]
) -> tuple[list[T], float]:
    """Answers in the order of `bodies`, each sent at its moment; and by how much the latest was sent too late, in s.

    `send` is told when each was due, by `time.perf_counter`.
    """
    start = time.perf_counter()
    late = 0.0
    tasks = []
    for body, moment in zip(bodies, moments, strict=True):
        ahead = start + moment - time.perf_counter()
        await asyncio.sleep(max(0.0, ahead))
        late = max(late, time.perf_counter() - start - moment)
        tasks.append(asyncio.ensure_future(send(body, start + moment)))
    return list(await asyncio.gather(*tasks)), late
