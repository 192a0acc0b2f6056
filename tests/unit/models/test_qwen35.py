"""Qwen3.5: the laws with recurrent states, in the cases that broke other engines; GGUF files; the MTP block."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import lawkit
import pytest
import torch
from fixtures_gguf import write_gguf
from fixtures_models import load, oracle_logits
from lawkit import SAMPLED, Pair, TreeDrafter, knowing, make_engine, random_prompts, run, texts
from safetensors.torch import load_file, save_file

from sameseed import ops
from sameseed.batch import Rows, build_batch
from sameseed.cli.options import draft_choice
from sameseed.config import CacheConfig, EngineConfig, SpecConfig
from sameseed.engine.build import build_engine
from sameseed.errors import ConfigError, ModelLoadError
from sameseed.kvcache.blocks import MOST_UNSETTLED
from sameseed.kvcache.cache import KVCache
from sameseed.kvcache.state import RecurrentStates
from sameseed.laws.trees import Answers
from sameseed.models.config import parse_config
from sameseed.models.loader import load_model
from sameseed.models.mtp import load_mtp
from sameseed.models.qwen35 import Qwen35, Qwen35Config, mtp_names, mtp_shapes
from sameseed.models.runner import ModelRunner
from sameseed.request import Request, SamplingParams, Sequence
from sameseed.scheme import QuantScheme
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Drafter
from sameseed.tokenizer import Tokenizer

QWEN: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 5,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "rms_norm_eps": 1e-6,
    "mtp_num_hidden_layers": 1,
}
MOE: dict[str, Any] = {
    **QWEN,
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 24,
}
MOE_KEYS = {
    "expert_count": 6,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 24,
}
GGUF_KEYS = {
    "rope.dimension_count": 4,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
    "full_attention_interval": 4,
    "nextn_predict_layers": 1,
}
TEXT = random_prompts(1, seed=3, longest=60)[0] * 60


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors with the experts of a layer in two, as the published checkpoints have them."""
    found = {n: x for n, x in tensors.items() if ".experts." not in n}
    for at in {n.partition(".experts.")[0] for n in tensors.keys() - found.keys()}:
        gate, up, down = (
            torch.stack([tensors[f"{at}.experts.{e}.{part}_proj.weight"] for e in range(MOE["num_experts"])])
            for part in ("gate", "up", "down")
        )
        found |= {f"{at}.experts.gate_up_proj": torch.cat([gate, up], 1), f"{at}.experts.down_proj": down}
    return found


@pytest.fixture(scope="module", params=["dense", "moe"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny target, and a draft model that often agrees with it."""
    root, raw = tmp_path_factory.mktemp("qwen35"), {"dense": QWEN, "moe": MOE}[request.param]
    lawkit.write_model(root / "target", seed=1, dtype="float32", **raw)
    file = root / "target" / "model.safetensors"
    config = parse_config(json.loads((root / "target" / "config.json").read_text()))
    assert isinstance(config, Qwen35Config)
    block = {n: torch.randn(s) * (0.1 if len(s) == 1 else s[1] ** -0.5) for n, s in mtp_shapes(config).items()}
    save_file(stacked({**load_file(file), **block}), file)
    noise = {"dense": 0.5, "moe": 0.1}[request.param]  # the routers of another draft would choose other experts
    lawkit.write_model(root / "draft", seed=1, noise=noise, **raw)
    return root / "target", root / "draft"


@pytest.fixture(scope="module")
def pair(folders: tuple[Path, Path]) -> Pair:
    target, draft = (load_model(folder, ops.resolve()) for folder in folders)
    return Pair(target, draft, Tokenizer.from_folder(folders[0]))


def logits_of(model: Any, text: Seq[int]) -> torch.Tensor:
    """Logits [T, V], each token in a pass of its own."""
    r, seq = runner(model), Sequence(0, (), SamplingParams(), 0)
    return torch.cat([advance(r, seq, text, 1, 0, 0) for _ in text])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_logits_are_those_of_transformers(folders: tuple[Path, Path], backend: str, tmp_path: Path) -> None:
    """Without the MTP block, which transformers does not read."""
    tensors = load_file(folders[0] / "model.safetensors")
    save_file({n: x for n, x in tensors.items() if not n.startswith("mtp.")}, tmp_path / "model.safetensors")
    raw = json.loads((folders[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "mtp_num_hidden_layers": 0}))
    wanted, found = oracle_logits(tmp_path, TEXT[:60]), logits_of(load(tmp_path, backend), TEXT[:60])
    assert (found - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    assert found.argmax(1).equal(wanted.argmax(1))


def runner(model: Any, slots: int = 2) -> ModelRunner:
    c = model.config
    return ModelRunner(model, KVCache(c.kv_shapes, 32, 16, states=RecurrentStates(c.state_shapes, slots)))


def advance(r: ModelRunner, seq: Sequence, text: Seq[int], known: int, drafted: int, kept: int) -> torch.Tensor:
    """One pass: `known` tokens of the text, then a draft of which `kept` tokens are right; logits [1 + kept, V]."""
    end = seq.num_cached + known
    seq.token_ids = list(text[:end])
    assert r.blocks.reserve(seq, end + drafted)
    right = list(text[end : end + kept])
    out = r.forward([seq], Draft.chains([right + [1] * (drafted - kept)]), [known])
    r.commit([seq], [known], [list(range(kept))], out)
    return out.logits[: 1 + kept]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_rows_have_the_same_bits_in_every_pass(folders: tuple[Path, Path], backend: str) -> None:
    """Chunks of a prompt, drafts kept and rejected in part or whole, a round without a draft, a slot used again."""
    if ops.registry.load("ops", backend).unavailable() is not None:
        pytest.skip("the native module is not built")
    r, text = runner(load_model(folders[0], ops.resolve(backend)), slots=1), TEXT[:60]
    whole = Sequence(0, (), SamplingParams(), 0)
    plain = torch.cat([advance(r, whole, text, 1, 0, 0) for _ in range(len(text))])
    r.blocks.release(whole)
    seq = Sequence(1, (), SamplingParams(), 0)
    at = 0
    rounds = [
        (5, 0, 0),
        (7, 4, 4),
        (1, 4, 0),
        (1, 0, 0),
        (1, MOST_UNSETTLED, 1),
        (1, 3, 2),
        (1, 1, 0),
        (9, 6, 3),
        (1, 0, 0),
    ]
    for known, drafted, kept in rounds:
        logits = advance(r, seq, text, known, drafted, kept)
        at += known
        assert torch.equal(logits, plain[at - 1 : at + kept])
        at += kept
    r.truncate(seq, 10)  # before the stored state: the sequence starts anew
    assert seq.num_cached == 0
    assert torch.equal(advance(r, seq, text, 20, 2, 1), plain[19:21])


def test_a_branching_draft_and_a_missing_slot_are_refused(pair: Pair) -> None:
    r = runner(pair.target, slots=1)
    seq, other = Sequence(0, TEXT[:5], SamplingParams(), 0), Sequence(1, TEXT[:5], SamplingParams(), 0)
    assert r.blocks.reserve(seq, 8)
    assert not r.blocks.reserve(other, 8)
    with pytest.raises((IndexError, ValueError)):
        r.forward([seq], Draft.trees([([1, 2], [-1, -1])]), [5])
    assert r.blocks.reserve(other, 8), "after an error the slot is free"


class SomeRight(Drafter):
    """Chains of random lengths, none included, whose first tokens are right, in a random number."""

    def __init__(self, answer: Answers) -> None:
        self.answer, self.random = answer, random.Random(0)

    def propose(self, seqs: Seq[Sequence], num_draft: Seq[int]) -> Draft:
        chains = []
        for seq, most in zip(seqs, num_draft, strict=True):
            right, wrong = list(self.answer(seq)), self.random.randrange(4)
            length = self.random.randint(0, most)
            chains.append([*right[: max(0, length - wrong)], *[1] * wrong][:length])
        return Draft.chains(chains)


@pytest.mark.parametrize("method", ["some", "tree", "ngram", "suffix", "draft_model", "cascade", "first"])
@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_drafters_chunks_and_preemption_change_nothing(pair: Pair, method: str, params: dict[str, float]) -> None:
    prompts = random_prompts(5, seed=7)
    sampling = SamplingParams(max_tokens=24, ignore_eos=True, seed=5, **params)
    plain = texts(run(make_engine(pair), prompts, sampling, alone=True))
    answer = knowing(prompts, plain)
    own = {"some": SomeRight(answer), "tree": TreeDrafter(answer, lawkit.MODEL_VOCAB)}.get(method)
    engine = make_engine(
        pair, "none" if own else method, 5, rows=24, seqs=5, block=4, tokens=112, drafter=own, policy="fixed"
    )
    assert texts(run(engine, prompts, sampling)) == plain
    assert engine.scheduler.num_preemptions > 0
    assert engine.metrics.num_accepted_tokens > 0 or method in ("ngram", "suffix", "cascade")


def test_an_abort_leaves_nothing_to_the_next(pair: Pair) -> None:
    prompts = random_prompts(3, seed=9)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    plain = texts(run(make_engine(pair), prompts, params, alone=True))
    engine = make_engine(pair, seqs=1, drafter=SomeRight(knowing(prompts, plain)))
    engine.add(Request("gone", tuple(prompts[2]), params, 0))
    for _ in range(4):
        engine.step()
    engine.abort("gone")
    assert texts(run(engine, prompts, params)) == plain


def test_low_bit_drafts_in_the_targets_cache_are_refused(folders: tuple[Path, Path]) -> None:
    config = EngineConfig(spec=SpecConfig("self_quant"), max_model_len=64)
    with pytest.raises(ConfigError, match="recurrent"):
        build_engine(str(folders[0]), config)


def as_gguf(folder: Path, path: Path, without: str = "") -> Path:
    """The model of a folder as GGUF stores it: value heads in turns by key head, 1 + w in norms, -exp(A_log)."""
    raw, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    config = parse_config(raw)
    assert isinstance(config, Qwen35Config)
    inner = dict(zip(mtp_names(config), mtp_names(replace(config, in_gguf=True)), strict=True))
    heads, groups, dim = config.value_heads, config.key_heads, config.value_dim
    order = torch.arange(heads).view(groups, -1).T.flatten()
    wide = (order[:, None] * dim + torch.arange(dim)).flatten()
    mixed = torch.cat([torch.arange(config.mixed - heads * dim), config.mixed - heads * dim + wide])
    rows = {"in_proj_qkv": mixed, "conv1d": mixed, "in_proj_z": wide}
    stored = {}
    for name, x in tensors.items():
        module, _, kind = name.rpartition(".")
        for old, new in inner.items():
            name = name.replace(f"{old}.", f"{new}.") if name.startswith(f"{old}.") else name
        short = module.rsplit(".", 1)[-1]
        if short in rows:
            x = x[rows[short]]
        elif short in ("in_proj_a", "in_proj_b") or kind in ("A_log", "dt_bias"):
            x = x[order]
        elif short == "out_proj":
            x = x[:, wide]
        if x.ndim == 1 and kind in ("A_log", "weight") and "linear_attn.norm" not in name:
            x = -x.exp() if kind == "A_log" else x + 1
        at, dot, part = name.partition(".experts.")
        parts = {"gate_up_proj": ("gate_proj", "up_proj")}.get(part, (part,))
        if dot:
            sizes = zip(parts, x.chunk(len(parts), 1), strict=True)
            stored |= {f"{at}.experts.0.{p}.weight": half for p, half in sizes}
        elif not without or without not in name:
            stored[name] = x.squeeze()
    stored[f"model.layers.{config.num_layers}.nextn.embed_tokens.weight"] = torch.zeros(config.vocab_size, 32)  # unread
    raw["num_hidden_layers"] += 1
    arch, keys = ("qwen35moe", MOE_KEYS) if "num_experts" in raw else ("qwen35", {})
    return write_gguf(path, raw, stored, arch=arch, keys={**GGUF_KEYS, **keys})


def test_a_gguf_file_gives_the_same_logits(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Also with the file's matrices in 8 bits, as far as such weights differ."""
    both = [load_model(path, ops.resolve()) for path in (folders[0], as_gguf(folders[0], tmp_path / "tiny.gguf"))]
    logits = []
    for model in both:
        r, seq = runner(model), Sequence(0, (), SamplingParams(), 0)
        logits.append(torch.cat([advance(r, seq, TEXT, 1, 3, 3) for _ in range(10)]))
    assert torch.allclose(*logits, atol=1e-4 * float(logits[0].abs().max()))
    assert torch.equal(*(x.argmax(1) for x in logits))


def test_the_mtp_block_of_a_gguf_file(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """It has the logits of the folder in the reference; a file without it is refused when it should draft."""
    logits = []
    for path, backend in ((folders[0], "reference"), (as_gguf(folders[0], tmp_path / "tiny.gguf"), "auto")):
        target = load_model(path, ops.resolve(backend))
        assert isinstance(target, Qwen35)
        head = load_mtp(path, target, ops.resolve(backend), QuantScheme())
        batch = build_batch([Rows(TEXT[:9], 0, [], [], [0], True)], 16)
        states = torch.sin(torch.arange(9.0 * target.config.hidden_size)).view(9, -1)
        out, _ = head.forward(states, batch, KVCache(head.config.layer.kv_shapes, 1, 16), captured=True)
        logits.append(out)
    assert torch.allclose(*logits, atol=1e-4 * float(logits[0].abs().max()))
    path = as_gguf(folders[0], tmp_path / "cut.gguf", without="nextn.eh_proj")
    target = load_model(path, ops.resolve())
    assert isinstance(target, Qwen35)
    with pytest.raises(ModelLoadError, match="missing"):
        load_mtp(path, target, ops.resolve(), QuantScheme())


def test_the_mtp_block_drafts_the_same_text(folders: tuple[Path, Path]) -> None:
    """Its cache takes over the target's states after each round."""
    prompts = random_prompts(4, seed=4)
    for params in ({}, SAMPLED):
        sampling = SamplingParams(max_tokens=20, ignore_eos=True, seed=2, **params)
        found = []
        for spec in (SpecConfig(), SpecConfig("mtp", num_draft_tokens=3)):
            cache = CacheConfig(block_size=4, num_blocks=200)
            config = EngineConfig(max_model_len=128, max_num_rows=24, max_num_seqs=3, cache=cache, spec=spec)
            engine = build_engine(str(folders[0]), config)
            found.append(texts(run(engine, prompts, sampling)))
        assert found[0] == found[1]
        assert engine.metrics.num_drafts > 10


def test_a_whole_block_drafts_by_default(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """`--draft auto` takes it; a file whose block is cut off drafts nothing."""
    whole, cut = as_gguf(folders[0], tmp_path / "whole.gguf"), as_gguf(folders[0], tmp_path / "cut.gguf", "nextn.enorm")
    for path, drafts in ((folders[0], True), (whole, True), (cut, False), (tmp_path / "none", False)):
        assert draft_choice("auto", str(path)) == (SpecConfig("mtp") if drafts else None)
    assert draft_choice("auto", str(folders[1])) is None, "config.json names a block, of which there is no tensor"
