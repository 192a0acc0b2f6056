"""The assistant of a Gemma 4: transformers' logits at each step of a draft, the laws, and what it is refused for."""

import json
import shutil

import lawkit
import pytest
import torch
from fixtures_gguf import write_gguf
from fixtures_models import load, oracle, random_tensors
from lawkit import SAMPLED, random_prompts, run, texts
from safetensors.torch import load_file, save_file

from sameseed.batch import Rows, build_batch
from sameseed.cli.options import draft_choice, shipped
from sameseed.config import CacheConfig, EngineConfig, SpecConfig, parse_draft
from sameseed.engine.build import build_engine
from sameseed.errors import ConfigError
from sameseed.kvcache.cache import KVCache
from sameseed.models.config import model_text, parse_config
from sameseed.request import SamplingParams

TARGET = {**lawkit.FAMILIES["gemma4"], "model_type": "gemma4_text", "dtype": "float32"}
KEYS = {
    "attention.sliding_window": 20,
    "attention.sliding_window_pattern": [True, False],
    "attention.shared_kv_layers": 2,
    **dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), 16),
    "attention.key_length_swa": 8,
}
TARGET_KEYS = {
    **KEYS,
    "attention.sliding_window_pattern": [True, False] * 2,
    "final_logit_softcapping": 30.0,
    "embedding_length_per_layer_input": 8,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny target and its assistant."""
    root = tmp_path_factory.mktemp("assistant")
    lawkit.write_model(root / "target", seed=1, **TARGET)
    text = json.loads((root / "target" / "config.json").read_text())
    text |= {"num_hidden_layers": 2, "hidden_size": 24, "num_kv_shared_layers": 2, "tie_word_embeddings": True}
    text |= {"layer_types": TARGET["layer_types"][:2], "final_logit_softcapping": None}
    text |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    raw = {"architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant", "dtype": "float32"}
    raw |= {"backbone_hidden_size": 32, "text_config": text, "tie_word_embeddings": True}
    (root / "draft").mkdir()
    (root / "draft" / "config.json").write_text(json.dumps(raw))
    save_file(random_tensors(parse_config(raw)), root / "draft" / "model.safetensors")
    lawkit.write_tokenizer(root / "draft")
    return root / "target", root / "draft"


def as_gguf(folder, path):
    raw = json.loads((folder / "config.json").read_text())
    tensors, flat = random_tensors(parse_config(raw)), {**raw["text_config"], "architectures": raw["architectures"]}
    rope = {"rope_parameters": {"rope_theta": 1e6}}
    return write_gguf(path, {**flat, **rope}, tensors, arch="gemma4-assistant", keys=KEYS)


@pytest.mark.parametrize("container", ["folder", "gguf"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@torch.inference_mode()
def test_steps_are_those_of_transformers(folders, container, backend, tmp_path):
    """Four steps at one position, over 49 committed tokens, more than a window."""
    transformers = pytest.importorskip("transformers")
    target = oracle(folders[0])
    assistant, info = transformers.Gemma4AssistantForCausalLM.from_pretrained(
        folders[1], dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values())
    text = (random_prompts(1, seed=3)[0] * 50)[:50]
    known = len(text) - 1
    out = target(torch.tensor([text[:known]]), output_hidden_states=True, return_shared_kv_states=True)
    shared, state = out.shared_kv_states, out.hidden_states[-1][0, -1:]

    path = folders[1] if container == "folder" else as_gguf(folders[1], tmp_path / "draft.gguf")
    model = load(path, backend)
    cache = KVCache(((2, 8), (2, 16)), 4, 16)
    for layer, kind in zip(cache.layers, ("sliding_attention", "full_attention"), strict=True):
        for stored, values in zip((layer.k, layer.v), shared[kind], strict=True):
            stored.flatten(0, 1)[:known] = values[0].transpose(0, 1)
    token, own = text[-1], state
    for _ in range(4):
        embedding = target.get_input_embeddings()(torch.tensor([token]))
        x = torch.cat([embedding, state], 1)[None]
        at = torch.tensor([[known]])
        wanted = assistant(inputs_embeds=x, position_ids=at, shared_kv_states=shared)
        batch = build_batch([Rows([token], known - 1, [], [], [0, 1, 2, 3], True)], 16)
        logits, own = model.draft(torch.cat([embedding, own], 1), batch, cache.layers)
        assert (logits - wanted.logits[0]).abs().max() <= 2e-5 * wanted.logits.abs().max()
        token, state = int(wanted.logits.argmax()), wanted.last_hidden_state[0]
        assert int(logits.argmax()) == token


def engine(model, draft, method="assistant", policy="fixed", **more):
    spec = SpecConfig() if draft is None else SpecConfig(method, str(draft), num_draft_tokens=4, policy=policy)
    cache = CacheConfig(block_size=4, num_blocks=34)
    config = EngineConfig(max_model_len=128, max_num_rows=24, max_num_seqs=3, cache=cache, spec=spec, **more)
    return build_engine(str(model), config)


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_laws_1_and_3(folders, params):
    """With chunked prompts and too few blocks; a folder given as any draft model is known for what it is."""
    prompts = random_prompts(6, seed=4)
    sampling = SamplingParams(max_tokens=30, ignore_eos=True, seed=2, **params)
    plain = texts(run(engine(folders[0], None), prompts, sampling, alone=True))
    drafting = engine(*folders, "draft_model")
    assert drafting.drafter.name == "assistant"
    assert texts(run(drafting, prompts, sampling)) == plain
    assert texts(run(engine(*folders, policy="goodput"), prompts, sampling)) == plain, "it rests where it does not pay"
    assert drafting.metrics.num_drafts > 20 and drafting.scheduler.num_preemptions > 0


def test_a_file_beside_its_target_drafts_by_default(folders, tmp_path):
    """Named as llama.cpp names it; one of another model does not."""
    tensors, raw = load_file(folders[0] / "model.safetensors"), json.loads((folders[0] / "config.json").read_text())
    raw |= {"rope_parameters": {"rope_theta": 1e6}}
    target = write_gguf(tmp_path / "m.gguf", raw, tensors, arch="gemma4", keys=TARGET_KEYS)
    beside = as_gguf(folders[1], tmp_path / "mtp-m.gguf")
    spec = draft_choice("auto", str(target))
    assert spec == parse_draft(str(beside)) and model_text(beside) == "assistant"
    lawkit.write_model(tmp_path / "other", **{**TARGET, "hidden_size": 48})
    tensors, raw = load_file(tmp_path / "other" / "model.safetensors"), {**raw, "hidden_size": 48}
    write_gguf(target, raw, tensors, arch="gemma4", keys=TARGET_KEYS)
    shipped.cache_clear()
    assert draft_choice("auto", str(target)) == parse_draft("suffix")


def test_what_is_refused(folders, tmp_path):
    with pytest.raises(ConfigError, match="--draft"):
        engine(folders[1], None)
    lawkit.write_model(tmp_path / "other", **{**TARGET, "hidden_size": 48})
    for wrong in ("other", "llama"):
        if wrong == "llama":
            lawkit.write_model(tmp_path / "llama")
        with pytest.raises(ConfigError, match="assistant of this target"):
            engine(tmp_path / wrong, folders[1])
    with pytest.raises(ConfigError, match="assistant"):
        engine(folders[0], tmp_path / "other")
    with pytest.raises(ConfigError, match="assistant"):
        build_engine(str(folders[0]), EngineConfig(spec=parse_draft(f"ngram > {folders[1]}")))


def test_a_sequence_beyond_its_context_costs_the_others_nothing(folders, tmp_path):
    shutil.copytree(folders[1], tmp_path / "short")
    raw = json.loads((tmp_path / "short" / "config.json").read_text())
    raw["text_config"]["max_position_embeddings"] = 32
    (tmp_path / "short" / "config.json").write_text(json.dumps(raw))
    prompts, params = [[5] * 40, [6, 7, 8]], SamplingParams(max_tokens=20, ignore_eos=True)
    drafting = engine(folders[0], tmp_path / "short")
    far, near = run(drafting, prompts, params)
    assert texts([far, near]) == texts(run(engine(folders[0], None), prompts, params, alone=True))
    assert far.metrics.spec.num_drafts == 0 < near.metrics.spec.num_drafts
