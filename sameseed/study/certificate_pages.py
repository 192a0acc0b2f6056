"""Many certificates as one HTML page: the verdict of all, and a row for each configuration with what it found."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from html import escape

from sameseed.study.certificate_every import Outcome
from sameseed.study.certificate_page import HEADLINES, STYLE, statistic_text

TONES = {"passed": "passed", "these checks passed": "passed", "impossible": "warning"}


def render_every(outcomes: Seq[Outcome], verdict: str) -> str:
    """The page of all outcomes."""
    head, tone = HEADLINES.get(verdict, ("Not lossless, or not provable", "failed"))
    found = [o.record for o in outcomes if o.record is not None]
    about = ""
    if found:
        config = found[0]["config"]
        name = f" ({config['device_name']})" if config.get("device_name") else ""
        about = f"{config['model']}, backend {config['backend']}, device {config['device']}{name}; " + (
            f"{found[0]['time']}, commit {found[0]['commit']}; {sum(r['seconds'] for r in found):,.0f} s"
        )
    heads = "".join(f"<th>{h}</th>" for h in ("", "draft", "weights", "cache", "batch", "checks", "found", "s"))
    rows = "\n".join(_row(o) for o in outcomes)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Certificates: {len(outcomes)} configurations</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f'<div class="verdict {tone}"><h1>{head}</h1><p>{len(outcomes)} configurations: {escape(about)}</p></div>\n'
        f'<table class="checks"><thead><tr>{heads}</tr></thead><tbody>\n{rows}\n</tbody></table>\n</body>\n</html>\n'
    )


def _row(o: Outcome) -> str:
    cell, tone = o.cell, TONES.get(o.verdict, "failed")
    checks, said, seconds = "", escape(o.failure), ""
    if o.record is not None:
        every = o.record["checks"]
        checks = ", ".join(c["id"] if c["status"] == "passed" else f"{c['id']} ({c['status']})" for c in every)
        said = "; ".join(
            escape(f"{c['id']}: {statistic_text(c['statistic'])}" + "".join(f" | {f['where']}" for f in c["findings"]))
            for c in every
            if c["status"] == "failed"
        )
        seconds = f"{o.record['seconds']:.0f}"
    values = (("draft", cell.name), ("weights", cell.format), ("cache", cell.kv_format), ("batch", cell.batch))
    cells = "".join(f'<td data-head="{head}">{escape(str(value))}</td>' for head, value in values)
    return (
        f'<tr><td><span class="mark {tone}">{escape(o.verdict)}</span></td>{cells}'
        f'<td data-head="checks">{escape(checks)}</td><td data-head="found">{said}</td><td class=n>{seconds}</td></tr>'
    )
