"""L5 and L7: sampled texts follow the target's exact distribution, and the noise behind them is independent."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sameseed.batch import Rows, build_batch
from sameseed.kvcache.cache import KVCache
from sameseed.laws.check import Effort, Found, check
from sameseed.laws.statistics import ALPHA, Cell, Fit, g_test, marginal, normal_tail, target_law
from sameseed.laws.subject import Subject, Tokens
from sameseed.laws.textbook import adjusted, gumbel, probabilities
from sameseed.laws.toy import needs_head, toy_loaded
from sameseed.laws.trees import TreeDrafter
from sameseed.models.llama import Llama
from sameseed.request import Request, SamplingParams, Sequence, SpecMetrics
from sameseed.spec import sampling

VOCAB, LENGTH = 16, 3
PROMPT: Tokens = (3, 1, 4, 1)
POLICIES = ("confidence", "disco", "history", "goodput")
SURE = 0.3  # confidence below which a draft ends
GROUP = 2048  # sequences in one run of the engine
LAWS = {
    "temperature 1": SamplingParams(temperature=1.0),
    "top-k": SamplingParams(temperature=1.3, top_k=6),
    "top-p": SamplingParams(temperature=1.1, top_p=0.8),
    "min-p and penalties": SamplingParams(
        temperature=1.2, min_p=0.03, presence_penalty=0.6, frequency_penalty=0.5, repetition_penalty=1.2
    ),
}
PLACES = ((0, 1, 2), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2))  # the joint law, each marginal, each pair
DEVIATIONS = 5.0
LAGS = range(1, 9)
_LAW = f"every p-value of the G-test above {ALPHA:g}, total variation below 1.25 of its expectation, 0 impossible"


def exact_law(
    model: Llama, kv_format: str, params: SamplingParams, prompt: Seq[int] = PROMPT, length: int = 0
) -> dict[Cell, float]:
    """Probability of every possible text of `length` tokens (0: LENGTH), from the model's own logits in float64."""
    c = model.config
    law: dict[Cell, float] = {(): 1.0}
    for _ in range(length or LENGTH):
        grown: dict[Cell, float] = {}
        for path, share in law.items():
            tokens = [*prompt, *path]
            blocks = list(range(-(-len(tokens) // 16)))
            cache = KVCache(c.num_layers, len(blocks), 16, c.num_kv_heads, c.head_dim, kv_format, str(model.device))
            batch = build_batch([Rows(tokens, 0, [], [], blocks, True)], 16, model.device)
            row = adjusted(model.forward(batch, cache)[0][0].tolist(), params, prompt, path)
            grown.update({(*path, t): share * p for t, p in enumerate(probabilities(row, params)) if p > 0.0})
        law = grown
    return law


def _arms(toy: Subject, drafts: Seq[str]) -> list[tuple[str, SamplingParams, str, Subject]]:
    """What is sampled: each setting of LAWS with each of `drafts`, and the first with every policy of "the draft"."""
    arms = [(name, params, draft, toy) for (name, params), draft in itertools.product(LAWS.items(), drafts)]
    if "the draft" in drafts:
        chosen = next(iter(LAWS.items()))
        for policy in POLICIES:
            spec = replace(toy.config.spec, policy=policy, confidence=SURE if policy == "confidence" else None)
            loaded = replace(toy.loaded, config=replace(toy.config, spec=spec))
            other = replace(toy, loaded=loaded, leaks=[], metrics=SpecMetrics(), scripted=SpecMetrics())
            arms.append((*chosen, f"the draft, {policy}", other))
    return arms


@check(
    "L5",
    "the law of whole texts",
    _LAW,
    least={"sequences": 2_400, "tests": 28, "all_guesses": 200, "all_rejections": 50},
    sequences=4_000_000,
)
def texts(subject: Subject, effort: Effort) -> Found:
    """Texts of three tokens, drafted and verified by the real engine in batches, follow the target's distribution.

    They follow it exactly: jointly, at each position and at each pair of positions, under temperature, top-k, top-p,
    min-p, penalties and every length policy.
    """
    wanted = effort.of(4_000_000, 2_400)
    spec = subject.config.spec
    headed = needs_head(spec)
    config = replace(subject.config, spec=type(spec)() if headed else spec)
    other: list[str] = []
    loaded = toy_loaded(subject.loaded.tokenizer, VOCAB, config, subject.target.ops, notes=other)
    toy = Subject(loaded, [PROMPT], SamplingParams(), max_tokens=LENGTH + 2, batch=64)
    kv = toy.kv_format
    drafts = ("trees",) if headed else ("the draft", "trees")
    arms = _arms(toy, drafts)
    share = -(-wanted // len(arms))
    found = Found({"sequences": 0, "tests": 0}, {"least_p_value": 1.0, "most_variation_of_limit": 0.0, "impossible": 0})
    laws = {name: exact_law(loaded.target, kv, params) for name, params in LAWS.items()}
    for n, (name, params, draft, drawn) in enumerate(arms):
        counts = _draw(drawn, params, draft, share, subject.seed * 100 + n)
        for places in PLACES:
            _judge(found, f"{name}, {draft}, places {places}", marginal(counts, places), marginal(laws[name], places))
        found.sizes["sequences"] += share
    found.false_alarm = 2 * found.sizes["tests"] * ALPHA
    toys = {id(drawn): drawn for *_, drawn in arms}.values()
    every = [m for drawn in toys for m in (drawn.metrics, drawn.scripted)]
    found.sizes["all_guesses"] = sum(m.num_draft_tokens for m in every)
    found.sizes["all_rejections"] = sum(m.num_rollbacks for m in every)
    for drawn in toys:
        subject.leaks += drawn.leaks
        subject.num_emptied += drawn.num_emptied
    found.notes.append(f"vocabulary {VOCAB}, texts of {LENGTH} tokens; drafts: {', '.join(drafts)}; cache in {kv}")
    if not headed:
        found.notes.append(f"policies of the draft: fixed, {', '.join(POLICIES)}")
    found.notes += other
    if headed:
        found.notes.append("there is no toy of a draft head: only trees were tried here")
    return found


def _draw(toy: Subject, params: SamplingParams, draft: str, count: int, base: int) -> Counter[Cell]:
    """Count the texts of `count` derived seeds, which are those of one request with `n` completions."""
    drafter = TreeDrafter(lambda seq: (), VOCAB, base) if draft == "trees" else None
    engine = toy.engine(drafter=drafter, nodes=8)
    asked = replace(params, max_tokens=LENGTH + 2, ignore_eos=True)
    counts: Counter[Cell] = Counter()
    for start in range(0, count, GROUP):
        seeds = [sampling.derive_seed(base, i) for i in range(start, min(count, start + GROUP))]
        jobs = [Request(f"c{i}", PROMPT, asked, seed) for i, seed in enumerate(seeds)]
        counts.update(c.token_ids[:LENGTH] for c in toy.run(engine, jobs))
    return counts


def _judge(found: Found, where: str, counts: dict[Cell, float], law: dict[Cell, float]) -> None:
    got: Fit = target_law({cell: int(n) for cell, n in counts.items()}, law)
    s = found.statistic
    found.sizes["tests"] += 1
    s["least_p_value"] = min(s["least_p_value"], got.p_value)
    s["most_variation_of_limit"] = max(s["most_variation_of_limit"], round(got.variation / got.variation_limit, 4))
    s["impossible"] += got.impossible
    if not got.good:
        found.add(
            where,
            f"p > {ALPHA:g}, total variation < {got.variation_limit:.4f}, 0 impossible texts",
            f"p = {got.p_value:.2g}, total variation {got.variation:.4f}, {got.impossible} impossible",
        )


@check("L5s", "the law of the sampler", _LAW, on_host=True, least={"draws": 24_000, "tests": 30}, draws=4_000_000)
def sampler(subject: Subject, effort: Effort) -> Found:
    """The sampler's choices over seeds and positions follow the processed distribution."""
    kinds: dict[str, SamplingParams] = {
        "temperature 0.7": SamplingParams(temperature=0.7),
        "temperature 1.5": SamplingParams(temperature=1.5),
        "top-k": SamplingParams(temperature=1.0, top_k=4),
        "top-p": SamplingParams(temperature=1.0, top_p=0.7),
        "min-p": SamplingParams(temperature=1.0, min_p=0.1),
        "all": SamplingParams(temperature=1.3, top_k=8, top_p=0.9, min_p=0.02),
    }
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
        counts: Counter[Cell] = Counter()
        for i in range(share):
            seq = Sequence(0, [0], params, sampling.derive_seed(subject.seed, i))
            counts[(sampling.choose(row, seq, [0] * (i % 8), ()),)] += 1
        _judge(found, f"{row_name}, {name}", dict(counts), {(t,): x for t, x in enumerate(p)})
        found.sizes["draws"] += share
    found.false_alarm = 2 * found.sizes["tests"] * ALPHA
    return found


@check(
    "L7",
    "independent noise",
    f"|r| < {DEVIATIONS:g} / sqrt(n) at lags 1 to 8; p above {ALPHA:g} of a 16 x 16 G-test of pairs",
    on_host=True,
    least={"uniforms": 10_000, "tests": 49, "choices": 200},
    uniforms=10_000_000,
)
def noise(subject: Subject, effort: Effort) -> Found:
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
    found.false_alarm = 25 * ALPHA + 24 * normal_tail(DEVIATIONS)
    found.notes.append("one draw serves a draft and its check (coupled sampling): there is no separate residual draw")
    return found


def _choices(found: Found, seed: int, count: int) -> None:
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


def _judge_pairs(found: Found, name: str, a: NDArray[np.float64], b: NDArray[np.float64] | None) -> None:
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
