"""A study as one self-contained HTML page, in the style of the certificate's page."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence as Seq
from typing import Any

from sameseed.report.page import templates
from sameseed_lab.studies._study import Records, Report, Study, same_text

BODY = """{% extends "page" %}
{% block about %}
{% for line in report.findings %}<p>{{ line }}</p>
{% endfor %}
<p class=soft>Published: {{ study.source }}.</p>
<p class=soft>Ours: {{ ours }}.</p>
{% if busy %}<p><strong>Other work ran beside it: read no speeds here, and ratios with care.</strong></p>{% endif %}

{% if unequal %}<p><strong>{{ unequal }} records have another text than plain decoding.</strong></p>
{% elif compared %}<p class=soft>All texts of {{ compared }} speculative records are plain decoding's, token for
token.</p>{% endif %}
{% endblock %}
{% block body %}
{% for plot in report.plots %}
<h2>{{ plot.title }}</h2>
<p><img src="data:image/svg+xml;base64,{{ pictures[plot.name] }}" alt="{{ plot.title }}"
width="{{ [100, 34 * plot.panels | length] | min }}%" style="background: #fff"></p>
{% endfor %}
{% if report.published %}
<h2>Theirs beside ours</h2>
<table class="checks"><thead><tr><th>figure</th><th>published</th><th>ours</th><th>ours / published</th></tr>
</thead><tbody>
{% for p in report.published if p.ours is not none %}
<tr><td>{{ p.what }}{% if p.note %}<br><small>{{ p.note }}</small>{% endif %}</td>
<td class=n data-head="published">{{ number(p.theirs) }}</td><td class=n data-head="ours">{{ number(p.ours) }}</td>
<td class=n data-head="ratio">{{ "%.2f" % (p.ours / p.theirs) }}</td></tr>
{% endfor %}
</tbody></table>
{% set missing = report.published | selectattr("ours", "none") | list %}
{% if missing %}<details><summary>{{ missing | length }} published figures that are not measured here</summary>
{% for p in missing %}<p class=soft>{{ p.what }}: {{ number(p.theirs) }}</p>
{% endfor %}</details>{% endif %}
{% endif %}
<h2>What differs</h2>
{% for line in study.differs %}<p>{{ line }}</p>
{% endfor %}
<p>{{ study.data }}</p>
{% for table in report.tables %}
<h2>{{ table.title }}</h2>
<div style="overflow-x: auto"><table class="checks"><thead><tr>
{% for head in table.heads %}<th>{{ head }}</th>{% endfor %}
</tr></thead><tbody>
{% for row in table.rows %}
<tr>{% for cell in row %}
<td{% if not loop.first %} class=n style="white-space: nowrap" data-head="{{ table.heads[loop.index0] }}"{% endif %}>
{{- cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% endfor %}
{% if left_out %}
<h2>Left out</h2>
<table><tbody>
{% for cell, why in left_out %}<tr><td>{{ cell }}</td><td>{{ why }}</td></tr>
{% endfor %}
</tbody></table>
{% endif %}
<h2>Machine</h2>
<table><tbody>
{% for name, value in machine.items() %}<tr><td>{{ name }}</td><td>{{ value }}</td></tr>
{% endfor %}
</tbody></table>
{% endblock %}
"""
_TEMPLATES = templates({"study": BODY}, tone="passed", number=lambda value: f"{value:.3g}")


def render(
    name: str,
    study: Study,
    report: Report,
    records: Records,
    left_out: Seq[tuple[str, str]],
    pictures: Mapping[str, bytes],
) -> str:
    """The HTML page. `left_out`: names of cells without records, with the reason. `pictures`: SVG bytes by plot."""
    last = next((r for r in reversed(records) if "repetitions" in r), records[-1])
    drafted = [same for r in records if (same := same_text(r)) is not None]
    machine: dict[str, Any] = {**last["machine"], "commit": last["commit"], "time": last["time"], "size": last["size"]}
    loads = [r["machine"]["load_1min"] for r in records]
    machine["load in the minute before each cell"] = f"{min(loads):g} to {max(loads):g}" if loads else ""
    return _TEMPLATES.get_template("study").render(
        title=f"Study: {name}",
        head=study.title,
        study=study,
        report=report,
        ours=ours(last),
        busy=any(r["machine"]["load_1min"] > r["machine"]["cores"] + 1 for r in records),
        compared=len(drafted),
        unequal=drafted.count(False),
        left_out=left_out,
        pictures={plot: base64.b64encode(svg).decode() for plot, svg in pictures.items()},
        machine=machine,
    )


def ours(last: Mapping[str, Any]) -> str:
    """The machine and the workload of our measurement in one line."""
    c = last["config"]
    if "repetitions" not in last:
        return f"{c['model']} on {last['machine']['cpu']}; no speed was measured"
    if "workload" in c:
        return f"{c['workload']}; {last['machine']['cpu']}"
    count = f"{c['num_prompts']} prompts" if "num_prompts" in c else f"{c['num_requests']} requests at the most clients"
    kind = "the embedded family" if last["size"] == "small" else "twins of the embedded family at true shapes"
    return (
        f"{kind} on {last['machine']['cpu']}, {last['machine']['threads']} threads; {count}, at most "
        f"{c['max_tokens']} tokens each, {len(last['repetitions'])} x in turns, medians"
    )
