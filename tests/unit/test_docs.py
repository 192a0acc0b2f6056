"""The pages say what is true: generated tables are current, links lead somewhere, the examples run."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import make_tables
import pytest
import recorded

from sameseed.request import SamplingParams, Sequence
from sameseed.spec.drafter import parse_options
from sameseed.study.fields import BENCH_SCHEMA

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]


def load(path: Path) -> ModuleType:
    """A Python file as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_tables_from_the_code_are_current(page: Path) -> None:
    # Tables of records are left out: a user who runs `make bench` has not broken the docs.
    text = page.read_text()
    for match in make_tables.MARKED.finditer(text):
        kind, name = match[2], match[3]
        if kind != "table":
            assert make_tables.MAKERS[kind](name) in match[0], f"{page.name}: {kind}:{name} is stale; run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|mailto:)([^)#\s]+)[^)]*\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_the_drafter_of_the_extension_guide_works(tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extend.md").read_text(), re.DOTALL)[0]
    (tmp_path / "repeat.py").write_text(code)
    drafter_class = load(tmp_path / "repeat.py").DRAFTER
    drafter = drafter_class(parse_options(drafter_class, {"period": 3}))
    seqs = [Sequence(i, tokens, SamplingParams(), 0) for i, tokens in enumerate(([1, 2, 3, 4], [5]))]
    draft = drafter.propose(seqs, [4, 2])
    assert draft.nodes(0) == ([2, 3, 4, 2], [-1, 0, 1, 2])
    assert draft.nodes(1) == ([], [])


def line(run: str, label: str, speedup: float) -> str:
    """A record as `sameseed bench` writes it, with made-up numbers."""
    config = {"model": "m", "num_parameters": 1_000_000, "format": "fp32", "batch_size": 1, "num_prompts": 2}
    config |= {"temperature": 0.0, "top_p": 1.0, "seed": 1, "label": label, "draft": label}
    record = {
        "schema": BENCH_SCHEMA,
        "run": run,
        "time": run,
        "commit": "c0ffee",
        "config": config,
        "repetitions": [{}, {}],
    }
    record |= {"machine": {"cpu": "a|b", "cores": 2, "threads": 2, "isa": "avx2"}, "tokens_per_s": 10.0}
    record |= {name: {"median": 0.001} for name in ("latency_s", "ttft_s", "time_per_output_token_s", "time_split")}
    record |= {"acceptance_rate": 0.5, "mean_acceptance_length": 2.5, "rollbacks": 7, "accepted_per_pos": [1]}
    record |= {"speedup": speedup, "equals_plain": True, "overhead_ms_per_round": 0.25}
    return json.dumps(record) + "\n"


def test_a_table_shows_the_newest_run_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "RECORDS", tmp_path)
    assert "No record yet" in make_tables.table("trial")
    lines = [
        line("2026-01-01", "ngram k=3", 1.11),
        line("2026-01-02", "ngram k=3", 1.22),
        line("2026-01-02", "x", 1.33),
    ]
    (tmp_path / "trial.jsonl").write_text("".join(lines))
    text = make_tables.render("<!-- table:trial -->\nold\n<!-- end -->\n")
    assert "1.22x" in text and "1.33x" in text and "1.11x" not in text and "old" not in text
    assert "median of 2 runs, 2026-01-02, commit c0ffee" in text
    assert make_tables.render(text) == text


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_python_of_a_page_runs(page: str) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
