"""Law 1: same seed, same text, for any drafter, draft length, batch, prompt chunks and block size.

If there is a GPU, each test runs on it as well.
"""

import math
from itertools import product

import pytest
from lawkit import DEVICES, SAMPLED, TreeDrafter, knowing, load_pair, make_engine, random_prompts, run, texts

from sameseed.config import SpecConfig
from sameseed.laws import subject
from sameseed.models.loader import resolve_model
from sameseed.request import SamplingParams

DRAFTERS = {
    "plain": {},
    "ngram": {"method": "ngram", "k": 5},
    **{f"draft_model k={k}": {"method": "draft_model", "k": k} for k in (1, 2, 4, 8)},
    "confidence": {"method": "draft_model", "k": 8, "confidence": 0.4},
    "siblings": {"method": "draft_model", "k": 12, "options": {"siblings": 2}},
}
SAMPLING = {"greedy": {}, "sampled": SAMPLED}
# alone (not in a batch), rows of a pass (which limit the chunks of a prompt), block size, sampling
SETTINGS = list(product((True, False), (16, 512), (16, 32), SAMPLING))
NUM_PROMPTS, NUM_TOKENS = 50, 16


def covering(place):
    """Two opposite settings, so every factor takes both of its values. The drafters together cover all 16 settings."""
    return [SETTINGS[place % 8], SETTINGS[15 - place % 8]]


def prompts_of(pair):
    """50 prompts of 1 to 60 tokens: text for the embedded pair, random tokens for the tiny one."""
    if pair.target.config.vocab_size < 1000:
        return random_prompts(NUM_PROMPTS)
    starts = (
        "def {0}(items):\n    ", "What is a {0}?", "The {0} was", "User: I need a {0}.\nAssistant:", "import {0}\n",
    )  # fmt: skip
    nouns = ("list", "train ticket", "number", "cat", "restaurant", "function", "river", "table", "price", "story")
    filler = "It is a long day, and the list of things to do is longer. First add the numbers, then sort them. "
    every = [filler * (i % 5 // 3) + s.format(n) for i, (s, n) in enumerate(product(starts, nouns))]
    return [pair.tokenizer.encode(text) for text in every]


@pytest.fixture(scope="module", params=DEVICES)
def pair(request, pair_folders):
    """The tiny pair on the fastest backend of each device."""
    return load_pair(*pair_folders, device=request.param)


@pytest.fixture(scope="module", params=DEVICES)
def matrix_pair(request, pair_folders):
    """The embedded pair if it is in the checkout, else the tiny one."""
    embedded = [resolve_model(n) for n in ("embedded", "embedded-draft")]
    present = all((folder / "model.safetensors").exists() for folder in embedded)
    return load_pair(*(embedded if present else pair_folders), device=request.param)


@pytest.fixture(scope="module")
def plain_texts(matrix_pair):
    """The texts that every setting must give: plain decoding, one prompt after the other."""
    prompts = prompts_of(matrix_pair)
    return {name: texts(run(make_engine(matrix_pair), prompts, params(name), alone=True)) for name in SAMPLING}


def params(sampling, **more):
    return SamplingParams(**{"max_tokens": NUM_TOKENS, "seed": 1234, "ignore_eos": True, **SAMPLING[sampling], **more})


def check(pair, plain, drafter, setting, every):
    """Compare the texts after every first, or every second, prompt."""
    alone, rows, block, sampling = setting
    engine = make_engine(pair, **DRAFTERS[drafter], rows=rows, block=block)
    found = texts(run(engine, prompts_of(pair)[::every], params(sampling), alone))
    assert found == plain[sampling][::every], (drafter, setting)
    if drafter.startswith("draft_model"):
        # Drafts must be accepted and rejected, or the comparison shows nothing.
        rate = engine.metrics.acceptance_rate
        tiny = pair.target.config.vocab_size < 1000
        assert (0.3 if tiny else 0.03) < rate < 0.97
        # In a pass of 16 rows, eight sequences and new prompts leave hardly a row for drafts.
        assert engine.metrics.num_rollbacks > (20 if alone or rows > 16 else 0)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_same_text_in_opposite_settings(matrix_pair, plain_texts, drafter):
    for setting in covering(list(DRAFTERS).index(drafter)):
        check(matrix_pair, plain_texts, drafter, setting, every=2)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_same_text_in_every_setting(matrix_pair, plain_texts, drafter, setting):
    check(matrix_pair, plain_texts, drafter, setting, every=1)


@pytest.mark.parametrize(
    "drafter", ["none", "ngram", "draft_model", "cascade", "ngram + draft_model", "eagle", "block"]
)
def test_same_text_however_long_prompts_are_cut(pair, drafter):
    """While others stream, time limits the rows of prompts: to the fewest, to what is measured, and not at all.

    A drafter with a model reads prompts in the same way: a sequence that it has not read yet has no draft.
    """
    prompts = [prompt * 4 for prompt in random_prompts(12, seed=3, longest=60)]
    alone = texts(run(make_engine(pair), prompts, params("sampled"), alone=True))
    owns = drafter not in ("none", "ngram")
    below = {"below": tuple(map(SpecConfig, drafter.split(" + ")))} if "+" in drafter else {}
    for ms in (1e-6, 2.0, math.inf):
        engine = make_engine(pair, "first" if below else drafter, 2, seqs=3, block=8, pass_ms=ms, **below)
        assert texts(run(engine, prompts, params("sampled"), streamed=True)) == alone, ms
        waited = engine.metrics.undrafted.get("catching up", 0)
        assert waited > 0 if owns and ms == 1e-6 else waited == 0 or ms == 2.0


PROMPTS = random_prompts(10, seed=5)
STOPS = ("a", "r", "\u00e9", "the", "1", "X")
FEATURES = {
    "greedy": {},
    "top_p": SAMPLED,
    "top_k": {"temperature": 1.1, "top_k": 5},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "all three": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "greedy penalties": {"repetition_penalty": 1.5, "frequency_penalty": 1.0},
    "bias": {"temperature": 0.9, "logit_bias": {7: 3.0, 11: -5.0, 12: float("-inf")}},
    "banned": {"banned_token_ids": tuple(range(20, 120))},
    "allowed": {"temperature": 1.0, "allowed_token_ids": tuple(range(0, 300, 3))},
    "min_tokens": {"temperature": 2.0, "ignore_eos": False, "min_tokens": 9, "stop_token_ids": tuple(range(60))},
    "stop ids": {"temperature": 1.0, "stop_token_ids": tuple(range(40, 60))},
    "stop strings": {"temperature": 1.0, "stop": STOPS, "min_tokens": 3},
    "n": {"temperature": 1.0, "n": 3, "max_tokens": 12},
    "logprobs": {"temperature": 0.8, "top_k": 30, "presence_penalty": 0.3, "logprobs": 4},
}
LEVELS = {
    "ngram": {"method": "ngram", "k": 6, "options": {"min_ngram": 1}},
    "draft_model": {"method": "draft_model", "k": 4, "rows": 24},
    "confidence": {"method": "draft_model", "k": 8, "confidence": 0.3, "block": 4},
}


def outcome(completions):
    return [subject.outcome(c) for c in completions]


@pytest.mark.parametrize("feature", FEATURES)
def test_sampling_features_do_not_notice_speculation(pair, feature):
    asked = params("greedy", **FEATURES[feature])
    plain = run(make_engine(pair), PROMPTS, asked, alone=True)
    for level in LEVELS.values():
        assert outcome(run(make_engine(pair, **level), PROMPTS, asked)) == outcome(plain), level
    if asked.n == 1:
        drafter = TreeDrafter(knowing(PROMPTS, texts(plain)), pair.target.config.vocab_size, seed=3)
        engine = make_engine(pair, k=24, rows=256, drafter=drafter)
        assert outcome(run(engine, PROMPTS, asked)) == outcome(plain)
        assert 0 < engine.metrics.num_accepted_tokens < engine.metrics.num_draft_tokens


@pytest.mark.parametrize("level", LEVELS)
def test_a_batch_of_all_features(pair, level):
    """Other requests of the batch, with other features, change nothing."""
    each = [params("greedy", **feature) for feature in FEATURES.values()]
    prompts = random_prompts(len(each), seed=6)
    alone = run(make_engine(pair), prompts, each, alone=True)
    assert outcome(run(make_engine(pair, **LEVELS[level]), prompts, each)) == outcome(alone)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sampling", SAMPLING)
def test_trees_of_64_nodes(pair, sampling, seed):
    asked = params(sampling, max_tokens=140)
    plain = texts(run(make_engine(pair), PROMPTS, asked))
    drafter = TreeDrafter(knowing(PROMPTS, plain), pair.target.config.vocab_size, seed)
    engine = make_engine(pair, k=64, rows=512, block=(4, 16, 32)[seed], drafter=drafter)
    assert texts(run(engine, PROMPTS, asked)) == plain
    metrics = engine.metrics
    assert drafter.largest > 48
    assert len(metrics.num_accepted_tokens_per_pos) > 8, "long paths were accepted"
    assert metrics.num_rollbacks > 10
