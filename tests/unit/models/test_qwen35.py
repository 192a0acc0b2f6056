"""Qwen3.5: transformers' logits; GGUF files; the MTP block. The laws are in tests/contract/test_families.py."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import lawkit
import pytest
import torch
from fixtures_gguf import bpe_keys, write_gguf
from fixtures_layouts import fp8, gptq, modelopt_nvfp4
from fixtures_models import all_logits, load, make_runner, oracle_logits, published_experts, write_tensors
from lawkit import SAMPLED, random_prompts, run, texts
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as HFTokenizer

from sameseed import ops
from sameseed.batch import Rows, build_batch
from sameseed.cli.options import draft_choice
from sameseed.config import EngineConfig, SpecConfig, parse_draft
from sameseed.engine.build import build_engine
from sameseed.errors import ConfigError, ModelLoadError
from sameseed.kvcache.cache import KVCache
from sameseed.models.config import parse_config
from sameseed.models.loader import load_model, open_model
from sameseed.models.mtp import load_mtp
from sameseed.models.qwen35 import mtp_names, mtp_shapes
from sameseed.models.weights import weight_bytes
from sameseed.request import SamplingParams, Sequence
from sameseed.scheme import QuantScheme
from sameseed.spec.draft import Draft

QWEN, MOE = lawkit.FAMILIES["qwen3_5"], lawkit.FAMILIES["qwen3_5_moe"]
MOE_KEYS = {"expert_count": 6, "expert_used_count": 2}
MOE_KEYS |= {"expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 24}
GGUF_KEYS = {"rope.dimension_count": 4, "full_attention_interval": 4, "nextn_predict_layers": 1}
GGUF_KEYS |= {"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.inner_size": 64}
GGUF_KEYS |= {"ssm.group_count": 2, "ssm.time_step_rank": 4}
TEXT = random_prompts(1, seed=3, longest=60)[0] * 60


@pytest.fixture(scope="module", params=["dense", "moe"])
def folders(request, tmp_path_factory):
    """A tiny model with its MTP block, and one without."""
    root, raw = tmp_path_factory.mktemp("qwen35"), {"dense": QWEN, "moe": MOE}[request.param]
    save_file(published_experts(with_block(root / "target", raw)), root / "target" / "model.safetensors")
    lawkit.write_model(root / "cut", seed=1, **raw)
    return root / "target", root / "cut"


def with_block(folder, raw):
    """Write a model, and return its tensors with those of an MTP block."""
    lawkit.write_model(folder, seed=1, dtype="float32", **raw)
    config = parse_config(json.loads((folder / "config.json").read_text()))
    block = {n: torch.randn(s) * (0.1 if len(s) == 1 else s[1] ** -0.5) for n, s in mtp_shapes(config).items()}
    return {**load_file(folder / "model.safetensors"), **block}


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_logits_are_those_of_transformers(folders, backend, tmp_path):
    """Without the MTP block, which transformers does not read."""
    tensors = load_file(folders[0] / "model.safetensors")
    save_file({n: x for n, x in tensors.items() if not n.startswith("mtp.")}, tmp_path / "model.safetensors")
    raw = json.loads((folders[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "mtp_num_hidden_layers": 0}))
    wanted, found = oracle_logits(tmp_path, TEXT[:60]), all_logits(load(tmp_path, backend), TEXT[:60])
    assert (found - wanted).abs().max() <= 2e-5 * wanted.abs().max() and found.argmax(1).equal(wanted.argmax(1))


def test_a_branching_draft_and_a_missing_slot_are_refused(folders):
    r = make_runner(load_model(folders[0], ops.resolve()))
    seq, other = Sequence(0, TEXT[:5], SamplingParams(), 0), Sequence(1, TEXT[:5], SamplingParams(), 0)
    assert r.blocks.reserve(seq, 8)
    assert not r.blocks.reserve(other, 8)
    with pytest.raises((IndexError, ValueError)):
        r.forward([seq], Draft.trees([([1, 2], [-1, -1])]), [5])
    assert r.blocks.reserve(other, 8), "after an error the slot is free"


def test_a_gpu_is_refused_before_weights_are_read(folders):
    with open_model(folders[0]) as (config, source), pytest.raises(ConfigError, match="leave out --device"):
        weight_bytes(config, source, QuantScheme(), device="cuda")


def test_low_bit_drafts_in_the_targets_cache_are_refused(folders):
    with pytest.raises(ConfigError, match="recurrent"):
        build_engine(str(folders[0]), EngineConfig(spec=SpecConfig("self_quant"), max_model_len=64))


def as_gguf(folder, path, without="", alone=False):
    """The model of a folder as GGUF stores it: value heads in turns by key head, 1 + w in norms, -exp(A_log).

    `alone`: only the MTP block, with the tensors outside layers.
    """
    path.parent.mkdir(exist_ok=True)
    raw, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    config = parse_config(raw)
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
    last = f".layers.{config.num_layers}."
    stored = {n: x for n, x in stored.items() if not alone or ".layers." not in n or last in n}
    raw["num_hidden_layers"] += 1
    arch, keys = ("qwen35moe", MOE_KEYS) if "num_experts" in raw else ("qwen35", {})
    tokenizer = bpe_keys(HFTokenizer.from_file(str(folder / "tokenizer.json")), "gpt-2", {}, eos_token_id=lawkit.EOS)
    return write_gguf(path, raw, stored, arch=arch, keys={**GGUF_KEYS, **keys}, tokenizer=tokenizer)


def test_a_gguf_file_gives_the_same_logits(folders, tmp_path):
    """Also with the file's matrices in 8 bits, as far as such weights differ."""
    both = [load_model(path, ops.resolve()) for path in (folders[0], as_gguf(folders[0], tmp_path / "tiny.gguf"))]
    logits = [all_logits(model, TEXT[:40]) for model in both]
    assert torch.allclose(*logits, atol=1e-4 * float(logits[0].abs().max()))
    assert torch.equal(*(x.argmax(1) for x in logits))


def drafted(folder, backend="auto", format="auto"):
    """The logits of the MTP block of a model, and the model."""
    table, quant = ops.resolve(backend), QuantScheme.parse(format)
    target = load_model(folder, table, quant)
    head = load_mtp(folder, target, table, quant)
    batch = build_batch([Rows(TEXT[:9], 0, [], [], [0], True)], 16)
    states = torch.sin(torch.arange(9.0 * target.config.hidden_size)).view(9, -1)
    return head.run(states, batch, KVCache(head.config.layer.kv_shapes, 1, 16), captured=True)[0], target


def test_the_mtp_block_of_a_gguf_file(folders, tmp_path):
    """It has the logits of the folder in the reference, also in a file of its own; one that is cut off is refused."""
    whole = as_gguf(folders[0], tmp_path / "tiny.gguf")
    without = as_gguf(folders[0], tmp_path / "beside" / "cut.gguf", "nextn.")
    as_gguf(folders[0], tmp_path / "beside" / "mtp-tiny.gguf", alone=True)
    logits = [drafted(folders[0], "reference")[0], drafted(whole)[0], drafted(without)[0]]
    assert torch.allclose(*logits[:2], atol=1e-4 * float(logits[0].abs().max()))
    assert torch.equal(*logits[1:])
    with pytest.raises(ModelLoadError, match="missing"):
        drafted(as_gguf(folders[0], tmp_path / "cut.gguf", without="nextn.eh_proj"))


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_the_block_drafts_by_default(folders, tmp_path, params):
    """`--draft auto` takes it, as a file of its own too, if it is this model's; the text is plain decoding's."""
    cut, beside = as_gguf(folders[0], tmp_path / "cut.gguf", "nextn."), tmp_path / "mtp-model.gguf"
    lawkit.write_model(tmp_path / "small", **QWEN | {"num_hidden_layers": 4})
    for path, drafts in ((folders[0], True), (folders[1], False), (cut, False), (tmp_path / "none", False)):
        assert draft_choice("auto", str(path)) == SpecConfig("mtp" if drafts else "suffix")
    as_gguf(folders[0], beside, alone=True)
    whole, other = (as_gguf(f, tmp_path / f"{f.name}.gguf") for f in (folders[0], tmp_path / "small"))
    assert [draft_choice("auto", str(path)) for path in (whole, other)] == [SpecConfig("mtp"), SpecConfig("suffix")]
    sampling, found = SamplingParams(max_tokens=20, ignore_eos=True, seed=2, **params), []
    for path, draft in ((folders[0], None), (folders[0], "mtp"), (cut, "mtp"), (cut, str(beside))):
        options = {"window": 8} if (path, draft) == (cut, "mtp") else {}  # it changes drafts alone
        spec = SpecConfig() if draft is None else replace(parse_draft(draft), num_draft_tokens=3, options=options)
        config = EngineConfig(max_model_len=128, max_num_rows=24, max_num_seqs=3, spec=spec)
        found.append(texts(run(engine := build_engine(str(path), config), random_prompts(4, seed=4), sampling)))
        assert (engine.metrics.num_drafts > 10) == (draft is not None)
        assert not options or engine.drafter.runner.window == 8
    assert found[0] == found[1] and found[2] == found[3]
    with pytest.raises(ConfigError, match="another model"):
        build_engine(str(other), EngineConfig(max_model_len=64, spec=parse_draft(str(beside))))


@pytest.mark.parametrize("indexed", [True, False])
def test_a_block_in_a_file_that_no_index_names(folders, tmp_path, indexed):
    """Of that file only the block is read."""
    tensors = load_file(folders[0] / "model.safetensors")
    block = {name: x for name, x in tensors.items() if name.startswith("mtp.")}
    rest = {name: x for name, x in tensors.items() if name not in block}
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((folders[0] / file).read_bytes())
    save_file(rest, tmp_path / "model.safetensors")
    save_file({**block, "lm_head.weight": torch.zeros(1)}, tmp_path / "model-mtp.safetensors")
    if indexed:
        index = {"weight_map": dict.fromkeys(rest, "model.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert draft_choice("auto", str(tmp_path)) == SpecConfig("mtp")
    heads = []
    for folder in (folders[0], tmp_path):
        target = load_model(folder, ops.resolve())
        heads.append(load_mtp(folder, target, ops.resolve(), QuantScheme()).weights.fc)
    assert all(torch.equal(heads[0].parts[part], heads[1].parts[part]) for part in heads[0].parts)


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
QUANTIZED = {
    "fp8": (FP8 | {"modules_to_not_convert": ["lm_head", "mtp.fc"]}, fp8("block", "weight_scale_inv")),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": ["lm_head"]}, modelopt_nvfp4),
    "auto-round": ({"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}, gptq(group=32)),
}


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("raw", [QWEN, MOE], ids=["dense", "moe"])
def test_the_block_of_a_quantized_folder(name, raw, tmp_path):
    """It drafts as the matrices do that its codes and scales mean; the folder runs without it, too."""
    config, writer = QUANTIZED[name]
    sizes = dict.fromkeys([n for n in ("intermediate_size", *raw) if n.endswith("intermediate_size")], 160)
    meant, stored, generator = with_block(tmp_path / "meant", raw | sizes), {}, torch.Generator().manual_seed(1)
    for key, value in meant.items():
        at = key.replace("model.", "model.language_model.", 1)
        made, meant[key] = {at: value}, value
        if key.endswith(("_proj.weight", "in_proj_qkv.weight")):
            made, meant[key] = writer(value, at.removesuffix(".weight"), generator)
        stored |= made
    text = json.loads((tmp_path / "meant" / "config.json").read_text())
    wrapped = {"architectures": [text["architectures"][0].replace("CausalLM", "ConditionalGeneration")]}
    for folder, tensors in ((tmp_path / "meant", meant), (tmp_path / "stored", stored)):
        folder.mkdir(exist_ok=True)
        write_tensors(folder, tensors)
    settings = wrapped | {"text_config": text, "quantization_config": config}
    (tmp_path / "stored" / "config.json").write_text(json.dumps(settings))
    assert draft_choice("auto", str(tmp_path / "stored")) == SpecConfig("mtp")
    found = []
    for folder in (tmp_path / "meant", tmp_path / "stored"):
        logits, target = drafted(folder, "reference", "fp32")
        found.append(torch.cat([logits, all_logits(target, TEXT[:9])]))
    torch.testing.assert_close(*found)


def test_a_block_beside_a_file_of_the_hub_drafts_too(folders, tmp_path):
    """As a download leaves the hub's cache; in a process of its own, as the hub's library reads its settings once."""
    place = tmp_path / "hub" / "models--org--m"
    snapshot = place / "snapshots" / ("1" * 40)
    for path in (snapshot, place / "refs"):
        path.mkdir(parents=True)
    (place / "refs" / "main").write_text(snapshot.name)
    as_gguf(folders[0], snapshot / "m-Q8_0.gguf", "nextn.")
    as_gguf(folders[0], snapshot / "mtp-m-Q8_0.gguf", alone=True)
    ask = "from sameseed.cli.options import draft_choice; print(draft_choice('auto', 'org/m:Q8_0').method)"
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "mtp", done.stderr
