import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from sameseed import devices
from sameseed.config import SpecConfig
from sameseed.engine.memory import Demand, plan_blocks
from sameseed.engine.settings import make_config
from sameseed.errors import ConfigError, RequestError
from sameseed.measure import bench_report as report
from sameseed.measure.bench import Bench, Run, fitted
from sameseed.measure.bench_report import config_as_dict, make_record, make_records
from sameseed.measure.prompt_sets import Prompt
from sameseed.measure.workload import Arm, Workload, arms, read_prompts, spec_as_dict
from sameseed.models.loader import read_config, resolve_model
from sameseed.report import record, schemas
from sameseed.request import SamplingParams, SpecMetrics
from sameseed.scheme import QuantScheme

POLICIES = ("fixed", "history", "goodput", "disco")


@pytest.fixture(scope="module")
def measured(pair_folders):
    """Three prompts, two at a time, measured three times in each of four ways."""
    target, draft = map(str, pair_folders)
    ways = arms([SpecConfig("ngram"), SpecConfig("draft_model", model=draft)], [3])
    ways += arms([SpecConfig("draft_model", model=draft, confidence=0.5)], [5])[1:]
    bench = Bench(target, ways, {"max_num_seqs": 2})
    tokenizer = bench.llm.tokenizer
    prompts = tuple(tuple(tokenizer.encode(t)) for t in ("the sum of", "the list is empty", "def add(a"))
    workload = Workload("test", prompts, SamplingParams(max_tokens=24, temperature=0.7, seed=4), 2)
    bench.warm_up(workload)
    return bench, workload, bench.measure(workload, 3)


def test_every_arm_ran_everything_and_wrote_the_same(measured):
    bench, workload, runs = measured
    plain = runs[bench.arms[0]][0]
    assert len(plain.completions) == len(workload.prompts)
    for arm in bench.arms:
        assert len(runs[arm]) == 3
        for run in runs[arm]:
            assert run.texts == plain.texts
            assert run.num_steps <= plain.num_steps
            assert 0 < run.times.target < run.seconds
    assert plain.metrics.num_draft_tokens == 0
    assert runs[bench.arms[2]][0].metrics.num_accepted_tokens > 0


def test_arms_of_one_drafter_share_it(measured):
    bench = measured[0]
    fixed, confident = (bench.install(bench.arms[i]).drafter for i in (2, 3))
    assert fixed is confident
    assert bench.install(bench.arms[3]).policy.uses_confidence
    assert not bench.install(bench.arms[2]).policy.uses_confidence


def test_engines_of_one_bench_leave_each_other_room_on_a_gpu(monkeypatch):
    """On a GPU of 8 GiB, one engine takes all of it for its KV cache if it does not know how long the texts are."""
    left, block = [8 << 30], 50 << 20
    longest = read_config(resolve_model("embedded")).max_model_len
    monkeypatch.setattr(devices, "memory_room", lambda name, share: (left[0], left[0], 8 << 30))

    def load(model, draft, target=None, **given):
        config = make_config(draft, **given)
        left[0] -= block * plan_blocks(config, config.max_model_len or longest, [Demand(QuantScheme(), 0, block)])
        return SimpleNamespace(engine=SimpleNamespace(drafter=draft, runner=SimpleNamespace(model=None)))

    settings, ways = {"device": "cuda", "max_num_seqs": 1}, arms([SpecConfig("ngram")], [3])
    given = fitted("embedded", settings, [Prompt("a", "b", "one prompt")], 32)
    with pytest.raises(ConfigError, match="the most that fits"):
        Bench("embedded", ways, settings, load)
    left[0] = 8 << 30
    Bench("embedded", ways, given, load)
    for own in ({**settings, "max_model_len": 4096}, {**settings, "num_blocks": 90}, {"max_num_seqs": 1}):
        assert fitted("embedded", own, [Prompt("a", "b", "one prompt")], 32) == own, "the user's, and the CPU's"


def test_records_are_complete_and_their_medians_right(measured, pair_folders, tmp_path):
    bench, workload, runs = measured
    records = make_records(bench, str(pair_folders[0]), workload, runs, record.now(), record.machine())
    for line in records:
        record.append(tmp_path / "r.jsonl", line)
    again = record.read(tmp_path / "r.jsonl")
    assert again == json.loads(json.dumps(records))
    plain = sorted(r["tokens_per_s"] for r in again[0]["repetitions"])[1]
    for line in again:
        ratios = sorted(r["speedup"] for r in line["repetitions"])
        assert line["speedup"] == ratios[1]
        assert line["tokens_per_s"] == pytest.approx(plain * ratios[1]), "rates and ratios never contradict each other"
        assert line["latency_s"]["median"] <= line["latency_s"]["p95"]
        split = line["repetitions"][0]["time_split"]
        assert sum(split.values()) == pytest.approx(line["repetitions"][0]["seconds"])


def test_a_text_that_differs_is_told(measured):
    bench, _, runs = measured
    plain = runs[bench.arms[0]]
    done = list(plain[0].completions)
    done[1] = replace(done[1], token_ids=(*done[1].token_ids[:-1], done[1].token_ids[-1] + 1))
    made = make_record({}, [Run(1.0, 1, completions=done), plain[1]], plain[:2], "now", {})
    assert made["equals_plain"] is False and [r["equals_plain"] for r in made["repetitions"]] == [False, True]


@pytest.mark.parametrize("damage", ["speedup", "machine", "schema"])
def test_a_foreign_record_is_refused(measured, tmp_path, damage):
    bench, _, runs = measured
    plain = runs[bench.arms[0]]
    line = make_record({}, plain, plain, "now", {})
    schemas.check(line)
    bad = {**line, "schema": "other/2"} if damage == "schema" else {k: v for k, v in line.items() if k != damage}
    with pytest.raises(ConfigError, match=damage):
        record.append(tmp_path / "r.jsonl", bad)
    assert not (tmp_path / "r.jsonl").exists()
    (tmp_path / "r.jsonl").write_text(json.dumps(bad) + "\n")
    with pytest.raises(ConfigError, match=r"r\.jsonl:1"):
        record.read(tmp_path / "r.jsonl")


def test_repeated_grams():
    def repeated(*texts):
        done = [SimpleNamespace(token_ids=tuple(text)) for text in texts]
        return Run(completions=done).repeated

    assert repeated(range(7)) is None and repeated(range(8)) == 0.0
    assert repeated([5] * 9) == 0.5, "two 8-grams, one of them new"
    assert repeated([5] * 9, range(9), range(9)) == pytest.approx(1 / 6), "each text by itself"


def test_levels_are_counted_for_each_run(pair_folders):
    """Runs and arms share a drafter, but a run's record counts only that run's levels."""
    target, draft = map(str, pair_folders)
    below = (SpecConfig("ngram", num_draft_tokens=4), SpecConfig("draft_model", draft, num_draft_tokens=4))
    bench = Bench(target, arms([SpecConfig("first", below=below)], [4]), {"max_num_seqs": 2})
    prompts = tuple(tuple(bench.llm.tokenizer.encode(t)) for t in ("the sum of the sum of", "def add(a"))
    workload = Workload("test", prompts, SamplingParams(max_tokens=20, seed=4), 2)
    runs = bench.measure(workload, 2)
    for run in runs[bench.arms[1]]:
        assert list(run.levels) == ["level 1: ngram", "level 2: draft_model"]
        for field in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            assert sum(getattr(m, field) for m in run.levels.values()) == getattr(run.metrics, field) > 0
    plain, first = make_records(bench, target, workload, runs, "run", {})
    assert "levels" not in plain and "useless_draft" not in first
    schemas.check(json.loads(json.dumps(first)))
    lines = report.levels(first)
    assert len(lines) == 2 and all(f": level {i}: " in line for i, line in enumerate(lines, 1))
    assert report.levels(plain) == []


def test_a_draft_that_is_no_use_is_marked(measured, pair_folders):
    bench, workload, runs = measured
    plain, arm = runs[bench.arms[0]], bench.arms[2]
    useless = [replace(run, metrics=SpecMetrics()) for run in runs[arm]]
    for run in useless:
        for _ in range(50):
            run.metrics.update(4, 0)
    config = config_as_dict(bench.llm, str(pair_folders[0]), arm, workload)
    told = make_record(config, useless, plain, "run", {})
    assert told["useless_draft"] is True
    assert "take a draft of this very target" in report.levels(told)[0]
    looked_up = make_record({**config, "draft": "ngram"}, useless, plain, "run", {})
    assert "useless_draft" not in looked_up


def test_no_repetition_finds_what_an_earlier_one_left(measured):
    """A prompt in the prefix cache costs no prefill, so every arm after the first would seem faster."""
    bench, workload, runs = measured
    assert all(c.metrics.num_cached_tokens == 0 for arm in bench.arms for run in runs[arm] for c in run.completions)
    drafters = [bench.install(arm).drafter for arm in bench.arms]
    caches = [bench.llm.engine.runner.blocks, *(d.runner.blocks for d in drafters if hasattr(d, "runner"))]
    assert len(caches) > 1
    assert all(len(blocks.prefixes) == 0 for blocks in caches)
    long = replace(workload, prompts=(tuple(range(1, 60)),) * 2, batch_size=1)
    for arm, found in bench.measure(long, 2).items():
        assert [c.metrics.num_cached_tokens for run in found for c in run.completions] == [0] * 4, arm.label


def test_prompts_of_both_kinds_and_a_limit_from_all_over_the_file(tmp_path):
    rows, lines = tmp_path / "p.jsonl", tmp_path / "p.txt"
    text = '{"id": "a", "domain": "d", "prompt": "x"}\n\n{"messages": [{"role": "user", "content": "y"}]}\n'
    rows.write_text(text, encoding="utf-8-sig")
    first, second = read_prompts(rows)
    assert (first.id, first.domain, first.text, first.messages) == ("a", "d", "x", ())
    assert second.text is None and second.messages == ({"role": "user", "content": "y"},)
    lines.write_text("".join(f"{i}\u2028\n" for i in range(10)), encoding="utf-8-sig")
    assert [len(read_prompts(lines, 99)), *(p.text for p in read_prompts(lines, 2))] == [10, "0\u2028", "5\u2028"]
    with pytest.raises(ConfigError, match="at least 1"):
        read_prompts(lines, 0)
    refusing = SimpleNamespace(chat_template="", chat=lambda messages: SamplingParams(n=0))
    with pytest.raises(ConfigError, match=r"p\.jsonl:3: n must"):
        second.encode(refusing)


def test_a_workload_gives_each_prompt_its_own_seed():
    work = Workload("w", ((1,), (2,), (3,)), SamplingParams(seed=2**63 - 2), 2)
    assert [[p.seed for _, p in batch] for batch in work.batches()] == [[2**63 - 2, 2**63 - 1], [0]]
    for params, size, says in ((SamplingParams(), 1, "--seed"), (SamplingParams(seed=1), 2, "give 2 prompts")):
        with pytest.raises((RequestError, ConfigError), match=says):
            Workload("w", ((1,),), params, size)
    with pytest.raises(ConfigError, match="batch size"):
        Workload("w", ((1,),), SamplingParams(seed=1), 0)


def test_arms_begin_with_plain_decoding():
    made = arms([SpecConfig("none"), SpecConfig("ngram", confidence=0.5)], [2, 4])
    assert [a.label for a in made] == ["plain", "ngram k=2 p>=0.5", "ngram k=4 p>=0.5"]
    assert [a.plain for a in made] == [True, False, False]
    with pytest.raises(ConfigError, match=r"0\.\.64"):
        arms([SpecConfig("ngram")], [65])
    lengths = {p: [a.spec.num_draft_tokens for a in arms([SpecConfig("ngram", policy=p)], None)[1:]] for p in POLICIES}
    assert lengths == {"fixed": [3, 5, 7], "history": [3, 5, 7], "goodput": [12], "disco": [12]}


def test_heads_are_named_as_what_they_are_and_records_hold_no_path(tmp_path):
    """Labels and records name the drafter and include its options, with their defaults."""
    made = arms([SpecConfig("draft_model", "embedded-head", options={"depth": 3})], [4])[1]
    held = spec_as_dict(made.spec)
    assert (made.label, made.spec.method, held["draft"]) == ("eagle k=4", "eagle", "eagle")
    assert held["draft_options"]["depth"] == 3 and held["draft_options"]["top_k"] == 8
    below = (SpecConfig("suffix"), SpecConfig("draft_model", "embedded-head"))
    assert arms([SpecConfig("first", below=below)], [4])[1].label == "suffix + eagle k=4"
    (tmp_path / "small").mkdir()
    below = (SpecConfig("suffix"), SpecConfig("draft_model", str(tmp_path / "small")))
    said = json.dumps(spec_as_dict(SpecConfig("first", below=below)))
    assert str(tmp_path) not in said and '"small"' in said


def test_arms_do_not_learn_from_one_another():
    """Arms write the same texts, so a drafter that remembers past requests must not remember those of another arm."""
    asked = SpecConfig("first", below=(SpecConfig("suffix"), SpecConfig("draft_model", model="small")))
    assert Arm("both", asked).spec.below[0].options == {"past": "none"}
    assert Arm("both", asked).spec.below[1] == asked.below[1]
    wanted = SpecConfig("suffix", options={"past": "all", "store": "texts"})
    assert Arm("all", wanted).spec == wanted
    assert Arm("ngram", SpecConfig("ngram")).spec == SpecConfig("ngram")
