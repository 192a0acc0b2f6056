"""Certificates as self-contained HTML pages: one certificate in full, or a table of many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from pathlib import Path
from typing import Any

from sameseed.laws.check import IN_PART, NOT_SHOWN, PASSED
from sameseed.laws.statistics import bound_text
from sameseed.measure.certificate_every import Outcome
from sameseed.measure.certificate_words import summary
from sameseed.report.page import templates

TONES = {"passed": "passed", "these checks passed": "passed", "impossible": "warning", NOT_SHOWN: "warning"}
HEADLINES = {  # by verdict: the headline, and its colour
    PASSED: ("Speculation changed nothing", "passed"),
    IN_PART: ("These checks passed; others were left out", "warning"),
    NOT_SHOWN: ("Not shown: not enough evidence", "warning"),
}


def sizes_text(values: Mapping[str, float]) -> str:
    """Numbers with their names: "2,844 tokens, 72 texts"."""
    return ", ".join(f"{_number(v)} {name.replace('_', ' ')}" for name, v in values.items())


def statistic_text(values: Mapping[str, float]) -> str:
    """Names with their numbers: "differing texts: 0"."""
    return ", ".join(f"{name.replace('_', ' ')}: {_number(v)}" for name, v in values.items())


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


_TEMPLATES = templates(
    Path(__file__).parent,
    tones=TONES,
    sizes=sizes_text,
    statistic=statistic_text,
    bound=bound_text,
    summary=summary,
)


def _page(template: str, verdict: str, **values: object) -> str:
    head, tone = HEADLINES.get(verdict, ("Not lossless, or not provable", "failed"))
    return _TEMPLATES.get_template(f"{template}.html").render(head=head, tone=tone, **values)


def render(record: Mapping[str, Any]) -> str:
    """The HTML page of a record (schema `sameseed.certificate/1`)."""
    status = [check["status"] for check in record["checks"]]
    counts = ", ".join(f"{status.count(s)} {s}" for s in ("passed", "failed", "warning", NOT_SHOWN) if s in status)
    config = record["config"]
    return _page(
        "certificate", record["verdict"], title=f"Certificate: {config['label']}", r=record, c=config, counts=counts
    )


def render_every(outcomes: Seq[Outcome], verdict: str) -> str:
    """The HTML page with a table of all outcomes."""
    records = [o.record for o in outcomes if o.record is not None]
    first = records[0] if records else {"config": None}
    title, seconds = f"Certificates: {len(outcomes)} configurations", sum(r["seconds"] for r in records)
    return _page("certificates", verdict, title=title, outcomes=outcomes, r=first, c=first["config"], seconds=seconds)
