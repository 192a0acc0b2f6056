"""Certificates as HTML pages that need nothing else: one in full, or a table of many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from html import escape
from typing import Any

from sameseed.laws.check import IN_PART, PASSED
from sameseed.laws.statistics import bound_text
from sameseed.study.certificate_every import Outcome

STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5b6472; --line: #d9dee7; --ground: #fbfcfe; --card: #fff;
  --passed: #12733f; --failed: #b3261e; --warning: #8a5a00; --skipped: #5b6472; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf1; --soft: #9aa5b5; --line: #323b49; --ground: #12161d;
  --card: #1a2029; --passed: #5fd08f; --failed: #ff8a80; --warning: #f2c14e; --skipped: #9aa5b5; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 4rem; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p { margin: .4rem 0; } .soft, small { color: var(--soft); }
.verdict { border: 1px solid var(--line); border-left: .5rem solid var(--tone); background: var(--card);
  border-radius: .4rem; padding: 1rem 1.2rem; margin: 1rem 0; } .verdict h1 { color: var(--tone); }
.passed { --tone: var(--passed); } .failed { --tone: var(--failed); } .warning { --tone: var(--warning); }
.skipped { --tone: var(--skipped); }
.mark { color: var(--tone); font-weight: 600; white-space: nowrap; }
table { border-collapse: collapse; width: 100%; background: var(--card); font-size: .93rem; }
th, td { text-align: left; vertical-align: top; padding: .5rem .6rem; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; }
table.checks td:last-child { white-space: nowrap; overflow-wrap: normal; }
th { color: var(--soft); font-weight: 600; } td.n { font-variant-numeric: tabular-nums; }
details { border-bottom: 1px solid var(--line); padding: .5rem 0; } summary { cursor: pointer; }
dl { margin: .6rem 0; } dt { color: var(--soft); margin-top: .5rem; } dd { margin: 0 0 0 1rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .2rem 0; padding: .5rem; font-size: .85rem;
  background: var(--ground); border: 1px solid var(--line); border-radius: .3rem; }
@media (max-width: 40rem) {
  table.checks thead { display: none; } table.checks tr { display: block; padding: .5rem 0;
    border-bottom: 1px solid var(--line); }
  table.checks td { display: block; border: 0; padding: .1rem .6rem; }
  table.checks td[data-head]::before { content: attr(data-head) ": "; color: var(--soft); } }
"""
TONES = {"passed": "passed", "these checks passed": "passed", "impossible": "warning"}
HEADLINES = {  # of a verdict, with its colour
    PASSED: ("Speculation changed nothing", "passed"),
    IN_PART: ("These checks passed; others were left out", "warning"),
}


def render(record: Mapping[str, Any]) -> str:
    """The page of a record (schema `sameseed.certificate/1`)."""
    label = escape(str(record["config"]["label"]))
    parts = [
        _verdict(record, label),
        "<h2>Checks</h2>",
        _table(record["checks"]),
        "<h2>Details</h2>",
        *(_details(check) for check in record["checks"]),
        _mutants(record["mutants"]),
        "<h2>Configuration</h2>",
        _pairs(record["config"]),
        "<h2>Machine</h2>",
        _pairs({**record["machine"], "commit": record["commit"], "time": record["time"]}),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Certificate: {label}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body>\n</html>\n"
    )


def _verdict(record: Mapping[str, Any], label: str) -> str:
    status = [check["status"] for check in record["checks"]]
    counts = ", ".join(f"{status.count(s)} {s}" for s in ("passed", "failed", "warning", "skipped") if s in status)
    head, tone = HEADLINES.get(record["verdict"], ("Not lossless, or not provable", "failed"))
    config, accepted = record["config"], record["acceptance"]
    target = (
        f"{config['model']}, weights {config['format']}, cache {config['kv_format']}, "
        f"backend {config['backend']}, device {config['device']}"
    )
    if config.get("device_name"):
        target += f" ({config['device_name']})"
    alarm = record["false_alarm"]
    chance = f"below {bound_text(alarm)}" if alarm else "of 0: bits were compared"
    rows = [
        f"<h1>{head}</h1>",
        f"<p><strong>{label}</strong> on {escape(target)}</p>",
        f"<p>{counts}; effort {record['effort']:g} of the full sizes, {record['seconds']:,.0f} s. "
        f"A right engine fails this certificate with a probability {chance}.</p>",
        f"<p class=soft>{accepted['num_accepted_tokens']:,} of {accepted['num_draft_tokens']:,} drafted tokens were "
        f"accepted, {accepted['num_rollbacks']:,} rounds rolled back.</p>",
    ]
    if record["left_out"]:
        rows.append(f"<p><strong>Left out: {escape(', '.join(record['left_out']))}.</strong></p>")
    return f'<div class="verdict {tone}">{"".join(rows)}</div>'


def _table(checks: list[Mapping[str, Any]]) -> str:
    head = "".join(f"<th>{h}</th>" for h in ("", "check", "looked at", "full size", "threshold", "found", "s"))
    rows = []
    for c in checks:
        cells = [
            f'<td><span class="mark {c["status"]}">{c["status"]}</span></td>',
            f"<td>{escape(c['id'])} {escape(c['name'])}</td>",
            *(
                f'<td class=n data-head="{name}">{escape(sizes_text(c[key]))}</td>'
                for name, key in (("looked at", "sizes"), ("full size", "full_sizes"))
            ),
            f'<td data-head="threshold">{escape(c["threshold"])}</td>',
            f'<td class=n data-head="found">{escape(statistic_text(c["statistic"]))}</td>',
            f'<td class=n data-head="seconds">{c["seconds"]:.1f}</td>',
        ]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f'<table class="checks"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def _details(check: Mapping[str, Any]) -> str:
    opened = " open" if check["status"] in ("failed", "warning") else ""
    body = [f"<dt>a pass means</dt><dd>{escape(check['proves'])}</dd>"]
    if "device" in check:
        body.append(f"<dt>ran on</dt><dd>{escape(str(check['device']))}</dd>")
    body += [f"<dt>note</dt><dd>{escape(note)}</dd>" for note in check["notes"]]
    if check["false_alarm"]:
        body.append(f"<dt>probability of a false alarm</dt><dd>below {bound_text(check['false_alarm'])}</dd>")
    for f in check["findings"]:
        body.append(
            f"<dt>{escape(f['where'])}</dt><dd>expected<pre>{escape(f['expected'])}</pre>"
            f"found<pre>{escape(f['found'])}</pre></dd>"
        )
    mark = f'<span class="mark {check["status"]}">{check["status"]}</span>'
    title = f"{escape(check['id'])} {escape(check['name'])}"
    return f"<details{opened}><summary>{mark} {title}</summary><dl>{''.join(body)}</dl></details>"


def _mutants(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    rows = []
    for t in found["trials"]:
        status, by = ("passed", f"rejected by {t['caught_by']}") if t["caught_by"] else ("failed", "not noticed")
        rows.append(
            f'<tr><td>{escape(t["name"])}</td><td><span class="mark {status}">{by}</span></td>'
            f"<td>{escape(t['said'])}</td></tr>"
        )
    return (
        f"<h2>Mutants</h2><p>{found['caught']} of {found['total']} wrong versions of the code, put in the place of the "
        f"right one, were rejected by a check.</p><table><tbody>{''.join(rows)}</tbody></table>"
    )


def _pairs(values: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><td>{escape(k)}</td><td>{escape(str(v))}</td></tr>" for k, v in values.items())
    return f"<table><tbody>{rows}</tbody></table>"


def sizes_text(values: Mapping[str, float]) -> str:
    """Numbers with their names: "2,844 tokens, 72 texts"."""
    return ", ".join(f"{_number(v)} {name.replace('_', ' ')}" for name, v in values.items())


def statistic_text(values: Mapping[str, float]) -> str:
    """Names with their numbers: "differing texts: 0"."""
    return ", ".join(f"{name.replace('_', ' ')}: {_number(v)}" for name, v in values.items())


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


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
