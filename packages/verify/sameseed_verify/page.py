"""A report as a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment

from sameseed_verify.inquiry import BROKEN, HOLDS, NOT_SHOWN

HEADLINES = {  # by verdict: the headline, and its colour
    HOLDS: ("The server keeps its promises", "passed"),
    BROKEN: ("The server breaks a promise", "failed"),
    NOT_SHOWN: ("Not shown: something could not be asked, or too little was", "warning"),
}


def compared_text(entry: Mapping[str, Any]) -> str:
    """How much was compared: "10 texts, 480 tokens"."""
    return f"{entry['compared']:,} texts, {entry['tokens']:,} tokens" if entry["compared"] else ""


def first_text(entry: Mapping[str, Any]) -> str:
    """Where the difference at the earliest character is; "" without differences."""
    found = min(entry["differences"], key=lambda d: d["at"], default=None)
    return "" if found is None else f"character {found['at']}: {found['where']}"


def numbers_text(values: Mapping[str, float]) -> str:
    """Names with their numbers: "near ties: 3"."""
    return ", ".join(f"{name.replace('_', ' ')}: {value:,.6g}" for name, value in values.items())


def counts_text(report: Mapping[str, Any]) -> str:
    """The number of promises with each verdict, in words."""
    statuses = [p["status"] for p in report["promises"]]
    said = [(statuses.count(s), s) for s in (HOLDS, BROKEN, NOT_SHOWN) if s in statuses]
    verbs = {HOLDS: ("holds", "hold"), BROKEN: ("is broken", "are broken")}
    return ", ".join(f"{n} {verbs.get(s, ('is not shown', 'are not shown'))[n != 1]}" for n, s in said)


_ENVIRONMENT = Environment(autoescape=True, trim_blocks=True, keep_trailing_newline=True)
_ENVIRONMENT.globals.update(
    tones={v: tone for v, (_, tone) in HEADLINES.items()},
    compared=compared_text,
    first=first_text,
    numbers=numbers_text,
)
_TEMPLATE = _ENVIRONMENT.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))


def render(report: Mapping[str, Any]) -> str:
    """The HTML page of a report (schema `sameseed.server/1`)."""
    head, tone = HEADLINES[report["verdict"]]
    title = f"Promises of a server: {report['config']['model']}"
    values = {"r": report, "c": report["config"], "counts": counts_text(report)}
    return _TEMPLATE.render(head=head, tone=tone, title=title, **values)
