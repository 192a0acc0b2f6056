"""Tiny random checkpoints of every model of the family, and the ways to run them."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sameseed import hub, ops, registry, scheme
from sameseed.batch import Rows, build_batch
from sameseed.errors import ModelLoadError
from sameseed.kvcache.cache import KVCache
from sameseed.kvcache.state import RecurrentStates
from sameseed.measure import limits, shapes
from sameseed.models.config import family, parse_config
from sameseed.models.decoder import Decoder
from sameseed.models.layers import rope_table
from sameseed.models.loader import load_model, resolve_model
from sameseed.models.runner import ModelRunner
from sameseed.models.weights import TensorSource, expected_shapes, read_weights
from sameseed.request import SamplingParams, Sequence
from sameseed.scheme import QuantScheme
from sameseed.spec.draft import Draft

SHARED = Path(__file__).parents[2] / "shared" / "data"
VOCAB = 97  # odd, so that kernels also meet tiles that are not full


def need(path):
    """`path`, or skip the test with the reason."""
    if not path.exists():
        pytest.skip(f"{path.name} is not here (data beside the repository)")
    return path


def embedded(name="embedded"):
    """The folder of an embedded model; skips the test in a checkout without its weights."""
    folder = resolve_model(name)
    if not (folder / "model.safetensors").exists():
        pytest.skip(f"{name}: its weights are not in this checkout; `sameseed train` makes them")
    return folder


def others_model(name):
    """The first file of $SAMESEED_MODELS with this name; skips the test where there is none."""
    found = sorted(Path(os.environ.get(hub.MODELS, "nowhere")).glob(f"{name}*.gguf"))
    if not found:
        pytest.skip(f"{hub.MODELS} names no folder with {name}")
    return found[0]


def backends():
    """The backends that can run on this machine's CPU."""
    modules = {name: registry.load("ops", name) for name in registry.names("ops")}
    return [n for n, m in modules.items() if "cpu" in getattr(m, "DEVICES", ("cpu",)) and m.unavailable() is None]


BASE = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3_ROPE = {  # with head_dim 12: frequencies in each of the three bands
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
PHI4 = {
    "hidden_size": 64, "original_max_position_embeddings": 64, "pad_token_id": 0, "tie_word_embeddings": True,
    "sliding_window": None,
}  # fmt: skip
GEMMA4 = {
    "model_type": "gemma4_text", "head_dim": 16, "global_head_dim": 32, "tie_word_embeddings": True,
    "sliding_window": 7, "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One kind of model: its architecture, settings over BASE, length of the test prompt.

    `without` removes the feature that the variant tests from our config or weights. The logits must then be wrong;
    otherwise the test would not notice that the feature is missing.
    """

    architecture: str
    settings: dict[str, Any] = field(default_factory=dict)
    length: int = 24
    without: Callable[[Decoder], None] | None = None

    @property
    def raw(self):
        """config.json in its newer form (rope_parameters)."""
        kind = self.architecture.removesuffix("ForCausalLM").lower()
        return {"architectures": [self.architecture], "model_type": kind, **BASE, **_plain(10000.0), **self.settings}


def _config(**changes):
    def without(model):
        model.config = replace(model.config, **changes)

    return without


_no_window, _all_rotate = _config(windows=(None,) * 3), _config(still_layers=frozenset())


def _rope(**changes):
    def without(model):
        model.rope = rope_table(replace(model.config.rope, **changes), model.config.head_dim, model.max_model_len)

    return without


def _one_tap(model):
    for layer in model.weights.layers:
        if layer.mixer is not None:
            layer.mixer[:-1] = 0


def _drop(*names):
    def without(model):
        layers = tuple(replace(layer, **dict.fromkeys(names)) for layer in model.weights.layers)
        model.weights = replace(model.weights, layers=layers)

    return without


GRANITE = {
    "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.3, "logits_scaling": 2.5,
    "rms_norm_eps": 1e-2,
}  # fmt: skip
GRANITE4 = {
    **GRANITE, "layer_types": ["full_attention"] * 3, "num_local_experts": 0, "shared_intermediate_size": 72,
    "position_embedding_type": "rope", "mamba_n_heads": 8,
}  # fmt: skip


def _plain(theta):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


VARIANTS = {
    "llama2": Variant("LlamaForCausalLM", {"num_key_value_heads": 4}),
    "llama3": Variant("LlamaForCausalLM", {**_plain(500000.0), "num_key_value_heads": 1}),
    "llama3.1": Variant("LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE}, 96, _rope(kind="default")),
    "llama3.2": Variant(
        "LlamaForCausalLM",
        {"rope_parameters": {**LLAMA3_ROPE, "factor": 32.0}, "tie_word_embeddings": True, "head_dim": 16},
        100, _rope(kind="default"),
    ),
    "llama-linear": Variant(
        "LlamaForCausalLM", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
        without=_rope(kind="default"),
    ),
    "llama-biases": Variant(
        "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True},
        without=_drop("o_bias", "gate_up_bias", "down_bias"),
    ),
    "mistral": Variant("MistralForCausalLM", {"sliding_window": 7, "head_dim": 12}, 40, _no_window),
    "mistral-full": Variant("MistralForCausalLM", {"sliding_window": None, "head_dim": 12}),
    "qwen2": Variant("Qwen2ForCausalLM", without=_drop("qkv_bias")),
    "qwen2.5-tied": Variant(
        "Qwen2ForCausalLM", {"tie_word_embeddings": True, **_plain(1000000.0)}, without=_drop("qkv_bias")
    ),
    "qwen2-window": Variant(
        "Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}, 40,
        _config(windows=(6,) * 3),
    ),
    "qwen3": Variant("Qwen3ForCausalLM", {"head_dim": 20, "max_window_layers": 3}, without=_drop("q_norm", "k_norm")),
    "qwen3-biases": Variant(
        "Qwen3ForCausalLM", {"head_dim": 8, "attention_bias": True}, without=_drop("qkv_bias", "o_bias")
    ),
    "smollm3": Variant("SmolLM3ForCausalLM", {"num_hidden_layers": 5, "pad_token_id": 0}, without=_all_rotate),
    "granite": Variant("GraniteForCausalLM", GRANITE),
    "granite4": Variant("GraniteMoeHybridForCausalLM", GRANITE4),
    "granite4-still": Variant(
        "GraniteMoeHybridForCausalLM", {**GRANITE4, "position_embedding_type": None}, without=_all_rotate
    ),
    "ministral3": Variant(
        "Ministral3ForCausalLM",
        {"head_dim": 12, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
            "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        }},
        60, _rope(kind="default"),
    ),
    "phi4-mini": Variant(
        "Phi3ForCausalLM",
        {**PHI4, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 64, "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0],
            "long_factor": [1.0, 1.5, 2.0, 4.0, 6.0, 9.0],
        }},
        100, _rope(long_factors=()),
    ),
    "lfm2": Variant(
        "Lfm2ForCausalLM",
        {
            "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"], "norm_eps": 1e-5,
            "block_ff_dim": 100, "block_multiple_of": 24, "tie_word_embeddings": True, "conv_L_cache": 4,
        },
        without=_one_tap,
    ),
    "phi3": Variant("Phi3ForCausalLM", {**PHI4, "sliding_window": 7}, 40, _no_window),
    "gemma3": Variant(
        "Gemma3ForCausalLM",
        {  # the sixth layer sees all tokens
            "model_type": "gemma3_text", "num_hidden_layers": 7, "head_dim": 16, "query_pre_attn_scalar": 16,
            "tie_word_embeddings": True, "sliding_window": 7, "final_logit_softcapping": 8.0, "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        40, _config(windows=(7,) * 7),
    ),
    "gemma4": Variant(
        "Gemma4ForCausalLM",
        {  # two sizes of heads; values that are keys
            **GEMMA4, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 8.0,
        },
        40,
    ),
    "gemma4-e": Variant(
        "Gemma4ForCausalLM",
        {  # shared keys and values; inputs of each layer
            **GEMMA4, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
        40,
    ),
}  # fmt: skip


def random_tensors(config, seed=0, dtype=torch.float32):
    """Weights that make every part matter: sharp attention, norms away from 1, biases away from 0, logits of size 2."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name, shape):
        noise = torch.randn(shape, generator=generator)
        if name.endswith((".bias", ".sinks")):
            return 0.5 * noise
        if len(shape) == 1:
            return 1 + 0.3 * noise
        return noise if "embed_tokens" in name and not config.tied_embeddings else 1.5 * noise / shape[1] ** 0.5

    return {name: draw(name, shape).to(dtype) for name, shape in expected_shapes(config).items()}


def write_config(folder, raw):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))


def write_checkpoint(folder, variant, seed=0, dtype=torch.float32):
    """Write config.json and one safetensors file of a variant with random weights."""
    raw = {**variant.raw, "dtype": str(dtype).removeprefix("torch.")}
    write_config(folder, raw)
    save_file(random_tensors(parse_config(raw), seed, dtype), folder / "model.safetensors", {"format": "pt"})
    return folder


def write_shards(folder, tensors, num_shards=3):
    """Write the tensors as several files and an index."""
    names = sorted(tensors)
    weight_map = {}
    for i in range(num_shards):
        file = f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {n: tensors[n].contiguous() for n in names[i::num_shards]}
        save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_tensors(folder):
    return load_file(folder / "model.safetensors")


def write_tensors(folder, tensors):
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


def prompt(length, seed=1):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def oracle(folder):
    """The checkpoint as `transformers` runs it: float32, eager attention."""
    transformers = pytest.importorskip("transformers")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True, output_loading_info=True
    )
    # transformers fills missing tensors with random values and ignores extra ones: then it would be no oracle.
    faults = {kind: found for kind, found in info.items() if found}
    assert not faults, f"transformers reads the checkpoint otherwise: {faults}"
    return model.eval()


@torch.inference_mode()
def oracle_logits(folder, token_ids):
    """Logits [T, V] of every position by `transformers`."""
    return oracle(folder)(torch.tensor([list(token_ids)]), use_cache=False).logits[0]


def load(folder, backend="reference", weights="auto"):
    return load_model(folder, ops.resolve(backend), QuantScheme.parse(weights))


def joined_experts(tensors):
    """The tensors, with those of all experts of a layer as one under the name of expert 0."""
    found = {n: t for n, t in tensors.items() if ".experts." not in n}
    for name in (n for n in tensors if ".experts.0." in n):
        at, _, part = name.partition(".experts.0.")
        count = sum(n.startswith(f"{at}.experts.") and n.endswith(f".{part}") for n in tensors)
        found[name] = torch.stack([tensors[f"{at}.experts.{e}.{part}"] for e in range(count)])
    return found


def published_experts(tensors, interleaved=False):
    """Experts in two tensors a layer, as checkpoints have them; `interleaved`: as gpt-oss, inputs before outputs."""
    joined, found = joined_experts(tensors), dict[str, Tensor]()
    for name, value in joined.items():
        stem, (part, kind) = name.replace(".experts.0.", ".experts."), name.split(".")[-2:]
        stacked = stem.removesuffix(".weight").replace(".bias", "_bias")
        if ".experts." not in name:
            found[name] = value
        elif part != "up_proj":
            up = joined.get(name.replace("gate", "up"), value)
            both = torch.stack([value, up], 2).flatten(1, 2) if interleaved else torch.cat([value, up], 1)
            value = value if part == "down_proj" else both
            value = value.mT if interleaved and kind == "weight" else value
            found[stacked.replace("gate_proj", "gate_up_proj")] = value.contiguous()
    return found


def make_runner(model, block_size=16, num_blocks=64, kv_format="fp32"):
    """A runner for one sequence at a time where a model has recurrent layers, else for any number."""
    c = model.config
    states = RecurrentStates(c.state_shapes, 1) if c.state_shapes else None
    return ModelRunner(model, KVCache(c.kv_shapes, num_blocks, block_size, kv_format, states=states))


def make_sequence(token_ids, seq_id=0):
    return Sequence(seq_id, list(token_ids), SamplingParams(), 0)


def all_logits(model, token_ids, kv_format="fp32"):
    """Logits [T, V] of every position, in one pass."""
    return whole_pass(model, token_ids, (), kv_format)[0]


def whole_pass(model, token_ids, captures, kv_format="fp32"):
    """Logits [T, V] and captured states of every position, in one pass."""
    cache, blocks = make_runner(model, kv_format=kv_format).cache, list(range(-(-len(token_ids) // 16)))
    state = (0, 0, len(token_ids)) if cache.states else None
    batch = build_batch([Rows(token_ids, 0, [], [], blocks, True, state=state)], 16)
    rows = torch.arange(len(token_ids), dtype=torch.int32)
    return model.run(replace(batch, logit_rows=rows), cache, captures)[:2]


def feed(runner, seq, count):
    """Run `count` pending tokens and keep their rows; logits [1, V] if no token is left pending, else [0, V]."""
    assert runner.blocks.reserve(seq, seq.num_cached + count)
    out = runner.forward([seq], Draft.empty(1), [count])
    runner.commit([seq], [count], [[]], out)
    return out.logits


class Stored(TensorSource):
    """A weight source in memory; the matrices of the modules in `schemes` are stored in codes."""

    def __init__(self, tensors, schemes=None):
        self.tensors = tensors
        self.schemes = {f"{m}.weight": QuantScheme.parse(text) for m, text in (schemes or {}).items()}
        self.decoded: list[str] = []

    def scheme(self, name):
        return self.schemes.get(name)

    def stored(self, name, start=0, stop=None):
        return self.schemes[name].encode(self.tensors[name])

    def dtype(self, name):
        return self.tensors[name].dtype

    def tensor(self, name):
        return self.tensors[name]

    def rows(self, name, start, stop):
        if name not in self.schemes:
            return self.tensors[name][start:stop]
        self.decoded.append(name)
        q = self.stored(name)
        return scheme.get(q.format).decode(q)[start:stop]


@cache
def tiny_model(backend, name="llama3.2", weights="fp32"):
    """A random model, without files, for tests that need any model."""
    config = parse_config(VARIANTS[name].raw)
    chosen = ops.resolve(backend)
    source = Stored(random_tensors(config))
    weights_ = read_weights(config, source, QuantScheme.parse(weights), chosen)
    return family(config.architecture)(config, weights_, chosen)


def tiny_shape(monkeypatch):
    """A shape "tiny" to profile, and limits that are measured in a moment."""
    tiny = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }  # fmt: skip
    monkeypatch.setattr(shapes, "SHAPES", {**shapes.SHAPES, "tiny": tiny})
    monkeypatch.setattr(limits, "BYTES", 1 << 20)
    monkeypatch.setattr(limits, "SECONDS", 1e-4)


def fails(make, *words):
    """Check that `make` raises a ModelLoadError with all these words."""
    with pytest.raises(ModelLoadError) as caught:
        make()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


def llama_shape(hidden, heads, vocab=400, inner=96, layers=5, tied=False):
    """Config of a Llama; `heads`: query heads, KV heads, head dimension."""
    raw = {"architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "intermediate_size": inner}
    raw |= {"num_hidden_layers": layers, "num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    return parse_config({**raw, "head_dim": heads[2], "vocab_size": vocab, "tie_word_embeddings": tied})
