"""A certificate as a self-contained HTML page, and its summary in a few sentences."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sameseed.laws.check import FAILED, IN_PART, NOT_SHOWN, PASSED
from sameseed.laws.statistics import bound_text
from sameseed.report.page import templates

OPENINGS = {
    PASSED: "Outputs with the draft equal those with speculation off, wherever this certificate looked.",
    FAILED: "Something differs, or a check broke down. The first differences stand below.",
    NOT_SHOWN: "Nothing differed, but there is not enough evidence. What to change stands below.",
}
PART = "Nothing differed in the checks that ran. Others were left out, so this is no proof of the whole."


def summary(record: Mapping[str, Any]) -> list[str]:
    """Sentences about a record (schema `sameseed.certificate/1`): verdict, what was checked, how much, what was not."""
    checks = {c["id"]: {**c["sizes"], **c["statistic"]} for c in record["checks"]}
    lines = [OPENINGS.get(record["verdict"], PART), *_looked_at(checks), _drafted(record), _share(record)]
    lacking = [f"{c['id']} ({'; '.join(c['lacking'])})" for c in record["checks"] if c["lacking"]]
    if lacking:
        remedies = dict.fromkeys(c["remedy"] for c in record["checks"] if c["lacking"])
        lines.append(f"Not enough evidence: {', '.join(lacking)}. To change that, {'; or '.join(remedies)}.")
    unseen = [*record["unseen"], *([f"the checks {', '.join(record['left_out'])}"] if record["left_out"] else [])]
    lines.append(f"Not looked at: {'; '.join(unseen)}.")
    return lines


def _looked_at(checks: Mapping[str, Mapping[str, float]]) -> list[str]:
    """What the checks that ran compared."""
    lines = []
    compared = [
        f"{checks[i][key]:,.0f} {words}"
        for i, key, words in (
            ("L3", "tokens", "greedy tokens"),
            ("L6", "texts", "sampled outputs"),
            ("S1", "requests", "requests that end early"),
        )
        if i in checks and key in checks[i]
    ]
    if compared:
        lines.append(f"Generated with and without speculation, and compared bit by bit: {', '.join(compared)}.")
    oracle = checks.get("T1", {})
    if "exact" in oracle:
        lines.append(
            f"{oracle['tokens']:,.0f} tokens were compared with a textbook decoder: "
            f"{oracle['exact']:,.0f} are its choice, {oracle['near_ties']:,.0f} too near to call, "
            f"{oracle['differing_tokens']:,.0f} wrong."
        )
    if "sequences" in checks.get("L5", {}):
        lines.append(f"{checks['L5']['sequences']:,.0f} short outputs were counted against their exact probabilities.")
    return lines


def _drafted(record: Mapping[str, Any]) -> str:
    """Counts of the configured draft; tokens of trees that the certificate makes itself are given separately."""
    a = record["acceptance"]
    return (
        f"The draft ({record['config']['label']}) proposed {a['num_draft_tokens']:,} tokens: "
        f"{a['num_accepted_tokens']:,} were accepted, and {a['num_rollbacks']:,} rounds rejected some. "
        f"{a['num_scripted_tokens']:,} tokens of trees made to provoke mistakes are not among them."
    )


def _share(record: Mapping[str, Any]) -> str:
    """The effort, and how large the checks' samples are as shares of the full sizes."""
    shares = []
    for c in record["checks"]:
        sizes = {**c["sizes"], **c["statistic"]}
        own = [sizes[k] / full for k, full in c["full_sizes"].items() if k in sizes]
        shares += [min(own)] if own else []
    if not shares:
        return f"Effort {record['effort']:g}."
    low, high = (f"{100 * min(share, 1.0):.3g} %" for share in (min(shares), max(shares)))
    return (
        f"Effort {record['effort']:g} (quick is 0.0005, full is 1): each check looked at {low} to {high} of its full "
        "size. What is rarer than that may be missed."
    )


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
    sizes=sizes_text,
    statistic=statistic_text,
    bound=bound_text,
    summary=summary,
)


def render(record: Mapping[str, Any]) -> str:
    """The HTML page of a record (schema `sameseed.certificate/1`)."""
    status = [check["status"] for check in record["checks"]]
    counts = ", ".join(f"{status.count(s)} {s}" for s in ("passed", "failed", "warning", NOT_SHOWN) if s in status)
    config = record["config"]
    head, tone = HEADLINES.get(record["verdict"], ("Not lossless, or not provable", "failed"))
    title = f"Certificate: {config['label']}"
    page = _TEMPLATES.get_template("certificate.html")
    return page.render(head=head, tone=tone, title=title, r=record, c=config, counts=counts)
