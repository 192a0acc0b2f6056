"""When requests are sent: by clients that wait for each answer (closed loop), or on a schedule (open loop)."""

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
    """A load: `concurrency` clients (closed loop), or `rate` requests per second with `burstiness` (open loop)."""

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
    """Arrival times of an open-loop level, in seconds after the start: `count` of them, or those before `seconds`.

    Gaps follow a gamma distribution with shape `burstiness` and mean 1 / rate. A `burstiness` of 1 gives a Poisson
    process; lower values are burstier, higher values more regular.
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
    """Closed loop: answers in the order of `bodies`. Each client sends its next request when it has its answer.

    After `seconds`, no more requests are sent, and only the first bodies have answers. Each client sends at least one.
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
    """Open loop: answers in the order of `bodies`, each sent at its time in `moments`; and the largest delay, in s.

    With fewer moments than bodies, only the first bodies are sent. `send` also gets the time at which its request was
    due, on the clock of `time.perf_counter`.
    """
    start = time.perf_counter()
    late = 0.0
    tasks = []
    for body, moment in zip(bodies, moments, strict=False):  # with fewer moments, only the first bodies
        ahead = start + moment - time.perf_counter()
        await asyncio.sleep(max(0.0, ahead))
        late = max(late, time.perf_counter() - start - moment)
        tasks.append(asyncio.ensure_future(send(body, start + moment)))
    return list(await asyncio.gather(*tasks)), late
