"""Goodput's use of a draft's probabilities: calibration, kept nodes, wishes, and reasons."""

import copy
import random

import pytest
from lawkit import finished, make_engine, sequences

from sameseed.cost.curve import Curve
from sameseed.cost.running import EngineCost
from sameseed.engine.policies import RequestPolicies
from sameseed.lengths._acceptance import Acceptance, DraftNodes
from sameseed.lengths.goodput import GoodputLength
from sameseed.request import Request, SamplingParams, Speculation, TimeSplit
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Round

STEEP = Curve([(m, 0.03 * (1 + 0.1 * (m - 1))) for m in (1, 2, 4, 8, 16, 32, 64)])


def random_tree(rng, size):
    """Tokens, parents and path probabilities; siblings share their parent's probability."""
    parents, left, path = [], {-1: 1.0}, {-1: 1.0}
    sure = []
    for i in range(size):
        parent = rng.choice(list(left))
        share = rng.random() * left[parent]
        left[parent] -= share
        parents.append(parent)
        path[i] = path[parent] * share
        left[i] = 1.0
        sure.append(path[i])
    return list(range(size)), parents, sure


def drafted(trees):
    return Draft.trees([(t, p) for t, p, _ in trees], [c for _, _, c in trees])


def walk(rng, parents, truth):
    """The accepted path: node i is right, given its parent, with probability truth[i]; siblings share one draw."""
    path, at = [], -1
    while True:
        draw = rng.random()
        for i, parent in enumerate(parents):
            if parent == at:
                draw -= truth[i]
                if draw < 0:
                    path.append(i)
                    at = i
                    break
        else:
            return path


def settled(policy, seqs, step=0.001):
    """The policy after 60 rounds of trees from a drafter whose probabilities are true."""
    rng, truth = random.Random(5), copy.deepcopy(policy.cost.target)
    context = sum(len(seq) for seq in seqs) / len(seqs)
    for _ in range(60):
        asked = policy.lengths(seqs, len(seqs))
        trees = [random_tree(rng, k) for k in asked]
        draft = policy.trim(drafted(trees), seqs, len(seqs))
        nodes = []
        for b in range(len(seqs)):
            part = slice(draft.offsets[b], draft.offsets[b + 1])
            parents, path = draft.parents[part].tolist(), draft.confidence[part].tolist()
            own = [p / (path[q] if q >= 0 else 1.0) for p, q in zip(path, parents)]
            nodes.append(walk(rng, parents, own))
        rows = len(seqs) + len(draft.tokens)
        counts = [draft.count(b) for b in range(len(seqs))]
        seconds = truth.cost(rows, len(seqs), context)
        times = TimeSplit(draft=step * max(asked), target=seconds)
        policy.update(Round(seqs, asked, counts, [len(n) for n in nodes], rows, times, nodes))
    return policy


@pytest.mark.parametrize("seed", range(8))
def test_what_stays_is_a_tree_of_the_likeliest(seed):
    """Each kept node's parent is kept, no dropped node is likelier than a kept one, and the number kept is the best."""
    rng = random.Random(seed)
    policy, seqs = settled(GoodputLength(24, Curve(list(zip(STEEP.rows, STEEP.seconds)))), sequences(3)), sequences(3)
    policy.lengths(seqs, 3)
    draft = drafted([random_tree(rng, n) for n in (24, 0, 9)])
    likely = [
        DraftNodes(
            draft.nodes(b)[1],
            draft.confidence[draft.offsets[b] : draft.offsets[b + 1]].tolist(),
            policy.acceptance.rates(b),
        ).likely
        for b in range(3)
    ]
    trimmed = policy.trim(draft, seqs, 3)
    assert 0 < len(trimmed.tokens) < len(draft.tokens), "some nodes pay, some do not"
    for b in (0, 2):
        tokens, parents = trimmed.nodes(b)
        original = draft.nodes(b)
        assert [tokens[p] if p >= 0 else -1 for p in parents] == [original[1][t] for t in tokens]
    kept = [likely[b][t] for b in range(3) for t in trimmed.nodes(b)[0]]
    dropped = [p for b in range(3) for t, p in enumerate(likely[b]) if t not in trimmed.nodes(b)[0]]
    assert min(kept) >= max(dropped)
    everything = sorted(kept + dropped, reverse=True)
    target, value = policy.cost.target, policy._tokens_per_second
    worth = [sum(everything[:n]) - value * target.at(3 + n) for n in range(len(everything) + 1)]
    assert worth[len(kept)] == pytest.approx(max(worth))


def test_probabilities_are_calibrated():
    """A drafter that says .9 where .3 is true, and .3 where .9 is true, is soon corrected."""
    estimates, rng = Acceptance(4), random.Random(0)
    estimates.tells = True
    for _ in range(300):
        said = rng.choice([0.9, 0.3])
        nodes = DraftNodes([-1], [said], estimates.rates(7))
        estimates.learn(7, 1, nodes, [0] if rng.random() < {0.9: 0.3, 0.3: 0.9}[said] else [])
    high, low = (DraftNodes([-1], [said], estimates.rates(7)).likely[0] for said in (0.9, 0.3))
    assert high == pytest.approx(0.3, abs=0.15)
    assert low == pytest.approx(0.9, abs=0.15)
    tree = DraftNodes([-1, -1, 0, 0, 2], [0.9, 0.1, 0.8, 0.05, 0.7], estimates.rates(7))
    assert all(p <= (tree.likely[q] if q >= 0 else 1.0) for p, q in zip(tree.likely, tree.parents)), (
        "none beats its parent"
    )


def test_who_wished_for_a_length_keeps_every_node():
    seqs = sequences(2)
    policy = settled(GoodputLength(12, Curve(list(zip(STEEP.rows, STEEP.seconds)))), seqs)
    policies = RequestPolicies(policy)
    seqs[0].speculation = Speculation("fixed", 12)
    assert policies.lengths(seqs, 2)[0] == 12
    tree = random_tree(random.Random(3), 12)
    trimmed = policies.trim(drafted([tree, tree]), seqs, 2)
    assert trimmed.count(0) == 12 and trimmed.count(1) < 12


def test_reasons(pair):
    """The reasons for rounds without drafts, for every policy and every request's wish."""
    params = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    wishes = {"off": Speculation("off"), "zero": Speculation("fixed", 0), "capped": Speculation(None, 0), "none": None}
    for policy, k in (("fixed", 4), ("fixed", 0), ("goodput", 4), ("goodput", 0)):
        engine = make_engine(pair, "draft_model", k=k, policy=policy)
        if isinstance(engine.policy, GoodputLength):
            engine.policy.cost = EngineCost(Curve([(1, 1e-9), (2, 9.0), (64, 900.0)]))  # no draft can pay
            engine.policy.cost.draft.coefficients[:2] = 1.0, 1.0
        for name, wish in wishes.items():
            engine.add(Request(name, (5, 6, 7), params, 1, speculation=wish))
        why = {name: done.metrics.spec.undrafted for (name, _), done in finished(engine).items()}
        assert all(set(why[n]) == {"prompt", "off"} for n in ("off", "zero", "capped"))
        expected = {"prompt"} if policy == "fixed" and k else {"prompt", "cost" if k else "off"}
        assert set(why["none"]) - {"last token"} == expected, (policy, k)
    engine = make_engine(pair, "ngram", k=4)
    engine.add(Request("new", tuple(range(5, 30)), SamplingParams(max_tokens=3, seed=1, ignore_eos=True), 1))
    assert finished(engine)["new", 0].metrics.spec.undrafted == {"prompt": 1, "no draft": 1, "last token": 1}
