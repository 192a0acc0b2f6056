"""A report as a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment

from sameseed_verify.inquiry import BROKEN, HOLDS, NOT_SHOWN

HEADLINES = {  # by verdict: the headline, and its colour
    HOLDS: ("The server keeps its promises", "passed"),
    BROKEN: ("The server breaks a promise", "failed"),
    NOT_SHOWN: ("Not shown: something could not be asked, or too little was", "warning"),
}
TONES = {HOLDS: "passed", BROKEN: "failed", NOT_SHOWN: "warning"}
PAGE = """{% macro mark(status) %}<span class="mark {{ tones[status] }}">{{ status }}</span>{% endmacro %}
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; --soft: #7a8494; --line: #8886; }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 4rem; font: 16px/1.5 system-ui, sans-serif; }
.soft, th, dt { color: var(--soft); } .passed { color: #1f8a4c; } .failed { color: #d0342c; }
.warning { color: #b07a10; }
.verdict { border: 1px solid var(--line); border-left: .5rem solid currentColor; padding: 1rem 1.2rem; }
.verdict p { color: CanvasText; } .mark { font-weight: 600; white-space: nowrap; }
table { border-collapse: collapse; width: 100%; font-size: .93rem; } td.n { font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .5rem .6rem; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; }
details { border-bottom: 1px solid var(--line); padding: .5rem 0; } summary { cursor: pointer; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; padding: .5rem; border: 1px solid var(--line); }
</style>
</head>
<body>
<div class="verdict {{ tone }}"><h1>{{ head }}</h1>
<p><strong>{{ c.model }}</strong> on {{ c.engine if c.engine != "unknown" else "a server that does not say which" }},
asked {{ "as a conversation" if c.chat else "for completions" }}.</p>
<p>{{ r.requests }} requests in {{ "{:,.0f}".format(r.seconds) }} s: {{ c.num_prompts }} prompts
({{ c.prompts }}), at most {{ c.max_tokens }} tokens each, {{ c.concurrency }} at once under load. Of
{{ r.promises | length }} promises {{ counts }}.</p>
{% if r.died %}<p><strong>The server died on the way: {{ r.ended }}. What was found until then is below.</strong></p>
{% elif r.ended %}<p class=soft>Ended early: {{ r.ended }}.</p>{% endif %}
{% if r.failures %}<p class=soft>Requests that failed: {% for kind, n in r.failures.items() %}{{ n }} {{ kind }}
{{- ", " if not loop.last }}{% endfor %}.</p>{% endif %}
<p class=soft>Texts were compared from outside. Equal texts show that these requests came out equal, no more: with n
equal texts the true rate of differences is below 3 / n (95 %).</p>
</div>
<h2>Promises</h2>
<table class="checks"><thead><tr><th></th><th>promise</th><th>first where, or why</th><th>compared</th>
<th>changed</th></tr></thead>
<tbody>
{% for p in r.promises %}
<tr><td>{{ mark(p.status) }}</td><td>{{ p.name }}: {{ p.says }}</td>
{% set why = first(p) or p.why %}<td{% if why %} data-head="first where, or why"{% endif %}>{{ why }}</td>
<td class=n data-head="compared">{{ compared(p) }}</td>
<td class=n data-head="changed">{{ p.differing }}</td></tr>
{% endfor %}
</tbody></table>
<h2>Details</h2>
{% for p in r.promises %}
<details{% if p.status != "holds" %} open{% endif %}>
<summary>{{ mark(p.status) }} {{ p.name }}</summary>
<dl>{% if p.why %}<dt>not shown</dt><dd>{{ p.why }}</dd>{% endif %}
{% if p.numbers %}<dt>counted</dt><dd>{{ numbers(p.numbers) }}</dd>{% endif %}
{% for note in p.notes %}<dt>note</dt><dd>{{ note }}</dd>{% endfor %}
{% for d in p.differences %}
<dt>{{ d.where }}, character {{ d.at }}</dt><dd>expected<pre>{{ d.expected }}</pre>found<pre>{{ d.found }}</pre></dd>
{% endfor %}
{% if p.differing > p.differences | length %}<dt>and {{ p.differing - p.differences | length }} more</dt>{% endif %}
{% if p.advice %}<dt>what an operator can set</dt><dd>{{ p.advice }}</dd>{% endif %}
</dl></details>
{% endfor %}
<h2>Settings</h2>
<table><tbody>
{% for name, value in dict(c, time=r.time, commit=r.commit, not_asked=r.not_asked | join(", ")).items() %}
<tr><td>{{ name }}</td><td>{{ value }}</td></tr>
{% endfor %}
</tbody></table>
</body>
</html>
"""


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
    words = {
        HOLDS: ("holds", "hold"),
        BROKEN: ("is broken", "are broken"),
        NOT_SHOWN: ("is not shown", "are not shown"),
    }
    return ", ".join(f"{n} {words[s][n != 1]}" for n, s in said)


_ENVIRONMENT = Environment(autoescape=True, trim_blocks=True, keep_trailing_newline=True)
_ENVIRONMENT.globals.update(tones=TONES, compared=compared_text, first=first_text, numbers=numbers_text)
_TEMPLATE = _ENVIRONMENT.from_string(PAGE)


def render(report: Mapping[str, Any]) -> str:
    """The HTML page of a report (schema `sameseed.server/1`)."""
    head, tone = HEADLINES[report["verdict"]]
    title = f"Promises of a server: {report['config']['model']}"
    values = {"r": report, "c": report["config"], "counts": counts_text(report)}
    return _TEMPLATE.render(head=head, tone=tone, title=title, **values)
