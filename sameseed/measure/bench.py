"""Measuring: several arms decode a workload, interleaved batch by batch, so that machine drift affects all alike."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from sameseed.cost import experts
from sameseed.cost.curve import Curve
from sameseed.cost.prediction import Prediction, RunCounts, draft_curve, predict
from sameseed.cost.round import Passes
from sameseed.engine.calibrate import LONG, ROWS, measure_curve, measure_rounds
from sameseed.engine.engine import Engine
from sameseed.engine.levels import Level
from sameseed.engine.llm import LLM
from sameseed.engine.overlap import make_overlap
from sameseed.engine.policies import make_policy
from sameseed.errors import RequestError
from sameseed.measure.prompt_sets import Prompt
from sameseed.measure.usage import Meter, Usage
from sameseed.measure.workload import Arm, Workload
from sameseed.models.loader import load_tokenizer, read_config, resolve_model
from sameseed.request import Completion, Request, SamplingParams, SpecMetrics, TimeSplit
from sameseed.spec.drafter import LengthPolicy, level_metrics

Job = tuple[tuple[int, ...], SamplingParams]
WARMUP_TOKENS = 16
GRAM = 8  # tokens of the n-grams in `Run.repeated`
FIRST_STEPS = 24
SPARE = 64  # tokens of context beyond prompt and text, for drafts


@dataclass
class Run:
    """One run of one arm over a workload; times in seconds. `overhead`: time outside both models' passes."""

    seconds: float = 0.0
    num_steps: int = 0
    num_batches: int = 0
    prefill: float = 0.0  # until the last sequence of each batch has its first token
    times: TimeSplit = field(default_factory=TimeSplit)
    metrics: SpecMetrics = field(default_factory=SpecMetrics)
    levels: dict[str, SpecMetrics] = field(default_factory=dict)  # of lower-level drafters with counts of their own
    completions: list[Completion] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)  # of the machine
    first_steps: list[TimeSplit] = field(default_factory=list)  # times of each of the first FIRST_STEPS steps

    @property
    def num_tokens(self) -> int:
        return sum(len(c.token_ids) for c in self.completions)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def overhead(self) -> float:
        return self.seconds - self.times.target - self.times.draft

    @property
    def counts(self) -> RunCounts:
        """The counts that a prediction needs."""
        done = self.completions
        context = sum(c.metrics.num_prompt_tokens + c.metrics.num_output_tokens / 2 for c in done) / max(1, len(done))
        plain, *lengths = self.draft_lengths
        rounds = plain - len(done), *lengths  # without those over prompts
        prompts, accepted = tuple(c.metrics.num_prompt_tokens for c in done), self.metrics.num_accepted_tokens
        times = self.seconds, self.prefill, self.times.draft, self.overhead
        return RunCounts(rounds, accepted, max(1, self.num_steps - self.num_batches), *times, context, prompts)

    @property
    def decoded_per_s(self) -> float:
        """Tokens/s after the first tokens; 0 if no completion has a second token."""
        more = self.num_tokens - len(self.completions)
        return more / (self.seconds - self.prefill) if more > 0 else 0.0

    @property
    def repeated(self) -> float | None:
        """Share of 8-grams that repeat an earlier one of the same text; None if no text has eight tokens."""
        grams = [[text[i : i + GRAM] for i in range(len(text) - GRAM + 1)] for text in self.texts]
        whole = sum(map(len, grams))
        return 1 - sum(len(set(g)) for g in grams) / whole if whole else None

    @property
    def draft_lengths(self) -> list[int]:
        """Number of rounds that drafted 0, 1, 2, ... tokens."""
        told = [c.metrics.spec for c in self.completions]
        counts = Counter(drafted for spec in told for drafted, _ in spec.rounds or ())
        counts[0] = sum(spec.num_rounds - spec.num_drafts for spec in told)
        return [counts[n] for n in range(max(counts) + 1)]

    @property
    def texts(self) -> list[tuple[int, ...]]:
        return [c.token_ids for c in self.completions]


def fitted(model: str, settings: dict[str, Any], prompts: Seq[Prompt], max_tokens: int) -> dict[str, Any]:
    """Keyword arguments of LLM for these prompts. On a GPU without a set context, `max_model_len` is set to fit them.

    Otherwise an engine would take all free GPU memory for its cache, and leave none for the next engine (a Bench loads
    one per drafter). Raises ModelLoadError.
    """
    sizes = (settings.get(name) for name in ("max_model_len", "num_blocks"))
    if settings.get("device", "cpu") == "cpu" or any(size is not None for size in sizes):
        return settings
    folder = resolve_model(model)
    tokenizer = load_tokenizer(folder)
    longest = max((len(p.encode(tokenizer)) + max_tokens * (1 + len(p.then)) for p in prompts), default=0) + SPARE
    return {**settings, "max_model_len": min(read_config(folder).max_model_len, max(longest, LONG + SPARE))}


def fitting(
    folder: Path, settings: Mapping[str, Any], prompts: Seq[Prompt], tell: Callable[[str], None]
) -> list[Prompt]:
    """The prompts that leave room for an answer in the context; `tell` hears of the others. Raises RequestError."""
    limit = settings.get("max_model_len") or read_config(folder).max_model_len
    tokenizer, found = load_tokenizer(folder), list[Prompt]()
    for prompt in prompts:
        if (size := len(prompt.encode(tokenizer))) < limit:
            found.append(prompt)
        else:
            tell(f"prompt {prompt.id}: {size} tokens, and the context holds {limit}")
    if not found:
        raise RequestError(f"no prompt fits the context of {limit} tokens; give shorter --prompts")
    return found


class Bench:
    """One loaded target whose weights and KV cache serve all arms; the drafter changes between batches."""

    def __init__(self, model: str, arms: Seq[Arm], settings: dict[str, Any], load: Callable[..., LLM] = LLM) -> None:
        """`settings` are keyword arguments of LLM, without `draft`; `load` makes an LLM. Raises what LLM raises.

        On a GPU, `settings` must bound the context (see `fitted`), or the first engine's cache leaves no room for the
        next. The prefix cache is off: all arms run the same prompts, and only the first would compute them.
        """
        settings = {**settings, "prefix_cache": False}
        self.arms, self._model = list(arms), model
        self._engines: dict[object, Engine] = {}  # by drafter; they share the target and its cache
        self._policies: dict[Arm, LengthPolicy] = {}
        self._answers: dict[tuple[tuple[int, ...], str], str] = {}  # answers to earlier turns, by (tokens, parameters)
        self._target: Passes | None = None  # the target's cost curve, for predictions
        self._curves: dict[object, Curve | None] = {}  # cost curves of draft models, by drafter
        self._aheads = {arm.spec.overlap: make_overlap(arm.spec) for arm in arms}
        for arm in arms:
            Level.of(arm.spec).check()
        self.llm = load(model, None, **settings)
        for arm in arms:
            if not arm.plain and _key(arm) not in self._engines:
                given = {**settings, "target": self.llm.engine.runner}
                self._engines[_key(arm)] = load(model, arm.spec, **given).engine

    def install(self, arm: Arm) -> Engine:
        """The engine of an arm, with the arm's length policy and overlap installed."""
        engine = self.llm.engine if arm.plain else self._engines[_key(arm)]
        if arm not in self._policies:  # created once per arm: a learning policy keeps what it learned
            policy = self._policies[arm] = make_policy(arm.spec)
            policy.calibrate(partial(measure_rounds, engine.runner, engine.drafter))
        engine.policy = self._policies[arm]
        engine.ahead = self._aheads[arm.spec.overlap]
        return engine

    def predict(self, arm: Arm, run: Run, plain: Run) -> Prediction | None:
        """The predicted speed-up of a run; None for plain decoding. Call it after `measure`: it times passes first."""
        if arm.plain:
            return None
        engine, key = self.install(arm), _key(arm)
        if self._target is None:
            config = experts.count(self.llm.engine.runner, resolve_model(self._model), plain.completions)
            self._target = experts.in_texts(measure_curve(engine.runner), config)
        if key not in self._curves:  # up to the rows of a prompt, which the draft model reads too
            self._curves[key] = draft_curve(engine.drafter, partial(measure_curve, rows=(*ROWS, 64)))
        return predict(run.counts, plain.counts, self._target, self._curves[key], type(engine.drafter).at_once)

    def workload(self, name: str, prompts: Seq[Prompt], params: SamplingParams, batch_size: int = 1) -> Workload:
        """The prompts as tokens; the target answers earlier turns. Raises RequestError naming a prompt too long."""

        def answer(tokens: Seq[int]) -> str:
            key = tuple(tokens), repr(params)
            if key not in self._answers:
                self.llm.engine.check(key[0])
                self._answers[key] = run_batch(self.llm.engine, [(key[0], params)]).completions[0].text
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
        """Generate a few tokens with every arm. Returns the estimated seconds of one batch, summed over all arms."""
        batch = shortened(next(workload.batches()), WARMUP_TOKENS)
        times = max(1.0, workload.params.max_tokens / WARMUP_TOKENS)
        runs = [run_batch(self.install(arm), batch) for arm in self.arms]
        return sum(run.prefill + (run.seconds - run.prefill) * times for run in runs)

    def measure(
        self, workload: Workload, repeat: int, tick: Callable[[str], None] = lambda label: None
    ) -> dict[Arm, list[Run]]:
        """`repeat` runs of every arm, as by `interleave`."""
        return interleave([(self, workload)], repeat, tick)


def interleave(
    benches: Seq[tuple[Bench, Workload]], repeat: int, tick: Callable[[str], None] = lambda label: None
) -> dict[Arm, list[Run]]:
    """`repeat` runs of every arm of all benches. Each batch is run by all arms one after the other; the first rotates.

    The workloads have as many batches; no two benches share an Arm. `tick(label)` is called after every batch of every
    arm. Raises BenchStopped on Ctrl-C after the first runs.
    """
    jobs = [(bench, arm, list(workload.batches())) for bench, workload in benches for arm in bench.arms]
    runs: dict[Arm, list[Run]] = {arm: [Run() for _ in range(repeat)] for _, arm, _ in jobs}
    for r in range(repeat):
        try:
            for i in range(len(jobs[0][2])):
                first = (r + i) % len(jobs)
                for bench, arm, batches in jobs[first:] + jobs[:first]:
                    run_batch(bench.install(arm), batches[i], runs[arm][r])
                    tick(arm.label)
        except KeyboardInterrupt:
            if not r:
                raise
            raise BenchStopped({arm: whole[:r] for arm, whole in runs.items()}) from None
    return runs


class BenchStopped(KeyboardInterrupt):
    """Ctrl-C while a later run was measured. `runs`: the whole ones before it, as many of every arm."""

    def __init__(self, runs: dict[Arm, list[Run]]) -> None:
        super().__init__()
        self.runs = runs


def _key(arm: Arm) -> object:
    """Key of an arm's drafter. Arms that differ only in length, confidence, policy or overlap share a drafter."""
    spec = replace(arm.spec, num_draft_tokens=0, confidence=None, policy="fixed", overlap=0)
    return repr(spec)


def shortened(batch: Seq[Job], most: int) -> list[Job]:
    """The same prompts with outputs of at most `most` tokens."""
    return [(p, replace(s, max_tokens=min(most, s.max_tokens), min_tokens=0)) for p, s in batch]


def run_batch(engine: Engine, batch: Seq[Job], run: Run | None = None, tick: Callable[[], None] = lambda: None) -> Run:
    """Run prompts together to their end; add times and counts to `run`, or a new one. `tick`: a prompt has ended."""
    run = run or Run()
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
    completions = [done[f"bench{i}"] for i in range(len(batch))]
    run.completions += completions
    run.num_batches += 1
    run.prefill += max((c.metrics.time_to_first_token for c in completions), default=0.0)
    for completion in completions:
        run.metrics.add(completion.metrics.spec)
    return run
