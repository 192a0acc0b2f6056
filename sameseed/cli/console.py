"""Terminal output that the commands share: progress bars, text streamed in colour, tables and summary lines."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, TextIO

from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from sameseed.config import SpecConfig
from sameseed.engine.llm import LLM
from sameseed.ops import available_cores
from sameseed.report import record
from sameseed.report.plot import plot_paths
from sameseed.request import Delta, Metrics, SpecMetrics

GREEN, DIM, RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"
# Without colour, accepted draft tokens stand between these marks.
PLAIN_MARKS = ("\u2039", "\u203a")
WIDE = 10_000  # characters: more than any table needs


def stderr_console() -> Console:
    """A console for everything that is not the command's result."""
    return Console(stderr=True, highlight=False)


def stdout_console() -> Console:
    """A console for a command's result: as wide as the terminal, or in a pipe as wide as the output needs."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDE)


def note(text: str, style: str = "dim") -> None:
    """Say something on stderr that is not the command's result."""
    stderr_console().print(text, style=style, markup=False, soft_wrap=True)


def keep(records: Seq[dict[str, Any]], out: Path | None, as_json: bool, *tables: Table) -> None:
    """Append records to a file, if there is one; even if that fails, print them as lines of JSON, or the tables."""
    try:
        if out is not None:
            for line in records:
                record.append(out, line)
    finally:
        for line in records if as_json else ():
            print(json.dumps(line), flush=True)
        for table in () if as_json else tables:
            show_table(table)


def check_outputs(*files: tuple[Path | None, str], plot: Path | None = None) -> None:
    """Raise ConfigError, before anything is measured, if a file (with its flag) or a plot cannot be written."""
    for path, flag in (*files, *((path, "--plot") for path in (plot_paths(plot) if plot is not None else ()))):
        if path is not None:
            record.prepare(path, flag)


def show_table(table: Table) -> None:
    """Print a table without cutting it: on a narrow terminal, heads and cells wrap, between words if they can.

    If single words do not fit between the table's lines, the lines are left out.
    """
    console = stdout_console()
    words, lines = [], []
    for column in table.columns:
        column.no_wrap, column.overflow = False, "fold"
        cells = [Measurement.get(console, console.options, c) for c in (column.header, *column.cells)]
        words.append(max(c.minimum for c in cells))
        lines.append(max(c.maximum for c in cells))
    spare = console.width - 3 * len(words) - 1 - sum(words)  # beside lines and padding
    if spare < 0:
        table.box, table.padding, table.pad_edge, table.title_justify = None, (0, 1, 0, 0), False, "left"
        spare = console.width - len(words) - sum(words)
    if 0 <= spare < sum(lines) - sum(words):
        for _ in range(spare):
            i = max(range(len(words)), key=lambda i: lines[i] / words[i])  # the column that wraps most
            words[i] += 1
        for column, width in zip(table.columns, words, strict=True):
            column.width = width
    console.print(table)


def warn_if_busy() -> None:
    """Warn on stderr if other work runs on this machine, because it would distort a measurement."""
    load, cores = os.getloadavg()[0], available_cores()
    if load > cores / 2:
        said = f"warning: this machine is busy (load {load:.1f} on {cores} cores): times will be too long, and shares "
        note(f"{said}wrong; end what else runs, then measure again", style="yellow")


def colourful(stream: IO[str]) -> bool:
    """Whether to write colour codes to a stream. NO_COLOR and FORCE_COLOR take precedence over the terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (stream.isatty() and os.environ.get("TERM") != "dumb")


@contextmanager
def progress(title: str, quiet: bool = False) -> Iterator[tuple[Callable[..., None], Callable[..., None]]]:
    """A progress bar on stderr that disappears at its end; silent if stderr is not a terminal.

    Yields its `update`, which takes description, completed, total, advance and note, and a `print` above the bar.
    """
    console = Console(file=sys.stderr)  # the present stderr: it may be redirected while the bar runs
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    notes = TimeRemainingColumn(), TextColumn("[dim]{task.fields[note]}")
    off = quiet or not console.is_terminal
    with Progress(*columns, *notes, console=console, transient=True, disable=off) as bar:
        yield partial(bar.update, bar.add_task(title, total=None, note="")), bar.console.print


@contextmanager
def stages(title: str, quiet: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar for work in stages. Yields a function of a stage's name, the part of it done, and its total."""
    with progress(title, quiet) as (update, _):
        yield lambda stage, done, total: update(description=stage, completed=done, total=total)


@contextmanager
def weights_progress(title: str, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A progress bar for weights. Yields a function of weights done and in all; if they start anew, a draft is read."""
    with stages(title, quiet) as update:
        before = 0

        def report(done: int, total: int) -> None:
            nonlocal before, title
            title, before = "loading the draft" if done < before else title, done
            update(f"{title} (million weights)", done // 10**6, total // 10**6)

        yield report


def load_llm(model: str, draft: Any = None, *, quiet: bool = False, **settings: Any) -> LLM:
    """The engine of these settings, with a progress bar while its weights are read."""
    logging.basicConfig(format="note: %(message)s", stream=sys.stderr)
    draft = draft or SpecConfig()  # "none" was chosen: it overrides a profile's draft
    title = f"loading {model if 'target' not in settings else draft.model or draft.method}"
    with weights_progress(title, quiet) as report:
        return LLM(model, draft, progress=report, **settings)


class TextWriter:
    """Writes a completion's text as it grows; with `show_draft`, accepted draft tokens are highlighted."""

    def __init__(self, stream: TextIO, show_draft: bool = False) -> None:
        self.text = ""
        self._stream = stream
        self._show = show_draft
        self._colour = colourful(stream)
        self._terminal = stream.isatty()
        self._tokens: deque[tuple[int, bool]] = deque()  # where each begins in the text, and was it accepted?
        self._whole = False  # were all tokens accepted that begin where the current one does?
        self._open = False  # is accepted text being written?

    def write(self, delta: Delta) -> None:
        self._tokens.extend(zip(delta.text_offset, delta.accepted, strict=False))
        for c in delta.text:
            self._stream.write(self._switch(self._show and self._accepted(len(self.text))))
            self.text += c
            harmless = not self._terminal or c in "\n\t" or c.isprintable() or ord(c) > 0x9F  # no control code
            self._stream.write(c if harmless else "\ufffd")
        if delta.completion is not None:
            self._stream.write(self._switch(False))
        self._stream.flush()

    def _accepted(self, at: int) -> bool:
        """Did this character come from accepted tokens alone?"""
        begin = -1
        while self._tokens and self._tokens[0][0] <= at:
            place, accepted = self._tokens.popleft()
            self._whole = accepted and (self._whole or place != begin)
            begin = place
        return self._whole

    def _switch(self, accepted: bool) -> str:
        if accepted == self._open:
            return ""
        self._open = accepted
        begin, end = (GREEN, RESET) if self._colour else PLAIN_MARKS
        return begin if accepted else end

    def end(self) -> None:
        self._stream.write(self._switch(False))
        self._stream.flush()


def legend(text_stream: IO[str], own_stream: IO[str]) -> str:
    """A legend of the marks of `--show-draft` in `text_stream`, to be written to `own_stream`."""
    mark = "green" if colourful(text_stream) else "...".join(PLAIN_MARKS)
    if mark == "green" and colourful(own_stream):
        mark = f"{GREEN}{mark}{RESET}"
    return f"{mark}: drafted and accepted; the rest: generated by the target itself"


def level_line(name: str, metrics: SpecMetrics) -> str:
    """One line about a drafter below another one, whose drafts are counted separately."""
    if not metrics.num_drafts:
        return f"{name}: no draft"
    return (
        f"{name}: {metrics.num_accepted_tokens} of {metrics.num_draft_tokens} drafted accepted "
        f"({metrics.acceptance_rate:.0%}) | {metrics.mean_acceptance_length:.2f} tokens a draft"
    )


def summary(metrics: Metrics) -> str:
    """One line about a completion: its tokens, times and acceptance."""
    spec, split = metrics.spec, metrics.time_split
    parts = [
        f"{metrics.num_output_tokens} tokens in {metrics.total_time:.2f} s"
        f" ({metrics.num_output_tokens / max(metrics.total_time, 1e-9):.1f} tokens/s)",
        f"first after {metrics.time_to_first_token * 1e3:.0f} ms",
    ]
    if metrics.num_cached_tokens:
        parts.append(f"{metrics.num_cached_tokens} of {metrics.num_prompt_tokens} prompt tokens from the cache")
    if spec.acceptance_rate is not None and spec.mean_acceptance_length is not None:
        parts += [
            f"{spec.num_accepted_tokens} of {spec.num_draft_tokens} drafted accepted ({spec.acceptance_rate:.0%})",
            f"{spec.mean_acceptance_length:.2f} tokens a draft",
            f"{spec.num_rollbacks} rollbacks",
        ]
    if spec.undrafted.get("draft context"):
        parts.append(f"{spec.undrafted['draft context']} rounds beyond the draft's context")
    stages = {"draft": split.draft, "target": split.target, "verify": split.verify, "schedule": split.schedule}
    whole = sum(stages.values()) or 1.0
    parts.append("time: " + ", ".join(f"{name} {share / whole:.0%}" for name, share in stages.items() if share))
    return " | ".join(parts)
