"""`sameseed study` at toy size: every study measures, resumes, draws its plots and writes its page."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures_models import llama_shape
from fixtures_quality import write_data

from sameseed import LLM, registry
from sameseed.cli import main
from sameseed.errors import ConfigError
from sameseed.measure import shapes
from sameseed.measure.costs import Cost, Profile, StoredModel
from sameseed.measure.limits import Limits
from sameseed.report import plot as drawing, record
from sameseed.report.plot import MOST, Panel, plot_paths
from sameseed.request import SamplingParams
from sameseed_lab.studies import _runner, _setup, assisted, concurrency, formats, rivals, serving
from sameseed_lab.studies._bench import BenchCell, _shared, price
from sameseed_lab.studies._load import LoadCell
from sameseed_lab.studies._setup import SIZES, StudySetup
from sameseed_lab.studies._study import Report, Study, Tell

TOY = ("--num-prompts", "2", "--max-tokens", "6", "--repeat", "1")
CELLS = {  # enough cells of each study to draw every plot
    "assisted": ("lengths sampled", "mixes of w4a8", "perplexity in"),
    "concurrency": ("k=4", "head"),
    "formats": ("w8a8", "w4a8-qoq"),
    "serving": ("rounds", "200-20"),
}


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Path, Path]]:
    """Leave plots empty, for a study draws its plots anew each time; returns what draws them."""
    draw = drawing.draw

    def leave(panels: Seq[Panel], path: Path, *more: object) -> tuple[Path, Path]:
        paths = plot_paths(path)
        for empty in paths:
            empty.write_bytes(b"")
        return paths

    monkeypatch.setattr(drawing, "draw", leave)
    monkeypatch.setattr(drawing, "svg", lambda panel: b"")
    return draw


@pytest.mark.parametrize("name", CELLS)
def test_a_study(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    undrawn: Callable[..., tuple[Path, Path]],
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(concurrency, "CLIENTS", (1, 3))
    monkeypatch.setattr(serving, "CLIENTS", (2,))
    monkeypatch.setattr(serving, "FORMATS", serving.FORMATS[::2])  # fewer servers
    flags = ["study", name, *TOY, "--out", str(tmp_path)]
    first, *rest = CELLS[name]
    assert main([*flags, "--only", first, "--dry-run"]) == 0
    assert "to measure" in capsys.readouterr().out
    assert not list(tmp_path.iterdir()), "a dry run writes nothing"
    assert main([*flags, "--only", first]) == 0
    found = record.read(tmp_path / f"{name}.jsonl")
    assert found and all(r["study"] == name and r["size"] == "small" for r in found)
    assert main([*flags, "--only", first, *rest]) == 0
    again = record.read(tmp_path / f"{name}.jsonl")
    assert again[: len(found)] == found and len(again) > len(found), "what was there is not measured again"
    monkeypatch.setattr(drawing, "draw", undrawn)
    assert main([*flags, "--only", first, *rest]) == 0
    assert len(record.read(tmp_path / f"{name}.jsonl")) == len(again)
    assert all(r["usage"]["cpu_share"] is not None for r in again)
    page = html.unescape((tmp_path / f"{name}.html").read_text())
    assert all(drawn.stat().st_size > 1000 for suffix in ("svg", "png") for drawn in tmp_path.glob(f"*.{suffix}"))
    assert _runner.load(name).source.split(",")[0] in page
    svgs, pngs = (len(list(tmp_path.glob(f"*.{kind}"))) for kind in ("svg", "png"))
    assert page.count("data:image/svg+xml") >= svgs == pngs > 0
    assert not re.search(r"<(script|link)|src=.http", page), "the page needs nothing else"


def test_engines_that_are_not_here_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEERS_HOME", str(tmp_path / "none"))
    assert main(["study", "rivals", "--dry-run", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert all(engine in shown for engine in rivals.ENGINES) and shown.count("make peers") == 2 * len(rivals.ENGINES)
    assert main(["study", "rivals", "--out", str(tmp_path)]) == 2
    assert "nothing of rivals is measured" in capsys.readouterr().err
    monkeypatch.setattr(rivals, "PEERS", tmp_path / "gone")
    assert "a checkout" in _runner.plan("rivals", StudySetup("small", tmp_path))[0].wrong


def test_a_comparison_with_engines_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undrawn: Callable[..., tuple[Path, Path]]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(drawing, "draw", undrawn)
    kept = Path(__file__).parents[3] / "benchmarks/results/peers.jsonl"
    made = rivals.split(json.loads(kept.read_text().splitlines()[-1]))
    monkeypatch.setattr(rivals.PeerCell, "check", lambda cell, setup: None)
    monkeypatch.setattr(rivals.PeerCell, "measure", lambda cell, setup, tell: made)
    assert main(["study", "rivals", "--only", "llama_cpp passes", "--out", str(tmp_path)]) == 0
    assert len(record.read(tmp_path / "rivals.jsonl")) == len(made)
    page = (tmp_path / "rivals.html").read_text()
    assert "sameseed w4a8 / llama.cpp Q4_0" in page and "no publication" in page


@pytest.mark.parametrize("name", registry.names("studies"))
@pytest.mark.parametrize("size", SIZES)
def test_the_grid_of_a_size(name: str, size: str, tmp_path: Path) -> None:
    study = _runner.load(name)
    assert name in (*CELLS, "rivals"), "another study needs cells to test"
    assert isinstance(study, Study) and study.source and study.data and study.differs
    setup = StudySetup(size, tmp_path, models={"target": "embedded-target", "1b": "embedded-draft"})
    names = [cell.name for cell in study.cells(setup)]
    assert names and len(set(names)) == len(names)
    planned = _runner.plan(name, setup)
    assert not any(p.done for p in planned) and len({p.digest for p in planned}) == len(planned)
    if size == "small" and name in CELLS:
        wrong = {p.cell.name: p.wrong for p in planned if p.wrong}
        assert all("HumanEval" in cell and "--data DIR: fetch HumanEval.jsonl.gz" in why for cell, why in wrong.items())
    assert not list(tmp_path.iterdir())


def test_a_gain_is_over_its_own_format(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {"bf16": (10.0, 12.0), "fp8": (16.0, 19.2)}
    rows = [
        {"lengths": "2-1", "concurrency": 1, "on": on, "form": form, "first_p90": 1.0, "first_p90_each": [1.0]}
        | {"tokens_per_s": speed, "tokens_per_s_each": [speed, 2 * speed]}
        for form, pair in speeds.items()
        for on, speed in zip((False, True), pair, strict=True)
    ]
    monkeypatch.setattr(serving, "load_rows", lambda _: rows)
    made = [(row["gain"], row["gain_each"]) for row in serving.derive([])]
    assert made == [(None, []), (pytest.approx(1.2), pytest.approx([1.2, 1.2]))] * 2


def test_a_target_of_70b_by_its_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cell measures part of the large shape; the gain is tokens per round over the costs of the paper's model."""
    pytest.importorskip("matplotlib")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    base = {**shapes.SHAPES["smollm2-135m"], **sizes, "vocab_size": 512}
    large, small = ({**base, "num_hidden_layers": n} for n in (9, 2))
    monkeypatch.setattr(shapes, "SHAPES", {formats.LARGE: large, formats.MIDDLE: small})
    flags = ["study", "formats", "--size", "true", "--only", "70b", *TOY, "--out", str(tmp_path)]
    assert main(flags) == 0
    (deep,) = record.read(tmp_path / "formats.jsonl")
    assert deep["shape"]["num_layers"] == 9 and deep["config"]["layers"] == [2, 6] and deep["draft"]["costs"]
    assert "Left out" not in (tmp_path / "formats.html").read_text()
    model = {"accepted_per_pos": [80, 60, 45], "mean_acceptance_length": 2.85}  # of 100 drafts
    rows = {row["k"]: row for row in formats.depth_rows(deep, model, 2.0)}
    assert [rows[k]["tokens"] for k in (1, 2, 3)] == pytest.approx([1.8, 2.4, 2.85])
    assert rows[4]["tokens"] == pytest.approx(2.85 + 0.45 * 0.75), "it falls on as before"
    assert rows[2]["alone_share"] == 2.0 * rows[2]["head_share"] and len(rows) == formats.LONGEST
    assert rows[2]["head_gain"] == pytest.approx(2.4 / (rows[2]["check"] + rows[2]["head_share"]))


def test_times_grow_with_the_bytes_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of 80 layers do not multiply the noise of the gap between 2 and 6 layers."""
    monkeypatch.setattr(formats, "get_shape", lambda name: llama_shape(64, (4, 2, 16), layers=80))
    limit = Limits(1, {"read": (1.0,), "fp32": (1.0,)}, {}, "native")

    def of(layers: int, ms: float) -> Profile:
        size = 10 + 5 * layers  # an LM head of two layers' size
        costs = tuple(Cost("w4a8", "bf16", 8, m, ms * m, float(m), ms, ms, 5, size / 100, 0.0) for m in (1, 2))
        stored = StoredModel("w4a8", "bf16", size, float(size), 1, 0.5, "int8", 1.0, 7)
        return Profile({"name": "x"}, costs, (), (), (stored,), limit)

    exact = formats.extended(of(2, 20.0), of(6, 40.0))
    assert [(x.rows, x.c, x.ms) for x in exact.costs] == [(1, 1.0, pytest.approx(410)), (2, 2.0, pytest.approx(820))]
    noisy = formats.extended(of(2, 22.0), of(6, 40.0))
    assert noisy.costs[0].ms / 410 == pytest.approx(62 / 60), "a line through both would give 0.91"
    assert exact.shape["num_layers"] == 80


def test_settings_decide_what_is_there(tmp_path: Path) -> None:
    cell = _runner.load("assisted").cells(StudySetup("small", tmp_path))[0]
    keys = {
        StudySetup("small", tmp_path, **more).digest(cell)
        for more in ({}, {"repeat": 2}, {"max_tokens": 9}, {"num_prompts": 3}, {"threads": 1})
    }
    assert len(keys) in (4, 5)  # a machine with one core cannot use another number of threads
    file = tmp_path / "one.txt"
    file.write_text("the only prompt")
    read = [StudySetup("small", tmp_path, file, num_prompts=n) for n in (2, 3)]
    assert len({setup.digest(cell) for setup in read}) == 1, "the same prompts"
    assert len({s.digest(assisted.QualityCell("x", "bf16", "perplexity")) for s in read}) == 2, "but more of the text"


def test_bad_usage_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, says in (
        (["asisted"], "did you mean 'assisted'"),
        (["assisted", "--size", "huge"], "--size is small, real or true"),
        (["assisted", "--repeat", "0"], "--repeat must be at least 1"),
        (["assisted", "--problems", "0"], "--problems must be at least 1"),
        (["assisted", "--only", "nothing"], "there are: embedded-draft lengths greedy"),
        (["assisted", "--prompts", str(tmp_path / "wikitext.txt")], "--prompts wikitext fetches the set"),
        (["assisted", "--draft", "ngram"], "name it with --model"),
        (["formats", "--prompts", f"spec-bench:{tmp_path}"], "fetch Spec-Bench's question.jsonl"),
    ):
        assert main(["study", *flags, "--out", str(tmp_path)]) == 2
        assert says in capsys.readouterr().err
    assert main(["study", "list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in registry.names("studies"))


def test_quality_by_format(tmp_path: Path) -> None:
    """Perplexity and HumanEval beside published values, also if no speed was measured; plots name the small draft."""
    pytest.importorskip("matplotlib")
    write_data(tmp_path)
    flags = ["study", "assisted", *TOY, "--data", str(tmp_path), "--problems", "1", "--out", str(tmp_path)]
    assert main([*flags, "--only", "HumanEval in bf16", "perplexity in bf16", "perplexity in nf4"]) == 0
    values = {r["config"]["format"]: r["perplexity"]["value"] for r in _records(tmp_path) if r["perplexity"]}
    ours = {p.what: p.ours for p in assisted.STUDY.report(_records(tmp_path)).published}
    assert ours["perplexity in 4 bit (nf4) over bf16"] == values["nf4"] / values["bf16"]
    assert ours["HumanEval pass@1 in bf16, sampled"] == 0.0 and ours["perplexity in 8 bit over bf16"] is None
    assert "no speed was measured" in (tmp_path / "assisted.html").read_text()
    assert main([*flags, "--only", "mixes of w4a8"]) == 0
    mixes = next(p for p in assisted.STUDY.report(_records(tmp_path)).plots if p.name == "mixes")
    assert {s.label for panel in mixes.panels for s in panel.series} == {"target 4 bit (w4a8)"}


def _records(folder: Path) -> list[dict[str, Any]]:
    return record.read(folder / "assisted.jsonl")


def test_only_what_ran_now_decides_the_exit_code(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    flags = ["study", "assisted", "--only", "mixes of w4a8", *TOY, "--out", str(tmp_path)]
    assert main(flags) == 0
    found = _records(tmp_path)
    for r, digest in ((found[-1], "another"), (found[-1], found[-1]["digest"])):
        record.append(tmp_path / "assisted.jsonl", {**r, "equals_plain": False, "digest": digest})
        assert main(flags) == (0 if digest == "another" else 1)


def test_a_true_size_that_memory_does_not_hold_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_setup, "available_memory", lambda: 12 * 2**30)
    wrong = {p.cell.name: p.wrong for p in _runner.plan("assisted", StudySetup("true", tmp_path))}
    assert "llama-3.1-8b bf16 15.0" in wrong["1b lengths greedy"] and "12.0 are free" in wrong["1b lengths greedy"]
    assert not wrong["1b mixes of w4a8"]


def test_twins_are_made_once_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    shapes = {
        "llama-3.1-8b": llama_shape(512, (16, 4, 32), vocab=4200, inner=800, layers=10),
        "llama-3.2-1b": llama_shape(400, (12, 4, 32), vocab=4200, inner=600, layers=3),
    }
    monkeypatch.setattr(_setup, "find_shape", shapes.__getitem__)
    monkeypatch.setattr(_setup, "available_memory", lambda: 2**40)  # the check is of the true shapes
    flags = ["study", "assisted", "--size", "true", "--only", "1b mixes of w4a8", *TOY, "--out", str(tmp_path)]
    assert main(flags) == 0
    made = {folder.name: folder.stat().st_mtime_ns for folder in (tmp_path / "twins").iterdir()}
    assert set(made) == {"target-llama-3.1-8b", "1b-llama-3.2-1b"}
    found = {(r["config"]["model"], r["size"], r["equals_plain"]) for r in _records(tmp_path)}
    assert found == {("target-llama-3.1-8b", "true", True)}
    (tmp_path / "assisted.jsonl").unlink()
    assert main(flags) == 0
    assert made == {folder.name: folder.stat().st_mtime_ns for folder in (tmp_path / "twins").iterdir()}


def test_a_cell_that_fails_or_is_interrupted_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    measure, errors = BenchCell.measure, [ConfigError("no luck with nf4"), KeyboardInterrupt()]

    def failing(cell: BenchCell, setup: StudySetup, tell: Tell) -> list[dict[str, Any]]:
        if cell.format == "nf4":
            raise errors.pop(0)
        return measure(cell, setup, tell)

    monkeypatch.setattr(BenchCell, "measure", failing)
    flags = ["study", "assisted", "--only", "of nf4", "of w4a8", *TOY, "--out", str(tmp_path)]
    assert main(flags) == 1
    assert "embedded-draft mixes of nf4: no luck" in capsys.readouterr().err
    assert {r["config"]["format"] for r in record.read(tmp_path / "assisted.jsonl")} == {"w4a8"}
    assert "no luck with nf4" in (tmp_path / "assisted.html").read_text()
    assert main(flags) == 130 and len(_records(tmp_path)) == 5, "the cell that had ended is kept"
    monkeypatch.setattr(BenchCell, "measure", measure)
    assert main(flags) == 0 and "no luck" not in (tmp_path / "assisted.html").read_text()


@pytest.mark.parametrize(
    ("name", "only", "draft", "more"),
    [
        ("assisted", "mixes of auto", "embedded-draft", ()), ("concurrency", "k=4", "embedded-draft", ()),
        ("formats", "as stored", "suffix > embedded-draft", ("--head", "embedded-head")),
        ("serving", "rounds", "embedded-draft", ()),
    ],
)  # fmt: skip
def test_a_study_takes_models_of_ones_own(
    name: str, only: str, draft: str, more: Seq[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(concurrency, "CLIENTS", (1,))
    flags = ["study", name, *TOY, "--model", "embedded-target", "--draft", draft, *more, "--only", only]
    assert main([*flags, "--out", str(tmp_path)]) == 0
    found = record.read(tmp_path / f"{name}.jsonl")
    assert {r["size"] for r in found} == {"real"} and found[0]["models"]["1b"] == draft
    assert name != "formats" or {"ngram > draft model 6", "suffix > draft model 6"} < {r["way"] for r in found}
    report = _runner.load(name).report(found)
    assert report.plots and report.tables
    assert all(len(p.series) <= MOST for p in _panels(report) if not p.stacked)


def _panels(report: Report) -> list[Panel]:
    return [panel for plot in report.plots for panel in plot.panels]


def test_published_points_stand_only_beside_our_own(tmp_path: Path) -> None:
    """Each says whose it is: paper, model and hardware."""
    records = record.read(Path(__file__).parents[3] / "benchmarks/results/studies/assisted.jsonl")
    found = [r for r in records if "lengths greedy" in r["cell"]]
    panels = _panels(assisted.STUDY.report(found))
    published = {s.label for panel in panels for s in panel.series if s.published}
    assert published and all("Llama-3.1-8B + 1B, L4 (HPML study 2025)" in label for label in published)
    assert all(any(s.points and not s.published for s in panel.series) for panel in panels)
    assert not any("sampled" in panel.title or "mixes" in panel.title for panel in panels), "only what was measured"
    speed = next(panel for panel in panels if panel.title.startswith("speed-up"))
    assert all(low <= y <= high for s in speed.series for (_, y), (low, high) in zip(s.points, s.spread))


def test_missing_packages_are_named_before_the_first_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LoadCell, "needs", ("server", "no_such_server"))
    assert main(["study", "serving", *TOY, "--out", str(tmp_path)]) == 2
    assert "no_such_server; install" in capsys.readouterr().err and not list(tmp_path.glob("*.jsonl"))


@pytest.fixture(scope="module")
def pair(pair_folders: tuple[Path, Path]) -> LLM:
    target, draft = map(str, pair_folders)
    return LLM(target, draft, policy="fixed", num_draft_tokens=3)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_that_drafts_for_itself_loses_nothing(pair: LLM, temperature: float) -> None:
    params = SamplingParams(max_tokens=20, temperature=temperature, seed=3)
    prompt = pair.tokenizer.encode("def add(a")
    text = pair.generate("def add(a", params)[0].token_ids
    jobs = [(prompt, text, params)]
    runner = pair.engine.runner
    same = price(runner, runner, jobs)
    assert same["coupled"] == 1.0 and same["min_pq"] == pytest.approx(1.0)
    other = price(runner, pair.engine.drafter.runner, jobs)  # type: ignore[attr-defined]
    assert other["positions"] == len(text)
    if temperature == 0.0:
        assert other["coupled"] == other["min_pq"], "greedy decoding pays nothing"
    assert price(runner, runner, []) == {}


def test_the_shared_probability() -> None:
    params = SamplingParams(temperature=1.0)
    p, q = (np.log(np.array(row, np.float32)) for row in ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]))
    assert _shared(p, q, params) == pytest.approx(0.7)
    assert _shared(p, np.append(q, np.float32(-1e9)), params) == pytest.approx(0.7), "a padded vocabulary"
    assert _shared(p, q, SamplingParams(temperature=0.0)) == 0.0
