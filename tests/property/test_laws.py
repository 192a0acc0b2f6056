"""Laws 1 and 3 for every drafter in the registry, in every kind of format: a new drafter is tested at once.

If there is a GPU, they are tested on it too: with its kernels in more formats, and with the reference.
"""

from functools import cache

import pytest
from lawkit import DEVICES, DRAFTERS, SAMPLED, load_pair, make_engine, random_prompts, run, texts

from sameseed import registry
from sameseed.engine.overlap import Overlap
from sameseed.request import SamplingParams
from sameseed.spec.drafter import goes_ahead

FORMATS = [("cpu", "auto", weights, kv) for weights in ("bf16", "w8a8", "w4a8") for kv in ("bf16", "int8")]
ROUNDED = [
    ("cpu", "auto", "bf16-a16", "bf16"), ("cpu", "auto", "w8a8", "int8_a8"), ("cpu", "auto", "w8a8-outliers", "bf16"),
    ("cpu", "auto", "w4a8-asym", "fp16"), ("cpu", "auto", "nf4", "fp8_e4m3"), ("cpu", "auto", "fp32", "bf16/int4"),
    ("cpu", "auto", "fp8", "fp8_e5m2"),
]  # fmt: skip
ON_GPU = [
    *(("cuda", "triton", weights, kv) for _, _, weights, kv in FORMATS),
    *(
        ("cuda", "triton", *each)
        for each in (("w4a16", "fp8_e4m3"), ("fp8", "fp16"), ("fp8-a8", "int8"), ("fp32", "fp32"))
    ),
    *(("cuda", "reference", *each) for each in (("bf16", "bf16"), ("w4a8", "int8"))),
]
PROMPTS = [p * 2 for p in random_prompts(6, seed=31, longest=12)]  # each one twice in a row, for look-ups
LENGTH = 20
# Greedy, sampled and penalized texts in one batch.
EACH = [
    SamplingParams(max_tokens=LENGTH, seed=40 + i, ignore_eos=True, **({}, SAMPLED, {"frequency_penalty": 0.3})[i % 3])
    for i in range(len(PROMPTS))
]


@pytest.fixture(scope="module", params=FORMATS + ROUNDED + (ON_GPU if "cuda" in DEVICES else []), ids="-".join)
def stored(request, pair_folders):
    """The tiny pair in a weight format, the cache format, and plain texts, one prompt after the other."""
    device, backend, weights, kv = request.param
    if backend == "triton" and (reason := registry.load("ops", backend).unavailable()) is not None:
        pytest.skip(f"the GPU's kernels do not run here: {reason}")
    pair = _load(*pair_folders, backend, weights, device)
    return pair, kv, texts(run(make_engine(pair, kv=kv), PROMPTS, EACH, alone=True))


@cache
def _load(target, draft, backend, weights, device):
    return load_pair(target, draft, backend, weights, device)


def engine_of(pair, name, **settings):
    """An engine with a drafter of the registry; a drafter that can guess during the target's pass does so."""
    engine = make_engine(pair, name, k=5, **settings)
    if goes_ahead(type(engine.drafter)):
        engine.ahead = Overlap(1)
    return engine


@pytest.mark.parametrize("name", ["none", *DRAFTERS])
def test_text_is_plain_decodings(stored, name):
    """Laws 1 and 3: in a batch, and again with prompt chunks, few rows and preempted sequences."""
    pair, kv, plain = stored
    engine = engine_of(pair, name, kv=kv)
    assert texts(run(engine, PROMPTS, EACH)) == plain
    spec, drafter = engine.metrics, engine.drafter
    assert (spec.num_draft_tokens > 0) == (name != "none")
    if type(drafter).owns:
        assert 0 < spec.num_accepted_tokens < spec.num_draft_tokens, "right guesses and wrong ones"
    tight = engine_of(pair, name, kv=kv, rows=9, block=4, tokens=96, max_len=48)
    done = run(tight, PROMPTS, EACH)
    assert texts(done) == plain
    assert sum(c.metrics.num_preemptions for c in done) == tight.scheduler.num_preemptions > 0
