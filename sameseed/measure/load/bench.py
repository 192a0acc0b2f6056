"""The load test: all arms run interleaved over the same prompts and seeds, in a closed loop or an open one."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from sameseed.errors import ConfigError, say_once
from sameseed.fields import check_ranges, flag, within
from sameseed.measure.load import outcome, wire
from sameseed.measure.load.prompts import PromptSource, Shape, as_prompt
from sameseed.measure.load.wire import Endpoint, Exchange
from sameseed.measure.usage import Meter

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
B = TypeVar("B")


@dataclass(frozen=True)
class LoadLevel:
    """A load: `concurrency` clients (closed loop), or `rate` requests per second with `burstiness` (open loop)."""

    concurrency: int | None = within(None, 1)
    rate: float | None = within(None, 0, above=True)
    burstiness: float = within(1.0, 0, above=True)

    def __post_init__(self) -> None:
        said = {"rate": "--rates", "burstiness": "--burstiness (1 is a Poisson process)"}
        check_ranges(self, lambda name: said.get(name, flag(name)))
        if (self.concurrency is None) == (self.rate is None):
            raise ConfigError("a level is a number of clients or a rate; give one of them")

    @property
    def label(self) -> str:
        return f"{self.concurrency}" if self.rate is None else f"{self.rate:g}/s"


def arrivals(level: LoadLevel, count: int, seed: int, seconds: float | None = None) -> list[float]:
    """Arrival times of an open-loop level, in seconds after the start: `count` of them, or those before `seconds`.

    Gaps follow a gamma distribution with shape `burstiness` and mean 1 / rate. A `burstiness` of 1 gives a Poisson
    process; lower values are burstier, higher values more regular.
    """
    assert level.rate is not None
    gaps = np.random.default_rng(seed).gamma(level.burstiness, 1 / (level.rate * level.burstiness), count)
    moments = [0.0, *np.cumsum(gaps).tolist()][:count]
    return moments if seconds is None else [moment for moment in moments if moment < seconds]


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


WRONG = {f"HTTP {code}" for code in (400, 401, 403, 404, 405, 413, 415, 422)}  # asked again, they come again


@dataclass(frozen=True)
class LoadSettings:
    """Settings of a load test. Raises ConfigError for a value out of range."""

    shapes: tuple[Shape, ...]
    levels: tuple[LoadLevel, ...]
    prompts: str = "text"
    sampling: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    seed: int = 1
    num_requests: int | None = within(None, 1)  # None: four per client, at least eight
    max_seconds: float | None = within(None, 0, above=True)  # of one run of an arm; then nothing more is sent
    warm_up: int = within(2, 0)
    repeat: int = within(3, 1)
    ttft_slo: float | None = None  # seconds
    tpot_slo: float | None = None
    timeout: float = within(600.0, 0, above=True)
    max_retries: int = within(5, 0)
    strict: bool = False
    fit: bool = False  # scale all shapes down if the longest does not fit the server's context

    def __post_init__(self) -> None:
        check_ranges(self, flag)

    def count(self, level: LoadLevel) -> int:
        """Number of requests in one repetition at a level."""
        return self.num_requests or max(8, 4 * (level.concurrency or 8))


@dataclass
class Repetition:
    """The results of one arm in one repetition."""

    outcomes: list[Exchange]
    summary: dict[str, Any]


class LoadBench:
    """Runs all arms, shapes and levels over one HTTP client with persistent connections."""

    def __init__(self, client: httpx.AsyncClient, arms: Seq[Endpoint], settings: LoadSettings) -> None:
        self.client, self.arms, self.settings = client, list(arms), settings
        self.max_model_len: int | None = None
        self.pids: Mapping[str, int] = {}  # process ids of local servers, by arm label: their CPU use is measured
        self._source: PromptSource | None = None
        self._salt = f"bench {time.time_ns()}"

    async def prepare(self) -> None:
        """Ask the servers for their models, and check that they read the field `speculation`. Raises ConfigError."""
        if self.settings.strict and len({arm.url for arm in self.arms}) < len(self.arms):
            raise ConfigError(
                "with --strict no request has a cache_salt, so that each arm would find the other's prompts in the "
                "server's prefix cache; leave --strict out, or compare two servers with --baseline-url"
            )
        self.arms = [await self._known(arm) for arm in self.arms]
        self._source = PromptSource(self.client, self.arms[0], self.settings.prompts)
        await self._source.open()
        self._check_lengths()
        for endpoint in (arm for arm in self.arms if "speculation" in arm.fields):
            text = as_prompt("one two three " * 4, endpoint.chat)
            text |= {} if self.settings.strict else {"ignore_eos": True}  # an answer that ends at once tells nothing
            body = self._body(endpoint, Shape(None, 24), text, 0, self._salt)
            found = outcome.read(await self._send(endpoint, body))
            if found.error is not None and "speculation" not in found.detail:
                raise ConfigError(f"{endpoint.url} answers a first request with: {found.error}: {found.detail}")
            drafted_though_off = endpoint.fields["speculation"] == "off" and found.speculation is not None
            if found.error is not None or "speculative_decoding" not in found.metrics or drafted_though_off:
                raise ConfigError(
                    f"{endpoint.url} does not read the field 'speculation'; start a second server without speculation "
                    "and give its address with --baseline-url"
                )

    def _check_lengths(self) -> None:
        """Raise ConfigError if a shape needs more than the server's context; with `fit` scale all shapes instead."""
        longest = max(self.settings.shapes, key=lambda shape: shape.needed)
        if self.max_model_len is None or longest.needed <= self.max_model_len:
            return
        factor = math.floor(980 * self.max_model_len / longest.needed) / 1000  # 2 % less, for what a template adds
        if not self.settings.fit:
            raise ConfigError(
                f"{longest.label} needs {longest.needed} tokens and the server's context is {self.max_model_len}; "
                f"give --scale {factor:g}, or shorter --lengths"
            )
        say_once(f"the server's context is {self.max_model_len} tokens: all lengths are scaled by {factor:g}")
        self.settings = replace(self.settings, shapes=tuple(shape.scaled(factor) for shape in self.settings.shapes))

    @property
    def tokenized(self) -> bool:
        """Whether prompts have exact token counts (the server tokenizes)."""
        return self._source is not None and bool(self._source.tokens)

    async def _known(self, endpoint: Endpoint) -> Endpoint:
        """The endpoint completed with the model's name and speculation. Raises ConfigError if there is no server."""
        await wire.await_ready(self.client, endpoint.url)
        chosen = await wire.introduce(self.client, endpoint)
        limit, about = chosen.get("max_model_len"), chosen.get("speculation")
        if isinstance(limit, int):
            self.max_model_len = min(limit, self.max_model_len or limit)
        model = endpoint.model or str(chosen.get("id", ""))
        return replace(endpoint, model=model, speculation=about if isinstance(about, dict) else None)

    def _body(
        self, endpoint: Endpoint, shape: Shape, prompt: Mapping[str, Any], seed: int, salt: str
    ) -> dict[str, Any]:
        """The body of a request. `salt` keeps it from using other requests' entries in the server's prefix cache."""
        own = {"return_token_ids": True, "cache_salt": salt, "cache_prompt": False}  # fields that OpenAI lacks
        return {
            "model": endpoint.model,
            **prompt,
            "max_tokens": shape.num_output,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.settings.sampling,
            **({} if self.settings.strict else own),
            **endpoint.fields,
        }

    def _send(self, endpoint: Endpoint, body: Mapping[str, Any], due: float | None = None) -> Awaitable[Exchange]:
        return wire.exchange(self.client, endpoint, body, self.settings.timeout, self.settings.max_retries, due)

    async def measure(self, shape: Shape, level: LoadLevel, tick: Callable[..., None]) -> dict[str, list[Repetition]]:
        """The repetitions of each arm, by label. Raises ConfigError if a server refuses all requests as wrong (4xx)."""
        found: dict[str, list[Repetition]] = {arm.label: [] for arm in self.arms}
        for arm in self.arms:
            if self.settings.warm_up:
                await self._run(arm, shape, level, -1, self.settings.warm_up)
        for number in range(self.settings.repeat):
            # Alternate the order: drift within a repetition would otherwise favour the same arm each time.
            for arm in self.arms if number % 2 == 0 else reversed(self.arms):
                found[arm.label].append(await self._run(arm, shape, level, number, self.settings.count(level)))
                tick(note=f"{level.label} {arm.label}")
        return found

    async def _run(self, arm: Endpoint, shape: Shape, level: LoadLevel, number: int, count: int) -> Repetition:
        """Run one arm once. The prompts and seeds of a repetition are the same for all arms."""
        s, pid, send = self.settings, self.pids.get(arm.label), partial(self._send, arm)
        seed = f"{s.seed} {shape.label} {level.label} {number}"
        assert self._source is not None, "prepared"
        made = await self._source.make(shape, count, seed)
        salt = f"{self._salt} {arm.label} {seed}"
        bodies = [self._body(arm, shape, prompt, s.seed + i, f"{salt} {i}") for i, prompt in enumerate(made)]
        meter = None if pid is None else Meter(pid)
        before = outcome.counters(await wire.page(self.client, f"{arm.url}/metrics"))
        cpu, start = time.process_time(), time.perf_counter()
        late: float | None = None
        if level.concurrency is not None:
            sent = await closed(send, bodies, level.concurrency, s.max_seconds)
        else:
            sent, late = await opened(send, bodies, arrivals(level, count, s.seed, s.max_seconds))
        busy = (time.process_time() - cpu) / (time.perf_counter() - start)
        taken = None if meter is None else meter.read()
        outcomes = [outcome.read(e) for e in sent]
        if all((o.error or "") in WRONG for o in outcomes):
            first, remedy = outcomes[0], "" if s.strict else "; --strict sends OpenAI's fields only"
            raise ConfigError(f"{arm.url} refuses every request, with {first.error}: {first.detail}{remedy}")
        told = outcome.acceptance((o.speculation for o in outcomes if o.speculation), outcome.ANSWERED, "answers")
        if told is None and not any("speculative_decoding" in o.metrics for o in outcomes):
            after = outcome.counters(await wire.page(self.client, f"{arm.url}/metrics"))
            if len(after) == len(outcome.COUNTERS):  # these counters include other clients' requests
                gained = {name: value - before.get(name, 0.0) for name, value in after.items()}
                told = outcome.acceptance([gained], outcome.COUNTERS, "/metrics")
        summary = outcome.summarize(outcomes, s.ttft_slo, s.tpot_slo)
        summary |= {"acceptance": told, "generator_cpu": busy, "late_ms": None if late is None else late * 1e3}
        if taken is not None:
            summary["usage"] = taken.as_dict(summary["num_output_tokens"])
        return Repetition(outcomes, summary)
