import json
import math
from dataclasses import replace

import numpy as np
import pytest
from lawkit import write_model, write_tokenizer

from sameseed.config import SpecConfig
from sameseed.errors import ConfigError, RegistryError
from sameseed.measure.quality import compare, show
from sameseed.measure.quality.compare import Comparing
from sameseed.measure.quality.perplexity import Perplexity
from sameseed.measure.quality.show import Variant
from sameseed.measure.quality.tasks import EvalSettings, Quality, TaskResult
from sameseed.measure.workload import read_prompts


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("the sum of\nthe list is empty\ndef add(a\n")
    return path


@pytest.fixture(scope="module")
def asked(pair_folders, data_folder, prompts):
    return Comparing(
        EvalSettings(
            ("perplexity", "humaneval"), data_folder, limit=2, seed=1, max_tokens=8, window=64, stride=32, tokens=400
        ),
        draft=str(pair_folders[1]),
        num_draft_tokens=3,
        prompts=prompts,
        max_tokens=12,
        repeat=2,
    )


@pytest.fixture(scope="module")
def found(pair_folders, asked):
    target = str(pair_folders[0])
    return compare.report([target, f"{target}@nf4", f"{target}@auto@int8"], asked)


def test_every_figure_is_there(found, pair_folders):
    base, small, cached = (r["comparison"] for r in found.records)
    assert base["as_draft"] is None and cached["as_draft"] is None and not base["notes"]
    assert 0.0 < small["as_draft"]["acceptance_rate"] < 1.0, "other weights draft for the baseline"
    assert base["interleaved"] and base["perplexity_ratio"] is None and not base["differences"]
    for its in (base, small, cached):
        assert all(its[name] > 0 for name in ("tokens_per_s", "drafted_tokens_per_s"))
        assert its["equals_plain"] and len(its["repetitions"]) == 2
        assert its["disk_bytes"] == (pair_folders[0] / "model.safetensors").stat().st_size
        low, high = its["as_target"]["interval"]
        assert low <= its["as_target"]["acceptance_rate"] <= high
    assert small["weight_bytes"] < base["weight_bytes"] / 3 and cached["weight_bytes"] == base["weight_bytes"]
    assert cached["kv_bytes_per_token"] < base["kv_bytes_per_token"]
    assert found.records[2]["config"]["kv_format"] == "int8" and found.records[1]["config"]["format"] == "nf4"
    values = [r["perplexity"]["value"] for r in found.records]
    for its, value in zip((small, cached), values[1:]):
        assert its["perplexity_ratio"]["value"] == pytest.approx(value / values[0])
        assert "humaneval" in its["differences"]


def test_one_that_fails_while_it_is_timed_is_named_and_the_others_are_measured_alone(pair_folders, asked, monkeypatch):
    right, target, loaded = compare.interleave, str(pair_folders[0]), []

    def failing(benches, *more):
        loaded.append(len(benches))
        if any(bench.llm.config.format == "nf4" for bench, _ in benches):
            raise MemoryError("no room")
        return right(benches, *more)

    monkeypatch.setattr(compare, "interleave", failing)
    brief = replace(asked, quality=replace(asked.quality, tasks=("perplexity",)), repeat=1)
    found = compare.report([target, f"{target}@nf4", f"{target}@auto@int8"], brief)
    assert found.failed == {"target nf4": "no room"} and loaded == [3, 1, 1, 1]
    assert [r["config"]["kv_format"] for r in found.records] == ["fp32", "int8"]
    assert not any(r["comparison"]["interleaved"] for r in found.records)


def test_who_would_draft_for_itself_is_drafted_for_by_ngrams(pair_folders, asked):
    model, other = map(str, pair_folders)
    for target, draft, itself in (("auto", "auto", True), ("w8a8", "auto", True), ("auto", "w8a8", False)):
        spec = SpecConfig("draft_model", model, draft)
        assert compare.drafts_for_itself(Variant(model, target), spec) is itself
        assert not compare.drafts_for_itself(Variant(other, target), spec)
    assert not compare.drafts_for_itself(Variant(model), SpecConfig("ngram"))
    found = compare.report(
        [model, other], replace(asked, quality=replace(asked.quality, tasks=("perplexity",)), repeat=1)
    )
    assert [bool(r["comparison"]["notes"]) for r in found.records] == [False, True]


def test_settings_out_of_range_name_their_flag():
    for name in ("tokens", "limit", "window", "stride"):
        with pytest.raises(ConfigError, match=f"^--{name} must be at least"):
            EvalSettings(**{name: 0})


def acceptance(rate):
    return {"acceptance_rate": rate}


def changed(found, row, **parts):
    """A record with other parts of its comparison."""
    its = found.records[row]
    return {**its, "comparison": {**its["comparison"], **parts}}


@pytest.mark.parametrize(
    ("rate", "words"),
    [(0.5, []), (0.4, []), (0.29, ["fell to 29.0%"]), (0.04, ["near zero"]), (0.0, ["near zero"]), (None, ["nothing"])],
)
def test_lost_acceptance_is_said_loudly(found, rate, words):
    base = changed(found, 0, as_target=acceptance(0.5), as_draft=None)
    same = {"perplexity_ratio": {"value": 1.0}}
    said = compare.warnings(changed(found, 2, as_target=acceptance(rate), as_draft=acceptance(0.9), **same), base, 1.0)
    assert len(said) == len(words)
    assert all(word in line and line.startswith("as target") for word, line in zip(words, said, strict=True))
    said = compare.warnings(changed(found, 2, as_target=acceptance(0.5), as_draft=acceptance(rate), **same), base, 1.0)
    assert all(line.startswith("as draft") for line in said) and bool(said) == (rate is None or rate < 0.6)


def test_a_dead_baseline_and_lost_perplexity_are_said(found):
    dead = changed(found, 0, as_target=acceptance(0.01))
    assert any("near zero" in line for line in compare.warnings(dead, dead, 1.0))
    row = changed(found, 2, perplexity_ratio={"value": 1.3})
    assert any("1.30 times" in line for line in compare.warnings(row, found.records[0], 1.0))


@pytest.mark.parametrize(("change", "words"), [({"digest": "y"}, "bits per byte"), ({"window": 48}, "--window")])
def test_perplexities_that_cannot_be_divided_say_why(change, words):
    base, notes = Perplexity(np.ones(99, np.float32), 400, 64, 32, True, "x"), []
    its = compare._beside(Quality(replace(base, **change), "a text", ()), Quality(base, "a text", ()), notes, 0)
    assert its["perplexity_ratio"] is None and words in notes[0]


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_model_that_overflows_is_said_and_its_record_is_json(found, asked, value, tmp_path):
    overflown = Perplexity(np.full(99, value, np.float32), 400, 64, 32, True)
    broken = Quality(overflown, "a text", (TaskResult("humaneval", "pass@1", (0.0, 1.0)),))
    its = changed(found, 1, perplexity_ratio={"value": None, "interval": None})
    variant = Variant("embedded", "nf4")
    made = show.make_record(variant, asked.quality, broken, its["config"], its["comparison"])
    assert any("not finite" in line for line in compare.warnings(made, found.records[0], 1.0))
    lines = [found.records[0], made]
    assert json.loads(json.dumps(made, allow_nan=False))["perplexity"]["value"] is None
    missing = [name for name, its in show.figures(made).items() if its.text() == "not finite"]
    assert missing == ["perplexity", "  over the baseline's"]
    assert show.quality(made).row_count == 2
    assert all(p.stat().st_size for p in show.plot(lines, tmp_path / "page.png")), "and is no bar"


def test_variants_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m@w4a8").mkdir()
    assert Variant.parse("m@w4a8") == Variant("m@w4a8"), "a path may hold an @"
    assert Variant.parse("embedded@w4a16,lm_head=bf16@int8") == Variant("embedded", "w4a16,lm_head=bf16", "int8")
    assert Variant.parse("embedded") == Variant("embedded")
    assert Variant("embedded", "auto", "int8").label == "embedded kv int8"
    for text in ("", "a@b@c@d", "embedded@", "@w4a8"):
        with pytest.raises(ConfigError, match="variant"):
            Variant.parse(text)
    with pytest.raises(RegistryError, match="did you mean"):
        Variant.parse("embedded@w4a9")
    with pytest.raises(ConfigError, match="KV cache"):
        Variant.parse("embedded@w4a8@nf4")


def test_bad_choices_fail_before_any_work(pair_folders, asked, monkeypatch):
    monkeypatch.setattr(compare, "LLM", None)  # nothing can be loaded
    target, typo = str(pair_folders[0]), replace(asked, quality=replace(asked.quality, tasks=("perplexitty",)))
    for variants, settings, says in (
        ([target, target], asked, "each once"),
        ([target, "nowhere/at/all"], asked, "nowhere"),
        ([target], typo, "no task"),
        ([target], replace(asked, draft="none"), "acceptance"),
    ):
        with pytest.raises(ConfigError, match=says):
            compare.report(variants, settings)


def test_a_draft_of_another_vocabulary_is_said(pair_folders, tmp_path, prompts):
    write_model(tmp_path)
    write_tokenizer(tmp_path, 290)
    own, other, asked, texts = str(pair_folders[0]), str(tmp_path), Comparing(max_tokens=4), read_prompts(prompts)
    rate, why = compare.as_draft(Variant(own), Variant(other), texts, asked)
    assert rate is None and "its token 290 is missing" in str(why)
    rate, why = compare.as_draft(Variant(own, "w8a8"), Variant(own, "bf16"), texts, asked)
    assert rate is None and "itself" in str(why) and own not in str(why)  # a record has no paths
