"""The certificate: a correct engine passes, every known-wrong one fails, and the record and page can be read."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from proof import mutants

from sameseed.cli import main
from sameseed.config import EngineConfig, SpecConfig
from sameseed.drafters._eagle_context import Contexts
from sameseed.engine.build import Loaded
from sameseed.errors import ConfigError, RequestError
from sameseed.laws import acceptance
from sameseed.laws.check import FAILED, IN_PART, NOT_SHOWN, PASSED, TURNS, WARNING, Check, Effort, Found, run_check
from sameseed.laws.checks import CHECKS, chosen
from sameseed.laws.subject import Subject, shadows
from sameseed.laws.trees import FirstDrafts, Watched
from sameseed.measure import certificate as suite
from sameseed.measure.certificate import render, summary
from sameseed.report import record, schemas
from sameseed.request import SamplingParams, Sequence
from sameseed.spec.draft import Draft
from sameseed.tokenizer import Tokenizer

LEAST = Effort(1e-9, 0.2)
PROMPTS = [(3, 1, 4, 1, 5), (9, 2, 6, 5), (3, 1, 4, 1), (8, 7, 8, 7, 8, 7)]


@pytest.fixture(scope="module")
def tokenizer(pair_folders):
    return Tokenizer.from_folder(pair_folders[0])


def subject_of(pair, spec=None):
    """The tiny pair, drafting with its own draft model unless a spec is given."""
    spec = spec or SpecConfig("draft_model", "draft", num_draft_tokens=4)
    loaded = Loaded(EngineConfig(spec=spec), pair.tokenizer, 0, pair.target, (pair.draft,))
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=12, ignore_eos=True)
    subject = Subject(loaded, PROMPTS, params, max_tokens=12, batch=4)
    subject.digest = acceptance.weights_digest(subject)
    return subject


def asked(prompts=Path("p.jsonl"), effort=LEAST):
    return suite.Asked("tiny", prompts, None, 12, 4, effort)


@pytest.fixture(scope="module")
def certificate(pair):
    return suite.certify(subject_of(pair), asked())


def test_a_right_engine_passes_every_check(certificate):
    wrong_ones = {r.check.id: r.found.findings for r in certificate.results if r.status == FAILED}
    assert not wrong_ones
    assert certificate.passed and certificate.verdict == PASSED
    part = replace(certificate, results=certificate.results[:3])
    assert part.passed and part.verdict == IN_PART
    found = {r.check.id: r.found for r in certificate.results}
    assert len(found) == 19 and [*found] == [c.id for c in CHECKS]
    assert {r.check.id: r.found.lacking for r in certificate.results if r.found.lacking} == {}, "each saw enough"
    assert found["L6"].statistic["preemptions"] > 0
    assert certificate.acceptance["num_accepted_tokens"] > 50
    assert certificate.acceptance["num_rollbacks"] > 20
    assert 0 < sum(f.false_alarm for f in found.values()) < 1e-4


@pytest.fixture(scope="module")
def baseline(tokenizer):
    return mutants.Baseline(tokenizer)


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda m: m.name)
def test_every_mutant_is_rejected(baseline, mutant):
    caught, said = mutants.caught(mutant, baseline)
    assert caught, said
    assert "(error)" not in said, "it is rejected for what it does, not because it fails"


def test_every_check_has_a_least_count_of_evidence(pair):
    for check in CHECKS:
        assert check.least and check.remedy
        nothing = replace(check, run=lambda subject, effort: Found({}, {}))
        result = run_check(nothing, subject_of(pair), Effort.parse("quick"))
        assert result.status == NOT_SHOWN, "a pass without evidence"
        assert len(result.found.lacking) == len(check.least) and result.as_dict()["remedy"] == check.remedy


def test_a_draft_that_never_guesses_shows_nothing(pair):
    nobody = replace(pair_of_ngrams(pair), prompts=[(3, 1, 4), (9, 2, 6)])
    found = suite.certify(nobody, asked(), chosen(["S1", "A1", "C2"]))
    assert found.verdict == NOT_SHOWN and found.passed
    assert found.acceptance["num_draft_tokens"] == 0 < found.acceptance["num_scripted_tokens"], "trees are not its own"
    assert any("n-grams need repetition" in line for line in summary(found.as_dict())), "the remedy"


def test_a_check_goes_on_until_it_saw_enough_and_not_for_ever(pair):
    seen = []

    def run(subject, effort):
        seen.append(subject.turn)
        return Found({"texts": 2}, {"most": len(seen), "least_margin": -len(seen), "differing": 1})

    own = Check("X", "made up", "nothing", "0", {"texts": 100}, run, {"texts": 5})
    result = run_check(own, subject_of(pair), Effort.parse("quick"))
    assert seen == [0, 1, 2] and result.status == PASSED
    assert result.found.sizes == {"texts": 6}
    assert result.found.statistic == {"most": 3, "least_margin": -3, "differing": 3}
    seen.clear()
    assert run_check(replace(own, least={"texts": 10**6}), subject_of(pair), LEAST).status == NOT_SHOWN
    assert len(seen) == TURNS
    seen.clear()
    assert run_check(replace(own, least={"nothing": 1}), subject_of(pair), LEAST).status == NOT_SHOWN
    assert len(seen) == 2, "a second run added nothing"


def test_a_request_that_the_configuration_refuses_is_no_failure(pair):
    def run(subject, effort):
        raise RequestError("the prompt is too long; give a shorter one")

    result = run_check(Check("X", "", "", "", {"texts": 9}, run, {"texts": 1}), subject_of(pair), LEAST)
    assert result.status == NOT_SHOWN and any("too long" in note for note in result.found.notes)


def pair_of_ngrams(pair):
    """An n-gram drafter whose n-grams are too long to be found."""
    return subject_of(pair, SpecConfig("ngram", options={"min_ngram": 32, "max_ngram": 32}))


def test_a_failure_outweighs_what_was_not_seen(pair):
    wrong = Found({}, {})
    wrong.add("somewhere")
    assert run_check(replace(CHECKS[0], run=lambda s, e: wrong), subject_of(pair), LEAST).status == FAILED


def test_the_digest_is_of_every_stored_tensor(pair):
    subject = subject_of(pair)
    weights = subject.target.weights
    tensors = [t for _, t in acceptance.stored_tensors(weights)]
    assert any(t is weights.norm for t in tensors)
    assert any(t is weights.layers[0].input_norm for t in tensors)
    assert all(any(t is part for t in tensors) for m in weights.matrices for part in m.parts.values())
    for tensor in (weights.norm, weights.layers[-1].post_norm, next(iter(weights.embedding.parts.values()))):
        first = tensor.view(-1)[0].clone()
        try:
            tensor.view(-1)[0] += 1
            found = acceptance.own_target.run(subject, LEAST)
        finally:
            tensor.view(-1)[0] = first
        assert found.verdict == FAILED and found.statistic["changed_digests"] == 1
    assert acceptance.own_target.run(subject, LEAST).verdict == PASSED


def test_a_head_has_no_sequence_of_its_own_to_look_at():
    """A head's cache holds rows made from the target's hidden states, so only texts can show a mistake in it."""
    contexts = Contexts(cast(Any, None), 1, 1)
    assert shadows(SimpleNamespace(followers=contexts), Sequence(1, [1], SamplingParams(), 0)) == []


def test_a_users_store_is_left_alone(pair, tmp_path):
    store = tmp_path / "store"
    suffix = SpecConfig("suffix", options={"store": str(store)})
    for spec in (suffix, SpecConfig("first", below=(suffix, SpecConfig("ngram")))):
        loaded = Loaded(EngineConfig(spec=spec), pair.tokenizer, 0, pair.target, ())
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        subject = Subject(loaded, PROMPTS, params, max_tokens=8, batch=4)
        subject.run(subject.engine(), subject.jobs(4, params))
        assert not store.exists()


def test_nothing_leaks_where_nothing_ran(pair):
    alone = suite.certify(subject_of(pair), asked(), chosen(["L1", "C2"]))
    assert [r.status for r in alone.results] == [PASSED, NOT_SHOWN]
    assert alone.passed and alone.verdict == NOT_SHOWN == alone.as_dict()["verdict"]
    alone.results.pop()  # L1 alone passes without a draft
    assert not any("proposed" in line for line in summary(alone.as_dict())), "no draft was used"


def test_the_record_is_a_record(certificate, tmp_path):
    found = json.loads(json.dumps(certificate.as_dict()))
    assert found["schema"] == "sameseed.certificate/1"
    record.append(tmp_path / "c.jsonl", found)
    assert record.read(tmp_path / "c.jsonl") == [found]
    about = {"id", "name", "proves", "status", "sizes", "full_sizes", "least", "lacking", "remedy", "threshold"}
    about |= {"notes", "findings"}
    assert all(check.keys() == about | {"statistic", "false_alarm", "seconds"} for check in found["checks"])
    assert found["left_out"] == []
    assert {"label", "model", "model_digest", "format", "kv_format", "backend", "seed"} <= found["config"].keys()
    del found["checks"]
    with pytest.raises(ConfigError, match="lacks 'checks'"):
        schemas.check(found)


def test_the_page_shows_what_differs_and_no_markup_of_texts(pair, certificate):
    found = Found({"texts": 1}, {"differing_texts": 1})
    found.add("prompt 0: token 3", "<script>alert(1)</script>", "a & b")
    bad = Check("X", "made up", "nothing", "0", {}, lambda subject, effort: found)
    result = run_check(bad, subject_of(pair), LEAST)
    failed = replace(certificate, results=[*certificate.results, result])
    assert not failed.passed
    text = render(failed.as_dict())
    assert "<script>" not in text and "&lt;script&gt;" in text and "a &amp; b" in text


@pytest.mark.parametrize(
    ("counts", "verdict", "words"),
    [
        (FirstDrafts(1000, 6, 5.5, taken=6), WARNING, "6 of 1000"),
        (FirstDrafts(400, 60, 55.0, taken=60), WARNING, "another target"),  # no better than chance
        (FirstDrafts(400, 60, 8.0, taken=60), PASSED, ""),
        (FirstDrafts(400, 60, 8.0, taken=59, missed=1), FAILED, "1 rejected"),
        (FirstDrafts(400, 60, 8.0, taken=62, wrong=2), FAILED, "2 accepted"),
        (FirstDrafts(3, 1, 0.1, missed=1), FAILED, "1 rejected"),  # however few
    ],
)
def test_the_alarm(pair, counts, verdict, words):
    subject = subject_of(pair)
    subject.first = counts
    found = run_check(acceptance.alarm, subject, Effort(1e-9)).found
    assert found.verdict == verdict and words in str(found.notes) + str(found.findings)


def test_the_alarm_goes_on_until_it_saw_enough(pair):
    for few in (FirstDrafts(), FirstDrafts(3, 0, 0.1), FirstDrafts(400, 0, 3.0), FirstDrafts(49, 20, 1.0, taken=20)):
        silent = pair_of_ngrams(pair)
        silent.first = few
        assert run_check(acceptance.alarm, silent, Effort(1e-9)).status == NOT_SHOWN, "never drafted, or never right"
    started = subject_of(pair)
    started.first = FirstDrafts(3, 1, 0.1, taken=1)
    assert run_check(acceptance.alarm, started, Effort(1e-9)).found.sizes["first_drafts"] >= 50


def test_first_guesses_are_counted_as_they_are_checked(pair):
    guesses = FirstDrafts()
    runner = subject_of(pair).plain().runner
    watched = Watched(runner, lambda seq: (6, 2), {7: 0.25, 6: 0.5, 1: 0.125}, guesses)
    seqs = [Sequence(i, [1, 2, 3], SamplingParams(), 0) for i in range(4)]
    for seq in seqs:
        watched.blocks.reserve(seq, 8)
    draft = Draft.trees([([7, 5, 6], [-1, 0, -1]), ([], []), ([1], [-1]), ([6], [-1])])
    out = watched.forward(seqs, draft, [3] * 4)
    watched.commit(seqs, [3] * 4, [[2], [], [0], []], out)
    assert (guesses.num, guesses.hits, guesses.by_chance) == (3, 2, 1.375)
    assert (guesses.taken, guesses.missed, guesses.wrong) == (2, 1, 1)
    assert [seq.num_cached for seq in seqs] == [4, 3, 4, 3], "the runner's own commit"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *((["--effort", text], "--effort must be quick") for text in ("0", "-1", "none", "nan", "1e9", "")),
        (["--draft", "nowhere"], "no drafter"), (["--draft", "none"], "nothing to certify"),
        (["--k", "0"], "nothing to certify"), (["--num-prompts", "0"], "--num-prompts"),
        (["--prompts", "{tmp}/missing.jsonl"], "cannot read"), (["--prompts", "{tmp}/empty.txt"], "holds no prompts"),
        (["--max-tokens", "2"], "--max-tokens, to leave room for drafts, must be at least 8"),
        (["--batch", "0"], "--batch must be at least 1"),
        (["--html", "{tmp}/file.txt/page.html"], "--html"), (["--device", "gpu"], "use cpu, cuda, or cuda:N"),
        (["--device", "cpu", "--backend", "triton"], "backend 'triton'"), (["--only", "L3", "L4"], "no check 'L4'"),
    ],
)  # fmt: skip
def test_bad_usage_is_exit_code_2(arguments, words, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "file.txt").write_text("hello\n")
    assert main(["verify-lossless", *(a.format(tmp=tmp_path) for a in arguments)]) == 2
    assert words in capsys.readouterr().err


FEW = ("--only", "S1", "A1", "C2")  # cheap checks; the others are tested above


def command(folders, tmp_path, *more):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the sum of all\nadd one, add one, add one\n")
    own = ["--model", str(folders[0]), "--draft", str(folders[1]), "--prompts", str(prompts), "--threads", "1"]
    return ["verify-lossless", *own, "--max-tokens", "10", "--effort", "1e-6", *FEW, *more]


def test_the_command_writes_record_and_page(pair_folders, tmp_path, capsys):
    out, html = tmp_path / "c.jsonl", tmp_path / "c.html"
    few = command(pair_folders, tmp_path, "--out", str(out), "--html", str(html), "--json")
    assert main(few) == 0, "two prompts are enough: the checks go on until the draft was tried"
    shown = json.loads(capsys.readouterr().out)
    assert record.read(out) == [shown]
    assert shown["verdict"] == "these checks passed"
    assert [c["id"] for c in shown["checks"]] == ["S1", "A1", "C2"]
    assert "L3" in shown["left_out"]
    assert shown["config"]["label"] == "draft_model k=4"
    assert str(tmp_path) not in json.dumps(shown), "paths are nobody's business"
    assert "These checks passed" in html.read_text()
    few = command(pair_folders, tmp_path)
    assert main([*few[: few.index("--only")], "--only", "L1", "S1", "C2"]) == 0
    said = capsys.readouterr().out
    assert "these checks passed: draft_model k=4" in said and "this is no proof of the whole" in said
    assert "lossless" not in said


def test_a_wrong_engine_is_exit_code_1(pair_folders, tmp_path, capsys):
    with next(m for m in mutants.MUTANTS if "row before" in m.name).alive():
        assert main(command(pair_folders, tmp_path)) == 1
    shown = capsys.readouterr().out
    assert "NOT lossless" in shown
    assert "expected" in shown and "|" in shown, "both continuations from the first differing token"
