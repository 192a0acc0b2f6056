"""The evaluation suite: perplexity and tasks, chosen by name, on one loaded model.

GSM8K and MMLU-Pro run by lm-evaluation-harness, whose task files define prompts, stop strings and scoring. This module
supplies their rows, from a folder or the hub. It checks them, and spreads a `limit` over the whole set.
"""

from __future__ import annotations

import io
import json
import logging
import math
from collections import defaultdict
from collections.abc import Sequence as Seq
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sameseed.engine.llm import LLM
from sameseed.errors import ConfigError, nearest
from sameseed.measure.quality import data
from sameseed.measure.quality.data import GSM8K, GSM8K_SHOTS, MMLU_PRO, MMLU_PRO_SHOTS, Row
from sameseed.measure.quality.perplexity import Perplexity, estimate, perplexity
from sameseed.measure.quality.tasks import PERPLEXITY, EvalSettings, Report, TaskResult, humaneval, silent

HARNESS = ("gsm8k", "mmlu_pro")
SHOTS = 5
FEWSHOT_SEED = 1234  # the harness's default
LETTERS = "ABCDEFGHIJ"
INVALID = "[invalid]"  # the harness's mark for an answer from which no result could be extracted
Splits = dict[str, list[Row]]


def read_rows(name: str, settings: EvalSettings) -> tuple[Splits, tuple[str, ...]]:
    """The rows of a task by the harness's name of their split, and notes for the result.

    Raises ConfigError for missing or invalid data, or if the harness is not installed.
    """
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


def run_harness(llm: LLM, name: str, settings: EvalSettings, report: Report = silent) -> TaskResult:
    """Run a task on a loaded model. Raises ConfigError as `read_rows` does."""
    splits, notes = read_rows(name, settings)
    import datasets
    import lm_eval
    from lm_eval.tasks import TaskManager

    from sameseed.measure.lm_eval import SameseedLM

    s, differs = settings, {}  # differs: generation settings that override the task's own
    if s.temperature > 0:
        differs = {"do_sample": True, "temperature": s.temperature, "top_p": s.top_p, "seed": s.seed}
    if s.max_tokens is not None:
        differs["max_gen_toks"] = s.max_tokens
    model = SameseedLM(llm, report=partial(report, name))
    # Silence the harness's progress bars and messages, which would mix with this program's.
    with TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):
        datasets.disable_progress_bars()
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        tasks = _write_tasks(name, splits, Path(lm_eval.__file__).parent / "tasks", Path(folder))
        loaded = TaskManager(include_path=folder, include_defaults=False).load(tasks)
        for task in loaded["tasks"].values():
            task.set_fewshot_seed(seed=FEWSHOT_SEED)
            task.set_config(key="generation_kwargs", value=differs, update=True)
        found = lm_eval.evaluate(
            lm=model,
            task_dict=loaded,
            bootstrap_iters=0,
            apply_chat_template=settings.chat,
            fewshot_as_multiturn=settings.chat,
        )
    samples = [sample for task in tasks for sample in found["samples"][task]]
    if model.num_cut:
        length = llm.engine.max_model_len
        notes += (f"{model.num_cut} prompts lost their beginning: the model's context has {length} tokens",)
    return _result(name, samples, notes)


def _write_tasks(name: str, splits: Splits, theirs: Path, folder: Path) -> list[str]:
    """Write the rows, and task files that include the harness's own but read these rows; returns the tasks' names."""
    files = {}
    for split, rows in splits.items():
        files[split] = str(folder / f"{split}.jsonl")
        Path(files[split]).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if name == "gsm8k":
        sources = {name: theirs / "gsm8k" / "gsm8k.yaml"}
    else:  # a task for each subject
        subjects = sorted({row["category"].replace(" ", "_") for row in splits["test"]})
        sources = {f"{name}_{s}": theirs / name / f"{name}_{s}.yaml" for s in subjects}
    for task, source in sources.items():
        if not source.is_file():
            raise ConfigError(f"lm-evaluation-harness has no {source.stem!r}; is this the data of {name}?")
        where = {"data_files": files, "cache_dir": str(folder)}
        own = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": where}
        # JSON is YAML.
        (folder / f"{task}.yaml").write_text(json.dumps({"include": str(source), "task": task, **own}))
    return list(sources)


def _result(name: str, samples: Seq[dict[str, Any]], notes: tuple[str, ...]) -> TaskResult:
    """A TaskResult from the harness's samples: score and generated answer of each question."""
    asked = [s for s in samples if s["filter"] != "strict-match"]
    scores = tuple(float(s["exact_match"]) for s in asked)
    missing = sum(s["filtered_resps"][0] == INVALID for s in asked)
    answers = tuple(s["resps"][0][0] for s in asked)
    if name == "gsm8k":
        strict = [s["exact_match"] for s in samples if s["filter"] == "strict-match"]
        extra = {"strict": sum(strict) / len(strict), "without_number": missing}
        return TaskResult(name, "exact match", scores, extra, notes, answers)
    subjects: dict[str, list[float]] = defaultdict(list)
    for score, sample in zip(scores, asked, strict=True):
        subjects[sample["doc"]["category"]].append(score)
    extra = {
        # Per subject, because the overall mean weights each subject by its number of questions.
        "subjects": {s: {"value": sum(v) / len(v), "num_questions": len(v)} for s, v in sorted(subjects.items())},
        "without_letter": missing,
        "chance": sum(1 / len(s["doc"]["options"]) for s in asked) / len(asked),
    }
    return TaskResult(name, "accuracy", scores, extra, notes, answers)


TASKS = ("humaneval", *HARNESS)
NAMES = (PERPLEXITY, *TASKS)


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
    found, name, notes = None, None, []
    if PERPLEXITY in asked.tasks:
        content, name = _text(asked)
        found = perplexity(llm, content, asked.window, asked.stride, asked.tokens, partial(report, PERPLEXITY))
        # Notes name every deviation from the published protocol.
        if found.window < asked.window:
            notes.append(
                f"the model's context is {found.window} tokens: windows are clipped to it (asked for: {asked.window})"
            )
        if found.stride < asked.stride:
            notes.append(
                f"the stride is {found.stride}, so that each window overlaps the one before (asked: {asked.stride})"
            )
        if not found.whole:
            notes.append(f"only the first {found.tokens + 1} tokens of the text were read")
        if asked.text is None and "<unk>" in content:
            notes.append(
                "the text is WikiText-2's word-tokenised variant (it holds <unk>), not the raw one: ratios between "
                "models stand, absolute figures are not comparable with published ones"
            )
    results = [
        humaneval(llm, asked, report) if task == "humaneval" else run_harness(llm, task, asked, report)
        for task in TASKS
        if task in asked.tasks
    ]
    return Quality(found, name, tuple(results), tuple(notes))
