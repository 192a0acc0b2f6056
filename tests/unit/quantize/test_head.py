"""A head that is rotated with its target: the same guesses from rotated hidden states."""

import json

import pytest
import torch
from fixtures_eagle import random_head, raw_config, silence, write_head
from lawkit import MODEL_VOCAB, write_model

from sameseed import ops
from sameseed.cli import main
from sameseed.config import EngineConfig, SpecConfig
from sameseed.engine.build import build_engine
from sameseed.errors import ConfigError
from sameseed.kvcache.cache import KVCache
from sameseed.models.eagle import HeadRunner
from sameseed.models.eagle_loader import load_head
from sameseed.models.head_config import parse_head_config
from sameseed.models.loader import load_model
from sameseed.quantize._head import turn_head
from sameseed.quantize._run import QuantizePlan, quantize
from sameseed.quantize.rotate import rotate_rows
from sameseed.request import SamplingParams, Sequence

SEED = 5
EMBED, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
KINDS = {
    "reduced": ("eagle3", {"draft_vocab_size": 130}, (EMBED,)),
    "all its own": ("eagle3", {"draft_vocab_size": 130}, ()),
    "shared LM head": ("eagle3", {}, (EMBED, LM_HEAD, "d2t")),
    "one norm": ("speculators", {"draft_vocab_size": 130, "norm_before_fc": True, "norm_before_residual": True}, ()),
    "EAGLE-3.1": ("eagle3", {"draft_vocab_size": 130, "fc_norm": True, "norm_output": True}, (EMBED,)),
    "Qwen3": ("eagle3", {"architectures": ["Eagle3Qwen3ForCausalLM"], "attention_bias": True}, (EMBED,)),
}


def made(root, kind):
    layout, changes, drop = KINDS[kind]
    raw = raw_config(layout, MODEL_VOCAB, [1, 2, 3], **changes)
    at = "midlayer" if layout == "eagle3" else "layers.0"
    tensors = random_head(parse_head_config(raw), 3, at)
    return write_head(root, raw, {n: t for n, t in tensors.items() if n not in drop})


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target, and the target rotated by `rotate` in 32 bits."""
    root = tmp_path_factory.mktemp("rotated")
    write_model(root / "target", num_hidden_layers=3)
    write_model(root / "draft")
    silence(root / "target", 0.05)
    return root / "target", rotated(root / "target", root / "turned")


def rotated(model, out, method="rotate"):
    return quantize(QuantizePlan(str(model), out, "fp32", method, seed=SEED)).folder


def guesses(folder, model, turned):
    """Logits and features of a head after nine tokens, from random hidden states of its target."""
    target = load_model(model, ops.resolve("reference"))
    head = load_head(folder, target, target.ops)
    c = head.config.layer
    runner = HeadRunner(head, KVCache(c.kv_shapes, 16, 4))
    generator = torch.Generator().manual_seed(2)
    states = torch.randn(9, head.config.num_captures, 32, generator=generator)
    tokens = torch.randint(0, MODEL_VOCAB, (9,), generator=generator).tolist()
    holder = Sequence(0, (), SamplingParams(), 0)
    assert runner.blocks.reserve(holder, 9)
    states = (rotate_rows(states, SEED) if turned else states).flatten(1)
    return runner.extend([holder], [tokens], [states], True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_turned_head_guesses_the_same(models, tmp_path, kind):
    target, turned = models
    head = made(tmp_path / "head", kind)
    own = turn_head(head, turned, tmp_path / "out", target if kind == "shared LM head" else None)
    for found, wanted in zip(guesses(own, turned, True), guesses(head, target, False), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_a_head_for_another_rotation_is_told(models, tmp_path, caplog):
    target, turned = models
    head = made(tmp_path / "head", "reduced")
    own = turn_head(head, turned, tmp_path / "out")

    def built(model, draft):
        caplog.clear()
        build_engine(str(model), EngineConfig(spec=SpecConfig("eagle", str(draft))))
        return caplog.text

    assert "was rotated" in built(turned, head)
    assert "rotated" not in built(turned, own) + built(target, head)
    with pytest.raises(ConfigError, match="take the head"):
        built(target, own)


def test_what_cannot_be_turned(models, tmp_path, capsys):
    target, turned = models
    head = made(tmp_path / "head", "reduced")
    with pytest.raises(ConfigError, match="no checkpoint of method rotate"):
        turn_head(head, target, tmp_path / "out")
    with pytest.raises(ConfigError, match="no draft head"):
        turn_head(target, turned, tmp_path / "out")
    with pytest.raises(ConfigError, match="--original"):
        turn_head(made(tmp_path / "sharing", "shared LM head"), turned, tmp_path / "out")
    again = turn_head(head, turned, tmp_path / "once")
    with pytest.raises(ConfigError, match="was turned before"):
        turn_head(again, turned, tmp_path / "out")
    raw = raw_config("eagle", MODEL_VOCAB)
    write_head(tmp_path / "other", raw, random_head(parse_head_config(raw), 3, "layers.0"))
    with pytest.raises(ConfigError, match="EAGLE"):
        turn_head(tmp_path / "other", turned, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_by_its_command(models, tmp_path, capsys):
    head = made(tmp_path / "head", "reduced")
    asked = ["quantize", str(head), "--head-for", str(models[1]), "-o", str(tmp_path / "out"), "--json"]
    assert main(asked) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": str(tmp_path / "out")}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rotated_for"] == SEED
    assert main([*asked, "--overwrite", "--method", "gptq"]) != 0
    assert "leave out --method" in capsys.readouterr().err
