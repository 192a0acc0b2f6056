"""The certificate: a right engine passes, every known-wrong one does not, and what is written can be read."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from lawkit import Pair

from foretoken import ops as backends
from foretoken.cli import main
from foretoken.config import EngineConfig, SpecConfig
from foretoken.engine.build import Loaded
from foretoken.errors import ConfigError
from foretoken.request import SamplingParams
from foretoken.spec import step
from foretoken.spec.draft import Draft
from foretoken.study import record
from foretoken.study.certificate import acceptance, law, mutants, suite, wrong
from foretoken.study.certificate.check import FAILED, PASSED, WARNING, Check, Effort, Found, run_check
from foretoken.study.certificate.page import render
from foretoken.study.certificate.script import Guesses, ScriptDrafter, Watched
from foretoken.study.certificate.subject import Subject
from foretoken.study.certificate.toy import toy_model
from foretoken.tokenizer import Tokenizer

LEAST = Effort(1e-9, 0.2)
PROMPTS = [(3, 1, 4, 1, 5), (9, 2, 6, 5), (3, 1, 4, 1), (8, 7, 8, 7, 8, 7)]


@pytest.fixture(scope="module")
def tokenizer(pair_folders: tuple[Path, Path]) -> Tokenizer:
    return Tokenizer.from_folder(pair_folders[0])


def subject_of(pair: Pair, method: str = "draft_model") -> Subject:
    """The tiny pair with its own draft."""
    spec = SpecConfig(method, "draft", num_draft_tokens=4)
    loaded = Loaded(EngineConfig(spec=spec), pair.tokenizer, 0, pair.target, (pair.draft,))
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=12, ignore_eos=True)
    subject = Subject(loaded, PROMPTS, params, max_tokens=12, batch=4)
    subject.digest = acceptance.weights_digest(subject)
    return subject


def asked(prompts: Path = Path("p.jsonl"), effort: Effort = LEAST) -> suite.Asked:
    return suite.Asked("tiny", prompts, None, 12, 4, effort)


@pytest.fixture(scope="module")
def certificate(pair: Pair) -> suite.Certificate:
    return suite.certify(subject_of(pair), asked())


def test_a_right_engine_passes_every_check(certificate: suite.Certificate) -> None:
    wrong_ones = {r.check.id: r.found.findings for r in certificate.results if r.status == FAILED}
    assert not wrong_ones
    assert certificate.passed
    found = {r.check.id: r.found for r in certificate.results}
    assert set(found) == {"L1", "L1a", "L2", "C1", "L3", "L3t", "L6", "L9", "S1", "L5", "L5s", "L7", "L10", "A1", "C2"}
    # Each looked at something.
    assert all(min(f.sizes.values()) > 0 for name, f in found.items() if name != "A1")
    assert found["L6"].statistic["preemptions"] > 0
    assert certificate.acceptance["num_accepted_tokens"] > 50
    assert certificate.acceptance["num_rollbacks"] > 20
    assert 0 < sum(f.false_alarm for f in found.values()) < 1e-4


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda m: m.name)
def test_every_mutant_is_rejected(tokenizer: Tokenizer, mutant: mutants.Mutant) -> None:
    before = getattr(mutant.owner, mutant.attribute)
    trial = mutants.try_mutant(mutant, tokenizer)
    assert trial.caught_by is not None
    assert trial.said
    assert getattr(mutant.owner, mutant.attribute) is before, "it is dead again"


def test_the_mutants_are_many_and_distinct() -> None:
    names = [m.name for m in mutants.MUTANTS]
    assert len(set(names)) == len(names) >= 30


def test_no_flaw_no_alarm(tokenizer: Tokenizer) -> None:
    """The verification that mutants are made of passes where it has no flaw: what is noticed is the flaw."""
    harmless = mutants.Mutant("none", step, "verify", wrong.verify(), ("L3", "C1"))
    assert mutants.try_mutant(harmless, tokenizer).caught_by is None


def test_the_score_tells_of_a_mutant_that_is_not_noticed(tokenizer: Tokenizer, certificate: suite.Certificate) -> None:
    harmless = mutants.Mutant("nothing wrong", step, "verify", wrong.verify(), ("S1",))
    score = mutants.try_all(tokenizer, [harmless])
    assert (score["caught"], score["total"]) == (0, 1)
    with_score = replace(certificate, mutants=score)
    assert not with_score.passed
    assert "not noticed" in render(with_score.as_dict())


LEVELS = {
    "self_quant": SpecConfig("self_quant"),
    "cascade": SpecConfig("cascade", "draft", below=(SpecConfig("ngram"),)),
    "first": SpecConfig(
        "first", below=(SpecConfig("suffix", options={"store": "file"}), SpecConfig("draft_model", "d"))
    ),
    "eagle": SpecConfig("eagle", "head", num_draft_tokens=8),
}


@pytest.mark.parametrize("method", LEVELS)
def test_every_way_to_guess_has_a_toy(tokenizer: Tokenizer, method: str) -> None:
    config = EngineConfig(spec=LEVELS[method], format="w8a8")
    loaded = Loaded(config, tokenizer, 0, toy_model(backends.resolve(), 32, "w8a8"), ())
    found = law.texts(Subject(loaded, PROMPTS, SamplingParams()), Effort(1e-9, 0.05))
    assert found.verdict == PASSED
    assert ("only trees" in found.notes[-1]) == (method == "eagle")


# --- the record and the page ---


def test_the_record_is_a_record(certificate: suite.Certificate, tmp_path: Path) -> None:
    found = json.loads(json.dumps(certificate.as_dict()))
    assert found["schema"] == "foretoken.certificate/1"
    record.append(tmp_path / "c.jsonl", found)
    assert record.read(tmp_path / "c.jsonl") == [found]
    about = {"id", "name", "proves", "status", "sizes", "full_sizes", "threshold", "notes", "findings"}
    assert all(check.keys() == about | {"statistic", "false_alarm", "seconds"} for check in found["checks"])
    assert found["left_out"] == []
    assert {"label", "model", "model_digest", "format", "kv_format", "backend", "seed"} <= found["config"].keys()
    del found["checks"]
    with pytest.raises(ConfigError, match="lacks 'checks'"):
        record.check(found)


class Page(HTMLParser):
    """Collects tags with their attributes, and complains about tags that do not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        self.tags.add(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page_of(found: dict[str, Any]) -> tuple[str, Page]:
    text = render(found)
    page = Page()
    page.feed(text)
    page.close()
    assert not page.open
    return text, page


def test_the_page_needs_nothing_else(certificate: suite.Certificate) -> None:
    text, page = page_of(certificate.as_dict())
    assert "http" not in text and "//" not in text and "@import" not in text and "url(" not in text
    assert not page.tags & {"script", "link", "img", "iframe"}
    assert not {name for name, _ in page.attributes} & {"src", "href"}
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text
    assert text.index("Speculation changed nothing") < text.index("<h2>Checks</h2>")
    assert all(r.check.name in text for r in certificate.results)


def test_the_page_shows_what_differs_and_no_markup_of_texts(certificate: suite.Certificate) -> None:
    found = Found({"texts": 1}, {"differing_texts": 1})
    found.add("prompt 0: token 3", "<script>alert(1)</script>", "a & b")
    bad = Check("X", "made up", "nothing", "0", {}, lambda subject, effort: found)
    result = run_check(bad, None, LEAST)  # type: ignore[arg-type]
    failed = replace(certificate, results=[*certificate.results, result])
    assert not failed.passed
    text, _ = page_of(failed.as_dict())
    assert "Not lossless" in text and "<script>" not in text and "&lt;script&gt;" in text and "a &amp; b" in text


# --- the alarm ---


def alarm_of(pair: Pair, guesses: Guesses) -> Found:
    subject = subject_of(pair)
    subject.guesses = guesses
    return acceptance.alarm(subject, LEAST)


def test_the_alarm(pair: Pair) -> None:
    useless = alarm_of(pair, Guesses(400, 3, 2.5))
    assert useless.verdict == WARNING
    assert "3 of 400" in useless.notes[0]
    assert all(cause in useless.notes[0] for cause in ("another target", "tokenizer", "chat template"))
    assert alarm_of(pair, Guesses(400, 60, 55.0)).verdict == WARNING, "no better than chance"
    assert alarm_of(pair, Guesses(400, 60, 8.0)).verdict == PASSED
    assert "too few" in alarm_of(pair, Guesses(3, 0, 0.1)).notes[0]


def test_first_guesses_are_counted(pair: Pair) -> None:
    class Told(ScriptDrafter):
        def propose(self, seqs: Any, num_draft: Any) -> Draft:
            return Draft.trees([([7, 5, 6], [-1, 0, -1]), ([], []), ([1], [-1])])

    guesses = Guesses()
    watched = Watched(Told(lambda seq: (), 9), lambda seq: (6, 2), {7: 0.25, 6: 0.5, 1: 0.125}, guesses)
    watched.propose([None, None, None], [3, 3, 3])  # type: ignore[list-item]
    assert (guesses.num, guesses.hits, guesses.by_chance) == (2, 1, 0.875)


# --- the command ---


@pytest.mark.parametrize("text", ["0", "-1", "none", "nan", "1e9", ""])
def test_an_effort_out_of_range_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-lossless", "--effort", text]) == 2
    assert "--effort must be quick" in capsys.readouterr().err


def test_efforts() -> None:
    assert Effort.parse("full").of(1000, 5) == 1000
    assert Effort.parse("0.5").of(1000, 5) == 500
    assert Effort.parse("quick").of(1000, 5) == 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--draft", "nowhere"], "no drafter"),
        (["--draft", "none"], "nothing to certify"),
        (["--k", "0"], "nothing to certify"),
        (["--num-prompts", "0"], "--num-prompts"),
        (["--prompts", "{tmp}/missing.jsonl"], "cannot read prompts"),
        (["--prompts", "{tmp}/empty.txt"], "holds no prompts"),
        (["--max-tokens", "2"], "--max-tokens must be at least 8"),
        (["--batch", "0"], "--batch"),
        (["--html", "{tmp}/file.txt/page.html"], "--html"),
        (["--device", "cuda"], "run on the CPU"),
        (["--only", "L3", "L4"], "no check 'L4'"),
    ],
)
def test_bad_usage_is_exit_code_2(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "file.txt").write_text("hello\n")
    assert main(["verify-lossless", *(a.format(tmp=tmp_path) for a in arguments)]) == 2
    assert words in capsys.readouterr().err


FEW = ("--only", "S1", "A1", "C2")  # cheap ones: what the others do is tested above


def command(folders: tuple[Path, Path], tmp_path: Path, *more: str) -> list[str]:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the sum of all\nadd one, add one, add one\n")
    own = ["--model", str(folders[0]), "--draft", str(folders[1]), "--prompts", str(prompts), "--threads", "1"]
    return ["verify-lossless", *own, "--max-tokens", "10", "--effort", "1e-6", *FEW, *more]


def test_the_command_writes_record_and_page(
    pair_folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, html = tmp_path / "c.jsonl", tmp_path / "c.html"
    assert main(command(pair_folders, tmp_path, "--out", str(out), "--html", str(html), "--json")) == 0
    shown = json.loads(capsys.readouterr().out)
    assert record.read(out) == [shown]
    assert shown["verdict"] == "passed"
    assert [c["id"] for c in shown["checks"]] == ["S1", "A1", "C2"]
    assert "L3" in shown["left_out"]
    assert shown["config"]["label"] == "draft_model k=4"
    assert str(tmp_path) not in json.dumps(shown), "paths are nobody's business"
    assert "Speculation changed nothing" in html.read_text()
    assert main(command(pair_folders, tmp_path)) == 0
    assert "lossless: draft_model k=4" in capsys.readouterr().out


def test_a_wrong_engine_is_exit_code_1(
    pair_folders: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step, "verify", wrong.verify("row before"))
    assert main(command(pair_folders, tmp_path)) == 1
    shown = capsys.readouterr().out
    assert "NOT lossless" in shown
    assert "expected" in shown and "|" in shown, "both continuations from the first differing token"
