"""Evaluation of a model: perplexity, HumanEval (Chen et al., 2021), and tasks by lm-evaluation-harness."""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from sameseed.engine.llm import LLM
from sameseed.errors import ConfigError, nearest
from sameseed.fields import check_ranges, flag, within
from sameseed.measure.bench import run_batch
from sameseed.measure.quality import data, sandbox
from sameseed.measure.quality.data import GSM8K, GSM8K_SHOTS, HUMANEVAL, MMLU_PRO, MMLU_PRO_SHOTS, Row
from sameseed.measure.quality.perplexity import (
    STRIDE,
    WINDOW,
    Interval,
    Perplexity,
    estimate,
    mean_interval,
    perplexity,
)
from sameseed.request import MAX_SEED, SamplingParams

Report = Callable[[str, int, int], None]  # stage, done, total


def silent(stage: str, done: int, total: int) -> None:
    """A progress report that does nothing."""


PERPLEXITY = "perplexity"
HARNESS = ("gsm8k", "mmlu_pro")
SHOTS = 5
LETTERS = "ABCDEFGHIJ"
Splits = dict[str, list[Row]]
TASKS = ("humaneval", *HARNESS)
NAMES = (PERPLEXITY, *TASKS)


@dataclass(frozen=True)
class EvalSettings:
    """What to measure, and how answers are generated. Raises ConfigError for a number out of range."""

    tasks: tuple[str, ...] = (PERPLEXITY,)
    data: Path | None = None  # folder of the tasks' data; None: the hub
    limit: int | None = within(None, 1)  # number of questions of each task
    chat: bool = False  # put each prompt into the model's chat template, as one user message
    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int | None = None  # None: each task's own limit
    seed: int = 0  # of sampled answers and of the bootstrap intervals
    text: Path | None = None  # for perplexity; None: the WikiText-2 test set
    window: int = within(WINDOW, 2)
    stride: int = within(STRIDE, 1)
    tokens: int | None = within(None, 2)  # most tokens of the text

    def __post_init__(self) -> None:
        check_ranges(self, flag)
        self.params(1, ())  # a bad value fails here, before any work

    def params(self, max_tokens: int, stop: tuple[str, ...]) -> SamplingParams:
        """Sampling parameters for a task with its own length limit `max_tokens` and stop strings `stop`."""
        return SamplingParams(
            max_tokens=self.max_tokens or max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=() if self.chat else stop,
        )


@dataclass(frozen=True)
class TaskResult:
    """Result of a task. `scores`: one per question, in the data's order, 0 to 1. `extra`: further values by name."""

    task: str
    metric: str
    scores: tuple[float, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()

    @property
    def value(self) -> float:
        return sum(self.scores) / len(self.scores)

    def interval(self, seed: int) -> Interval | None:
        """Bootstrapped; Wilson's where all scores are 0 or all are 1, since then all resamples are alike."""
        n, total = len(self.scores), sum(self.scores)
        if n < 2 or total not in (0, n):
            return mean_interval(self.scores, seed)
        free = 1.96**2 / (n + 1.96**2)
        return (0.0, free) if total == 0 else (1 - free, 1.0)

    def as_dict(self, seed: int) -> dict[str, Any]:
        """Plain data for a record. `seed`: of the bootstrap interval."""
        found = {"task": self.task, "metric": self.metric, **estimate(self.value, self.interval(seed))}
        return {**found, "num_questions": len(self.scores), **self.extra, "notes": list(self.notes)}


def counter(report: Callable[[int, int], None], total: int) -> Callable[[], None]:
    """A function that calls `report(number of calls so far, total)` at each call."""
    done = count(1)
    return lambda: report(next(done), total)


def answer(
    llm: LLM, prompts: Seq[Seq[int]], params: Seq[SamplingParams], report: Callable[[int, int], None]
) -> tuple[list[str], tuple[str, ...]]:
    """The model's answers ("" for an empty prompt), each with a seed of its own, and a note where some were cut."""
    jobs = [
        (tuple(prompt), replace(its, seed=((its.seed or 0) + i) % (MAX_SEED + 1)))
        for i, (prompt, its) in enumerate(zip(prompts, params, strict=True))
        if prompt
    ]
    run = run_batch(llm.engine, jobs, tick=counter(report, len(jobs)))
    texts = iter(c.text for c in run.completions)
    cut = sum(c.finish_reason == "length" for c in run.completions)
    note = f"{cut} of {len(jobs)} answers were cut at their limit of tokens; --max-tokens raises it"
    return [next(texts) if p else "" for p in prompts], (note,) if cut else ()


MAX_TOKENS = 512
ASK = (
    "Complete this Python function. Answer with the whole function in one code block, and nothing after it.\n\n"
    "```python\n{prompt}\n```"
)
# The end is indented like the opening line, or by a list's mark more; the fences of a docstring are further in.
FENCE = re.compile(r"^([ \t]*)(?:[^\n`]|`[^\n`]+`)*`{3,}[^\n`]*\n(.*?)(?:^\1 {0,3}```|\Z)", re.MULTILINE | re.DOTALL)


def program(row: Row, text: str, chat: bool = False) -> str:
    """The program to run: the prompt, the answer, the tests, and the call of the tests.

    With `chat`, the answer is the first code block after the model's thoughts that defines the function; else the first
    block, as the function's body.
    """
    if chat:
        text = text.rpartition("</think>")[2].replace("\r\n", "\n")
        blocks = [found[2] for found in FENCE.finditer(text)] or [text]
        defines = re.compile(rf"^\s*def\s+{re.escape(row['entry_point'])}\b", re.MULTILINE)
        text = next(filter(defines.search, blocks), blocks[0])
        if defines.search(text):  # keeps the prompt's imports and helpers; the answer redefines the function
            text = f"    pass\n\n{textwrap.dedent(text)}"
    return f"{row['prompt']}{text}\n\n{row['test']}\n\ncheck({row['entry_point']})\n"


def score(
    rows: Seq[Row], texts: Seq[str], chat: bool = False, tick: Callable[[], None] = lambda: None
) -> list[str | None]:
    """The error of each answer with its problem's tests, run in a sandbox; None: passed. `tick`: after each."""
    return sandbox.run_all([program(r, t, chat) for r, t in zip(rows, texts, strict=True)], tick)


def humaneval(llm: LLM, settings: EvalSettings, report: Report = silent) -> TaskResult:
    """Generate and test a solution for each problem. Raises ConfigError for missing data."""
    problems = data.take(data.rows(HUMANEVAL, settings.data), settings.limit)
    params = settings.params(MAX_TOKENS, data.HUMANEVAL_STOP)
    room = llm.engine.max_model_len - min(params.max_tokens, llm.engine.max_model_len // 4)  # the rest is the answer's
    prompts = []
    for row in problems:
        message = {"role": "user", "content": ASK.format(prompt=row["prompt"].rstrip())}
        tokens = llm.tokenizer.chat([message]) if settings.chat else llm.tokenizer.encode(row["prompt"])
        prompts.append(tokens if len(tokens) <= room else [])
    long = prompts.count([])
    texts, cut = answer(llm, prompts, [params] * len(prompts), partial(report, "humaneval"))
    tick = counter(partial(report, "humaneval, tests"), len(problems))
    errors = score(problems, texts, settings.chat, tick)
    kinds = Counter(re.split(r"[:;]", error)[0] for error in errors if error)
    notes = (f"{long} of {len(problems)} prompts do not fit the model's context and count as failed",) if long else ()
    passed = tuple(float(error is None) for error in errors)
    return TaskResult("humaneval", "pass@1", passed, {"errors": dict(kinds.most_common(6))}, notes + cut, tuple(texts))


def read_rows(name: str, settings: EvalSettings) -> tuple[Splits, tuple[str, ...]]:
    """The rows of a task by the harness's name of their split, and notes for the result. Raises ConfigError."""
    if find_spec("lm_eval") is None:
        raise ConfigError(f"{name} runs through lm-evaluation-harness: pip install '.[eval]'")
    notes: tuple[str, ...] = ()
    if name == "gsm8k":
        rows = data.rows(GSM8K, settings.data)
        if settings.data is None or data.find(settings.data, GSM8K_SHOTS) is not None:
            shots = data.rows(GSM8K_SHOTS, settings.data)
        else:
            shots, rows = rows[:SHOTS], rows[SHOTS:]
            notes = (f"no {GSM8K_SHOTS.files[0]}: the first {SHOTS} test questions are examples and are not asked",)
        if not rows:
            raise ConfigError(f"the test set holds no more than the {SHOTS} examples; give more rows")
        return {"train": shots, "test": data.take(rows, settings.limit)}, notes
    rows = data.take(data.rows(MMLU_PRO, settings.data), settings.limit)
    for row in rows:
        if row["answer"] not in list(LETTERS[: len(row["options"])]):  # a list: "" and "AB" are in the string
            raise ConfigError(f"mmlu_pro: question {row.get('question_id')} has no option {row['answer']!r}")
    return {"validation": data.rows(MMLU_PRO_SHOTS, settings.data), "test": rows}, notes


@dataclass(frozen=True)
class Quality:
    """Results of one model: its perplexity on the text named `text`, and one result per task."""

    perplexity: Perplexity | None
    text: str | None
    results: tuple[TaskResult, ...]
    notes: tuple[str, ...] = ()

    def as_dict(self, seed: int) -> dict[str, Any]:
        """Plain data for a record. `seed`: of the bootstrap intervals."""
        found: dict[str, Any] = {"perplexity": None, "tasks": [r.as_dict(seed) for r in self.results]}
        if self.perplexity is not None:
            p = self.perplexity
            found["perplexity"] = {
                "text": self.text,
                **estimate(p.perplexity, p.interval(seed)),
                "bits_per_byte": p.bits_per_byte if math.isfinite(p.perplexity) else None,
                "tokens": p.tokens,
                "bytes": p.num_bytes,
                **{name: getattr(p, name) for name in ("window", "stride", "whole")},
                "tokens_digest": p.digest,
                "notes": list(self.notes),
            }
        return found


def check(asked: EvalSettings) -> None:
    """Raise ConfigError for anything that would fail later: no task, an unknown task, missing or invalid data."""
    for name in asked.tasks:
        if name not in NAMES:
            raise ConfigError(f"no task {name!r}{nearest(name, NAMES)} (there are: {', '.join(NAMES)})")
        if name == PERPLEXITY:
            _text(asked)
        elif name == "humaneval":
            data.rows(data.HUMANEVAL, asked.data)
        else:
            read_rows(name, asked)
    if not asked.tasks:
        raise ConfigError(f"no tasks; give one or more of {', '.join(NAMES)}")


def _text(asked: EvalSettings) -> tuple[str, str]:
    """The text for perplexity and its name. Raises ConfigError."""
    if asked.text is None:
        return data.wikitext(asked.data)
    text = data.text_of(asked.text)
    if not text.strip():
        raise ConfigError(f"{asked.text} holds no text; name another with --text")
    return text, asked.text.name


def evaluate(llm: LLM, asked: EvalSettings, report: Report = silent) -> Quality:
    """Run the tasks, perplexity first. Raises ConfigError as `check` does."""
    check(asked)
    found, text_name, said = None, None, dict[str, bool]()
    if PERPLEXITY in asked.tasks:
        content, text_name = _text(asked)
        found = perplexity(llm, content, asked.window, asked.stride, asked.tokens, partial(report, PERPLEXITY))
        said = {  # every deviation from the published protocol
            f"the model's context is {found.window} tokens: windows are clipped to it (asked for: {asked.window})": (
                found.window < asked.window
            ),
            f"the stride is {found.stride}, so that each window overlaps the one before (asked: {asked.stride})": (
                found.stride < asked.stride
            ),
            f"only the first {found.tokens + 1} tokens of the text were read": not found.whole,
            "the text is WikiText-2's word-tokenised variant (it holds <unk>), not the raw one: ratios between models "
            "stand, absolute figures are not comparable with published ones": (
                asked.text is None and "<unk>" in content
            ),
        }
    results = []
    for task in (name for name in TASKS if name in asked.tasks):
        if task == "humaneval":
            results.append(humaneval(llm, asked, report))
        else:
            from sameseed.measure.lm_eval import run_harness

            results.append(run_harness(llm, task, asked, report))
    return Quality(found, text_name, tuple(results), tuple(note for note, holds in said.items() if holds))
