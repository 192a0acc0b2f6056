"""What a round costs and brings; a draft's format by cost; what a prediction costs; what a target says."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from lawkit import MODEL_VOCAB, SAMPLED, make_engine

from sameseed import store
from sameseed.cost.curve import Curve
from sameseed.cost.draft_format import FEW, cheaper, chosen_scheme, read_bytes
from sameseed.cost.prediction import RunCounts, predict
from sameseed.cost.round import PAYS, Drafted, Gap, ModelSteps, PlaceRates, RoundCost, best, expected, lengths_by_batch
from sameseed.cost.running import EngineCost
from sameseed.cost.said import SaidTokens
from sameseed.engine.build import models_of
from sameseed.engine.calibrate import measure_engine
from sameseed.engine.levels import resolve
from sameseed.engine.llm import LLM
from sameseed.engine.settings import make_config
from sameseed.errors import ConfigError
from sameseed.measure.costs import Cost as Point, Profile
from sameseed.measure.limits import Limits
from sameseed.models.eagle_loader import with_vocabulary
from sameseed.models.loader import open_checkpoint, read_config, resolve_model
from sameseed.plan.paper import sheet
from sameseed.quantize._run import QuantizePlan, quantize
from sameseed.request import SamplingParams
from sameseed.scheme import QuantScheme

COST = RoundCost(Curve([(1, 1.0), (3, 2.0)], 64, per_token=0.01, per_row=0.001), (), Gap(0.1, 0.2))
DRAFT = Curve([(1, 0.1), (2, 0.2)])


def test_parts_of_a_round_by_hand():
    assert COST.target(2, 1, 64) == pytest.approx(1.5) and COST.target(5, 1, 64) == pytest.approx(3.0)
    assert COST.target(2, 2, 164) == pytest.approx(1.5 + 0.01 * 264 + 0.001 * 2 * 100)
    cost = replace(COST, levels=(ModelSteps(DRAFT, start=0.5, each=0.01),))
    assert cost.draft(3, 1, 0, 2.0) == pytest.approx(0.51 + 0.2 + 2 * 0.1), "the first pass reads two tokens"
    assert RoundCost(DRAFT).draft(3, 1, 0, 2.0) == 0.0, "no level"
    at_once = replace(COST, levels=(ModelSteps(DRAFT, at_once=True),))
    assert at_once.draft(3, 1, 0, 2.0) == pytest.approx(DRAFT.at(4))
    flat = RoundCost(Curve([(1, 1.0), (512, 512.0)]), (ModelSteps(Curve([(1, 0.1), (512, 51.2)])),))
    assert flat.prompt(600) == pytest.approx(600) and flat.prompt(600, drafted=True) == pytest.approx(660)
    assert replace(flat, prompts=lambda n: 2 * n).prompt(600) == 1200


def test_what_a_round_brings_by_hand():
    cost = replace(COST, levels=(ModelSteps(DRAFT),))
    found = expected(cost, PlaceRates((0.5, 1.0)), 2, 1)
    assert found.tokens == 2.0
    assert (found.target, found.draft, found.gap) == pytest.approx((2.0, 0.2 + 0.1, 0.2))
    assert found.speedup == pytest.approx(2.0 * 1.1 / 2.5) and found.tokens_per_s == pytest.approx(2 / 2.5)
    assert found.whole(3.0, 4.0, 100) == pytest.approx((3.0 + 110.0) / (4.0 + 125.0))
    none = expected(cost, PlaceRates((0.5,)), 0, 4)
    assert none.speedup == 1.0 and none.seconds == none.plain == pytest.approx(2.5 + 0.1)


def test_rounds_that_find_no_draft_cost_their_own_passes():
    """Where half of the rounds draft four rows, a pass takes the mean of both times, not the time of three rows."""
    bent = RoundCost(Curve([(1, 1.0), (3, 1.0), (5, 2.0), (10, 7.0)]))
    lookup = SimpleNamespace(drafted=lambda k: Drafted(1.0, (0.5, 0.0, 0.0, 0.0, 0.5), ((0.5, 4.0),)))
    assert expected(bent, lookup, 4, 1).target == pytest.approx((1.0 + 2.0) / 2)
    assert expected(bent, lookup, 4, 2).target == pytest.approx((1.0 + 2 * 3.0 + 7.0) / 4), "2, 6, 6 and 10 rows"
    outputs_of_one_token = RunCounts((0,), 0, 1, 1.0, 1.0, 0.0, 0.0, 9.0)
    assert outputs_of_one_token.drafted(1).passes(1) == [(1.0, 1.0)], "no round, but a pass is a pass"


def test_the_best_length_by_batch():
    flat = RoundCost(Curve([(1, 1.0), (8, 1.1), (16, 2.6)]), (ModelSteps(Curve([(1, 0.05), (8, 0.06)])),))
    rates, ks = PlaceRates((0.7,)), range(1, 9)
    for batch in (1, 2, 4, 8):
        speeds = {k: expected(flat, rates, k, batch).speedup for k in ks}
        found = max(speeds, key=speeds.__getitem__) if max(speeds.values()) >= PAYS else 0
        assert best(flat, rates, ks, batch)[0] == found
    table = lengths_by_batch(flat, rates, ks, 32)
    assert table[0][0] == 1 and [a for a, _, _ in table[1:]] == [b + 1 for _, b, _ in table[:-1]]
    assert table[0][2] > table[-1][2], "many sequences fill the pass by themselves"
    assert best(flat, rates, ks, 1, least=100.0) == (0, 1.0)


def test_costs_of_a_running_engine():
    engine = EngineCost(Curve([(1, 1.0), (3, 2.0)]), catch_up=0.5)
    engine.draft.coefficients[:] = (0.1, 0.0, 0.2, 0.05, 0.4)
    engine.gap.plain.coefficients[:], engine.gap.plain.seen = (0.3, 0.01), 1
    engine.gap.drafted.coefficients[:], engine.gap.drafted.seen = (0.32, 0.02), 1
    cost = engine.now(1, 1)
    assert cost.draft(2, 1, 512, 1.0) == pytest.approx(0.1 + 2 * (0.25 + 0.2))
    assert cost.gap.at(2, True) == pytest.approx(0.36) and cost.gap.at(2, False) == pytest.approx(0.32)
    assert cost.prompt(3, drafted=True) - cost.prompt(3) == pytest.approx(1.5)


def test_costs_of_a_profile_and_of_another_engine():
    points = tuple(
        Point("w4a8", "bf16", c, m, ms, 1.0, 0.9 * ms, 1.1 * ms, 5, 1.0, 1.0)
        for c in (64, 1064)
        for m in (1, 2, 8)
        for ms in [10 + 0.5 * (m - 1) + (c - 64) * (0.01 + 0.001 * m)]
    )
    profile = Profile({}, points, (), (), (), Limits(1, {}, {}, "native"))
    curve = profile.curve("w4a8")
    assert (curve.context, curve.per_token, curve.per_row) == pytest.approx((64, 1e-5, 1e-6))
    cost = profile.cost("w4a8")
    assert cost.target(2, 1, 564) == pytest.approx(0.0105 + 500e-6 * 12) and cost.grade == "profiled"
    assert 0.0 < cost.spread < 0.2
    with pytest.raises(ConfigError, match="profiled"):
        profile.cost("w8a8")


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("known", [True, False])
def test_a_machine_whose_costs_are_known(batch, known, at_once):
    """Simulate rounds that take exactly the time of the curves: the prediction must match."""
    target = Curve([(1, 0.010), (32, 0.041)], 64, per_token=1e-6)
    draft = Curve([(1, 0.001), (8, 0.001)]) if not at_once else Curve([(1, 0.001), (64, 0.00352)])
    rng, k, context, steps = random.Random(0), 4, 200.0, 200
    rounds, accepted, seconds, drafting = steps * batch, 0, 0.0, 0.0
    extra = batch * 136 * 1e-6
    for _ in range(steps):
        decided = 0
        for _ in range(batch):
            right = next((i for i in range(k) if rng.random() > 0.8), k)
            accepted += right
            decided += right + 1
        took = draft.at(decided + batch * (k - 1)) if at_once else k * draft.at(1)
        drafting += took
        seconds += target.at(batch * (k + 1)) + extra + 0.0008 + took
    plain_steps = (tokens := rounds + accepted) // batch
    alone = plain_steps * (target.at(batch) + extra + 0.0005)
    before = RunCounts((plain_steps * batch,), 0, plain_steps, alone + 0.1, 0.1, 0.0, plain_steps * 0.0005, context)
    after = RunCounts((*[0] * k, rounds), accepted, steps, seconds + 0.1, 0.1, drafting, steps * 0.0008, context)
    found = predict(after, before, target, draft if known else None, at_once)
    if known:  # then the draft model's passes over the prompts are counted, too
        read = replace(after, prompts=(100,) * batch, seconds=after.seconds + batch * draft.at(100))
        assert abs(predict(read, before, target, draft, at_once).error) < 0.01
    assert found.speedup == pytest.approx((alone + 0.1) / (seconds + 0.1), rel=0.01)
    assert abs(found.error) < 0.01 and abs(found.decode_error) < 0.01
    assert found.decode_speedup == pytest.approx(alone / seconds, rel=0.01)
    assert found.draft_cost == ("curve" if known else "run")
    assert found.tokens_per_round == pytest.approx(tokens / rounds)
    assert found.rows_per_round == pytest.approx(batch * (k + 1))


TARGET, AUTO, TARGET_FORMAT = resolve_model("embedded-target"), QuantScheme(), QuantScheme.parse("w8a8")


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The embedded draft as a folder of 8 bits."""
    folder = tmp_path_factory.mktemp("stored") / "w8a8"
    quantize(QuantizePlan("embedded-draft", folder, "w8a8"))
    return folder


def test_8_bits_become_4_beside_a_target_of_its_size(stored):
    assert chosen_scheme(stored, TARGET, TARGET_FORMAT) == FEW
    level = resolve(make_config(str(stored)).spec)
    assert [m.quant for m in models_of(level, TARGET, TARGET_FORMAT)] == [FEW]
    assert sheet(str(stored), target=sheet("embedded-target", "w8a8")).name == str(FEW)


def test_beside_a_far_larger_target_only_acceptance_counts(stored):
    config = read_config(stored)
    with open_checkpoint(stored) as source:
        source.check(config)
        own = read_bytes(config, source, AUTO)
        assert cheaper(config, source, 2 * own) == FEW
        assert cheaper(config, source, 1000 * own) == AUTO


def test_only_on_a_cpu_and_only_where_no_format_is_named(stored):
    assert chosen_scheme(stored, TARGET, TARGET_FORMAT, "cuda") == AUTO
    level = resolve(make_config(str(stored), draft_format="w8a8").spec)
    assert [str(m.quant) for m in models_of(level, TARGET, TARGET_FORMAT)] == ["w8a8"]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "cache"))


def test_a_draft_keeps_the_rows_that_its_target_needs(pair, pair_folders):
    said, drafter = SaidTokens(pair_folders[0], MODEL_VOCAB), make_engine(pair, "draft_model").drafter
    said.follow(drafter, pair.target.weights.read_bytes, "auto")
    assert drafter.runner.model is pair.draft, "nothing was counted yet"

    def drafted():
        ids = drafter.runner.model.token_ids
        return list(range(MODEL_VOCAB)) if ids is None else ids.tolist()

    for _ in range(80):
        said.add([*range(100, 164)])
    assert drafted() == list(range(100, 164))
    again = SaidTokens(pair_folders[0], MODEL_VOCAB)
    assert again.counts.tolist() == said.counts.tolist() and again.share(64) == said.share(64) > 0.9
    assert not SaidTokens(pair_folders[0], MODEL_VOCAB + 1).counts.any(), "counts of another vocabulary"
    for _ in range(80):
        said.add([*range(50)])
    assert set(range(50)) < set(drafted()), "a cut that misses too much grows"


def test_so_many_rows_as_were_asked_for(pair, pair_folders):
    said, drafter = SaidTokens(pair_folders[0], MODEL_VOCAB), make_engine(pair, "draft_model").drafter
    said.follow(drafter, pair.target.weights.read_bytes, "8")
    assert drafter.runner.model.token_ids.tolist() == list(range(8)), "the first ids, until others are counted"
    said.add([200, 7, 200, 201])
    assert drafter.runner.model.token_ids.tolist() == [0, 1, 2, 3, 4, 7, 200, 201]
    said.add([])


def test_all_rows_are_no_cut(pair, pair_folders, caplog):
    caplog.set_level("INFO")
    said, drafter = SaidTokens(pair_folders[0], MODEL_VOCAB), make_engine(pair, "draft_model").drafter
    said.follow(drafter, pair.target.weights.read_bytes, str(MODEL_VOCAB))
    said.add([200, 7])
    assert drafter.runner.model is pair.draft and len(caplog.records) == 1


def test_a_head_without_the_frequent_tokens_keeps_those_that_it_has(pair, pair_folders):
    said, drafter = SaidTokens(pair_folders[0], MODEL_VOCAB), make_engine(pair, "eagle").drafter
    drafter.whole = drafter.runner.model = head = with_vocabulary(drafter.whole, torch.arange(100))
    said.add([*range(200, 208)])
    said.follow(drafter, pair.target.weights.read_bytes, "8")
    said.add([*range(200, 208)] * 9)
    assert drafter.runner.model is head, "while it serves, nothing fails"
    said.add([*range(8)] * 99)
    assert drafter.runner.model.weights.target_ids.tolist() == list(range(8))


def test_where_each_token_is_new_no_row_is_cut(pair, pair_folders):
    said, drafter = SaidTokens(pair_folders[0], MODEL_VOCAB), make_engine(pair, "draft_model").drafter
    said.follow(drafter, pair.target.weights.read_bytes, "auto")
    ids = list(range(MODEL_VOCAB))
    random.Random(3).shuffle(ids)
    for begin in range(0, 300, 20):
        said.add(ids[begin : begin + 20])
    assert drafter.runner.model is pair.draft


def test_what_measuring_generated_is_not_counted(pair_folders):
    target, draft = map(str, pair_folders)
    with LLM(target, draft, draft_options={"vocabulary": "auto"}, max_num_seqs=2) as llm:
        measure_engine(llm.engine, 0.05)
    assert not SaidTokens(pair_folders[0], MODEL_VOCAB).counts.any()


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("siblings", [0, 2])
def test_drafts_follow_what_is_said_and_the_output_stays(pair_folders, sampled, siblings):
    target, draft = map(str, pair_folders)
    params = SamplingParams(max_tokens=60, ignore_eos=True, seed=3, **(SAMPLED if sampled else {}))
    prompts, found, kept = [[5, 6, 7], [8, 9], [10]], [], []
    for options in ({}, *({"vocabulary": text, "siblings": siblings} for text in ("auto", "20", "auto"))):
        drafted = set()
        with LLM(target, draft, policy="fixed", draft_options=options, max_num_seqs=2) as llm:
            drafter = llm.engine.drafter
            propose = drafter.propose

            def watched(*args, propose=propose, drafter=drafter, drafted=drafted):
                draft = propose(*args)
                ids = drafter.runner.model.token_ids
                assert ids is None or {*draft.tokens.tolist()} <= {*ids.tolist()}
                drafted.update(draft.tokens.tolist())
                return draft

            drafter.propose = watched
            found.append([c.token_ids for c in llm.generate(prompts, params)])
            kept.append(drafter.runner.model.token_ids)
            assert drafted and llm.engine.metrics.num_accepted_tokens
    assert found[0] == found[1] == found[2] == found[3]
    assert len(kept[2]) == 20 and kept[0] is None
    told = SaidTokens(pair_folders[0], MODEL_VOCAB).counts
    assert {*told.nonzero()[0].tolist()} == {token for ids in found[0] for token in ids}
