"""L5: sampled outputs follow the model's exact distribution, over a few tokens of its vocabulary."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence as Seq
from dataclasses import replace

import numpy as np

from sameseed.batch import Rows, build_batch
from sameseed.kvcache.cache import KVCache
from sameseed.laws.check import Effort, Found, check
from sameseed.laws.statistics import ALPHA, Cell, marginal, target_law
from sameseed.laws.subject import Subject, Tokens
from sameseed.laws.textbook import Floats, adjusted, probabilities
from sameseed.laws.trees import TreeDrafter
from sameseed.models.decoder import Decoder
from sameseed.request import Request, SamplingParams
from sameseed.spec import sampling

FEW, LENGTH = 8, 3  # tokens that may be chosen, and tokens of an output: few enough to enumerate all outputs
PROMPT = 8  # tokens of the prompt
GROUP = 2048  # sequences in one run of the engine
BATCH = 64
LAWS = {
    "temperature 1": SamplingParams(temperature=1.0),
    "top-k": SamplingParams(temperature=1.3, top_k=6),
    "top-p": SamplingParams(temperature=1.1, top_p=0.8),
    "min-p and penalties": SamplingParams(
        temperature=1.2, min_p=0.03, presence_penalty=0.6, frequency_penalty=0.5, repetition_penalty=1.2
    ),
}
PLACES = ((0, 1, 2), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2))  # the joint law, each marginal, each pair
FITS = f"every p-value of the G-test above {ALPHA:g}, total variation below 1.25 of its expectation, 0 impossible"


def _logits(model: Decoder, kv_format: str, tokens: Seq[int]) -> Floats:
    """The model's own logits [V] after `tokens`, in float64; -inf for tokens that it never writes."""
    c, blocks = model.config, list(range(-(-len(tokens) // 16)))
    cache = KVCache(c.kv_shapes, len(blocks), 16, kv_format, str(model.device))
    batch = build_batch([Rows(list(tokens), 0, [], [], blocks, True)], 16, model.device)
    row: Floats = model.run(batch, cache)[0][0].double().cpu().numpy()
    row[list(c.suppress_tokens)] = -np.inf
    return row


def exact_laws(
    model: Decoder, kv_format: str, every: Mapping[str, SamplingParams], prompt: Seq[int], length: int
) -> dict[str, dict[Cell, float]]:
    """By name of the parameters: the probability of every possible output of `length` tokens."""
    known: dict[Cell, Floats] = {}
    laws = {}
    for name, params in every.items():
        law: dict[Cell, float] = {(): 1.0}
        for _ in range(length):
            grown: dict[Cell, float] = {}
            for path, share in law.items():
                if path not in known:
                    known[path] = _logits(model, kv_format, [*prompt, *path])
                row = np.array(probabilities(adjusted(known[path], params, prompt, path), params))
                grown.update({(*path, int(t)): share * float(row[t]) for t in np.flatnonzero(row)})
            law = grown
        laws[name] = law
    return laws


@check(
    "L5",
    "the law of outputs",
    FITS,
    least={"sequences": 800, "tests": 28, "all_drafts": 200, "all_rejections": 50},
    sequences=4_000_000,
)
def outputs(subject: Subject, effort: Effort) -> Found:
    """Outputs of three tokens, drafted and verified by the engine in batches, follow the model's exact distribution.

    Eight tokens of the vocabulary are allowed, so that every possible output has a known probability: jointly, at each
    position and at each pair of positions, under temperature, top-k, top-p, min-p and penalties.
    """
    prompt = subject.jobs(1, SamplingParams(max_tokens=1))[0].prompt_token_ids[-PROMPT:]
    row = _logits(subject.target, subject.kv_format, prompt)[: subject.vocab_size]
    few = tuple(sorted(np.argsort(-row, kind="stable")[:FEW].tolist()))
    every = {
        name: replace(params, allowed_token_ids=few, max_tokens=LENGTH + 2, ignore_eos=True)
        for name, params in LAWS.items()
    }
    own = replace(subject, prompts=[prompt], max_tokens=LENGTH + 2, batch=BATCH)  # its collectors are the subject's
    laws = exact_laws(own.target, own.kv_format, every, prompt, LENGTH)
    arms = list(itertools.product(every, ("the draft", "trees")))
    share = -(-effort.of(4_000_000, 800) // len(arms))
    found = Found({"sequences": 0, "tests": 0}, {"least_p_value": 1.0, "most_variation_of_limit": 0.0, "impossible": 0})
    before = [m.copy() for m in (subject.metrics, subject.scripted)]
    for n, (name, draft) in enumerate(arms):
        base = subject.seed * 100 + len(arms) * subject.turn + n
        drafter = _Few(few, own.vocab_size, base) if draft == "trees" else None
        counts = _draw(own, prompt, every[name], drafter, share, base)
        for places in PLACES:
            judge(found, f"{name}, {draft}, places {places}", marginal(counts, places), marginal(laws[name], places))
        found.sizes["sequences"] += share
    subject.num_emptied = own.num_emptied
    made = [m.since(old) for m, old in zip((subject.metrics, subject.scripted), before, strict=True)]
    found.sizes["all_drafts"] = sum(m.num_draft_tokens for m in made)
    found.sizes["all_rejections"] = sum(m.num_rollbacks for m in made)
    found.false_alarm = 2 * found.sizes["tests"] * ALPHA
    found.notes.append(f"tokens {', '.join(map(str, few))} after a prompt of {len(prompt)} tokens")
    return found


class _Few(TreeDrafter):
    """Drafts trees whose right paths are random texts of the few tokens that are allowed."""

    def __init__(self, few: Seq[int], vocab_size: int, seed: int) -> None:
        super().__init__(lambda seq: self.random.choices(few, k=LENGTH), vocab_size, seed)


def _draw(
    own: Subject, prompt: Tokens, params: SamplingParams, drafter: TreeDrafter | None, count: int, base: int
) -> Counter[Cell]:
    """Count the outputs of `count` derived seeds, which are those of one request with `n` completions."""
    engine = own.engine(drafter=drafter, nodes=8)
    counts: Counter[Cell] = Counter()
    for start in range(0, count, GROUP):
        seeds = [sampling.derive_seed(base, i) for i in range(start, min(count, start + GROUP))]
        jobs = [Request(f"c{i}", prompt, params, seed) for i, seed in enumerate(seeds)]
        counts.update(c.token_ids[:LENGTH] for c in own.run(engine, jobs))
    return counts


def judge(found: Found, where: str, counts: Mapping[Cell, float], law: Mapping[Cell, float]) -> None:
    """Test counts against a law, and keep the worst figures in `found`."""
    fit = target_law({cell: int(n) for cell, n in counts.items()}, law)
    s = found.statistic
    found.sizes["tests"] += 1
    s["least_p_value"] = min(s["least_p_value"], fit.p_value)
    s["most_variation_of_limit"] = max(s["most_variation_of_limit"], round(fit.variation / fit.variation_limit, 4))
    s["impossible"] += fit.impossible
    if not fit.good:
        found.add(
            where,
            f"p > {ALPHA:g}, total variation < {fit.variation_limit:.4f}, 0 impossible outputs",
            f"p = {fit.p_value:.2g}, total variation {fit.variation:.4f}, {fit.impossible} impossible",
        )
