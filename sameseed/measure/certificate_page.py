"""Certificates as self-contained HTML pages: one certificate in full, or a table of many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from typing import Any

from sameseed.laws.check import IN_PART, NOT_SHOWN, PASSED
from sameseed.laws.statistics import bound_text
from sameseed.measure.certificate_every import Outcome
from sameseed.measure.certificate_words import summary
from sameseed.report.page import templates

ONE = """{% extends "page" %}
{% macro mark(status, text) %}<span class="mark {{ status | replace(" ", "-") }}">{{ text }}</span>{% endmacro %}
{% macro pairs(values) %}
<table><tbody>
{% for name, value in values.items() %}<tr><td>{{ name }}</td><td>{{ value }}</td></tr>
{% endfor %}</tbody></table>
{% endmacro %}
{% block about %}
{% for line in summary(r) %}<p>{{ line }}</p>
{% endfor %}
<p class=soft><strong>{{ c.label }}</strong> on {{ c.model }}, weights {{ c.format }}, cache {{ c.kv_format }}, backend
{{- " " ~ c.backend }}, device {{ c.device }}{% if c.device_name %} ({{ c.device_name }}){% endif %}</p>
<p class=soft>{{ counts }}; {{ "{:,.0f}".format(r.seconds) }} s. A correct engine
fails this certificate with a probability
{{ "below " ~ bound(r.false_alarm) if r.false_alarm else "of 0: bits were compared" }}.</p>
{% endblock %}
{% block body %}
<h2>Checks</h2>
<table class="checks"><thead><tr><th></th><th>check</th><th>looked at</th><th>full size</th><th>threshold</th>
<th>found</th><th>s</th></tr></thead><tbody>
{% for check in r.checks %}
<tr><td>{{ mark(check.status, check.status) }}</td><td>{{ check.id }} {{ check.name }}</td>
<td class=n data-head="looked at">{{ sizes(check.sizes) }}</td>
<td class=n data-head="full size">{{ sizes(check.full_sizes) }}</td>
<td data-head="threshold">{{ check.threshold }}</td><td class=n data-head="found">{{ statistic(check.statistic) }}</td>
<td class=n data-head="seconds">{{ "%.1f" % check.seconds }}</td></tr>
{% endfor %}
</tbody></table>
<h2>Details</h2>
{% for check in r.checks %}
<details{% if check.status != "passed" %} open{% endif %}>
<summary>{{ mark(check.status, check.status) }} {{ check.id }} {{ check.name }}</summary>
<dl><dt>a pass means</dt><dd>{{ check.proves }}</dd>
{% if check.lacking %}<dt>not enough evidence</dt><dd>{{ check.lacking | join("; ") }}. What to change:
{{ check.remedy }}</dd>{% endif %}
{% for note in check.notes %}<dt>note</dt><dd>{{ note }}</dd>{% endfor %}
{% if check.false_alarm %}<dt>probability of a false alarm</dt><dd>below {{ bound(check.false_alarm) }}</dd>{% endif %}
{% for f in check.findings %}
<dt>{{ f.where }}</dt><dd>expected<pre>{{ f.expected }}</pre>found<pre>{{ f.found }}</pre></dd>
{% endfor %}
</dl></details>
{% endfor %}
<h2>Configuration</h2>
{{ pairs(c) }}
<h2>Machine</h2>
{{ pairs(dict(r.machine, commit=r.commit, time=r.time)) }}
{% endblock %}
"""
EVERY = """{% extends "page" %}
{% block about %}<p>{{ outcomes | length }} configurations: {% if c %}{{ c.model }}, backend {{ c.backend }},
device {{ c.device }}{% if c.device_name %} ({{ c.device_name }}){% endif %}; {{ r.time }}, commit {{ r.commit }};
{{ "{:,.0f}".format(seconds) }} s{% endif %}</p>{% endblock %}
{% block body %}
<table class="checks"><thead><tr><th></th><th>draft</th><th>weights</th><th>cache</th><th>batch</th><th>checks</th>
<th>found</th><th>s</th></tr></thead><tbody>
{% for o in outcomes %}
<tr><td><span class="mark {{ tones.get(o.verdict, "failed") }}">{{ o.verdict }}</span></td>
<td data-head="draft">{{ o.cell.name }}</td><td data-head="weights">{{ o.cell.format }}</td>
<td data-head="cache">{{ o.cell.kv_format }}</td><td data-head="batch">{{ o.cell.batch }}</td>
<td data-head="checks">{% for check in (o.record or {}).checks %}{{ ", " if not loop.first }}{{ check.id }}
{%- if check.status != "passed" %} ({{ check.status }}){% endif %}{% endfor %}</td>
<td data-head="found">{{ o.failure }}
{%- for check in (o.record or {}).checks if check.status == "failed" %}
{{- "; " if not loop.first }}{{ check.id }}: {{ statistic(check.statistic) }}
{%- for f in check.findings %} | {{ f.where }}{% endfor %}{% endfor %}</td>
<td class=n>{% if o.record %}{{ "%.0f" % o.record.seconds }}{% endif %}</td></tr>
{% endfor %}
</tbody></table>
{% endblock %}
"""
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
    {"one": ONE, "every": EVERY},
    tones=TONES,
    sizes=sizes_text,
    statistic=statistic_text,
    bound=bound_text,
    summary=summary,
)


def _page(template: str, verdict: str, **values: object) -> str:
    head, tone = HEADLINES.get(verdict, ("Not lossless, or not provable", "failed"))
    return _TEMPLATES.get_template(template).render(head=head, tone=tone, **values)


def render(record: Mapping[str, Any]) -> str:
    """The HTML page of a record (schema `sameseed.certificate/1`)."""
    status = [check["status"] for check in record["checks"]]
    counts = ", ".join(f"{status.count(s)} {s}" for s in ("passed", "failed", "warning", NOT_SHOWN) if s in status)
    config = record["config"]
    return _page("one", record["verdict"], title=f"Certificate: {config['label']}", r=record, c=config, counts=counts)


def render_every(outcomes: Seq[Outcome], verdict: str) -> str:
    """The HTML page with a table of all outcomes."""
    records = [o.record for o in outcomes if o.record is not None]
    first = records[0] if records else {"config": None}
    title, seconds = f"Certificates: {len(outcomes)} configurations", sum(r["seconds"] for r in records)
    return _page("every", verdict, title=title, outcomes=outcomes, r=first, c=first["config"], seconds=seconds)
