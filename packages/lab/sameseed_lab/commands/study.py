"""`sameseed study`: repeats the study of a published system: measures its grid here, and shows both results."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional

from sameseed.cli.options import option, parse
from sameseed.errors import ConfigError

if TYPE_CHECKING:
    from sameseed_lab.studies._runner import Planned

SAME = ("prompts", "num_prompts", "max_tokens", "repeat", "threads", "data", "problems")  # fields of StudySetup, too


@dataclass(frozen=True)
class StudyArgs:
    """Measure a published study's grid here, cell by cell; write records, plots and a page of their figures and ours.

    `study list` lists the studies. Measured cells are skipped, so an interrupted study goes on. Delete its records to
    measure again. Exit code 1 if a cell failed, or its texts differed from plain decoding's.
    """

    name: Annotated[str, Positional]  # name of the study, or list
    # small: the embedded family, minutes; real: trained models; true: twins at true shapes; both hours (26 GB of disk)
    size: str = "small"
    model: Annotated[str | None, option("MODEL")] = None  # a target of your own, in place of the size's models
    draft: Annotated[str | None, option("DRAFT")] = None  # its draft model, or a drafter's name; unset: ngram
    head: Annotated[str | None, option("HEAD")] = None  # its draft head, for cells that use one
    out: Annotated[Path | None, option("DIR")] = None  # records, plots, page; unset: studies/NAME
    # only these cells, by the names of --dry-run, e.g. 'lengths'
    only: Annotated[tuple[str, ...], option("PATTERN")] = ()
    dry_run: Annotated[bool, option()] = False  # print the grid, and which cells cannot run and why
    prompts: Annotated[Path | None, option("FILE")] = None  # .jsonl, .txt, or a set as gsm8k:DIR; unset: packaged
    num_prompts: Annotated[int, option("N")] = 12  # take N of them, spread over the file
    max_tokens: int = 64  # longest text
    repeat: int = 3  # runs of each setting, interleaved
    threads: Annotated[int | None, option("N")] = None  # CPU threads; unset: all cores
    data: Annotated[Path | None, option("DIR")] = None  # evaluation sets, for cells that ask for one (HumanEval)
    problems: Annotated[int | None, option("N")] = None  # of HumanEval; unset: --num-prompts


def run(argv: Seq[str], prog: str) -> int:
    """Parse, plan, measure, draw."""
    args = parse(StudyArgs, argv, prog).args
    from sameseed import registry
    from sameseed.cli.console import progress, stderr_console, stdout_console, warn_if_busy
    from sameseed_lab.studies import _runner
    from sameseed_lab.studies._setup import StudySetup

    if args.name == "list":
        for name in registry.names("studies"):
            stdout_console().print(f"{name:<12} {_runner.load(name).title}", markup=False)
        return 0
    if args.model and args.size == "true":
        raise ConfigError("--model is measured as it is, not at a true shape; leave --size out")
    with progress(args.name) as (update, say):
        setup = StudySetup(
            "real" if args.model else args.size,
            args.out or Path("studies") / args.name,
            models=_models(args),
            progress=lambda title, done, total: update(description=title, completed=done, total=total),
            **{name: getattr(args, name) for name in SAME},
        )
        planned = _runner.plan(args.name, setup, args.only)
        if not args.dry_run:
            warn_if_busy()
            for p in planned:
                if p.wrong:
                    say(f"left out: {p.cell.name}: {p.wrong}", style="yellow", markup=False)
            tried = _runner.run(args.name, setup, planned, lambda text: say(text, markup=False, highlight=False))
            written, same = _runner.write(args.name, setup, tried)
    if args.dry_run:
        _show(planned)
        return 0
    for path in written:
        stderr_console().print(f"written: {path}", style="dim", markup=False)
    failed = any(after.wrong and not before.wrong for before, after in zip(planned, tried))
    return 0 if same and not failed else 1


def _models(args: StudyArgs) -> dict[str, str]:
    """The models of --size real by role. Raises ConfigError for a draft without its target."""
    from sameseed_lab.studies._setup import REAL

    if args.model is None:
        for flag, given in (("--draft", args.draft), ("--head", args.head)):
            if given is not None and args.size != "real":
                raise ConfigError(f"{flag} needs the target that it drafts for; name it with --model")
    target, draft = (args.model, "ngram") if args.model else (REAL["target"], REAL["1b"])
    own = {"target": target, "1b": args.draft or draft, "head": args.head}
    return {role: name for role, name in own.items() if name is not None}


def _show(planned: Seq[Planned]) -> None:
    """The grid as a table."""
    from rich.text import Text

    from sameseed.cli.console import show_table
    from sameseed.report import table as layout

    table = layout.table(f"{len(planned)} cells", ("cell", "ways", "state"), left=(0, 2))
    for p in planned:
        state = Text("measured", "green") if p.done else Text(p.wrong, "yellow") if p.wrong else Text("to measure")
        table.add_row(p.cell.name, f"{p.cell.weight:g}", state)
    show_table(table)
