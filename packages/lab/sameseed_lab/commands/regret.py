"""`sameseed regret`: how far the choice of `tune` is behind the best setting of the whole grid."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from sameseed.cli.flags import TuneArgs
from sameseed.cli.options import option, parse, unread
from sameseed.errors import ConfigError

if TYPE_CHECKING:
    from sameseed_lab.regret import Regret


@dataclass(frozen=True)
class RegretArgs(TuneArgs):
    """Tune on half of the prompts, then run every setting on the other half: how good was the choice?

    The flags are those of `tune`; --seconds limits the choice, not what follows. No profile is written.
    """

    records: Annotated[Path | None, option("FILE")] = None  # append the result here


def run(argv: Seq[str], prog: str) -> int:
    """Parse, measure, show; exit code 1 if an output differed from plain decoding's."""
    args = parse(RegretArgs, argv, prog).args
    unread(args, ("engine", "url", "cost", "api_key_file"), "regret is measured of sameseed's own engine")
    unread(args, ("out", "check", "plot"), "regret writes no profile; --records keeps the result")
    from sameseed.cli.console import check_outputs, keep, stages
    from sameseed.cli.tune import load, requested, show
    from sameseed.plan.tune import as_tuned, tune
    from sameseed_lab.regret import regret

    check_outputs((args.records, "--records"))
    asked = requested(args)
    if len(asked.prompts) < (least := 2 * max(2, *asked.batches)) or asked.objective in ("ttft", "memory"):
        raise ConfigError(f"regret is of speed, on half of the prompts: give at least {least}, and another --objective")
    # Every other prompt: files list their domains one after the other.
    asked = replace(asked, prompts=asked.prompts[::2], held_out=asked.prompts[1::2])
    with stages(f"tuning {args.model}", args.json) as tell:
        outcome = tune(asked, load, tell)
        found = regret(outcome, tell)
    line = found.as_record(asked, outcome.seconds)
    keep([line], args.records, False)
    if args.json:
        print(json.dumps(line))
    else:
        show(outcome, as_tuned(outcome))
        _show(found)
    return 1 if outcome.differing or found.differing else 0


def _show(regret: Regret) -> None:
    """Show how far the choice, and usual choices, are behind the best of all on held-out prompts."""
    from sameseed.cli.console import show_table, stdout_console
    from sameseed.report import table as layout

    rows = [
        (name, x.setting, f"{x.share.value:.1%} ({x.share.low:.1%} to {x.share.high:.1%})")
        for name, x in {"tune": regret.choice, **regret.baselines}.items()
    ]
    title = f"behind {regret.best} (80 % intervals)"
    table = layout.table(title, ("choice", "setting", "behind"), rows, left=(0, 1))
    show_table(table)
    e = regret.errors
    stdout_console().print(
        f"{regret.best} is the best on the prompts held out. Predicted speed-ups are {e.median:.1%} off (median; p90 "
        f"{e.p90:.1%}, worst {e.worst:.1%}); {e.coverage:.0%} of {e.count} agree within 80 % intervals."
    )
