"""Law 2: over seeds, sampled text follows the target's processed distribution, whatever the drafter proposes.

The target is a toy of five tokens whose logits depend on the last token; `verify` needs no more. Penalties make the
processed distribution depend on all tokens written. Seeds are fixed, so the tests are deterministic: a p-value must
exceed 1e-3, and a total variation must stay below 0.02.

Simulated for these laws with other seeds: 60,000 right draws fail with probability 0.001 to 0.002. Draws with a
temperature that is wrong by 4 %, or with 1.5 % of the texts moved to another text, fail with probability 0.97 or more.
"""

import math
from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch

from sameseed.laws import textbook
from sameseed.laws.statistics import target_law
from sameseed.request import SamplingParams, Sequence
from sameseed.spec.draft import Draft
from sameseed.spec.sampling import choose, derive_seed, gumbel_noise
from sameseed.spec.verify import verify

V = 5
MIN_P_VALUE, MAX_VARIATION = 1e-3, 0.02
NUM_DRAWS = 60_000
PROMPT = [2, 0]
TARGET = torch.randn(V, V, generator=torch.Generator().manual_seed(1)) * 1.5  # logits after each last token
OTHER = torch.randn(V, V, generator=torch.Generator().manual_seed(2)) * 1.5  # logits of a draft model

LIKELIEST = OTHER.argmax(1).tolist()


def own_path(table, seq, length):
    """The next tokens of a model with these logits, drawn with the same noise, as drafters do."""
    path = []
    for _ in range(length):
        last = path[-1] if path else seq.token_ids[-1]
        path.append(choose(table[last].numpy(), seq, path, ()))
    return path


def chain(tokens):
    return tokens, list(range(-1, len(tokens) - 1))


def coupled(seq):
    """Tokens of another model, drawn with the same noise."""
    return chain(own_path(OTHER, seq, 2))


def honest(seq):
    """The most likely path of another model."""
    first = LIKELIEST[seq.token_ids[-1]]
    return chain([first, LIKELIEST[first]])


def lying(seq):
    """Always the same tokens, likely or not."""
    return chain([3, 3])


def adversarial(seq):
    """Knows the noise and the target's own choice, and proposes by it: never token 0, and token 1 only alone."""
    (first,) = own_path(TARGET, seq, 1)
    return chain([]) if first == 0 else chain([first] if first == 1 else [first, seq.seed % V])


def honest_tree(seq):
    """The most likely path, another path beside it, and duplicates."""
    first = LIKELIEST[seq.token_ids[-1]]
    return [first, LIKELIEST[first], (first + 1) % V, 4, first], [-1, 0, -1, 2, -1]


def lying_tree(seq):
    """The root does not depend on the noise, so it is mostly wrong; the right tokens are below wrong nodes."""
    return [seq.seed % V, 0, 1, 2, 3, 4], [-1, 0, 0, 0, 0, 0]


def adversarial_tree(seq):
    """The right first token, and below it all tokens but one, which depends on the first token."""
    (first,) = own_path(TARGET, seq, 1)
    others = [t for t in range(V) if t != (first + 1) % V]
    return [first, *others], [-1, *[0] * len(others)]


def advance(seqs, drafters, mates=0, table=TARGET):
    """One round of all sequences in one call of verify, beside `mates` others: greedy ones, and ones without logits."""
    trees = [drafter(seq) for seq, drafter in zip(seqs, drafters, strict=True)]
    batch, wants = list(seqs), [True] * len(seqs)
    for i in range(mates):
        mate = Sequence(-1 - i, [i % V], SamplingParams(), 0)
        batch.insert(3 * i % len(batch), mate)
        wants.insert(3 * i % len(wants), i % 2 == 0)
        trees.insert(3 * i % len(trees), chain([1, 1]) if i % 2 == 0 else chain([]))
    rows = [
        t for seq, (tokens, _), w in zip(batch, trees, wants, strict=True) if w for t in (seq.token_ids[-1], *tokens)
    ]
    result = verify(Draft.trees(trees), table[torch.tensor(rows, device=table.device)], batch, wants)
    for seq, tokens, want in zip(batch, result.tokens, wants, strict=True):
        assert bool(tokens) == want
        seq.token_ids += tokens


def draw(params, drafters, seeds, length, mates=0):
    """The first `length` tokens for each seed; groups of sequences share calls of verify."""
    counts = Counter()
    seeds = list(seeds)
    group = 500
    for start in range(0, len(seeds), group):
        seqs = [Sequence(i, PROMPT, params, derive_seed(5, s)) for i, s in enumerate(seeds[start : start + group])]
        open_seqs = seqs
        while open_seqs:
            advance(open_seqs, [drafters[s.seq_id % len(drafters)] for s in open_seqs], mates)
            open_seqs = [s for s in open_seqs if s.num_output < length]
        counts.update(tuple(s.output_token_ids[:length]) for s in seqs)
    return counts


def exact(params, length):
    """The probability of every text of `length` tokens: the product of the textbook's conditional probabilities."""
    law = {}
    for text in product(range(V), repeat=length):
        p = 1.0
        for i, token in enumerate(text):
            last = (PROMPT + list(text[:i]))[-1]
            row = textbook.adjusted(TARGET[last].tolist(), params, PROMPT, text[:i])
            p *= textbook.probabilities(row, params)[token]
        if p > 0.0:
            law[text] = p
    return law


SHAPES = {
    "chain": (SamplingParams(temperature=0.8, logit_bias={1: 0.7}), [honest, lying, adversarial], 2, 0),
    "tree": (
        SamplingParams(temperature=1.2, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.4),
        [honest_tree, lying_tree, adversarial_tree],
        2,
        0,
    ),
    "batch": (SamplingParams(temperature=1.1, top_p=0.85), [honest, adversarial_tree, lying, honest_tree], 2, 7),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_texts_follow_the_law(shape):
    params, drafters, length, mates = SHAPES[shape]
    law = exact(params, length)
    share = NUM_DRAWS // len(drafters)
    counts = Counter()
    if mates:  # all drafters in the same calls of verify
        counts = draw(params, drafters, range(NUM_DRAWS), length, mates)
    else:
        for i, drafter in enumerate(drafters):  # each drafter has its own seeds, and is also judged alone
            own = draw(params, [drafter], range(i * share, (i + 1) * share), length)
            assert target_law(own, law).p_value > MIN_P_VALUE, drafter.__name__
            counts += own
    assert sum(counts.values()) >= NUM_DRAWS - len(drafters)
    fit = target_law(counts, law)
    assert fit.p_value > MIN_P_VALUE and fit.variation < MAX_VARIATION and not fit.impossible


@pytest.mark.parametrize("shape", SHAPES)
def test_drafters_cannot_change_a_single_text(shape):
    """Stronger than law 2: with the same seeds, every drafter gives exactly the texts of plain decoding."""
    params, drafters, _, mates = SHAPES[shape]
    for seed in range(150):
        plain = Sequence(0, PROMPT, params, seed)
        while plain.num_output < 8:
            plain.token_ids.append(choose(TARGET[plain.token_ids[-1]].numpy(), plain, [], ()))
        for drafter in (coupled, *drafters):
            seq = Sequence(0, PROMPT, params, seed)
            while seq.num_output < 8:
                advance([seq], [drafter], mates)
            assert seq.output_token_ids[:8] == plain.output_token_ids


N = 100_000
EULER = 0.5772156649015329
ALONG = {
    "tokens": lambda: gumbel_noise(3, 17, np.arange(N)),
    "positions": lambda: np.concatenate([gumbel_noise(3, p, np.array([11, 12])) for p in range(N // 8)]),
    "seeds": lambda: np.concatenate([gumbel_noise(s, 17, np.array([11])) for s in range(N // 8)]),
    "hashed seeds": lambda: np.concatenate([gumbel_noise(derive_seed(1, s), 0, np.array([0])) for s in range(N // 8)]),
}


@pytest.mark.parametrize("along", ALONG)
def test_noise_is_gumbel(along):
    noise = torch.from_numpy(ALONG[along]())
    n = len(noise)
    deviation = math.pi / math.sqrt(6)
    assert abs(float(noise.mean()) - EULER) < 4 * deviation / math.sqrt(n)
    assert abs(float(noise.var()) - deviation**2) < 4 * deviation**2 * math.sqrt(4.4 / n)  # kurtosis 5.4
    cells = Counter((int(u * 64),) for u in torch.exp(-torch.exp(-noise)).tolist())
    assert target_law(cells, {(i,): 1 / 64 for i in range(64)}).p_value > MIN_P_VALUE


def test_derived_seeds():
    seeds = [derive_seed(s, i) for s in (0, 7, 2**63 - 1) for i in range(128)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= s < 2**63 for s in seeds)
    assert derive_seed(7, 0) == 7
