"""Profiles of tiny shapes. No test asserts a time; the tests check the order, shape and consistency of results."""

import json
from dataclasses import replace

import pytest
import torch
from fixtures_models import backends, tiny_model, tiny_shape

from sameseed import devices, registry, scheme
from sameseed.errors import ConfigError, SameseedError
from sameseed.measure import limits, passes, profiler, shapes
from sameseed.measure.costs import Cost, Profile
from sameseed.measure.limits import Limits, measure_limits
from sameseed.measure.passes import ModelWork, Pass, TimedModel, cache_bytes
from sameseed.measure.profiler import profile
from sameseed.measure.shapes import SHAPES, get_shape
from sameseed.report import record, schemas

SMALL = {
    "rows": (2, 4), "contexts": (8, 40), "prefill_tokens": 24, "batch_sizes": (2,), "repeats": 3, "seconds": 0.01,
    "threads": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Profiles a tiny shape; thread counts are restored afterwards."""
    tiny_shape(monkeypatch)
    threads, native = torch.get_num_threads(), devices.native_threads()
    yield
    profiler.ops.set_num_threads(native)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", backends())
def test_everything_is_measured(backend):
    found = profile("tiny", formats=("bf16", "w8a8"), backend=backend, draft="tiny", **SMALL)
    assert found.backend == backend and found.threads == 1 and found.interleaved and not found.interrupted
    expected = [(f, c, m) for f in ("bf16", "w8a8") for c in (8, 40) for m in (1, 2, 4)]
    assert [(x.format, x.context, x.rows) for x in found.costs] == expected
    for x in found.costs:
        one = next(y for y in found.costs if (y.format, y.context, y.rows) == (x.format, x.context, 1))
        assert x.c == x.ms / one.ms and x.repeats == 3
        assert 0 < x.p10 <= x.ms <= x.p90
        assert x.memory_ms > 0 and x.compute_ms > 0
    assert [(x.format, x.tokens) for x in found.prefill] == [("bf16", 24), ("w8a8", 24)]
    assert [(x.format, x.batch_size, x.context) for x in found.batch] == [("bf16", 2, 8), ("w8a8", 2, 8)]
    dense, integer = found.stored
    least = 2 * shapes.get_shape("tiny").num_parameters  # packed weights are whole blocks of outputs
    assert integer.bytes < dense.bytes and least <= dense.bytes < 1.1 * least
    assert dense.bytes_per_token == dense.bytes + 2 * 2 * 8 * 2 * 16 * 2  # plus k, v of 8 tokens, 2 layers, bf16
    assert dense.bandwidth_share is not None and dense.bandwidth_share > 0
    assert found.draft is not None and found.draft.formats == ("auto",) and len(found.draft.costs) == 6


def test_json_and_back(tmp_path):
    found = profile("tiny", draft="tiny", **{**SMALL, "rows": (4, 2, 4), "contexts": (40, 8)})
    assert [(x.context, x.rows) for x in found.costs] == [(c, m) for c in (8, 40) for m in (1, 2, 4)], "in order"
    data = found.as_dict()
    assert next(iter(data)) == "schema" and data["schema"] == "sameseed.profile/1"
    assert Profile.from_dict(json.loads(json.dumps(data))) == found
    record.append(tmp_path / "r.jsonl", data)
    assert record.read(tmp_path / "r.jsonl") == [json.loads(json.dumps(data))]
    for broken in ({**data, "schema": "other"}, {k: v for k, v in data.items() if k != "limits"}):
        with pytest.raises(ConfigError, match="profile"):
            Profile.from_dict(broken)
    with pytest.raises(ConfigError, match=r"lacks 'costs'.*sameseed profile"):
        schemas.check({k: v for k, v in data.items() if k != "costs"})


def made(*points):
    """A profile of (context, rows, ms) in "w4a8"."""
    base = {c: ms for c, rows, ms in points if rows == 1}
    costs = [Cost("w4a8", "bf16", c, m, ms, ms / base[c], ms, ms, 3, 1.0, 1.0) for c, m, ms in points]
    limit = Limits(1, {"read": (1.0,), "fp32": (1.0,)}, {}, "native")
    return Profile({"name": "x"}, tuple(costs), (), (), (), limit)


def test_interpolation():
    found = made((0, 1, 10.0), (0, 4, 13.0), (0, 8, 21.0), (100, 1, 20.0), (100, 4, 40.0), (100, 8, 40.0)).curve("w4a8")
    expected = {(4, 0): 13.0, (2, 0): 11.0, (6, 0): 17.0, (10, 0): 25.0, (1, 50): 15.0, (8, 100): 40.0}
    assert {at: 1e3 * found.cost(at[0], 1, at[1]) for at in expected} == pytest.approx(expected)
    alone = made((16, 1, 10.0)).curve("w4a8")
    assert alone.cost(8, 1, 4000) == alone.cost(1), "one point is all there is"
    falling = made((0, 1, 10.0), (0, 2, 12.0), (0, 4, 11.0)).curve("w4a8")
    assert falling.at(8) == falling.at(2), "noise is not carried on"
    with pytest.raises(ConfigError, match="did you mean 'w4a8'"):
        made((0, 1, 10.0)).curve("w4a16")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"formats": ("w4a7",)}, "did you mean"), ({"formats": ()}, "at least one format"), ({"rows": (66,)}, "1..65"),
        ({"formats": ("bf16", "bf16")}, "each once"), ({"formats": ("w8a8-g128",)}, "groups of 128 do not divide"),
        ({"rows": ()}, "rows must"), ({"batch_sizes": (0,)}, "batch_sizes must"), ({"draft": "embedded-head"}, "bench"),
        ({"contexts": (125,)}, "lower the context to 124"), ({"kv_format": "nf4"}, "does not serve the KV cache"),
        ({"backend": "cpx"}, "did you mean 'cpu'"), ({"draft": "qwen3-0.7b"}, "did you mean"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_any_work(given, words, monkeypatch):
    monkeypatch.setattr(profiler, "measure_limits", lambda threads: pytest.fail("work was begun"))
    with pytest.raises(SameseedError, match=words):
        profile("tiny", **{**SMALL, **given})


def test_too_little_memory_is_said_first(monkeypatch):
    monkeypatch.setattr(profiler, "available_memory", lambda: 8 << 30)
    with pytest.raises(ConfigError, match=r"takes about 15\.\d GiB in bf16 and 7\.5 GiB are free"):
        profiler.Profiler(passes.ProfileGrid(("w4a8", "bf16")), "llama-3.1-8b")


def test_an_interruption_keeps_what_was_measured(monkeypatch):
    seconds, count = TimedModel.seconds, 0

    def interrupted(self, job):
        nonlocal count
        count += 1
        if count == stop:
            raise KeyboardInterrupt
        return seconds(self, job)

    monkeypatch.setattr(TimedModel, "seconds", interrupted)
    stop = 2 + 12 + 12 + 5  # both are tried, all chains are warmed up and measured once, and a few twice
    found = profile("tiny", formats=("bf16", "fp32"), **SMALL)
    assert found.interrupted and found.as_dict()["interrupted"]
    assert len(found.costs) == 12 and {x.repeats for x in found.costs} == {1, 2}
    assert not found.prefill and not found.batch
    count, stop = 0, 2 + 12 + 2  # one measured, of the first format only
    found = profile("tiny", formats=("bf16", "fp32"), **SMALL)
    assert [(x.format, x.rows) for x in found.costs] == [("bf16", 1)]
    assert replace(found, interrupted=False).curve("bf16").at(1) == found.costs[0].ms / 1e3
    count, stop = 0, 4  # during the warm-up
    with pytest.raises(KeyboardInterrupt):
        profile("tiny", formats=("bf16", "fp32"), **SMALL)


def test_passes_run_as_verification_does(monkeypatch):
    """One pending token and a chain after it, logits of all rows; blocks are freed, no row stays cached."""
    p = profiler.Profiler(passes.ProfileGrid(**SMALL), "tiny")
    subject = p._load(p.candidates[0], lambda *args: None)
    forward, seen = subject.runner.forward, list[tuple[int, ...]]()

    def watch(seqs, draft, num_pending, *more, **named):
        out = forward(seqs, draft, num_pending, *more, **named)
        seen.append((len(seqs), seqs[0].num_cached, num_pending[0], len(draft.nodes(0)[0]), len(out.logits)))
        return out

    monkeypatch.setattr(subject.runner, "forward", watch)
    for job in (Pass("chain", 40, 4), Pass("prefill", 0, 24), Pass("batch", 8, 2)):
        subject.seconds(job)
    assert list(dict.fromkeys(seen)) == [(1, 40, 1, 3, 4), (1, 0, 24, 0, 1), (2, 8, 1, 0, 2)]
    assert subject.runner.blocks.num_free == subject.runner.blocks.num_blocks
    chain, prompt = subject.work(Pass("chain", 40, 2)), subject.work(Pass("prefill", 0, 3))
    params, head = shapes.get_shape("tiny").num_parameters, 97 * 64
    assert chain.matrix_ops == 2 * 2 * params and prompt.matrix_ops == 2 * (3 * (params - head) + head)
    assert chain.attention_ops == 4 * 64 * 2 * (41 + 42) and prompt.attention_ops == 4 * 64 * 2 * (1 + 2 + 3)
    hybrid = ModelWork(shapes.get_shape("qwen3.5-4b"), 0.0, 32, "").work(1, 1, 10)  # 8 layers attend, 24 have states
    assert prompt.num_bytes == subject.weight_bytes and hybrid.num_bytes == 32 * 10 + 8 * 24 * 32 * 128 * 128


@pytest.mark.parametrize("name", [n for n in registry.names("formats") if scheme.get(n).kv_dtype is not None])
def test_a_cache_of_noise_in_every_format(name):
    job = Pass("chain", 20, 3)
    subject = TimedModel(tiny_model("reference"), name, [job])
    layer = subject.runner.cache.layers[0]
    assert subject.runner.cache.nbytes == cache_bytes(subject.config, name, [job])
    rows = scheme.kv_format(name).decode_kv(layer.k, layer.k_scale).flatten(0, 1)
    assert 0.7 < rows[:20].std() < 1.3, "noise, not what was never written"


RATES = {"read": (1.0, 3.0), "fp32": (5.0,), "int8": (7.0,)}


def test_a_limit_is_the_best_of_its_repetitions():
    found = Limits(2, RATES, {}, "native").merged(Limits(2, {"read": (4.0,), "fp32": (2.0,)}, {}, "native"))
    assert (found.read, found.best("fp32"), found.best("bf16")) == (4.0, 5.0, None)
    assert (found.peak("int8"), found.peak("bf16")) == (7.0, 5.0), "float32 does what has no instruction"
    assert found.rates["read"] == (1.0, 3.0, 4.0) and Limits.from_dict(found.as_dict()) == found
    for lost in ("read", "fp32"):
        told = found.as_dict()
        del told["repetitions"][lost]
        with pytest.raises(KeyError, match=lost):
            Limits.from_dict(told)


def test_every_source_measures(monkeypatch):
    monkeypatch.setattr(limits, "BYTES", 4 << 20)
    monkeypatch.setattr(limits, "SECONDS", 1e-3)
    native = registry.load("ops", "cpu").unavailable() is None
    found = measure_limits(1, repeats=2)
    assert found.source == ("native" if native else "torch")
    assert found.read > 0 and found.peak("fp32") > 0
    if native:
        assert (found.best("int8") or 0) > 0
        assert len(found.rates["read"]) == 4 and len(found.rates["fp32"]) == 2
        assert (found.best("bf16") is None) == ("bf16" not in found.instructions)
    monkeypatch.setattr(registry.load("ops", "cpu"), "unavailable", lambda: "not built")
    found = measure_limits(1, repeats=2)
    assert found.source == "torch" and found.read > 0 and found.best("int8") is None


PUBLISHED = {  # millions of parameters, as the model cards state them
    "llama-3.2-1b": 1236, "llama-3.2-3b": 3213, "llama-3.1-8b": 8030, "llama-3.1-70b": 70554, "llama-2-7b": 6738,
    "llama-2-13b": 13016, "llama-2-70b": 68977, "qwen3-0.6b": 596, "qwen3-1.7b": 1721, "qwen3-4b": 4022,
    "qwen3-8b": 8191, "mistral-7b": 7248, "smollm2-135m": 134.5, "smollm2-360m": 361.8, "tinyllama-1.1b": 1100,
    "qwen3-30b-a3b": 30532, "gpt-oss-20b": 20915, "phi-4-mini": 3836, "lfm2.5-1.2b": 1170,
}  # fmt: skip
# Of these the cards state round figures only, E4B's with embeddings.
ROUND = {"qwen3.5-4b": 4000, "gemma-4-e4b": 8000, "qwen3.6-35b-a3b": 35000, "gemma-4-26b-a4b": 25200}


def test_every_shape_has_its_published_size():
    assert set(PUBLISHED | ROUND) == set(SHAPES)
    for name, millions in (PUBLISHED | ROUND).items():
        rel = 0.1 if name in ROUND else 1e-3
        assert get_shape(name).num_parameters / 1e6 == pytest.approx(millions, rel=rel), name


def test_names():
    assert get_shape("Llama-3.2-1B") == get_shape("llama-3.2-1b")
    with pytest.raises(ConfigError, match=r"did you mean 'llama-3.2-1b'\?.*--model"):
        get_shape("lama-3.2-1b")
