"""L5s and L7: the sampler follows the processed distribution, and the noise behind it is independent."""

import itertools
import math
from collections import Counter

import numpy as np

from sameseed.laws.check import Found, check
from sameseed.laws.law import FITS, judge
from sameseed.laws.statistics import ALPHA, g_test
from sameseed.laws.textbook import adjusted, gumbel, probabilities
from sameseed.request import SamplingParams, Sequence
from sameseed.spec import sampling

DEVIATIONS = 5.0
LAGS = range(1, 9)


@check("L5s", "the law of the sampler", FITS, least={"draws": 24_000, "tests": 30}, draws=4_000_000)
def sampler(subject, effort):
    """The sampler's choices over seeds and positions follow the processed distribution."""
    kinds = {
        "temperature 0.7": SamplingParams(temperature=0.7), "temperature 1.5": SamplingParams(temperature=1.5),
        "top-k": SamplingParams(temperature=1.0, top_k=4), "top-p": SamplingParams(temperature=1.0, top_p=0.7),
        "min-p": SamplingParams(temperature=1.0, min_p=0.1),
        "all": SamplingParams(temperature=1.3, top_k=8, top_p=0.9, min_p=0.02),
    }  # fmt: skip
    rng = np.random.default_rng(7)
    rows = {
        "dense": rng.normal(0, 0.5, 32).astype(np.float32),
        "peaked": rng.normal(0, 2.5, 32).astype(np.float32),
        "ties": np.repeat(rng.normal(0, 1, 4), 3).astype(np.float32),
        "two tokens": np.array([0.3, -0.4], np.float32),
        "one favourite": np.array([6.0, 0.0, 0.5, -1.0, 1.0], np.float32),
    }
    arms = list(itertools.product(rows.items(), kinds.items()))
    share = -(-effort.of(4_000_000, 24_000) // len(arms))
    found = Found({"draws": 0, "tests": 0}, {"least_p_value": 1.0, "most_variation_of_limit": 0.0, "impossible": 0})
    for (row_name, row), (name, params) in arms:
        p = probabilities(adjusted(row, params, (), ()), params)
        counts = Counter()
        for i in range(share):
            seq = Sequence(0, [0], params, sampling.derive_seed(subject.seed, i))
            counts[(sampling.choose(row, seq, [0] * (i % 8), ()),)] += 1
        judge(found, f"{row_name}, {name}", dict(counts), {(t,): x for t, x in enumerate(p)})
        found.sizes["draws"] += share
    found.false_alarm = 2 * found.sizes["tests"] * ALPHA
    return found


@check(
    "L7",
    "independent noise",
    f"|r| < {DEVIATIONS:g} / sqrt(n) at lags 1 to 8; p above {ALPHA:g} of a 16 x 16 G-test of pairs",
    least={"uniforms": 10_000, "tests": 49, "choices": 200},
    uniforms=10_000_000,
)
def noise(subject, effort):
    """The noise of different tokens, positions and requests is uncorrelated and pairwise independent.

    The noise equals the textbook's, and the engine's own sampler, native where it is built, chooses by it.
    """
    wanted = effort.of(10_000_000, 60_000)
    tokens = np.arange(64)
    seeds = 24
    positions = max(12, wanted // (seeds * len(tokens)))
    half = seeds // 2  # half are neighbours, half are the seeds of one request's completions
    every = [
        *range(subject.seed, subject.seed + half),
        *(sampling.derive_seed(subject.seed, i) for i in range(1, half + 1)),
    ]
    block = np.stack([[sampling.gumbel_noise(s, p, tokens) for p in range(positions)] for s in every])
    uniform = np.exp(-np.exp(-block))  # [seeds, positions, tokens]
    exact = np.stack([gumbel(s, 0, len(tokens)) for s in every])
    found = Found({"uniforms": uniform.size, "tests": 0}, {"most_deviations": 0.0, "least_p_value": 1.0})
    if (off := float(np.abs(block[:, 0] - exact).max())) > 1e-11:  # the last bit of a logarithm is about 1e-15
        found.add("noise of the first positions", "the textbook's", f"{off:.1e} from it")
    _judge_pairs(found, "one by one", uniform.ravel(), None)
    for axis, name in enumerate(("seeds", "positions", "tokens")):
        for lag in LAGS:
            length = uniform.shape[axis]
            here, there = (np.take(uniform, r, axis) for r in (range(length - lag), range(lag, length)))
            r = float(np.corrcoef(here.ravel(), there.ravel())[0, 1])
            deviations = abs(r) * math.sqrt(here.size)
            found.statistic["most_deviations"] = max(found.statistic["most_deviations"], round(deviations, 2))
            found.sizes["tests"] += 1
            if not deviations < DEVIATIONS:
                found.add(f"correlation along {name}, lag {lag}", f"below {DEVIATIONS:g} / sqrt(n)", f"r = {r:.4f}")
            _judge_pairs(found, f"pairs along {name}, lag {lag}", here.ravel(), there.ravel())
    _choices(found, subject.seed, max(200, wanted // 5_000))
    found.false_alarm = 25 * ALPHA + 24 * math.erfc(DEVIATIONS / math.sqrt(2))
    found.notes.append("one draw serves a draft and its check (coupled sampling): there is no separate residual draw")
    return found


def _choices(found, seed, count):
    """With equal logits, the engine's own sampler must take the token that has the largest noise in the textbook."""
    found.sizes["choices"], found.statistic["wrong_choices"] = count, 0
    level = np.zeros(64, np.float32)
    for i in range(count):
        own, position = sampling.derive_seed(seed, i // 8), 1 + i * 37 % 5_000
        seq = Sequence(0, [0] * position, SamplingParams(temperature=1.0), own)
        got, wanted = sampling.choose(level, seq, (), ()), int(gumbel(own, position, len(level)).argmax())
        if got != wanted:
            found.statistic["wrong_choices"] += 1
            found.add(f"seed {own}, position {position}", f"token {wanted}", got)
    found.notes.append(f"choices were made by the sampler {'in C++' if sampling.HAS_NATIVE else 'in NumPy'}")


def _judge_pairs(found, name, a, b):
    cells = np.minimum((a * 16).astype(np.int64), 15)
    width = 16 if b is None else 256
    if b is not None:
        cells = cells * 16 + np.minimum((b * 16).astype(np.int64), 15)
    counts = np.bincount(cells, minlength=width).astype(np.float64)
    p = g_test(counts, np.full(width, 1.0 / width))
    found.statistic["least_p_value"] = min(found.statistic["least_p_value"], p)
    found.sizes["tests"] += 1
    if p <= ALPHA:
        found.add(name, f"p > {ALPHA:g}", f"p = {p:.2g}")
