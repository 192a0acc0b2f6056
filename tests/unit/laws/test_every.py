"""Certificates of every drafter in each format, and the record of a cell that fails."""

from __future__ import annotations

import json
import weakref
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from proof.mutants import MUTANTS

from sameseed import registry
from sameseed.cli import main, verify_lossless
from sameseed.cli.options import EngineChoice
from sameseed.config import EngineConfig, SpecConfig
from sameseed.errors import ConfigError
from sameseed.laws import checks
from sameseed.laws.check import Effort
from sameseed.laws.checks import CHECKS
from sameseed.measure import certificate as suite, certificate_every as every
from sameseed.measure.certificate_page import render_every
from sameseed.report import record
from sameseed.request import SamplingParams

NAMES = {*registry.names("drafters")} - {"assistant", "block", "mtp"}  # none comes with the package


def methods(spec: SpecConfig) -> set[str]:
    return {spec.method, *(m for below in spec.below for m in methods(below))}


def test_every_drafter_meets_every_format_cache_and_batch() -> None:
    drafts = verify_lossless.drafts_of(EngineChoice("embedded", {"draft": None}))
    made = every.cells(drafts)
    assert {m for c in made for m in methods(c.draft)} == NAMES
    assert {(c.name, c.format) for c in made} == set(product(drafts, every.FORMATS))
    assert {(c.name, c.batch) for c in made} == set(product(drafts, every.BATCHES))
    assert {(c.format, c.batch) for c in made} == set(product(every.FORMATS, every.BATCHES))
    assert {(c.format, c.kv_format) for c in made} == set(product(every.FORMATS, every.KV_FORMATS))
    assert [c.format for c in made if c.whole] == list(every.FORMATS), "all checks, once for each format"
    known = {c.id for c in CHECKS}
    assert set(every.OF_DRAFTS) < known


def test_other_models_have_the_drafts_that_need_none_and_the_one_asked_for() -> None:
    own = SpecConfig("draft_model", "some/draft")
    found = verify_lossless.drafts_of(EngineChoice("some/model", {"draft": own}))
    assert list(found) == ["--draft", *every.MODELLESS]
    ngram = SpecConfig("ngram")
    assert list(verify_lossless.drafts_of(EngineChoice("some/model", {"draft": ngram}))) == list(every.MODELLESS)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cells with three checks."""
    monkeypatch.setattr(every, "FORMATS", ("bf16", "w8a8"))
    cells = every.cells
    monkeypatch.setattr(every, "cells", lambda drafts: cells(dict(list(drafts.items())[:2]), ("bf16",)))
    monkeypatch.setattr(every, "OF_DRAFTS", ("S1", "C2"))
    few = tuple(c for c in CHECKS if c.id in ("S1", "L10", "C2"))
    monkeypatch.setattr(checks, "CHECKS", few)
    monkeypatch.setattr(suite, "CHECKS", few)


class Loaded:
    """A stand-in for a loaded subject; like models and caches, it refers to itself."""

    def __init__(self) -> None:
        self.own = self


def test_one_cell_s_models_are_gone_before_the_next_ones_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also, if memory runs out while a cell is loaded or checked, only that cell fails."""
    alive: weakref.WeakSet[Loaded] = weakref.WeakSet()
    found: list[int] = []

    def load(*_: object) -> Loaded:
        found.append(len(alive))
        if len(found) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")
        subject = Loaded()
        alive.add(subject)
        return subject

    def certify(*_: object) -> SimpleNamespace:
        if len(found) == 3:
            raise torch.OutOfMemoryError
        return SimpleNamespace(as_dict=lambda: {"verdict": "passed"})

    monkeypatch.setattr(suite, "load_subject", load)
    monkeypatch.setattr(suite, "certify", certify)
    made = every.cells({"ngram": SpecConfig("ngram")}, ("bf16", "w8a8", "fp8", "w4a8"))
    asked = suite.Asked("a model", Path("prompts"), 1, 16, 1, Effort(1.0))
    outcomes = list(every.run(made, asked, EngineConfig(), SamplingParams()))
    assert found == [0, 0, 0, 0]
    assert [o.verdict for o in outcomes] == ["passed", "impossible", "impossible", "passed"]
    assert [o.failure for o in outcomes[1:3]] == [
        "CUDA out of memory. Tried to allocate",
        "the device's memory is full",
    ]


def command(folders: tuple[Path, Path], tmp_path: Path, *more: str) -> list[str]:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the sum of all\nadd one, add one, add one\n")
    own = ["--model", str(folders[0]), "--draft", str(folders[1]), "--prompts", str(prompts), "--threads", "1"]
    return ["verify-lossless", "--every", *own, "--max-tokens", "8", "--effort", "1e-6", *more]


def test_one_command_makes_all_of_them(
    few: None, pair_folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, html = tmp_path / "c.jsonl", tmp_path / "c.html"
    assert main(command(pair_folders, tmp_path, "--out", str(out), "--html", str(html))) == 3
    found = record.read(out)
    labels = [(r["config"]["label"], r["config"]["batch"]) for r in found]
    assert labels == [("draft_model k=4", 1), ("ngram k=4", 16)]
    assert [[c["id"] for c in r["checks"]] for r in found] == [["S1", "L10", "C2"], ["S1", "C2"]]
    assert [r["verdict"] for r in found] == ["passed", "not shown"], "n-grams guess too little in so few tokens"
    assert "all 2 configurations: not shown" in capsys.readouterr().out
    text = html.read_text()
    assert "Not shown: not enough evidence" in text and text.count("<tr>") == 3 and "device cpu" in text
    assert str(tmp_path) not in text + out.read_text()
    assert main(command(pair_folders, tmp_path, "--json")) == 3
    assert len([json.loads(line) for line in capsys.readouterr().out.splitlines()]) == 2


def test_a_wrong_engine_and_an_impossible_cell(
    few: None,
    pair_folders: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = suite.load_subject

    def no_room(asked: Any, config: Any, params: Any) -> Any:
        if config.spec.method == "ngram":
            raise ConfigError("no room: lower max_model_len")
        return load(asked, config, params)

    monkeypatch.setattr(suite, "load_subject", no_room)
    html = tmp_path / "c.html"
    assert main(command(pair_folders, tmp_path, "--html", str(html))) == 0
    assert "these checks passed" in capsys.readouterr().out and "no room: lower max_model_len" in html.read_text()
    with next(m for m in MUTANTS if "row before" in m.name).alive():
        assert main(command(pair_folders, tmp_path, "--html", str(html))) == 1
    said = capsys.readouterr().out
    assert "S1 stops:" in said and "all 2 configurations: failed" in said
    assert "Not lossless" in html.read_text() and "S1 (failed)" in html.read_text()


def test_a_page_of_nothing() -> None:
    cell = every.Combination(SpecConfig("ngram"), "ngram", "bf16", "bf16", 1, True)
    text = render_every([every.Outcome(cell, None, "a <b>reason</b>")], "these checks passed")
    assert "a &lt;b&gt;reason&lt;/b&gt;" in text
