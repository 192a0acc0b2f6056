"""A twin computes what its small model computes, also in `transformers`; its padding looks like real weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures_models import all_logits, llama_shape as shape, oracle_logits, prompt
from lawkit import write_model
from safetensors import safe_open

from sameseed import ops
from sameseed.errors import ConfigError, ModelSaveError
from sameseed.measure.shapes import SHAPES, get_shape
from sameseed.models.checkpoint import Checkpoint
from sameseed.models.config import ModelConfig, parse_config, read_json
from sameseed.models.llama import Llama
from sameseed.models.loader import load_model, read_config
from sameseed.models.weights import expected_shapes, read_weights
from sameseed.scheme import QuantScheme
from sameseed_lab.twin import files, find_shape, make_twin
from sameseed_lab.twin.layout import make_layout
from sameseed_lab.twin.source import TwinSource

TOKENS = prompt(40)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


# The source: 304 tokens, hidden 32, 2 layers, 4 heads and 2 KV heads of 8, feed-forward 48.
FITTING = {
    "powers of 4": shape(512, (8, 4, 32)), "two copies": shape(384, (8, 4, 16)), "packed": shape(65, (8, 4, 16)),
    "any head_dim": shape(320, (4, 2, 12)), "large heads": shape(300, (4, 2, 64)),
    "surplus queries": shape(128 + 1, (18, 3, 32)), "KV heads repeated": shape(200, (6, 6, 32)),
    "no more tokens": shape(64, (4, 2, 16), vocab=304), "as many layers": shape(160, (4, 2, 8), layers=2, inner=48),
}  # fmt: skip
SOURCES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "llama3": {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 32}},
    "new keys": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}},
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("sources")

    def get(name: str) -> Path:
        if not (root / name).exists():
            write_model(root / name, model_type="llama", **SOURCES[name])
        return root / name

    return get


def logits(config: ModelConfig, source: Any) -> torch.Tensor:
    chosen = ops.resolve("auto")
    return all_logits(Llama(config, read_weights(config, source, QuantScheme.parse("fp32"), chosen), chosen), TOKENS)


def twin_logits(folder: Path, shape: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [T, V] of a model and [T, V'] of its twin."""
    config = read_config(folder)
    with Checkpoint(folder) as checkpoint:
        checkpoint.check(config)
        layout = make_layout(config, shape, read_json(folder / "config.json"))
        return logits(config, checkpoint), logits(layout.config, TwinSource(layout, checkpoint))


def assert_same_law(small: torch.Tensor, twin: torch.Tensor, tolerance: float = 2e-4) -> None:
    """Padding tokens have no probability; the others have that of the small model."""
    size = small.shape[1]
    if twin.shape[1] > size:
        assert (twin[:, size:].amax(1) < twin[:, :size].amin(1) - 40).all()
    torch.testing.assert_close(twin.log_softmax(-1)[:, :size], small.log_softmax(-1), atol=tolerance, rtol=0)


@pytest.mark.parametrize("fit", FITTING)
def test_a_twin_computes_its_model(sources: Callable[[str], Path], fit: str) -> None:
    assert_same_law(*twin_logits(sources("plain"), FITTING[fit]))


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("fit", ["two copies", "any head_dim"])
def test_sources(sources: Callable[[str], Path], name: str, fit: str) -> None:
    assert_same_law(*twin_logits(sources(name), FITTING[fit]))


@pytest.mark.parametrize("heads", [(8, 4, 16), (8, 4, 32)])
def test_a_tied_shape_needs_no_other_head(sources: Callable[[str], Path], heads: tuple[int, int, int]) -> None:
    small, twin = twin_logits(sources("tied"), shape(384, heads, tied=True))
    assert_same_law(small, twin)
    shift = twin[:, : small.shape[1]] - small  # the constant adds the same value for every token
    assert (shift - shift.mean(1, keepdim=True)).abs().max() < 2e-4


def test_in_its_own_shape_a_model_is_its_own_twin(sources: Callable[[str], Path]) -> None:
    config = read_config(sources("plain"))
    with Checkpoint(sources("plain")) as checkpoint:
        checkpoint.check(config)
        layout = make_layout(config, config, read_json(sources("plain") / "config.json"))
        assert layout.config.rms_eps == config.rms_eps and layout.config.rope == config.rope
        twin = TwinSource(layout, checkpoint)
        for name in expected_shapes(config):
            assert torch.equal(twin.tensor(name), checkpoint.tensor(name)), name


def test_a_trained_model_in_bf16_keeps_its_bits() -> None:
    """Live weights are the small model's times powers of two: in a shape of powers of 4, bf16 holds them exactly."""
    from sameseed.models.loader import resolve_model

    folder = resolve_model("embedded")
    config = read_config(folder)
    layout = make_layout(config, get_shape("llama-3.1-8b"), read_json(folder / "config.json"))
    with Checkpoint(folder) as checkpoint:
        checkpoint.check(config)
        twin = TwinSource(layout, checkpoint)
        last = layout.layers[-1]
        q = twin.rows(f"model.layers.{last}.self_attn.q_proj.weight", 128, 256)  # head 1
        own = checkpoint.rows("model.layers.9.self_attn.q_proj.weight", 32, 64)
        assert q.dtype == torch.bfloat16
        assert torch.equal(q[::4, :256], own * 2)  # pair i of the big head's 64 is pair i / 4 of the small head's 16
        norm = twin.tensor(f"model.layers.{last}.input_layernorm.weight")
        assert norm.dtype == torch.bfloat16
        assert torch.equal(norm[:256] * 4, checkpoint.tensor("model.layers.9.input_layernorm.weight"))


def test_what_is_padded_looks_like_weights(sources: Callable[[str], Path]) -> None:
    config = read_config(sources("plain"))
    big = shape(512, (8, 4, 32), vocab=400, inner=700, layers=4)
    with Checkpoint(sources("plain")) as checkpoint:
        checkpoint.check(config)
        layout = make_layout(config, big, read_json(sources("plain") / "config.json"))
        assert layout.layers == (0, 2)
        twin = TwinSource(layout, checkpoint)
        for name, size in expected_shapes(layout.config).items():
            if len(size) == 1:
                continue
            weight = twin.tensor(name)
            live = ".layers." not in name or int(name.split(".")[2]) in layout.layers
            empty = (weight == 0).all(1)  # rows that are exactly zero in any number format
            if "v_proj" in name:
                assert int((~empty).sum()) == (16 if live else 0)
            elif "up_proj" in name:
                assert int((~empty).sum()) == (48 if live else 0)
            elif "k_proj" in name:
                assert int(empty.sum()) == (2 * (32 - 8) if live else 0)  # rows beside the live ones of their heads
            else:
                assert not empty.any()
                assert live or weight.std() * math.sqrt(size[1]) == pytest.approx(1, rel=0.05)


def test_transformers_agrees(sources: Callable[[str], Path], tmp_path: Path) -> None:
    for name, big in (("tied", shape(384, (8, 4, 16), tied=True)), ("new keys", shape(300, (6, 3, 12)))):
        twin = make_twin(big, str(sources(name)), tmp_path / name)
        assert_same_law(oracle_logits(sources(name), TOKENS), oracle_logits(twin.folder, TOKENS))


def test_it_is_written_in_pieces(
    sources: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "CHUNK", 4096)
    asked = []
    rows = TwinSource.rows

    def spy(self: TwinSource, name: str, start: int, stop: int) -> torch.Tensor:
        out = rows(self, name, start, stop)
        asked.append(out.numel())
        return out

    monkeypatch.setattr(TwinSource, "rows", spy)
    seen: list[tuple[int, int]] = []
    big = FITTING["powers of 4"]
    twin = make_twin(big, str(sources("plain")), tmp_path / "t", progress=lambda *x: seen.append(x), shard=10**6)
    assert max(asked) <= 4096
    assert seen[-1][0] == seen[-1][1] == sum(math.prod(s) for s in expected_shapes(twin.layout.config).values())
    index = json.loads((twin.folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == twin.num_bytes and len(set(index["weight_map"].values())) > 2
    with Checkpoint(sources("plain")) as checkpoint:
        checkpoint.check(read_config(sources("plain")))
        source = TwinSource(twin.layout, checkpoint)
        for name, file in index["weight_map"].items():
            with safe_open(twin.folder / file, "pt") as read:
                assert torch.equal(read.get_tensor(name), source.tensor(name)), name
    load_model(twin.folder, ops.resolve("auto"))
    assert read_config(twin.folder) == twin.layout.config


def test_a_parallel_draft_stays_one(tmp_path: Path) -> None:
    write_model(tmp_path / "small", model_type="llama", pard_token=3, spd_type="pard", para_num=8)
    twin = read_config(make_twin(FITTING["packed"], str(tmp_path / "small"), tmp_path / "twin").folder)
    assert (twin.mask_token, twin.num_parallel) == (3, 8)


# --- bad input ---


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 31}, "hidden_size 31.*needs 32"),
        ({"intermediate_size": 47}, "intermediate_size 47.*needs 48"),
        ({"num_layers": 1, "windows": (None,)}, "num_layers 1.*needs 2"),
        ({"num_heads": 3, "num_kv_heads": 3}, "num_heads 3.*needs 4"),
        ({"num_kv_heads": 1}, "num_kv_heads 1.*needs 2"),
        ({"num_heads": 4, "num_kv_heads": 3}, r"num_kv_heads 3.*needs 4 \(2 for each of its 2\)"),
        ({"num_heads": 4, "num_kv_heads": 4, "hidden_size": 31}, "hidden_size"),
        ({"num_heads": 16, "num_kv_heads": 16, "head_dim": 6}, "head_dim 6.*needs 8"),
        ({"vocab_size": 303}, "vocab_size 303.*needs 304"),
        ({"hidden_size": 64, "head_dim": 16}, r"needs 65 \(head_dim 16 over 8.*padded vocabulary"),
        ({"hidden_size": 32}, r"needs 33 \(a padded vocabulary"),
        ({"tied_embeddings": True}, "ties its head"),
        ({"head_dim": 62}, "head_dim 62 cannot carry"),
    ],
)
def test_what_does_not_fit_is_named(sources: Callable[[str], Path], change: dict[str, Any], named: str) -> None:
    folder = sources("plain")
    with pytest.raises(ConfigError, match=named):
        make_layout(
            read_config(folder), replace(shape(512, (4, 2, 32)), **change), read_json(folder / "config.json"), "s"
        )


def test_sources_that_are_no_plain_llama() -> None:
    for change in ({"attention_bias": True}, {"mlp_bias": True}):
        with pytest.raises(ConfigError, match="biases"):
            make_layout(parse_config({**SHAPES["llama-3.2-1b"], **change}), get_shape("llama-3.1-8b"), {})
    with pytest.raises(ConfigError, match="norms of queries"):
        make_layout(get_shape("qwen3-0.6b"), get_shape("qwen3-8b"), {})
    with pytest.raises(ConfigError, match="use a model of"):
        find_shape("qwen3-30b-a3b")


def test_a_full_disk_is_found_before_anything_is_written(
    sources: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: SimpleNamespace(free=files.SPARE + 1000))
    with pytest.raises(ModelSaveError, match=r"needs 0\.0 GB .* make room"):
        make_twin(FITTING["two copies"], str(sources("plain")), tmp_path / "deep" / "t")
    assert not list(tmp_path.iterdir())
