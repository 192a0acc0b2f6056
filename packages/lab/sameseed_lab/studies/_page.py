"""A study as one self-contained HTML page, in the style of the certificate's page."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence as Seq
from pathlib import Path
from typing import Any

from sameseed.report.page import templates
from sameseed.report.plot import svg
from sameseed_lab.studies._study import Records, Report, Study, same_text

SPREAD = "Bands and lines: the least and the most of several runs; of quality: 95 % intervals. Published: grey."
_TEMPLATES = templates(
    Path(__file__).parent,
    tone="passed",
    number=lambda value: f"{value:.3g}",
    picture=lambda panel: base64.b64encode(svg(panel)).decode(),
    spread=SPREAD,
)


def render(name: str, study: Study, report: Report, records: Records, left_out: Seq[tuple[str, str]]) -> str:
    """The HTML page. `left_out`: names of cells without records, with the reason."""
    last = next((r for r in reversed(records) if "repetitions" in r), records[-1])
    drafted = [same for r in records if (same := same_text(r)) is not None]
    facts: dict[str, Any] = {**last["machine"], "commit": last["commit"], "time": last["time"], "size": last["size"]}
    loads = [r["machine"]["load_1min"] for r in records]
    facts["load in the minute before each cell"] = f"{min(loads):g} to {max(loads):g}" if loads else ""
    return _TEMPLATES.get_template("study.html").render(
        title=f"Study: {name}",
        head=study.title,
        study=study,
        report=report,
        ours=ours(last),
        busy=any(r["machine"]["load_1min"] > r["machine"]["cores"] + 1 for r in records),
        compared=len(drafted),
        unequal=drafted.count(False),
        left_out=left_out,
        machine=facts,
    )


def ours(last: Mapping[str, Any]) -> str:
    """The machine and the workload of our measurement in one line."""
    c = last["config"]
    if "repetitions" not in last:
        return f"{c['model']} on {last['machine']['cpu']}; no speed was measured"
    kinds = {"small": "the embedded family", "true": "twins of the embedded family at true shapes"}
    kind = kinds.get(last["size"]) or " with ".join(last["models"].values())
    if "workload" in c:
        return f"{c['workload'].replace('own, ', f'{kind}, ', 1)}; {last['machine']['cpu']}"
    count = f"{c['num_prompts']} prompts" if "num_prompts" in c else f"{c['num_requests']} requests at the most clients"
    return (
        f"{kind} on {machine(last)}; {count}, at most "
        f"{c['max_tokens']} tokens each, {len(last['repetitions'])} x interleaved, medians"
    )


def machine(record: Mapping[str, Any]) -> str:
    """The machine of a record: its GPU, or its processor and threads."""
    its = record["machine"]
    return str(its.get("gpu") or f"{its['cpu']}, {its['threads']} thread{'s' * (its['threads'] > 1)}")
