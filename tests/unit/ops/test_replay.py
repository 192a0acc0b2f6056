"""Replayed passes: the bits of direct calls, results that are not overwritten, a fallback where recording fails."""

import gc
import random
import threading
import weakref
from dataclasses import replace

import pytest
import torch
from fixtures_models import tiny_model

from sameseed import ops
from sameseed.batch import Rows, build_batch
from sameseed.kvcache.cache import KVCache
from sameseed.models.llama import Llama
from sameseed.ops import _replay

pytestmark = pytest.mark.skipif(ops.registry.load("ops", "cpu").unavailable() is not None, reason="no native module")
BLOCK, NUM_BLOCKS = 4, 64


def make_cache(model, format="fp32"):
    c = model.config
    return KVCache(c.kv_shapes, NUM_BLOCKS, BLOCK, format)


def make_batch(seed, vocab, num_seqs=2, most_pending=6, most_nodes=5):
    """Sequences with pending rows and random trees, each in blocks of its own."""
    rng = random.Random(seed)
    rows = []
    for b in range(num_seqs):
        nodes = rng.randint(0, most_nodes)
        pending = rng.randint(1, most_pending)
        parents = [rng.randint(-1, i - 1) for i in range(nodes)]
        tokens = [rng.randrange(vocab) for _ in range(pending + nodes)]
        blocks = list(range(16 * b, 16 * b + 16))
        rows.append(Rows(tokens[:pending], rng.randint(0, 9), tokens[pending:], parents, blocks, True))
    return build_batch(rows, BLOCK)


@pytest.fixture(scope="module")
def model():
    return tiny_model("cpu")


@pytest.mark.parametrize("format", sorted(_replay.cache_ops.KV_FORMATS))
@torch.inference_mode()
def test_replay_gives_the_bits_of_direct_calls(model, format):
    direct, replayed = make_cache(model, format), make_cache(model, format)
    assert isinstance(model._run, _replay.PlanReplay)
    for seed in range(12 if format == "fp32" else 4):
        captures = ((), (0,), (0, 1))[seed % 3]
        batch = make_batch(seed, model.config.vocab_size, num_seqs=1 + seed % 4, most_pending=20)
        wanted, wanted_hidden, _ = model._forward(model.ops, batch, direct, captures)
        got, hidden, _ = model.run(batch, replayed, captures)
        assert got.equal(wanted)
        assert (hidden is None) == (wanted_hidden is None)
        if hidden is not None:
            assert hidden.equal(wanted_hidden)
        for a, b in zip(direct.layers, replayed.layers):
            assert a.k.equal(b.k) and a.v.equal(b.v)
    assert model._run.recorded(1, replayed, ()) is not None  # the pass was replayed, not computed by the fallback


@torch.inference_mode()
def test_results_outlive_later_passes(model):
    cache = make_cache(model)
    kept = []
    for seed in range(6):
        batch = make_batch(seed, model.config.vocab_size)
        logits, hidden, _ = model.run(batch, cache, (1,))
        kept.append((logits, hidden, logits.clone(), hidden.clone()))
    assert all(logits.equal(copy) and hidden.equal(other) for logits, hidden, copy, other in kept)


@torch.inference_mode()
def test_two_threads_share_a_model(model):
    """One thread replays while the other computes op by op: both get the bits that they get alone."""
    vocab = model.config.vocab_size
    batches = [make_batch(seed, vocab) for seed in range(4)]
    wanted = [model.run(b, make_cache(model))[0] for b in batches]
    faults = []

    def work(order):
        with torch.inference_mode():
            for i in order * 20:
                if not model.run(batches[i], make_cache(model))[0].equal(wanted[i]):
                    faults.append(i)

    threads = [threading.Thread(target=work, args=(order,)) for order in ([0, 1, 2, 3], [3, 1, 0, 2])]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not faults


@torch.inference_mode()
def test_what_has_no_kernel_runs_op_by_op(caplog, monkeypatch):
    model = tiny_model("cpu")
    cache = make_cache(model)
    monkeypatch.setattr(_replay.cache_ops, "KV_FORMATS", frozenset())
    batch = make_batch(0, model.config.vocab_size)
    with caplog.at_level("INFO", logger="sameseed.ops"):
        got, *_ = model.run(batch, cache)
        model.run(batch, cache)
    assert sum("no plan replay" in r.message for r in caplog.records) == 1
    monkeypatch.undo()
    torch.testing.assert_close(got, model.run(batch, make_cache(model))[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", [torch.Tensor.long, lambda x: x.repeat_interleave(2)[::2]])
@torch.inference_mode()
def test_a_batch_in_other_types_runs_op_by_op(model, change, monkeypatch):
    """A plan reads contiguous int32 at bare addresses, so it must not be given anything else."""
    batch = make_batch(3, model.config.vocab_size)
    wanted, *_ = model.run(batch, make_cache(model))
    monkeypatch.setattr(_replay.Recorded, "run", lambda *_: pytest.fail("it was replayed"))
    odd = replace(batch, positions=change(batch.positions))
    assert model.run(odd, make_cache(model))[0].equal(wanted)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@torch.inference_mode()
def test_a_model_and_its_plans_die_with_the_last_reference(backend):
    """No reference cycle: gigabytes of weights must not wait for the garbage collector."""
    tiny = tiny_model(backend)
    model = Llama(tiny.config, tiny.weights, tiny.ops)
    model.run(make_batch(0, model.config.vocab_size), make_cache(model))
    alive = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()
