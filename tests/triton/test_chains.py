"""Chains that a graph writes by itself have the tokens, confidences and cached rows of passes run by the host."""

import os
from dataclasses import replace

import pytest
import torch
from fixtures_eagle import fit_head
from fixtures_graph import fake_graphs
from lawkit import load_pair, make_engine, run, texts, write_model

from sameseed import devices, ops
from sameseed.batch import UNKNOWN
from sameseed.kvcache.cache import KVCache
from sameseed.models.eagle import HeadRunner
from sameseed.models.eagle_loader import load_head
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
# Prompts of several lengths, one longer than a block of 4; lengths of their chains; how tokens are drawn.
TEXTS = [[5, 6, 7], [8], [3, 9, 4, 2, 6, 1, 7]]
WARM, GREEDY = SamplingParams(temperature=0.8), SamplingParams(temperature=0.0)
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
PARAMS = [WARM, GREEDY, SamplingParams(temperature=1.2, min_p=0.05)]
LENGTHS = {"equal": [3, 3, 3], "unequal": [2, 1, 4], "one": [3]}


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    torch.set_default_device(None)
    monkeypatch.setattr(graphs, "NARROWEST", 64)


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


@pytest.fixture
def model(tmp_path):
    write_model(tmp_path, **SMALL)
    return load_model(tmp_path, ops.resolve("triton"), QuantScheme.parse("w4a16"))


def sequences(runner, lengths, seed, params=None):
    """Sequences with blocks reserved for `lengths` more tokens."""
    made = []
    for i, (n, p) in enumerate(zip(lengths, params or PARAMS, strict=False)):
        made.append(Sequence(i, tuple(t + seed for t in TEXTS[i]), p, seed + i))
        assert runner.blocks.reserve(made[-1], len(TEXTS[i]) + n)
    return made


def draft_runner(model, kv="fp32"):
    c = model.config
    return ModelRunner(model, KVCache(c.kv_shapes, 24, 4, kv))


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


def test_a_heads_chain(tmp_path, chains, copies, monkeypatch):
    write_model(tmp_path / "target", **SMALL)
    fit_head(tmp_path / "head", load_model(tmp_path / "target", ops.resolve("reference")))
    backend = ops.resolve("triton")
    target = load_model(tmp_path / "target", backend)
    loaded = load_head(tmp_path / "head", target, backend)
    c = loaded.config.layer
    made = []
    for window, names in ((None, ("unequal", "equal", "one", "one")), (3, ("equal", "unequal"))):
        runners = [HeadRunner(loaded, KVCache(c.kv_shapes, 24, 4, "fp32"), window) for _ in range(2)]
        generator, cases = torch.Generator().manual_seed(1), []
        width = target.config.hidden_size
        for counts in map(LENGTHS.__getitem__, names):
            cases.append((counts, [torch.randn(len(t), width, generator=generator) for t in TEXTS[: len(counts)]]))
        wanted = [head_chain(runners[0], *case) for case in cases]
        chains.clear()
        with monkeypatch.context() as patch:
            made += fake_graphs(patch)
            for i, (case, tokens) in enumerate(zip(cases, wanted, strict=True)):
                copies.clear()
                assert head_chain(runners[1], *case) == tokens
                assert i != 3 or len(copies) == 2  # the second "one" replays
        assert chains == [max(counts) - 1 for counts, _ in cases] and same_rows(*runners)


def head_chain(runner, counts, hidden):
    """The tokens that a head writes after texts with these hidden states."""
    holders = sequences(runner, counts, len(counts))

    def draws(b, depth):
        drawn = drawer(holders[b], depth)
        return drawn

    own = [draws(b, 0) for b in range(len(counts))]
    _, features, chosen = runner.extend(holders, [s.token_ids for s in holders], hidden, True, own)
    drawn = runner.draw(holders, counts, chosen, features, draws)
    return drawn.read()


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


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_texts_and_counts_are_those_of_passes(method, tmp_path, chains, copies, monkeypatch):
    """Greedy and sampled, prompts of several lengths, texts that end within a chain, and a preempted one."""
    for folder, noise in (("target", 0.0), ("draft", 0.1)):
        write_model(tmp_path / folder, noise=noise, **SMALL)
    if method == "eagle":
        fit_head(tmp_path / "head", load_model(tmp_path / "target", ops.resolve("reference")))
    pair = load_pair(tmp_path / "target", tmp_path / "draft", "triton", "w4a16")
    params = [replace(p, max_tokens=8, seed=1, ignore_eos=True) for p in PARAMS]
    how = {"block": 4, "tokens": 24, "max_len": 16}
    how |= {"options": {"top_k": 1}} if method == "eagle" else {}
    op_by_op = make_engine(pair, method, 4, **how)
    wanted = texts(run(op_by_op, TEXTS, params))  # of plain decoding: test_graphs.py
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
