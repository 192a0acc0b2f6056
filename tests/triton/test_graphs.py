"""Whole models in the interpreter: the reference's values, and passes and chains by graphs (a fake) with equal bits."""

import os
from dataclasses import replace

import pytest
import torch
from fixtures_eagle import fit_head
from fixtures_graph import fake_graphs
from fixtures_models import all_logits, prompt, tiny_model
from lawkit import load_pair, make_engine, random_prompts, run, texts, write_model

from sameseed import devices, ops
from sameseed.batch import UNKNOWN, Rows, build_batch
from sameseed.kvcache.cache import KVCache
from sameseed.models import weights
from sameseed.models.loader import load_model
from sameseed.models.runner import ModelRunner
from sameseed.ops.triton import graphs, guard
from sameseed.ops.triton.graphs import Graphs
from sameseed.request import SamplingParams, Sequence
from sameseed.scheme import QuantScheme
from sameseed.spec.sampling import drawer

pytestmark = pytest.mark.skipif(
    not guard.interpreted() or os.environ.get("SAMESEED_TEST_GPU") == "pretended", reason="its models are on the CPU"
)
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
# Prompts of several lengths, one longer than a block of 4; lengths of their chains; how tokens are drawn.
TEXTS = [[5, 6, 7], [8], [3, 9, 4, 2, 6, 1, 7]]
WARM, GREEDY = SamplingParams(temperature=0.8), SamplingParams(temperature=0.0)
PARAMS = [WARM, GREEDY, SamplingParams(temperature=1.2, min_p=0.05)]
LENGTHS = {"equal": [3, 3, 3], "unequal": [2, 1, 4], "one": [3]}


@pytest.fixture
def model(tmp_path):
    write_model(tmp_path, **SMALL)
    return load_model(tmp_path, ops.resolve("triton"), QuantScheme.parse("w4a16"))


def make_cache(model, kv="fp32", blocks=4, size=16):
    return KVCache(model.config.kv_shapes, blocks, size, kv)


def write_pair(root, method):
    """A target and a draft model, with a head if the method needs one."""
    for folder, noise in (("target", 0.0), ("draft", 0.1)):
        write_model(root / folder, noise=noise, **SMALL)
    if method == "eagle":
        fit_head(root / "head", load_model(root / "target", ops.resolve("reference")))
    return load_pair(root / "target", root / "draft", "triton", "w4a16")


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
    """Chains that end early, trees and several buckets, sequences together and alone: drafts are the same, too."""
    pair = write_pair(tmp_path, method)
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


@pytest.fixture
def chains(monkeypatch):
    """The number of passes in each chain that a graph wrote."""
    found = []
    chain = Graphs.chain

    def counted(self, *args):
        chosen = chain(self, *args)
        found.append(0 if chosen is None else len(chosen))
        return chosen

    monkeypatch.setattr(Graphs, "chain", counted)
    return found


@pytest.fixture
def copies(monkeypatch):
    """The number of elements of each batch that was copied to the device."""
    sizes = []
    put_into = devices.put_into
    monkeypatch.setattr(devices, "put_into", lambda there, x: (sizes.append(x.numel()), put_into(there, x))[1])
    return sizes


def sequences(runner, lengths, seed, params=None):
    """Sequences with blocks reserved for `lengths` more tokens."""
    made = []
    for i, (n, p) in enumerate(zip(lengths, params or PARAMS, strict=False)):
        made.append(Sequence(i, tuple(t + seed for t in TEXTS[i]), p, seed + i))
        assert runner.blocks.reserve(made[-1], len(TEXTS[i]) + n)
    return made


def draft_runner(model, kv="fp32"):
    return ModelRunner(model, make_cache(model, kv, 24, 4))


def same_rows(a, b):
    return all(x.k.equal(y.k) and x.v.equal(y.v) for x, y in zip(a.cache.layers, b.cache.layers, strict=True))


@pytest.mark.parametrize(
    ("lengths", "sure", "kv"), [("equal", True, "int8"), ("unequal", False, "fp32"), ("one", True, "fp32")]
)
def test_a_models_chain(lengths, sure, kv, model, chains, copies, monkeypatch):
    """Run twice: a graph recorded for some tokens, positions and noise must also serve others."""
    counts = LENGTHS[lengths]
    by_pass, by_graph = draft_runner(model, kv), draft_runner(model, kv)
    wanted = []
    for seed in (1, 9):
        seqs = sequences(by_pass, counts, seed)
        drawn = by_pass.draw(seqs, counts, drawer, sure)
        wanted.append((drawn.read(), [(s.token_ids, s.num_cached) for s in seqs]))
    assert not any(chains)
    made = fake_graphs(monkeypatch)
    for seed, (tokens, state) in zip((1, 9), wanted, strict=True):
        seqs = sequences(by_graph, counts, seed)
        recorded = len(made)
        copies.clear()
        drawn = by_graph.draw(seqs, counts, drawer, sure)
        assert drawn is not None and drawn.read() == tokens
        assert [(s.token_ids, s.num_cached) for s in seqs] == state
        assert all(s.token_ids[-n:] == [UNKNOWN] * n for s, n in zip(seqs, counts, strict=True))
        assert recorded == 0 or len(copies) == 2  # one for the first pass, one for all others
    assert chains[2:] == [max(counts) - 1] * 2 and len(made) == 2
    assert same_rows(by_pass, by_graph)


def test_what_rows_do_not_attend_to_may_not_change_within_a_chain(model, chains, monkeypatch):
    by_pass, by_graph = draft_runner(model), draft_runner(model)
    # Rows see the first block and the last six tokens; one more block of 4 is left out at 14, 18, ... rows.
    for runner in (by_pass, by_graph):
        runner.unseen = lambda seq: (1, (seq.num_cached - 6) // 4) if seq.num_cached >= 14 else (0, 0)
    text = [t % 50 + 3 for t in range(0, 90, 7)]  # 13 tokens

    def drawn(runner, length, count):
        seq = Sequence(0, tuple(text[:length]), WARM, 3)
        assert runner.blocks.reserve(seq, length + count)
        found = runner.draw([seq], [count], drawer)
        runner.blocks.release(seq)
        return found.read()

    wanted = [drawn(by_pass, 9, 4), drawn(by_pass, 13, 4), drawn(by_pass, 13, 3)]
    chains.clear()
    made = fake_graphs(monkeypatch)
    assert [drawn(by_graph, 9, 4), drawn(by_graph, 13, 4), drawn(by_graph, 13, 3)] == wanted
    assert chains == [3] and made  # the others run pass by pass


@pytest.mark.parametrize(
    ("method", "options"), [("draft_model", {}), ("eagle", {"top_k": 1}), ("eagle", {"top_k": 1, "window": 3})]
)
def test_texts_and_counts_are_those_of_passes(method, options, tmp_path, chains, copies, monkeypatch):
    """Greedy and sampled, prompts of several lengths, texts that end within a chain, and a preempted one."""
    pair = write_pair(tmp_path, method)
    params = [replace(p, max_tokens=8, seed=1, ignore_eos=True) for p in PARAMS]
    how = {"block": 4, "tokens": 24, "max_len": 16, "options": options}
    op_by_op = make_engine(pair, method, 4, **how)
    wanted = texts(run(op_by_op, TEXTS, params))  # of plain decoding: see above
    chains.clear()
    made, engine = fake_graphs(monkeypatch), make_engine(pair, method, 4, **how)
    reads, read, step = [], devices.read, engine.step

    def counted():
        copies.clear(), reads.clear()
        recorded, done = len(made), step()
        assert len(reads) == 1, "the target checks the chain before the host reads either"
        assert len(copies) <= 3 or len(made) > recorded, "the target's batch, and two of a chain"
        return done

    monkeypatch.setattr(devices, "read", lambda x: (reads.append(x), read(x))[1])
    monkeypatch.setattr(engine, "step", counted)
    done = run(engine, TEXTS, params)
    assert texts(done) == wanted and made and len([n for n in chains if n]) > 2
    assert engine.metrics == op_by_op.metrics and any(c.metrics.num_preemptions for c in done)
