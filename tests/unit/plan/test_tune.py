"""Tuning: the grid, which contestants run and win; the embedded pair, from prompts to a profile for an engine."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from sameseed import LLM
from sameseed.cli import main
from sameseed.config import SpecConfig, parse_draft
from sameseed.cost.round import Drafted
from sameseed.engine.levels import Level, resolve
from sameseed.engine.settings import make_config
from sameseed.errors import ConfigError, ModelLoadError
from sameseed.measure.bench import Run, run_batch
from sameseed.measure.prompt_sets import Prompt
from sameseed.measure.workload import DEFAULT_PROMPTS, read_prompts
from sameseed.plan import quality, tune
from sameseed.plan.candidates import TargetBench, Trial, TrialRun, load_targets, survivors
from sameseed.plan.grid import Setting, TuneRequest, draft_specs, lengths_of, options_of, parse_slo
from sameseed.plan.profile_file import write
from sameseed.plan.race import Contestant, missed, race, ratio
from sameseed.request import SamplingParams
from sameseed.tuned import Chosen, Scope, Tuned, TunedFigure, TunedModel

PROMPTS = tuple(Prompt(str(i), "text", f"Number {i} is") for i in range(8))
PARAMS = SamplingParams(max_tokens=8, seed=1)


def asked(**given):
    return TuneRequest(**{"model": "embedded", "prompts": PROMPTS, "params": PARAMS, "drafts": ("ngram",), **given})


def prospect(spec, value, num_bytes=0):
    speeds = dict.fromkeys((1, 4), value)
    made = {b: SimpleNamespace(tokens=1.0 + spec.num_draft_tokens / 2) for b in (1, 4)}
    return Contestant(Setting("auto", "auto", spec), SimpleNamespace, [()] * 4096, speeds, made, num_bytes)


def test_bad_requests():
    for given, says in (
        ({"objective": "fast"}, "objective must be one of balanced, latency"),
        *(({"prompts": few}, "at least two") for few in ((), PROMPTS[:1])),
        ({"prompts": (Prompt("a", "", "same"), Prompt("b", "", "same"))}, "different"),
        ({"batches": (0,)}, "--batch must be at least 1"),
        ({"threads": (0,)}, "1 or more"),
        *(({"seconds": seconds}, "--seconds must be .*at least 5") for seconds in (1.0, math.nan, math.inf)),
        ({"quality": 0.9}, "--quality must lie in 1..100"),
    ):
        with pytest.raises(ConfigError, match=says):
            asked(**given)
    with pytest.raises(ConfigError, match="batch 64 of 8 prompts: give 64"):
        tune.tune(asked(batches=(1, 64)), LLM)
    for slo in ("ttft", "ttft<0s", "speed<2s", "ttft<2"):
        with pytest.raises(ConfigError, match=r"write e\.g\. 'ttft<2s'"):
            parse_slo(slo)
    assert parse_slo("ttft<2s, itl < 50ms, ttft<3s") == {"ttft": 2.0, "itl": 0.05}


def test_the_grid():
    found = draft_specs(asked(drafts=("ngram", "self_quant + embedded-draft", "none"), draft_formats=("auto", "w8a8")))
    assert [(s.method, [b.format for b in s.below], Level.of(s).branches) for s in found] == [
        ("ngram", [], False), ("first", ["auto", "auto"], False), ("first", ["auto", "auto"], True),
        ("first", ["auto", "w8a8"], False), ("first", ["auto", "w8a8"], True),
    ]  # fmt: skip
    leaves = Setting("auto", "auto", found[2])
    assert leaves.way == "self_quant + embedded-draft siblings"
    assert max(s.num_draft_tokens for s in lengths_of(found[2])) == 16
    again = resolve(make_config(leaves.draft, policy="fixed", draft_options=options_of(found[2])).spec).spec
    assert again == found[2], "a profile's options say the same"
    names = ["suffix + ngram > self_quant", "(ngram > embedded-draft) + suffix"]
    assert [Setting("auto", "auto", parse_draft(name)).draft for name in names] == names
    few = draft_specs(asked(drafts=("ngram", "embedded-draft"), draft_vocabularies=("all", "auto")))
    assert [Setting("auto", "auto", spec).way for spec in few] == [
        "ngram", "embedded-draft", "embedded-draft siblings", "embedded-draft vocabulary auto",
        "embedded-draft siblings vocabulary auto",
    ]  # fmt: skip
    assert options_of(few[3]) == {"vocabulary": "auto"}
    lengths = lengths_of(found[0])
    assert [s.num_draft_tokens for s in lengths if s.policy == "fixed"] == [1, 2, 3, 4, 6, 8]
    assert lengths[-1].policy == "goodput"
    setting = Setting("w4a8", "auto", found[3], 2)
    assert setting.label == "self_quant + embedded-draft draft w8a8 k=4 threads=2 w4a8"


@pytest.mark.parametrize("text", ["embedded-head", "ngram + embedded-head"])
def test_a_head_guesses_trees_and_chains(text):
    tree, chain = draft_specs(asked(drafts=(text,)))
    assert Level.of(tree).branches and not Level.of(chain).branches
    assert [max(s.num_draft_tokens for s in lengths_of(spec)) for spec in (tree, chain)] == [32, 12]
    assert not options_of(tree) and Setting("auto", "auto", chain).way == f"{text} chain"
    again = resolve(make_config(text, policy="fixed", draft_options=options_of(chain)).spec).spec
    assert again == chain, "a profile's options say the same"


def test_who_runs():
    plain = prospect(SpecConfig(), 1.0)
    good = [prospect(s, 2.0, num_bytes=9) for s in lengths_of(SpecConfig("ngram"))]
    hopeless = [prospect(s, 0.5) for s in lengths_of(SpecConfig("suffix"))]
    found = survivors([plain, *good, *hopeless], asked())
    assert found[0] is plain and not any(p in hopeless for p in found)
    assert sum(p.setting.draft == "ngram" for p in found) == 3, "two, and the one that adapts itself"
    slow = replace(plain, setting=Setting("w8a8", "auto", SpecConfig()))
    fast = replace(good[0], setting=Setting("w4a8", "auto", SpecConfig()))
    found = survivors([plain, *good, slow, fast], asked())
    assert plain in found and fast in found and slow not in found, "other formats only where they may win"
    small = survivors([plain, *good, *hopeless], asked(objective="memory"))
    assert small[1] in hopeless, "the least bytes first"


class Runs:
    """A contestant whose speed is known."""

    def __init__(self, spec, speed, ttft=0.01, num_bytes=0):
        self.ran: list[int] = []
        self.contestant = prospect(spec, speed, num_bytes)
        self.contestant.run = self.run
        self.contestant.warm = lambda members: None
        self.speed, self.ttft = speed, ttft

    def run(self, batch, members):
        self.ran += members
        seconds = 100 * len(members) / self.speed * (1.0 + 0.02 * (len(self.ran) % 3))
        times = SimpleNamespace(time_to_first_token=self.ttft, time_per_output_token=1.0 / self.speed)
        done = SimpleNamespace(token_ids=(0,) * 100, metrics=times)
        self.contestant.runs.setdefault(batch, []).append(Run(seconds, completions=[done] * len(members)))


def ngrams(count):
    drafting = [Runs(SpecConfig("ngram", num_draft_tokens=k), 1.0 + 0.1 * k) for k in range(count)]
    return [Runs(SpecConfig(), 1.0), *drafting]


def test_the_race():
    runs = ngrams(6)
    order = race([r.contestant for r in runs], asked(), 32, 60.0)
    assert order[0] is runs[-1].contestant
    assert len(runs[0].ran) == len(runs[-1].ran) > len(runs[1].ran), "plain runs to the end, the worst soon no more"
    found = ratio(order[0], runs[0].contestant, (1, 4))
    assert found.value == pytest.approx(1.5, rel=0.05)
    few = ngrams(1)
    for r in few:
        r.run(4, range(4))
    single = ratio(few[1].contestant, few[0].contestant, (4,))
    assert single.high / single.low > 1.2 > found.high / found.low, "one pair tells little"


def test_what_scatters_does_not_win_by_luck():
    class Scattering(Runs):
        def run(self, batch, members):
            self.speed = (1.75, 1.35, 3.0, 1.6)[len(self.ran) // 4]
            super().run(batch, members)

    runs = [Runs(SpecConfig(), 1.0), Runs(SpecConfig("ngram"), 1.7), Scattering(SpecConfig("suffix"), 1.0)]
    order = race([r.contestant for r in runs], asked(batches=(4,)), 16, 60.0)
    steady, lucky = (ratio(r.contestant, runs[0].contestant, (4,)) for r in runs[1:])
    assert lucky.value > steady.value and order[0] is runs[1].contestant


@pytest.mark.parametrize(("slo", "whole"), [({}, False), ({"itl": 9.0}, True)])
def test_a_race_that_is_decided_ends(slo, whole):
    """A lead that is known well needs no more prompts, unless latencies count; a scattering one does."""
    few = [Runs(SpecConfig(), 1.0), Runs(SpecConfig("ngram"), 2.0)]
    race([r.contestant for r in few], asked(batches=(1,), slo=slo), 4096, 60.0)
    assert (len(few[0].ran) == len(few[1].ran) == 4096) == whole


@pytest.mark.parametrize(
    ("objective", "slo", "winner"),
    [
        ("latency", {}, "fast"), ("latency", {"ttft": 1.0}, "plain"), ("latency", {"itl": 0.6}, "fast"),
        ("ttft", {}, "plain"), ("memory", {}, "small"),
    ],
)  # fmt: skip
def test_what_is_best_is_what_was_aimed_at(objective, slo, winner):
    runs = {
        "plain": Runs(SpecConfig(), 1.0, num_bytes=5),
        "fast": Runs(SpecConfig("ngram"), 2.0, ttft=9.0, num_bytes=5),
        "small": Runs(SpecConfig("suffix"), 0.5, ttft=0.5, num_bytes=4),
    }
    request = asked(batches=(1,), objective=objective, slo=slo)
    order = race([r.contestant for r in runs.values()], request, 8, 60.0)
    assert order[0] is runs[winner].contestant
    late = missed(runs["fast"].contestant, request)
    assert late == ("ttft<1s missed: 9 s" if slo == {"ttft": 1.0} else None)


def test_a_small_budget_is_refused_before_anything_is_measured():
    slow = SimpleNamespace(
        seconds_of_text=lambda: 2.0, ways={"ngram": SpecConfig("ngram")}, tried=list(range(12)), asked=None
    )
    with pytest.raises(ConfigError, match="--seconds 60 or more"):
        tune._within(asked(seconds=40.0), [slow], 15.0, [])
    lost = []
    small = tune._within(asked(seconds=60.0), [slow], 10.0, lost)
    assert small.batches == (1,) and "batch 4" in lost[0].settings["setting"] and len(slow.tried) == 6


def test_a_small_budget_takes_fewer_settings_and_prompts():
    runners = [Runs(SpecConfig(), 10.0).contestant, *(r.contestant for r in ngrams(4)[1:])]
    # The first rung: 4 texts of 8 tokens at two batch sizes, 6.4 s of plain decoding and about 50 s of each other.
    assert len(tune.affordable(runners, asked(), 8.0, 1000.0, [])[0]) == 5
    few, _ = tune.affordable(runners, asked(), 8.0, 60.0, [])
    assert [c.label for c in few] == ["plain", "ngram k=3"], "the most promising"
    only = asked(only=runners[2].setting)
    assert [c.label for c in tune.affordable(runners, only, 8.0, 60.0, [])[0]] == ["plain", "ngram k=1"]
    lost = []
    few, small = tune.affordable(runners, asked(seconds=120.0), 8.0, 20.0, lost)
    assert len(few) == 2 and len(small.prompts) == 4, "fewer prompts, which fill the largest batch"
    assert {x.why for x in lost} == {"time"} and "4 of 8 prompts" in lost[0].settings["setting"]


def test_formats_beyond_the_bound_are_dropped_and_named():
    targets = [SimpleNamespace(format=f, kv_format="auto", name=f) for f in ("auto", "w8a8", "w4a8")]
    ratios = {("w8a8", "auto"): TunedFigure(1.03, 1.01, 1.05), ("w4a8", "auto"): TunedFigure(1.2, 1.1, 1.3)}
    lost = []
    kept = quality.kept(asked(quality=1.02), targets, ratios, lost)
    assert [t.format for t in kept] == ["auto", "w8a8"]
    assert [(x.settings["setting"], x.why) for x in lost] == [("w4a8", "quality")]
    with pytest.raises(ConfigError, match=r"no format keeps --quality 1\.05 .*1\.2000"):
        quality.kept(asked(quality=1.05), targets[2:], ratios, lost)


def test_the_checkpoint_is_measured_where_the_grid_lacks_it():
    llm = LLM("embedded", format="w4a8", max_num_seqs=1)
    target = SimpleNamespace(format="w4a8", kv_format="auto", name="w4a8", bench=SimpleNamespace(llm=llm))
    found = quality.measure(asked(quality_tokens=300), [target], LLM, lambda *_: None)["w4a8", "auto"]
    assert found.low < found.value < found.high and math.isfinite(found.high) and found.value != 1.0


def test_a_draft_that_fits_nowhere_and_a_model_that_is_nowhere():
    with pytest.raises(ModelLoadError, match=r"^no model at"):
        load_targets(asked(model="/no/such"), LLM, lambda *_: None, [])
    with pytest.raises(ConfigError, match="none of the drafts fits this target: embedded-target for auto"):
        load_targets(asked(drafts=("embedded-target",)), LLM, lambda *_: None, [])


def test_from_prompts_to_a_profile(tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"The {word} is" for word in ("cat", "sun", "house", "river")))
    out, plot = tmp_path / "tuned.toml", tmp_path / "tuned.png"
    argv = f"tune embedded --prompts {prompts} --max-tokens 8 --batch 1,2 --seconds 900 --slo itl<9s --threads 1"
    argv += " --formats auto w8a8 --quality 9 --quality-tokens 300 --drafts ngram"
    assert main([*argv.split(), "-o", str(out), "--plot", str(plot)]) == 0
    assert "settings predicted" in capsys.readouterr().out
    assert plot.stat().st_size > 5000
    tuned = Tuned.read(out)
    assert tuned.scope.num_prompts == 4 and tuned.scope.batch == (1, 2) and tuned.chosen.threads == 1
    assert tuned.chosen.max_num_seqs == (2 if tuned.chosen.policy == "fixed" else None)
    assert set(tuned.measured) >= {"speedup_batch_1", "speedup_batch_2"} and tuned.rejected
    assert all(f.low <= f.value <= f.high for f in tuned.measured.values())
    llm = LLM(profile=str(out))
    plain = LLM("embedded", format=tuned.chosen.format or "auto").generate(["The cat is"], PARAMS)
    assert llm.generate(["The cat is"], PARAMS)[0].text == plain[0].text


def test_a_profile_is_checked_for_what_it_was_tuned_for(tmp_path, capsys):
    """Its own choice is measured again; other machines, weights and prompts are refused."""
    prompts, path = tmp_path / "prompts.txt", tmp_path / "tuned.toml"
    prompts.write_text("\n".join(f"The {word} is" for word in ("cat", "sun", "house")))
    argv = f"tune embedded --prompts {prompts} --seconds 900 -o /dev/null/none --check {path}".split()
    here = tune._machine(asked(), Setting("auto", "auto", SpecConfig(), 1))
    chosen = Chosen(draft="ngram", num_draft_tokens=3, policy="fixed", threads=1)
    digest = tune._digest(read_prompts(prompts))
    scope = Scope(digest, 3, output_tokens=(5, 8), temperature=(0.0,), batch=(1, 2))
    figures = {f"speedup_batch_{n}": TunedFigure(50.0, 40.0, 60.0) for n in (1, 2)}
    good = Tuned(here, TunedModel("embedded"), chosen, scope, measured=figures)
    write(good, path)
    assert main(argv) == 0
    said = capsys.readouterr().out
    assert "ngram k=3 threads=1: " in said and "k=4" not in said and "speedup_batch_2: 50.00 then" in said
    assert main([*argv, "--drafts", "suffix"]) == 2
    assert "leave out --drafts" in capsys.readouterr().err
    for other, says in (
        (replace(good, machine=replace(here, cpu="a faster one")), "a faster one there"),
        (replace(good, model=TunedModel("embedded", "0")), "weights 0 there"),
        (replace(good, scope=replace(scope, prompts="0")), "--num-prompts of its tuning"),
        (replace(good, chosen=replace(chosen, num_draft_tokens=5)), "does not try ngram k=5"),
        (replace(good, chosen=Chosen(draft="none")), "nothing to check"),
    ):
        write(other, path)
        assert main(argv) == 2
        assert says in capsys.readouterr().err


def test_by_hand():
    # Four rounds: one without a draft, three with drafts of 4, 4 and 2 tokens, of which 3, 0 and 2 were right.
    run = TrialRun(4, np.array([[4, 3], [4, 0], [2, 2]]), (0.75,))
    trial = Trial({4: run})
    assert trial.drafted(4) == Drafted(5 / 4, (1 / 4, 0.0, 1 / 4, 0.0, 2 / 4), ((0.75, 10 / 3),))
    assert trial.drafted(1) == Drafted(2 / 4, (1 / 4, 3 / 4), ((0.75, 1.0),))
    rates = trial.rates(2)
    assert rates.marginal_accept_rates == (0.5, 0.5) and rates.conditional_accept_rates == (0.5, 1.0)
    assert (rates.mean_accept_length, rates.num_samples) == (2.0, 4)
    none = Trial({4: TrialRun(3, np.zeros((0, 2), np.int64), (0.0,))})
    assert none.drafted(4) == Drafted(0.0, (1.0,), ((0.0, 0.0),)) and none.rates(4).mean_accept_length == 1.0

    runs = {k: TrialRun(2, np.array([[k, 1], [k, k // 4]]), (1.0,)) for k in (4, 16)}
    trial = Trial(runs)  # each size of a tree has a run of its own
    assert (trial.drafted(4).accepted, trial.drafted(16).accepted) == (1.0, 2.5)
    assert trial.drafted(16).rows == 16 and trial.drafted(16).levels == ((1.0, 8),), "no deeper than drafts are"


@pytest.mark.parametrize("draft", ["embedded-draft", "ngram", "suffix + embedded-head"])
def test_a_trial_tells_what_shorter_runs_count(draft):
    prompts, params = tuple(read_prompts(DEFAULT_PROMPTS, 6)), SamplingParams(max_tokens=32, seed=1)
    request = TuneRequest("embedded", prompts, params, (draft,), batches=(2,))
    spec = draft_specs(request)[-1]
    target = TargetBench(request, "auto", "auto", [spec], LLM)
    trial = target.trial(spec)
    assert target.mean_tokens <= 32 and all(sum(r.shares) <= 1.0 for r in trial.runs.values())
    for one in lengths_of(spec)[:-1]:
        run = run_batch(target.engine(target.setting(one)), target.jobs)
        decided = run.metrics.num_rounds - len(run.completions)
        found = trial.drafted(one.num_draft_tokens)
        assert found.accepted == pytest.approx(run.metrics.num_accepted_tokens / decided, abs=0.5)
        assert found.rows == pytest.approx(run.metrics.num_draft_tokens / decided, abs=0.9)
