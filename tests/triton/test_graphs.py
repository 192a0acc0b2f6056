"""Whole models in the interpreter: the reference's values, and passes by graphs (a fake) with the bits of others."""

import os

import pytest
import torch
from fixtures_eagle import fit_head
from fixtures_graph import fake_graphs
from fixtures_models import all_logits, prompt, tiny_model
from lawkit import load_pair, make_engine, random_prompts, run, texts, write_model

from sameseed import SamplingParams, ops
from sameseed.batch import Rows, build_batch
from sameseed.kvcache.cache import KVCache
from sameseed.models import weights
from sameseed.models.loader import load_model
from sameseed.ops.triton import graphs, guard
from sameseed.scheme import QuantScheme

pytestmark = pytest.mark.skipif(
    not guard.interpreted() or os.environ.get("SAMESEED_TEST_GPU") == "pretended", reason="its models are on the CPU"
)
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture
def model(tmp_path):
    write_model(tmp_path, **SMALL)
    return load_model(tmp_path, ops.resolve("triton"), QuantScheme.parse("w4a16"))


def make_cache(model, kv="fp32"):
    c = model.config
    return KVCache(c.kv_shapes, 4, 16, kv)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    torch.set_default_device(None)
    monkeypatch.setattr(graphs, "NARROWEST", 64)  # the interpreter also spends time on programs of empty spans


@pytest.mark.parametrize("kv", ["fp32", "int8"])
def test_a_bucket_serves_all_its_passes(kv, model, monkeypatch):
    """Passes with fewer rows, other sequences or a tree give the logits, hidden states and cache of op-by-op passes."""
    passes = [
        [Rows([5, 6, 7], 0, [], [], [3], True), Rows([9], 0, [], [], [1], True)],
        [Rows([8], 3, [2, 4, 6], [-1, 0, -1], [3], True)],
        [Rows([1], 1, [], [], [1], True), Rows([3, 2], 0, [], [], [0], False), Rows([4], 0, [], [], [2], True)],
        [Rows([2], 2, [], [], [1], True), Rows([5, 6], 4, [], [], [3], True)],
        [Rows([t], n, [], [], [block], True) for t, n, block in ((7, 3, 1), (2, 2, 0), (4, 1, 2), (6, 6, 3))],
    ]
    batches = [build_batch(rows, 16) for rows in passes]
    wanted, cache = [], make_cache(model, kv)
    for batch in batches:
        wanted.append(model._forward(model.ops, batch, cache, (0,)))
    made, ours = fake_graphs(monkeypatch), make_cache(model, kv)
    for batch, (logits, hidden, _) in zip(batches, wanted, strict=True):
        for _ in range(2):  # storing the same rows twice is allowed
            got, kept, _ = model.run(batch, ours, (0,))
            assert got.equal(logits) and kept.equal(hidden)
    assert len(made) == 3  # for 4 rows, with one, two and four sequences
    for a, b in zip(cache.layers, ours.layers, strict=True):
        assert a.k.equal(b.k) and a.v.equal(b.v)


@pytest.mark.parametrize(
    ("method", "temperature", "how"),
    [("ngram", 0.8, {}), ("draft_model", 0.0, {"confidence": 0.2}), ("eagle", 0.0, {})],
)
def test_drafts_and_graphs_change_nothing(method, temperature, how, tmp_path, monkeypatch):
    """Chains that end early, trees and several buckets, sequences together and alone: drafts are the same, too.

    Whole chains: `test_chains.py`.
    """
    for folder, noise in (("target", 0.0), ("draft", 0.1)):
        write_model(tmp_path / folder, noise=noise, **SMALL)
    if method == "eagle":
        fit_head(tmp_path / "head", load_model(tmp_path / "target", ops.resolve("reference")))
    pair = load_pair(tmp_path / "target", tmp_path / "draft", "triton", "w4a16")
    prompts = random_prompts(2, longest=6)
    params = SamplingParams(max_tokens=5, temperature=temperature, seed=1, ignore_eos=True)
    plain = texts(run(make_engine(pair), prompts, params, alone=True))
    op_by_op = make_engine(pair, method, 3, **how)
    run(op_by_op, prompts, params)
    made, engine = fake_graphs(monkeypatch), make_engine(pair, method, 3, **how)
    assert texts(run(engine, prompts, params)) == plain
    assert made and engine.metrics == op_by_op.metrics


def test_what_cannot_be_recorded_runs_op_by_op(model, monkeypatch, caplog):
    batch, calls = build_batch([Rows([5, 6], 0, [], [], [3], True)], 16), []
    wanted = model.run(batch, make_cache(model))[0]

    def refuses(job):
        calls.append(job)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "capture_for", lambda device: refuses)
    cache = make_cache(model)
    for _ in range(4):
        assert model.run(batch, cache)[0].equal(wanted)
    assert len(calls) == 1 and "not permitted" in caplog.text


@pytest.mark.parametrize("name", ["w4a8", "fp32"])
def test_logits_are_the_reference_s(name, monkeypatch):
    """Includes matrices whose width no group size divides, stacked matrices, and the LM head."""
    monkeypatch.setattr(weights, "CHUNK", 48 * 32)  # many chunks, each packed by itself
    text = prompt(5)
    got, wanted = (all_logits(tiny_model.__wrapped__(b, "llama3.2", name), text) for b in ("triton", "reference"))
    # Quantized rows: an error in the last bit may change a code in the next layer by one step.
    torch.testing.assert_close(got, wanted, rtol=0, atol=(0.05 if name == "w4a8" else 1e-4) * float(wanted.abs().max()))
