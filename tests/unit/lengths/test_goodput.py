"""The goodput policy: its choices against an exhaustive search, and how it adapts."""

import itertools
import random

import numpy as np
import pytest
from lawkit import finished, make_engine, random_prompts, run, sequences, texts

from sameseed.cost.curve import Curve
from sameseed.cost.round import PAYS
from sameseed.cost.running import FadingFit
from sameseed.engine.policies import RequestPolicies
from sameseed.errors import RequestError
from sameseed.lengths._acceptance import HALF_LIFE, Acceptance, DraftNodes
from sameseed.lengths._budget import FIRST, SHARE, Budget
from sameseed.lengths.fixed import FixedLength
from sameseed.lengths.goodput import GoodputLength
from sameseed.request import Request, SamplingParams, Sequence, Speculation, TimeSplit
from sameseed.spec.drafter import Drafter, Round


def flat(rows):
    return 30 * (1 + 0.01 * (rows - 1))  # so long that a decision, on a busy machine too, takes no time beside it


def curve(cost):
    return Curve([(m, cost(m)) for m in (1, 2, 4, 8, 16, 32, 64)])


def test_the_choice_is_the_best_of_all():
    """The choice equals the best of all combinations of lengths, for three sequences with different acceptance."""
    for seed in range(20):
        rng = random.Random(seed)
        slope, step = rng.choice([0.01, 0.1, 0.3, 0.8]), rng.choice([0.0, 0.003, 0.01])
        policy = GoodputLength(3, Curve([(m, 0.03 * (1 + slope * (m - 1))) for m in (1, 2, 4, 8, 16)]))
        policy.cost.draft.coefficients[2] = step
        seqs = sequences(3)
        for seq in seqs:
            rate = rng.random()
            for _ in range(40):
                right = next((i for i in range(3) if rng.random() > rate), 3)
                policy.update(Round([seq], [3], [3], [right]))

        def worth(lengths, policy=policy, seqs=seqs, step=step):
            tokens, rows = 3.0, 3.0
            for seq, k in zip(seqs, lengths):
                for gain, there, _ in policy.acceptance.offers(seq.seq_id, k):
                    tokens += gain
                    rows += there
            return tokens / (policy.cost.target.at(rows) + step * max(lengths))

        best = max(itertools.product(range(4), repeat=3), key=worth)
        offers = [policy.acceptance.offers(seq.seq_id, 3) for seq in seqs]
        chosen = tuple(policy._best(offers, None, policy.cost.now(3, 3), 3, 1.0))
        nothing = worth((0, 0, 0))
        if worth(best) > nothing * (2 * PAYS - 1):
            assert worth(chosen) >= 0.97 * worth(best), (seed, chosen, best)
        assert worth(chosen) >= nothing


def test_a_fit_is_the_least_squares_of_its_observations():
    """Features that vary are told apart; one that takes no time gets none, and one that is always 0 gets none."""
    rng, fit = random.Random(0), FadingFit((1e-6,) * 4)
    for _ in range(200):
        row = (1.0, rng.randint(1, 8), rng.randint(0, 9), 0.0)
        fit.correct(row, 0.3 + 0.02 * row[2])
    assert fit.coefficients == pytest.approx([0.3, 0.0, 0.02, 0.0], abs=1e-3)
    other = FadingFit((1e-6,) * 4)
    other.restore(fit.as_array())
    assert other.as_array().tolist() == fit.as_array().tolist() and other.at((1.0, 2, 3, 0.0)) == pytest.approx(0.36)


def test_the_budget_is_kept():
    policy = GoodputLength(8, curve(flat))
    seqs = sequences(4)
    for seq in seqs:
        seq.metrics.update(4, 4)
    for _ in range(10):
        policy.update(Round(seqs, [4] * 4, [4] * 4, [4] * 4, 20, TimeSplit(draft=1, target=flat(20))))
    assert sum(policy.lengths(seqs, 4, 100)) > 10
    assert sum(policy.lengths(seqs, 4, 5)) == 5
    assert policy.lengths(seqs, 4, 0) == [0] * 4


@pytest.mark.parametrize("rows", [1, 3, 5, 12, 40, 100])
def test_a_curve(rows):
    c = Curve([(1, 1.0), (4, 2.0), (8, 1.5), (16, 4.0)])
    assert c.at(1) == 1.0 and c.at(4) == c.at(8) == 2.0
    assert c.at(12) == pytest.approx(3.0)
    assert c.at(20) == pytest.approx(5.0)
    some = np.array([1.0, 2.5, 9.0, 16.0, 90.0])
    assert c.at(some).tolist() == pytest.approx([c.at(m) for m in some])
    before = c.at(rows)
    for _ in range(200):
        c.correct(rows, 3 * before)
    assert c.at(rows) == pytest.approx(3 * before, rel=0.1)
    assert c.seconds == sorted(c.seconds)


def test_wishes():
    seqs = sequences(5)
    wishes = [None, Speculation("off"), Speculation("fixed", 7), Speculation(None, 2), Speculation("fixed")]
    for seq, wish in zip(seqs, wishes):
        seq.speculation = wish
    assert RequestPolicies(FixedLength(4)).lengths(seqs) == [4, 0, 7, 2, 4]


def test_a_wish_for_disco_ends_where_its_drafts_were_wrong():
    policies = RequestPolicies(FixedLength(4))
    mine, other = sequences(2)
    mine.speculation = Speculation("disco", 6)
    for _ in range(30):
        asked = policies.lengths([mine, other], 2)
        assert asked[1] == 4
        policies.update(Round([mine, other], asked, asked, [1, 4], 2 + sum(asked), TimeSplit()))  # other: one right
    assert policies.lengths([mine, other], 2) == [2, 4]


def test_a_trial_pays_what_its_rounds_really_lost():
    def left(*lost, right=False):
        budget, (seq,) = Budget(), sequences(1)
        budget.passed()
        assert budget.next([seq], 1.0) is seq  # the price, for two rounds
        for rounds in lost:
            budget.lost(rounds, right)
        return budget.rounds - (FIRST + SHARE)

    assert left(0.5, 0.5) == pytest.approx(-1.0), "as was expected"
    assert left(1.5, 0.5) == pytest.approx(-2.0), "dearer"
    assert left(-3.0, 0.25) == pytest.approx(-0.25), "what a trial wins buys no other"
    assert left(50.0, 0.0) == pytest.approx(-2.0), "the machine was busy for a moment"
    assert left(0.5, 0.5, 0.5, right=True) == pytest.approx(-1.5), "a longer one pays all of its rounds"


def test_what_texts_were_like_is_forgotten_while_nobody_drafts():
    """After rounds without drafts, a new kind of text is recognized in a few drafts, whatever was learned before."""

    def rate(rounds):
        estimates = Acceptance(4)
        for _ in range(200):
            estimates.learn(0, 2, DraftNodes(range(-1, 1), None, estimates.rates(0)), range(0))
        estimates.rested(rounds)
        for _ in range(4):
            estimates.learn(1, 2, DraftNodes(range(-1, 1), None, estimates.rates(1)), range(2))
        return estimates.offers(-1, 1)[0][0]

    assert rate(0) < 0.2 < rate(HALF_LIFE) < rate(4 * HALF_LIFE)
    assert rate(10**9) > 0.8


def test_rounds_of_a_rest_cost_the_engine_nothing_but_every_sixteenth():
    policies = RequestPolicies(GoodputLength(4, Curve([(1, 0.01), (8, 0.08)])))
    (seq,), skipped = sequences(1), []
    for _ in range(400):
        asked = policies.lengths([seq], 1)
        skipped.append(policies.pass_over())
        assert not (skipped[-1] and any(asked))
        if not skipped[-1]:
            times = TimeSplit(draft=0.05 * asked[0], target=0.01 * (1 + asked[0]))
            policies.update(Round([seq], asked, asked, [0], 1 + asked[0], times))
    assert 0.8 < sum(skipped) / len(skipped) < 0.95
    policies._own["fixed"] = FixedLength(2)
    assert not any(policies.pass_over() for _ in range(32)), "another policy has to learn too"


def test_bad_wishes():
    for bad in ({"policy": "fast"}, {"num_draft_tokens": -1}, {"num_draft_tokens": 65}, {"num_draft_tokens": True}):
        with pytest.raises(RequestError, match=r"speculation|num_draft_tokens"):
            Speculation(**bad)


def test_in_an_engine(pair):
    """Law 1 under a policy whose choices depend on the clock; rounds without drafts are counted by reason."""
    prompts, params = random_prompts(6, seed=3), SamplingParams(max_tokens=40, seed=1, ignore_eos=True)
    plain = texts(run(make_engine(pair), prompts, params))
    engine = make_engine(pair, "draft_model", k=6, policy="goodput")
    assert isinstance(engine.policy, GoodputLength) and engine.policy.cost is not None
    assert texts(run(engine, prompts, params)) == plain
    assert not engine.policy.acceptance.own and not engine.policy.budget._waits
    engine.add(Request("off", tuple(prompts[0]), params, 1, speculation=Speculation("off")))
    spec = finished(engine)["off", 0].metrics.spec
    assert (spec.num_draft_tokens, spec.undrafted) == (0, {"prompt": 1, "off": 39})


class Reader(Drafter):
    """A drafter that has read nothing of any text; with `looks_up`, it may draft all the same."""

    def __init__(self, looks_up=False):
        self.must_read = not looks_up


@pytest.mark.parametrize("limit", [24, 1000])
def test_texts_cut_by_their_limit_say_nothing_about_lengths(limit):
    """A prompt is read for a long answer, unless answers were short by themselves."""
    policy = GoodputLength(4, curve(flat))
    policy.drafter = Reader()
    policy.cost.catch_up = 2
    for i in range(8):
        short = Sequence(i, [1] * 300, SamplingParams(max_tokens=limit), 0)
        short.token_ids += [1] * 24
        policy.release(short)
    scored = Sequence(7, [1], SamplingParams(), 0)
    scored.num_prompt = 3000  # it ends while its prompt is scored: no text was written
    policy.release(scored)
    long = Sequence(8, [1] * 300, SamplingParams(max_tokens=400), 0)
    assert any(policy.lengths([long])) == (limit == 24)
    assert policy.recovers(long, 300) == (limit == 24)
    policy.drafter = Reader(looks_up=True)
    assert any(policy.lengths([Sequence(9, [1] * 300, SamplingParams(max_tokens=400), 0)]))


def test_drafts_beside_prompts_must_pay_in_the_pass_that_all_will_share():
    policy, mine = GoodputLength(4, Curve([(m, flat(m)) for m in (1, 4, 8, 16, 64)])), sequences(1)
    for _ in range(60):
        (k,) = policy.lengths(mine, 1)
        times = TimeSplit(draft=12 * k, target=flat(1 + k))
        policy.update(Round(mine, [k], [k], [min(k, 3)], 1 + k, times))
    assert policy.lengths(mine, 1, 400)[0] > 0, "alone, a step of the draft costs less than half a pass"
    assert policy.lengths(mine, 40, 400, beside=3) == [0], "the four will share each pass: a token is worth a quarter"
    assert policy.lengths(mine, 1, 400)[0] > 0, "alone again"
