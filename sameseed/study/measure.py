"""Measuring: several ways to decode a workload take turns batch by batch, so that a drifting machine hits all alike."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from sameseed.engine.calibrate import LONG, measure_curve, measure_rounds
from sameseed.engine.engine import Engine
from sameseed.engine.levels import check_overlap
from sameseed.engine.llm import LLM
from sameseed.engine.overlap import make_overlap
from sameseed.engine.policies import make_policy
from sameseed.errors import RequestError
from sameseed.lengths._cost import Curve
from sameseed.models.loader import load_tokenizer, read_config, resolve_model
from sameseed.request import Completion, Request, SamplingParams, SpecMetrics, TimeSplit
from sameseed.spec.drafter import LengthPolicy, level_metrics
from sameseed.study.estimate import Prediction, RunCounts, draft_curve, predict
from sameseed.study.prompt_sets import Prompt
from sameseed.study.usage import Meter, Usage
from sameseed.study.workload import Arm, Workload, spec_as_dict

Job = tuple[tuple[int, ...], SamplingParams]
WARMUP_TOKENS = 16
GRAM = 8  # tokens
FIRST_STEPS = 24
SPARE = 64  # tokens of a context beyond prompt and text, for drafts


@dataclass
class Run:
    """One pass of one arm over a workload. `overhead` is what neither model's passes explain; times in seconds."""

    seconds: float = 0.0
    num_steps: int = 0
    times: TimeSplit = field(default_factory=TimeSplit)
    metrics: SpecMetrics = field(default_factory=SpecMetrics)
    levels: dict[str, SpecMetrics] = field(default_factory=dict)  # of the drafters below, where they are counted apart
    completions: list[Completion] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)  # of the machine
    first_steps: list[TimeSplit] = field(default_factory=list)  # what each of them took

    @property
    def num_tokens(self) -> int:
        return sum(len(c.token_ids) for c in self.completions)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def overhead(self) -> float:
        return self.seconds - self.times.target - self.times.draft

    def counted(self, batch_size: int) -> RunCounts:
        """What a prediction needs to know of it; `batch_size`: completions that ran together."""
        done = self.completions
        batches = [done[i : i + batch_size] for i in range(0, len(done), batch_size)]
        prefill = sum(max(c.metrics.time_to_first_token for c in batch) for batch in batches)
        context = sum(c.metrics.num_prompt_tokens + c.metrics.num_output_tokens / 2 for c in done) / max(1, len(done))
        steps, rounds = max(1, self.num_steps - len(batches)), max(1, self.metrics.num_rounds - len(done))
        return RunCounts(self.metrics, steps, rounds, self.seconds, prefill, self.times.draft, self.overhead, context)

    @property
    def repeated(self) -> float | None:
        """Share of the texts' 8-grams that their own text had before; None where no text has eight tokens."""
        grams = [[text[i : i + GRAM] for i in range(len(text) - GRAM + 1)] for text in self.texts]
        whole = sum(map(len, grams))
        return 1 - sum(len(set(g)) for g in grams) / whole if whole else None

    @property
    def draft_lengths(self) -> list[int]:
        """How many rounds drafted 0, 1, 2, ... tokens."""
        told = [c.metrics.spec for c in self.completions]
        counts = Counter(drafted for spec in told for drafted, _ in spec.rounds or ())
        counts[0] = sum(spec.num_rounds - spec.num_drafts for spec in told)
        return [counts[n] for n in range(max(counts) + 1)]

    @property
    def texts(self) -> list[tuple[int, ...]]:
        return [c.token_ids for c in self.completions]


def fitted(model: str, settings: dict[str, Any], prompts: Seq[Prompt], max_tokens: int) -> dict[str, Any]:
    """`settings` of LLM for these prompts: on a GPU, where no context is asked for, one that holds what is measured.

    An engine by itself may take all that is left of a GPU for its cache, so that the next one (a Bench loads one a
    drafter) would find nothing. Raises ModelLoadError.
    """
    sizes = (settings.get(name) for name in ("max_model_len", "num_blocks"))
    if settings.get("device", "cpu") == "cpu" or any(size is not None for size in sizes):
        return settings
    folder = resolve_model(model)
    tokenizer = load_tokenizer(folder)
    longest = max((len(p.encode(tokenizer)) + max_tokens * (1 + len(p.then)) for p in prompts), default=0) + SPARE
    return {**settings, "max_model_len": min(read_config(folder).max_model_len, max(longest, LONG + SPARE))}


class Bench:
    """One loaded target that changes its drafter between batches; its own memory and cache serve every arm."""

    def __init__(self, model: str, arms: Seq[Arm], settings: dict[str, Any], load: Callable[..., LLM] = LLM) -> None:
        """`settings` are keyword arguments of LLM, without `draft`; `load` makes an LLM. Raises what LLM raises.

        On a GPU they say how long a context may be (`fitted`), or the first engine's cache leaves no room for the next.
        No prefix is remembered: the arms write the same texts, and all but the first would find the prompts there.
        """
        settings = {**settings, "prefix_cache": False}
        self.arms = list(arms)
        self._engines: dict[object, Engine] = {}  # by drafter; they share the target and its cache
        self._policies: dict[Arm, LengthPolicy] = {}
        self._answers: dict[tuple[tuple[int, ...], str], str] = {}  # to earlier turns
        self._target: Curve | None = None  # costs of passes, for predictions
        self._curves: dict[object, Curve | None] = {}  # of draft models
        self._aheads = {arm.spec.overlap: make_overlap(arm.spec) for arm in arms}
        for arm in arms:
            check_overlap(arm.spec)
        self.llm = load(model, None, **settings)
        for arm in arms:
            if not arm.plain and _key(arm) not in self._engines:
                given = {**settings, "target": self.llm.engine.runner}
                self._engines[_key(arm)] = load(model, arm.spec, **given).engine

    def install(self, arm: Arm) -> Engine:
        """The engine that decodes as `arm` says."""
        engine = self.llm.engine if arm.plain else self._engines[_key(arm)]
        if arm not in self._policies:  # one that learns keeps what it learned
            policy = self._policies[arm] = make_policy(arm.spec)
            policy.calibrate(partial(measure_rounds, engine.runner, engine.drafter))
        engine.policy = self._policies[arm]
        engine.ahead = self._aheads[arm.spec.overlap]
        return engine

    def predict(self, arm: Arm, run: Run, plain: Run, batch_size: int) -> Prediction | None:
        """What costs and acceptance promise for a run, beside its plain one; None for plain decoding.

        Cost curves are measured where they are first asked for: after `measure`, so that runs pay nothing for them.
        """
        if arm.plain:
            return None
        engine = self.install(arm)
        key = _key(arm)
        if self._target is None:
            self._target = measure_curve(engine.runner)
        if key not in self._curves:
            self._curves[key] = draft_curve(engine.drafter, measure_curve)
        done, before = run.counted(batch_size), plain.counted(batch_size)
        return predict(done, before, self._target, self._curves[key], type(engine.drafter).at_once)

    def workload(self, name: str, prompts: Seq[Prompt], params: SamplingParams, batch_size: int = 1) -> Workload:
        """The prompts as tokens, later turns after the target's own answers, written once by plain decoding.

        Raises RequestError naming a prompt that does not fit.
        """

        def answer(tokens: Seq[int]) -> str:
            key = tuple(tokens), repr(params)
            if key not in self._answers:
                self.llm.engine.check(key[0])
                run_batch(self.llm.engine, [(key[0], params)], run := Run())
                self._answers[key] = run.completions[0].text
            return self._answers[key]

        encoded = []
        for prompt in prompts:
            try:
                encoded.append(prompt.encode(self.llm.tokenizer, answer))
                self.llm.engine.check(encoded[-1])
            except RequestError as error:
                raise RequestError(f"prompt {prompt.id}: {error}") from None
        return Workload(name, tuple(encoded), params, batch_size, tuple(p.stop for p in prompts))

    def warm_up(self, workload: Workload) -> float:
        """A few tokens of the first batch by every arm: caches, pages and thread pools are then in place.

        Returns the seconds that whole texts of such a batch would take all arms together.
        """
        batch, few, total = next(workload.batches()), min(WARMUP_TOKENS, workload.params.max_tokens), 0.0
        for arm in self.arms:
            run_batch(
                self.install(arm), [(p, replace(s, max_tokens=few, min_tokens=0)) for p, s in batch], run := Run()
            )
            total += run.seconds
        return total * workload.params.max_tokens / few

    def measure(
        self, workload: Workload, repeat: int, tick: Callable[[str], None] = lambda label: None
    ) -> dict[Arm, list[Run]]:
        """`repeat` runs of every arm. Arms take turns at each batch, and who begins rotates.

        `tick(label)` is called after every batch of every arm.
        """
        runs: dict[Arm, list[Run]] = {arm: [Run() for _ in range(repeat)] for arm in self.arms}
        for r in range(repeat):
            for i, batch in enumerate(workload.batches()):
                first = (r + i) % len(self.arms)
                for arm in self.arms[first:] + self.arms[:first]:
                    run_batch(self.install(arm), batch, runs[arm][r])
                    tick(arm.label)
        return runs


def _key(arm: Arm) -> object:
    """Arms of one drafter share it: length, confidence and policy belong to the policy, overlap to the engine."""
    spec = replace(arm.spec, num_draft_tokens=0, confidence=None, policy="fixed", overlap=0)
    return json.dumps(spec_as_dict(spec), sort_keys=True)


def run_batch(engine: Engine, batch: Seq[Job], run: Run, tick: Callable[[], None] = lambda: None) -> None:
    """Run prompts together to their end, and add what it took to `run`; `tick` is called for each that ended."""
    before = replace(engine.times)
    levels = [(name, metrics, metrics.copy()) for name, metrics in level_metrics(engine.drafter)]
    done: dict[str, Completion] = {}
    meter = Meter()
    start = time.perf_counter()
    for i, (prompt, params) in enumerate(batch):
        engine.add(Request(f"bench{i}", prompt, params, params.seed or 0, detailed=True))
    while engine.has_work:
        run.num_steps += 1
        start_of_step = replace(engine.times)
        for delta in engine.step():
            if delta.completion is not None:
                done[delta.request_id] = delta.completion
                tick()
        if len(run.first_steps) < FIRST_STEPS:
            run.first_steps.append(replace(engine.times))
            run.first_steps[-1].add(start_of_step, -1.0)
    run.seconds += time.perf_counter() - start
    run.usage.add(meter.read())
    run.times.add(engine.times)
    run.times.add(before, -1.0)
    for name, metrics, earlier in levels:
        run.levels.setdefault(name, SpecMetrics()).add(metrics.since(earlier))
    for i in range(len(batch)):
        run.completions.append(done[f"bench{i}"])
        run.metrics.add(done[f"bench{i}"].metrics.spec)
