"""Measures a group of arms, each in its own worker, interleaved, and converts the results to plain data."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from arms import Arm
from client import Client, WorkerError, busy_and_stolen_seconds

LOAD_TIMEOUT = 900.0
TIMEOUT = 300.0
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What to measure: passes over rows at a context, `rounds` times; prefill and batch decode, `slow_rounds` times."""

    threads: int = 2
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    context: int = 256
    prefill: int = 512
    batch: int = 16
    batch_context: int = 128
    batch_steps: int = 16
    rounds: int = 10
    slow_rounds: int = 2
    text_tokens: int = 64

    @property
    def max_len(self) -> int:
        """The most tokens of a sequence, with room for the engines' slack; a multiple of 64."""
        longest = max(self.context + 2 * max(self.rows), self.prefill, self.batch_context + self.batch_steps)
        return -(-(longest + 64) // 64) * 64

    def text_len(self, prompts: Seq[Seq[int]]) -> int:
        """The most tokens of a sequence for texts after these prompts; a multiple of 64."""
        return -(-(max(map(len, prompts)) + self.text_tokens + 64) // 64) * 64


@dataclass
class Result:
    """Results of one arm: seconds of each repetition by measurement, facts from loading (`about`), missing values.

    `missing`: by measurement, the reason why it is missing.
    """

    arm: Arm
    about: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    logits: list[float] | None = None
    peak_rss: int = 0
    foreign: list[float] = field(default_factory=list)  # CPU time of other processes in each turn, as share of one core
    texts: list[list[int]] = field(default_factory=list)  # token ids, one text per turn
    failed: bool = False


class Group:
    """Arms that are loaded together. `start(arm)` starts a worker; `say` gets progress messages."""

    loads = "load"

    def __init__(self, arms: Seq[Arm], plan: Plan, start: Callable[[Arm], Client], say: Say) -> None:
        self.plan = plan
        self.say = say
        self.start = start
        self.results = [Result(arm) for arm in arms]
        self.clients: dict[str, Client] = {}

    def run(self, load: Callable[[Arm], dict[str, Any]]) -> list[Result]:
        """Load all arms, measure them interleaved, end the workers. An arm that fails does not affect the others."""
        try:
            self._load(load)
            self._measure()
        finally:
            for client in self.clients.values():
                client.close()
        return self.results

    def _load(self, load: Callable[[Arm], dict[str, Any]]) -> None:
        for result in self.results:
            start = time.perf_counter()
            client = self.clients[result.arm.name] = self.start(result.arm)
            about = self._ask(result, client, self.loads, LOAD_TIMEOUT, "load", **load(result.arm))
            result.failed = about is None
            if about is None:
                self.say(f"{result.arm.name}: not measured ({result.missing['load']})")
                continue
            result.about = {**about, "seconds": time.perf_counter() - start}  # with process start and imports
            self._begin(result, client)
            gib = about["peak_rss_bytes"] / 2**30
            self.say(f"{result.arm.name}: loaded in {result.about['seconds']:.1f} s, {gib:.1f} GiB")

    def _begin(self, result: Result, client: Client) -> None:
        probe = self._ask(result, client, "probe", TIMEOUT, tokens=24, count=64)
        result.logits = probe["logits"] if probe else None

    def _measure(self) -> None:
        plan = self.plan
        for r in range(plan.rounds):
            self.say(f"round {r + 1} of {plan.rounds}")
            for i, rows in enumerate(plan.rows):
                for result in self._in_turn(r + i):
                    self._turn(result, f"rows {rows}", do="rows", rows=[rows], context=plan.context)
        for r in range(plan.slow_rounds):
            self.say(f"prefill and batch, round {r + 1} of {plan.slow_rounds}")
            for result in self._in_turn(r):
                self._turn(result, "prefill", do="prefill", tokens=plan.prefill)
            for result in self._in_turn(r + 1):
                self._turn(
                    result, "batch", do="batch", size=plan.batch, context=plan.batch_context, steps=plan.batch_steps
                )

    def _in_turn(self, first: int) -> list[Result]:
        """The arms that still run, rotated by `first`, so that no arm always has the same place in the order."""
        ready = [result for result in self.results if not result.failed]
        first %= max(len(ready), 1)
        return ready[first:] + ready[:first]

    def _turn(self, result: Result, what: str, do: str, **message: Any) -> dict[str, Any] | None:
        if what in result.missing:
            return None
        client = self.clients[result.arm.name]
        busy, start = _others(client), time.perf_counter()
        answer = self._ask(result, client, do, TIMEOUT, what, **message)
        if answer is None:
            return None
        result.foreign.append(max(0.0, _others(client) - busy) / (time.perf_counter() - start))
        seconds = answer["seconds"][0] if isinstance(answer["seconds"], list) else answer["seconds"]
        if not seconds > 0:  # an impossible time: better no value than a wrong one
            result.missing[what] = f"the engine told {seconds} s"
            result.seconds.pop(what, None)
            return None
        result.seconds.setdefault(what, []).append(seconds)
        result.peak_rss = answer["peak_rss_bytes"]
        return answer

    def _ask(
        self, result: Result, client: Client, do: str, timeout: float, what: str | None = None, **message: Any
    ) -> dict[str, Any] | None:
        """The worker's answer, or None with the reason in `missing`. An arm whose worker died is not asked again."""
        try:
            answer = client.ask(timeout, do=do, **message)
        except WorkerError as error:
            result.failed = True
            answer = {"error": str(error)}
        reason = answer.get("error") or answer.get("unsupported")
        if reason is None:
            return answer
        result.missing[what or do] = reason
        if do not in ("probe", self.loads):
            self.say(f"{result.arm.name}: no {what or do}: {reason}")
        return None


class TextGroup(Group):
    """Arms that generate texts after `prompts`, interleaved prompt by prompt; each starts with one untimed text."""

    loads = "load_writer"

    def __init__(
        self, arms: Seq[Arm], plan: Plan, start: Callable[[Arm], Client], say: Say, prompts: Seq[Seq[int]]
    ) -> None:
        super().__init__(arms, plan, start, say)
        self.prompts = prompts

    def _begin(self, result: Result, client: Client) -> None:
        self._ask(result, client, "write", TIMEOUT, "texts", **self._text(self.prompts[0]))

    def _text(self, prompt: Seq[int]) -> dict[str, Any]:
        return {"prompt": list(prompt), "count": self.plan.text_tokens}

    def _measure(self) -> None:
        for r in range(self.plan.slow_rounds):
            for i, prompt in enumerate(self.prompts):
                self.say(f"round {r + 1} of {self.plan.slow_rounds}, prompt {i + 1} of {len(self.prompts)}")
                for result in self._in_turn(r + i):
                    if answer := self._turn(result, "texts", do="write", **self._text(prompt)):
                        result.texts.append(answer["text"])


def _others(client: Client) -> float:
    """CPU seconds so far of all other processes (not this one, not the worker's), including stolen time."""
    busy, stolen = busy_and_stolen_seconds()
    mine = os.times()
    return busy + stolen - client.cpu_seconds() - mine.user - mine.system


def spread(values: Seq[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile (nearest rank)."""
    ordered = sorted(values)
    rank = [round(q * (len(ordered) - 1)) for q in (0.1, 0.9)]
    return {"median": median(ordered), "p10": ordered[rank[0]], "p90": ordered[rank[1]]}


def as_record(result: Result, plan: Plan, reference: Seq[float] | None) -> dict[str, Any]:
    """One arm as plain data for a record. `reference`: the logits with which the arm's logits are compared."""
    arm, seconds = result.arm, result.seconds
    found: dict[str, Any] = {
        "name": arm.name,
        "engine": arm.engine,
        "checkpoint": arm.checkpoint,
        "options": dict(arm.options),
        "versions": result.about.get("versions", {}),
        "settings": result.about.get("settings", {}),
        "load_s": result.about.get("seconds"),
        "peak_rss_bytes": result.peak_rss or result.about.get("peak_rss_bytes"),
        "logits_correlation": correlation(result.logits, reference),
        "foreign_cpu": round(median(result.foreign), 3) if result.foreign else None,
        "missing": result.missing,
        "rows": [
            {"rows": m, "ms": ms, **spread(ms)}
            for m in plan.rows
            if (ms := [1e3 * s for s in seconds.get(f"rows {m}", ())])
        ],
    }
    for what, tokens in (("prefill", plan.prefill), ("batch", plan.batch * plan.batch_steps)):
        rates = [tokens / s for s in seconds.get(what, [])]
        found[what] = {"tokens_per_s": rates, **spread(rates)} if rates else None
    return found


def texts_record(result: Result, results: Seq[Result]) -> dict[str, Any] | None:
    """An arm's texts for a record: seconds and tokens of each; None if it has no texts.

    "plain": comparison with the same engine without speculation (equal texts, speed-ups); None for an arm without
    speculation.
    """
    if "texts" not in result.seconds:
        return None
    arm, seconds = result.arm, result.seconds["texts"]
    rates = speeds(result)
    plain = next((r for r in results if "texts" in r.seconds and not r.arm.guesses and same_model(r.arm, arm)), None)
    told = {"seconds": seconds, "tokens": [len(text) for text in result.texts], "tokens_per_s": rates}
    found: dict[str, Any] = {**told, **spread(rates), "plain": None}
    if plain is not None and arm.guesses:
        same = [a == b for a, b in zip(result.texts, plain.texts)]
        faster = [mine / theirs for mine, theirs in zip(rates, speeds(plain))]
        found["plain"] = {"name": plain.arm.name, "same": sum(same), "texts": len(same), "faster": spread(faster)}
    return found


def speeds(result: Result) -> list[float]:
    """Tokens per second of each text, including the prefill; an empty text counts as one token."""
    return [max(len(text), 1) / s for text, s in zip(result.texts, result.seconds["texts"])]


def same_model(a: Arm, b: Arm) -> bool:
    """Whether two arms run the same checkpoint in the same engine and format."""
    return (a.engine, a.checkpoint, a.options.get("format")) == (b.engine, b.checkpoint, b.options.get("format"))


def correlation(a: Seq[float] | None, b: Seq[float] | None) -> float | None:
    """Pearson's correlation; None if either is missing, lengths differ, or a side is constant."""
    if a is None or b is None or len(a) != len(b) or not a:
        return None
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    x, y = [v - mean_a for v in a], [v - mean_b for v in b]
    norm = (sum(v * v for v in x) * sum(v * v for v in y)) ** 0.5
    return round(sum(p * q for p, q in zip(x, y)) / norm, 4) if norm else None
