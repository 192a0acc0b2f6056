"""Profiles of tiny shapes. No test asserts a time; the tests check the order, shape and consistency of results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures_models import backends

from sameseed import devices
from sameseed.errors import ConfigError, RegistryError
from sameseed.measure import grid, limits, profiler, shapes
from sameseed.measure.costs import Cost, Profile
from sameseed.measure.limits import from_rates
from sameseed.measure.passes import Pass, TimedModel, least_work
from sameseed.measure.profiler import profile
from sameseed.report import record, schemas

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
SMALL: dict[str, Any] = {
    "rows": (2, 4),
    "contexts": (8, 40),
    "prefill_tokens": 24,
    "batch_sizes": (2,),
    "repeats": 3,
    "seconds": 0.01,
    "threads": 1,
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A shape "tiny" and limits that are measured in a moment; thread counts are restored afterwards."""
    monkeypatch.setattr(shapes, "SHAPES", {**shapes.SHAPES, "tiny": TINY})
    monkeypatch.setattr(limits, "BYTES", 1 << 20)
    monkeypatch.setattr(limits, "SECONDS", 1e-4)
    threads, native = torch.get_num_threads(), devices.native_threads()
    yield
    profiler.ops.set_num_threads(native)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", backends())
def test_everything_is_measured(backend: str) -> None:
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


def test_json_and_back(tmp_path: Path) -> None:
    found = profile("tiny", draft="tiny", **SMALL)
    data = found.as_dict()
    assert next(iter(data)) == "schema" and data["schema"] == "sameseed.profile/1"
    assert {"machine", "limits", "shape", "costs", "prefill", "batch", "threads", "commit", "date"} <= set(data)
    assert {"format", "kv_format", "context", "rows", "ms", "c", "p10", "p90", "repeats"} <= set(data["costs"][0])
    assert Profile.from_dict(json.loads(json.dumps(data))) == found
    record.append(tmp_path / "r.jsonl", data)
    assert record.read(tmp_path / "r.jsonl") == [json.loads(json.dumps(data))]
    for broken in ({**data, "schema": "other"}, {k: v for k, v in data.items() if k != "limits"}):
        with pytest.raises(ConfigError, match="profile"):
            Profile.from_dict(broken)
    with pytest.raises(ConfigError, match=r"lacks 'costs'.*sameseed profile"):
        schemas.check({k: v for k, v in data.items() if k != "costs"})


def test_a_checkpoint(pair_folders: tuple[Path, Path]) -> None:
    found = profile(model=str(pair_folders[0]), formats=("auto",), **SMALL)
    assert found.shape["name"] == pair_folders[0].name and len(found.costs) == 6


def made(*points: tuple[int, int, float]) -> Profile:
    """A profile of (context, rows, ms) in "w4a8"."""
    base = {c: ms for c, rows, ms in points if rows == 1}
    costs = [Cost("w4a8", "bf16", c, m, ms, ms / base[c], ms, ms, 3, 1.0, 1.0) for c, m, ms in points]
    limit = from_rates(1, {"read": (1.0,), "fp32": (1.0,)}, {}, "native")
    return Profile({"name": "x"}, tuple(costs), (), (), (), limit)


def test_interpolation() -> None:
    found = made((0, 1, 10.0), (0, 4, 13.0), (0, 8, 21.0), (100, 1, 20.0), (100, 4, 40.0), (100, 8, 40.0))
    assert found.ms("w4a8", 4) == 13.0
    assert found.ms("w4a8", 2) == 11.0
    assert found.ms("w4a8", 6) == 17.0
    assert found.ms("w4a8", 10) == 25.0, "beyond the last: along the last two"
    assert found.ms("w4a8", 10, 100) == 40.0
    assert found.ms("w4a8", 4, 50) == 26.5
    assert found.ms("w4a8", 1, 200) == 30.0
    assert found.c("w4a8", 4, 100) == 2.0 and found.c("w4a8", 1, 33) == 1.0
    assert made((16, 1, 10.0)).c("w4a8", 8, 4000) == 1.0, "one point is all there is"
    falling = made((0, 1, 10.0), (0, 2, 12.0), (0, 4, 11.0))
    assert falling.ms("w4a8", 8) == 11.0, "noise is not carried on"
    with pytest.raises(ConfigError, match="did you mean 'w4a8'"):
        found.c("w4a16", 2)
    with pytest.raises(ConfigError, match="at least 1 row"):
        found.ms("w4a8", 0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"formats": ("w4a7",)}, "did you mean"),
        ({"formats": ()}, "at least one format"),
        ({"formats": ("bf16", "bf16")}, "each once"),
        ({"formats": ("w8a8-g128",)}, "groups of 128 do not divide"),
        ({"rows": (4, 2)}, "ascending"),
        ({"rows": (0, 2)}, "from 1 on"),
        ({"rows": ()}, "rows is empty"),
        ({"rows": (66,)}, "up to 65"),
        ({"contexts": (125,)}, "lower the context to 124"),
        ({"kv_format": "nf4"}, "does not serve the KV cache"),
        ({"seconds": 0}, "above 0"),
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"backend": "cpx"}, "did you mean 'cpu'"),
        ({"draft": "qwen3-0.7b"}, "did you mean"),
        ({"draft_formats": ("int5",)}, "did you mean"),
    ],
)
def test_bad_input_is_refused_before_any_work(
    given: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "measure_limits", lambda threads: pytest.fail("work was begun"))
    with pytest.raises((ConfigError, RegistryError), match=words):
        profile("tiny", **{**SMALL, **given})


def test_too_little_memory_is_said_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "measure_limits", lambda threads: pytest.fail("work was begun"))
    monkeypatch.setattr(profiler, "available_memory", lambda: 8 << 30)
    with pytest.raises(ConfigError, match=r"takes about 15\.\d GiB in bf16 and 7\.5 GiB are free"):
        profile("llama-3.1-8b", formats=("w4a8", "bf16"))
    with pytest.raises(ConfigError, match="either a shape"):
        profile()


def test_an_interruption_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, count = TimedModel.seconds, 0

    def interrupted(self: TimedModel, job: Pass) -> float:
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
    assert replace(found, interrupted=False).c("bf16", 1) == 1.0
    count, stop = 0, 4  # during the warm-up
    with pytest.raises(KeyboardInterrupt):
        profile("tiny", formats=("bf16", "fp32"), **SMALL)


def test_passes_run_as_verification_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pending token and a chain after it, logits of all rows; blocks are freed, no row stays cached."""
    x = profiler.Profiler(grid.ProfileGrid(**SMALL), "tiny").candidates[0]
    p = profiler.Profiler(grid.ProfileGrid(**SMALL), "tiny")
    p._load(x, lambda *args: None)
    subject = x.subject
    assert subject is not None
    forward, seen = subject.runner.forward, list[tuple[int, ...]]()

    def watch(seqs: Any, draft: Any, num_pending: Any, *more: Any, **named: Any) -> Any:
        out = forward(seqs, draft, num_pending, *more, **named)
        seen.append((len(seqs), seqs[0].num_cached, num_pending[0], len(draft.nodes(0)[0]), len(out.logits)))
        return out

    monkeypatch.setattr(subject.runner, "forward", watch)
    for job in (Pass("chain", 40, 4), Pass("prefill", 0, 24), Pass("batch", 8, 2)):
        subject.seconds(job)
    assert list(dict.fromkeys(seen)) == [(1, 40, 1, 3, 4), (1, 0, 24, 0, 1), (2, 8, 1, 0, 2)]
    assert subject.runner.blocks.num_free == subject.runner.blocks.num_blocks
    assert all(layer.k.float().std() > 0.5 for layer in subject.runner.cache.layers)
    chain, prompt = subject.work(Pass("chain", 40, 2)), subject.work(Pass("prefill", 0, 3))
    params, head = shapes.get_shape("tiny").num_parameters, 97 * 64
    assert chain.matrix_ops == 2 * 2 * params and prompt.matrix_ops == 2 * (3 * (params - head) + head)
    assert chain.attention_ops == 4 * 64 * 2 * (41 + 42) and prompt.attention_ops == 4 * 64 * 2 * (1 + 2 + 3)
    hybrid = least_work(shapes.get_shape("qwen3.5-4b"), 0.0, 32.0, 10, 1, 1, 1)  # 8 layers attend, 24 have states
    assert prompt.num_bytes == subject.weight_bytes and hybrid.num_bytes == 32 * 10 + 8 * 24 * 32 * 128 * 128
