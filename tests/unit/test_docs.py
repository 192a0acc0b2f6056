"""The pages are true: generated tables are current, links lead somewhere, commands exist, examples run."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import make_tables
import pytest
import recorded

from sameseed import cli, registry
from sameseed.report.schemas import BENCH_SCHEMA
from sameseed.request import SamplingParams, Sequence
from sameseed.spec.drafter import parse_options
from sameseed_lab.studies import rivals

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]


def load(path: Path) -> ModuleType:
    """Loads a Python file as a module."""
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
        if kind not in ("table", "study"):
            assert make_tables.MAKERS[kind](name) in match[0], f"{page.name}: {kind}:{name} is stale; run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|mailto:)([^)#\s]+)[^)]*\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_to_headings_find_them(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?://)([^)#\s]*)#([^)\s]+)\)", page.read_text()):
        there = (page.parent / target).resolve() if target else page
        assert anchor in anchors(there), f"{page.name} links to #{anchor}, which {there.name} has not"


def places(page: Path, name: str) -> list[Path]:
    """The files that a name on a page may mean."""
    roots = (ROOT, ROOT / "sameseed", ROOT / "sameseed" / "ops" / "triton", ROOT / "benchmarks", page.parent)
    return [root / name for root in roots if (root / name).is_file()]


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent.name != "log"], ids=lambda p: str(p.relative_to(ROOT)))
def test_sources_named_by_a_page_are_there(page: Path) -> None:
    for name, function in re.findall(r"`([\w.-]+/[\w./-]+\.(?:py|h|cpp|html))(?:::(\w+))?`", page.read_text()):
        if Path(name).stem not in ("NAME", "mine"):
            assert places(page, name), f"{page.name} names {name}, which is not there"
            assert f"def {function}" in places(page, name)[0].read_text() or not function, f"no {function} in {name}"


def commands() -> dict[str, set[str]]:
    """The flags that the pages use with each of our commands, in code blocks and in the text."""
    found: dict[str, set[str]] = defaultdict(set)
    pages = [*PAGES, ROOT / "benchmarks" / "README.md"]
    for text in (page.read_text().replace("\\\n", " ") for page in pages):
        blocks = "\n".join(re.findall(r"```(?:bash)?\n(.*?)```", text, re.DOTALL)) + "\n"
        blocks += "\n".join(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)))
        for line in re.findall(r"(?:^|[ /(])sameseed ([a-z].*)$", blocks, re.MULTILINE):
            words = shlex.split(line.replace("...", ""), comments=True)
            name = " ".join(
                words[: 2 if words[:2] in (["bench", "serve"], ["train", "head"], ["train", "draft"]) else 1]
            )
            if words[0] in cli.COMMANDS:
                found[name] |= {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
    return found


@pytest.mark.parametrize("command", sorted(commands()))
def test_commands_of_the_pages_have_their_flags(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([*command.split(), "--help"])
    known = set(re.findall(r"--[a-z][\w-]*", capsys.readouterr().out))
    assert not commands()[command] - known, f"`sameseed {command}` has no such flags"


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
    config |= {"temperature": 0.0, "top_p": 1.0, "seed": 1, "label": label, "draft": label, "max_tokens": 96}
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
    assert "median of 2 runs, at most 96 tokens a prompt, 2026-01-02, commit c0ffee" in text
    assert make_tables.render(text) == text


def test_a_study_shows_its_newest_cells_beside_what_was_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [json.loads(text) for text in (recorded.RECORDS / "peers.jsonl").read_text().splitlines()]
    page = (ROOT / "docs" / "results.md").read_text()
    assert {f"study:{name}" for name in registry.names("studies")} <= set(re.findall(r"study:\w+", page))
    monkeypatch.setattr(recorded, "RECORDS", tmp_path)
    said = make_tables.render("<!-- study:rivals -->\nold\n<!-- end -->\n")
    assert "not run yet. `sameseed study rivals --size true --out" in said.replace("\n", " ") and "old" not in said
    runs = [("1", "outdated"), ("2", "outdated"), ("2", told[-1]["commit"])]  # other settings, and the same again
    each = {"size": "small", "cell": "all"}
    made = [{**r, **each, "digest": d, "commit": c} for d, c in runs for r in rivals.split(told[-1])]
    (tmp_path / "studies").mkdir()
    file = tmp_path / "studies" / "rivals.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in made[-len(made) // 3 :]))
    alone = make_tables.render("<!-- study:rivals -->\n<!-- end -->\n")
    file.write_text("".join(json.dumps(r) + "\n" for r in made))
    said = make_tables.render("<!-- study:rivals -->\n<!-- end -->\n")
    assert said == alone
    assert "**The embedded family.**" in said and made[-1]["commit"] in said and "outdated" not in said
    assert make_tables.render(said) == said


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_python_of_a_page_runs(page: str) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL))
    code = code.replace('"smollm2"', '"embedded"')  # nothing is downloaded here
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
