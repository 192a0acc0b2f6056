"""The evaluation suite: runs perplexity and tasks, chosen by name, on one loaded model."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sameseed.engine.llm import LLM
from sameseed.errors import ConfigError, nearest
from sameseed.measure.quality import data, harness, humaneval
from sameseed.measure.quality.bootstrap import estimate
from sameseed.measure.quality.perplexity import STRIDE, WINDOW, Perplexity, perplexity
from sameseed.measure.quality.tasks import Report, TaskResult, TaskSettings, silent

PERPLEXITY = "perplexity"
TASKS = ("humaneval", *harness.NAMES)
NAMES = (PERPLEXITY, *TASKS)


@dataclass(frozen=True)
class PerplexityText:
    """The text for perplexity (`file`; None: the WikiText-2 test set), its window and stride, and the most tokens."""

    file: Path | None = None
    window: int = WINDOW
    stride: int = STRIDE
    tokens: int | None = None

    def read(self, folder: Path | None) -> tuple[str, str]:
        """The text and its name. Raises ConfigError."""
        if self.file is None:
            return data.wikitext(folder)
        text = data.text_of(self.file)
        if not text.strip():
            raise ConfigError(f"{self.file} holds no text; name another with --text")
        return text, self.file.name


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


def check(tasks: Seq[str], settings: TaskSettings, text: PerplexityText) -> None:
    """Raise ConfigError for anything that would fail later: no task, an unknown task, missing or invalid data."""
    for name in tasks:
        if name not in NAMES:
            raise ConfigError(f"no task {name!r}{nearest(name, NAMES)} (there are: {', '.join(NAMES)})")
        if name == PERPLEXITY:
            text.read(settings.data)
        elif name == "humaneval":
            data.rows(data.HUMANEVAL, settings.data)
        else:
            harness.read(name, settings)
    if not tasks:
        raise ConfigError(f"no tasks; give one or more of {', '.join(NAMES)}")


def evaluate(
    llm: LLM, tasks: Seq[str], settings: TaskSettings, text: PerplexityText, report: Report = silent
) -> Quality:
    """Run the named tasks, perplexity first. Raises ConfigError as `check` does."""
    check(tasks, settings, text)
    found, name, notes = None, None, []
    if PERPLEXITY in tasks:
        content, name = text.read(settings.data)
        found = perplexity(llm, content, text.window, text.stride, text.tokens, partial(report, PERPLEXITY))
        # Notes name every deviation from the published protocol.
        if found.window < text.window:
            notes.append(
                f"the model's context is {found.window} tokens: windows are clipped to it (asked for: {text.window})"
            )
        if found.stride < text.stride:
            notes.append(
                f"the stride is {found.stride}, so that each window overlaps the one before (asked: {text.stride})"
            )
        if not found.whole:
            notes.append(f"only the first {found.tokens + 1} tokens of the text were read")
        if text.file is None and "<unk>" in content:
            notes.append(
                "the text is WikiText-2's word-tokenised variant (it holds <unk>), not the raw one: ratios between "
                "models stand, absolute figures are not comparable with published ones"
            )
    results = [
        humaneval.run(llm, settings, report) if task == "humaneval" else harness.run(llm, task, settings, report)
        for task in TASKS
        if task in tasks
    ]
    return Quality(found, name, tuple(results), tuple(notes))
