"""Estimates of what a format costs: those of the records, and for other formats of the most similar one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sameseed.formats._losses import LOSSES, MODEL, likely
from sameseed.scheme import QuantScheme

RECORDS = Path(__file__).parents[3] / "benchmarks" / "results" / "eval.jsonl"


def test_losses_are_those_of_the_records() -> None:
    measured = {}
    for line in RECORDS.read_text().splitlines():
        r = json.loads(line)
        if r["comparison"] and MODEL in r["config"]["model"]:
            ratio = r["comparison"]["perplexity_ratio"]
            measured[r["config"]["asked_format"]] = ratio and ratio["value"]
    assert {name: pytest.approx(measured[name], abs=0.005) for name in LOSSES} == LOSSES


@pytest.mark.parametrize(
    ("asked", "near"),
    [("w4a8-g64", "w4a8"), ("w4a8-qoq", "w4a8"), ("w4a16-asym,lm_head=bf16", "w4a16-g64-asym"), ("w8a8-g32", "w8a8")],
)
def test_others_are_estimated_by_the_most_similar(asked: str, near: str) -> None:
    assert f"{LOSSES[near]:.2f}" in likely(QuantScheme.parse(asked))


def test_what_was_not_measured_is_said() -> None:
    assert "not measured" in likely(QuantScheme.parse("q6_k"))
