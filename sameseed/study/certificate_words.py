"""The summary of a certificate: a few sentences for readers who do not know its checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sameseed.laws.check import FAILED, NOT_SHOWN, PASSED

OPENINGS = {
    PASSED: "The texts with the draft were the texts without it, wherever this certificate looked.",
    FAILED: "Something differs, or a check broke down. The first differences stand below.",
    NOT_SHOWN: "Nothing differed, but too little was seen to show anything. What to change stands below.",
}
PART = "Nothing differed in the checks that ran. Others were left out, so this is no proof of the whole."


def summary(record: Mapping[str, Any]) -> list[str]:
    """Sentences about a record (schema `sameseed.certificate/1`): verdict, what was checked, how much, what was not."""
    checks = {c["id"]: {**c["sizes"], **c["statistic"]} for c in record["checks"]}
    lines = [OPENINGS.get(record["verdict"], PART), *_looked_at(checks), _drafted(record), _share(record)]
    lacking = [f"{c['id']} ({'; '.join(c['lacking'])})" for c in record["checks"] if c["lacking"]]
    if lacking:
        remedies = dict.fromkeys(c["remedy"] for c in record["checks"] if c["lacking"])
        lines.append(f"Too little was seen by {', '.join(lacking)}. To change that: {'; or '.join(remedies)}.")
    unseen = [*record["unseen"], *([f"the checks {', '.join(record['left_out'])}"] if record["left_out"] else [])]
    lines.append(f"Not looked at: {'; '.join(unseen)}.")
    return lines


def _looked_at(checks: Mapping[str, Mapping[str, float]]) -> list[str]:
    """What the checks that ran compared."""
    lines = []
    compared = [
        f"{checks[i][key]:,.0f} {words}"
        for i, key, words in (
            ("L3", "tokens", "tokens of greedy texts"),
            ("L6", "texts", "sampled texts"),
            ("S1", "requests", "requests that end early"),
        )
        if i in checks and key in checks[i]
    ]
    if compared:
        lines.append(f"Written with and without drafts, and compared bit by bit: {', '.join(compared)}.")
    oracle = checks.get("T1", {})
    if "exact" in oracle:
        lines.append(
            f"{oracle['tokens']:,.0f} tokens were held against a textbook decoder of its own code: "
            f"{oracle['exact']:,.0f} are its choice, {oracle['near_ties']:,.0f} too near to call, "
            f"{oracle['differing_tokens']:,.0f} wrong."
        )
    served = checks.get("V1", {})
    if "misread" in served:
        wrong = served["misread"] + served["differing_answers"] + served["taken_though_bad"]
        lines.append(
            f"{served['requests']:,.0f} requests went through the server's code, field by field and several together: "
            f"{wrong:,.0f} were read or answered wrongly."
        )
    if "sequences" in checks.get("L5", {}):
        lines.append(f"{checks['L5']['sequences']:,.0f} short texts were counted against their exact probabilities.")
    return lines


def _drafted(record: Mapping[str, Any]) -> str:
    """Counts of the configured draft; tokens of trees that the certificate makes itself are given separately."""
    a = record["acceptance"]
    return (
        f"The draft ({record['config']['label']}) made {a['num_draft_tokens']:,} guesses: {a['num_accepted_tokens']:,} "
        f"were accepted, and {a['num_rollbacks']:,} rounds rejected some. "
        f"{a['num_scripted_tokens']:,} guesses of trees made to provoke mistakes are not among them."
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


def drawn_text(drawn: Mapping[str, Any]) -> str:
    """Results of randomly generated mutants (`laws.held_out.score`)."""
    low, high = (100 * share for share in drawn["interval"])
    live = drawn["caught"] + drawn["not_caught"] + drawn["other_counts_alone"]
    return (
        f"Drawn by seed {drawn['seed']}: {drawn['caught']} of {live} mutants that run on broke a law "
        f"({low:.0f} to {high:.0f} %). {drawn['broke_down'] + drawn['no_end']} more broke down or had no end. Of those "
        f"not caught, {drawn['other_counts_alone']} changed only what is counted. "
        f"{len(drawn['unreached'])} lay on lines that no check runs."
    )
