"""ModelConfig: shape and flags of a model, read from a Hugging Face config.json; and the table of families."""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from sameseed.errors import ConfigError, ModelLoadError, SameseedError, say_once

if TYPE_CHECKING:
    from sameseed.models.decoder import Decoder

log = logging.getLogger("sameseed.models")
V = TypeVar("V")

# Modules that stay as the checkpoint stores them, unless a rule names them.
ROUTERS = ("mlp.gate", "mlp.router", "feed_forward.gate")
# Architecture in config.json -> the file of its family in this folder, and its class there.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama.Llama",
    "MistralForCausalLM": "llama.Llama",
    "Qwen2ForCausalLM": "llama.Llama",
    "Qwen3ForCausalLM": "llama.Llama",
    "Gemma3ForCausalLM": "gemma.Gemma",
    "Gemma3ForConditionalGeneration": "gemma.Gemma",
    "Gemma4ForCausalLM": "gemma.Gemma",
    "Gemma4ForConditionalGeneration": "gemma.Gemma",
    "Gemma4UnifiedForConditionalGeneration": "gemma.Gemma",
    "Gemma4MoeForCausalLM": "gemma_moe.GemmaMoe",  # a Gemma 4 whose config.json enables its block of experts
    "Gemma4AssistantForCausalLM": "gemma_assistant.Assistant",
    "Gemma4UnifiedAssistantForCausalLM": "gemma_assistant.Assistant",
    "SmolLM3ForCausalLM": "llama.Llama",
    "GraniteForCausalLM": "llama.Llama",
    "GraniteMoeHybridForCausalLM": "granite4.Granite4",
    "Ministral3ForCausalLM": "llama.Llama",
    "Mistral3ForConditionalGeneration": "llama.Llama",
    "Phi3ForCausalLM": "phi3.Phi3",
    "Lfm2ForCausalLM": "lfm2.Lfm2",
    "Lfm2MoeForCausalLM": "lfm2.Lfm2Moe",
    "Qwen3MoeForCausalLM": "qwen3_moe.Qwen3Moe",
    "GptOssForCausalLM": "gpt_oss.GptOss",
    "Qwen3_5ForCausalLM": "qwen35.Qwen35",
    "Qwen3_5ForConditionalGeneration": "qwen35.Qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35.Qwen35Moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen35.Qwen35Moe",
}
# llama.cpp's architecture -> architecture and model_type in an equivalent config.json.
GGUF_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "gemma4": ("Gemma4ForCausalLM", "gemma4_text"),
    "gemma4-assistant": ("Gemma4AssistantForCausalLM", "gemma4_assistant"),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3"),
    "granite": ("GraniteForCausalLM", "granite"),
    "mistral3": ("Ministral3ForCausalLM", "ministral3"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "lfm2": ("Lfm2ForCausalLM", "lfm2"),
    "lfm2moe": ("Lfm2MoeForCausalLM", "lfm2_moe"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss"),
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
}

_GEMMA = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 131072, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
_QWEN35 = {
    "vocab_size": 248320, "num_attention_heads": 16, "head_dim": 256, "max_position_embeddings": 32768,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
_MINISTRAL = {"sliding_window": None, "max_position_embeddings": 131072, "num_key_value_heads": 8}
# Values of keys that a config.json may lack, by the beginning of the architecture. transformers leaves them out of the
# config of a language model that is part of another, and leaves out that embeddings are tied where they usually are.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "Gemma3": {**_GEMMA, "vocab_size": 262208, "num_hidden_layers": 26, "sliding_window": 4096},
    "Gemma4Unified": {
        **_GEMMA, "vocab_size": 262144, "num_hidden_layers": 30, "sliding_window": 1024,
        "max_position_embeddings": 262144, "hidden_size_per_layer_input": 0,
    },
    "Gemma4": {**_GEMMA, "vocab_size": 262144, "num_hidden_layers": 30, "sliding_window": 512},
    "Qwen3_5Moe": {
        **_QWEN35, "hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2, "num_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    },
    "Qwen3_5": {
        **_QWEN35, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_key_value_heads": 4,
    },
    "Mistral3": _MINISTRAL,
    "Ministral3": {**_MINISTRAL, "head_dim": 128, "rms_norm_eps": 1e-5},
    "SmolLM3": {"tie_word_embeddings": True, "rope_theta": 2e6, "sliding_window": None},
    "Phi3": {"rms_norm_eps": 1e-5, "sliding_window": None},
    "GptOss": {
        "attention_bias": True, "rms_norm_eps": 1e-5, "sliding_window": 128, "rope_theta": 150000.0, "head_dim": 64,
        "num_key_value_heads": 8, "max_position_embeddings": 131072,
    },
    "Lfm2": {"tie_word_embeddings": True, "rope_theta": 1e6},
}  # fmt: skip

WITH_FACTORS = ("SmolLM3ForCausalLM", "GraniteForCausalLM")  # Llamas that differ in more than flags of their layers
MSCALES = ("mscale", "mscale_all_dim")
LONGROPE = ("short_factor", "long_factor")
WINDOWLESS = ("LlamaForCausalLM", "GraniteForCausalLM")  # whatever their config.json says
ASSETS = Path(__file__).parent.parent / "assets"
PACKAGED_HEADS = {"smollm2-head": "smollm2", "coder-head": "coder"}  # packaged, for models that are not
EMBEDDED = {"embedded": "target"} | {f"embedded-{n}": n for n in ("target", "draft", "head")} | PACKAGED_HEADS
SILU = ("silu", "swish")
# Entries that a config.json with a text_config has outside it.
OUTER = (
    "architectures", "quantization_config", "tie_word_embeddings", "eos_token_id", "bos_token_id", "suppress_tokens",
)  # fmt: skip
GGUF = ".gguf"  # suffix of a model that is one file
MASK_TOKENS = ("pard_token", "ptd_token_id")  # AMD's and vLLM's key for the mask token; -1: none
PARALLEL = ("pard", "pard2")  # spd_type of models that draft several tokens in one pass
MTP_BESIDE = "mtp-*.gguf"  # files beside a GGUF file, each of an MTP block alone, as llama.cpp names them
KEY_BYTES = 1 << 24  # of a GGUF file's beginning, where its keys are
MAX_LAYERS = 10_000  # a bound, because names and shapes of all layers are listed before any file is read


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: the base, and the scaling of frequencies.

    `kind`: "default" (no scaling), "linear", "llama3" (Llama 3.1's bands), "yarn", or "factors" (one divisor per
    frequency). `magnitude` multiplies cosines and sines. `rotary_dim`: how many dimensions of a head rotate, the first
    ones; 0: all.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192
    factors: tuple[float, ...] = ()  # [D/2]
    long_factors: tuple[float, ...] = ()  # LongRoPE's, for models that may hold more than `original_max_len` tokens
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: round the bounds of its ramp to whole frequencies
    magnitude: float = 1.0
    rotary_dim: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """Shape and flags of a model. `windows[i]` is layer i's sliding window in tokens, None for full attention.

    `mask_token`: for a model that drafts several tokens in one pass, the id that stands for a token not known yet
    (PARD: An et al., 2025). `num_parallel`: the number of tokens it was trained to draft, 0 if config.json has none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    mask_token: int | None = None
    num_parallel: int = 0
    suppress_tokens: tuple[int, ...] = ()  # tokens that the checkpoint says are never written
    norm_shift: float = 0.0  # added to norm weights as stored; 1 in checkpoints that store w of a norm's 1 + w
    still_layers: frozenset[int] = frozenset()  # layers that do not rotate their heads
    embedding_factor: float = 1.0
    score_factor: float | None = None  # of attention; None: D^-0.5
    logit_divisor: float = 1.0
    recurrent: frozenset[int] = frozenset()  # layers that keep a state in place of keys and values
    gated: bool = False  # whether attention multiplies its output by the sigmoid of a gate, made beside q

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        """KV heads and head size of each layer of the KV cache; a layer that owns no cache has no entry."""
        own = (self.num_kv_heads, self.head_dim)
        return tuple(own for i in range(self.num_layers) if i not in self.recurrent)

    @property
    def state_shapes(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """Of each recurrent layer its state [H, K, D], and the width of a logged row (kvcache/state.py)."""
        return ()

    @property
    def num_parameters(self) -> int:
        """Number of weights in embedding, layers and LM head, without norms and biases."""
        return _num_parameters(self)

    @property
    def row_parameters(self) -> int:
        """Number of the layers' weights that one row is multiplied with."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.num_parameters - embeddings

    @property
    def mlp_width(self) -> int:
        """Floats of a row inside an MLP."""
        return 2 * self.intermediate_size

    def read_share(self, rows: float, batch: float = 1.0) -> float:
        """The share of the weights that a pass over `rows` rows of `batch` sequences reads."""
        return 1.0


@cache
def _num_parameters(config: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in family(config.architecture).shapes(config).values() if len(shape) == 2)


class View(NamedTuple):
    """A matrix or vector inside a stacked tensor of `shape`: `tensor[entry]`, transposed or not, then its `rows`."""

    tensor: str
    shape: tuple[int, ...]
    entry: int
    rows: slice
    transposed: bool = False


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file. Raises ModelLoadError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        if (path.parent / "adapter_config.json").exists():
            raise ModelLoadError(f"{path.parent} is an adapter; merge it into its base model, and give that") from None
        raise ModelLoadError(f"{path} is missing; a model's folder has config.json and *.safetensors") from None
    except (ValueError, RecursionError, OSError) as error:  # also of numbers of too many digits
        raise ModelLoadError(f"{path} cannot be read as JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds no JSON object; download it again")
    return value


def architecture_of(raw: Mapping[str, Any]) -> str:
    """The first of the architectures that a config.json names; "?" for none."""
    names = raw.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "?"


def one_of(value: Any, options: Iterable[V], what: str, remedy: str = "") -> V:
    """The option that equals `value`. Raises ModelLoadError, with the options and a remedy, where none does."""
    for option in (options := list(options)):
        if option == value:
            return option
    names = ", ".join(map(str, options)) + (f"; {remedy}" if remedy else "")
    raise ModelLoadError(f"{what} {str(value)[:80]!r} is not supported; these are: {names}")


def parse_config(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """ModelConfig from a parsed config.json, read by its family; of a model that also sees, its language model's."""
    architecture = one_of(architecture_of(raw), ARCHITECTURES, f"{where}: architecture")
    if isinstance(text := raw.get("text_config"), dict):
        raw = {**raw, **text, **{k: raw[k] for k in OUTER if raw.get(k) is not None}}
    usual = next((values for name, values in DEFAULTS.items() if architecture.startswith(name)), {})
    own = {key: value for key, value in raw.items() if value is not None or key not in usual}
    raw = {**usual, **own, "architectures": [architecture]}
    whole_number(raw, where, "num_hidden_layers", most=MAX_LAYERS)
    try:
        return family(architecture).parse(raw, where)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        if isinstance(error, SameseedError):
            raise
        raise ModelLoadError(f"{where} has a value of another kind than its key asks for ({error}); mend it") from error


def family(architecture: str) -> type[Decoder]:
    """The class of a family of models, by a name in ARCHITECTURES."""
    file, _, name = ARCHITECTURES[architecture].partition(".")
    model: type[Decoder] = getattr(import_module(f"sameseed.models.{file}"), name)
    return model


def llama_only(config: ModelConfig, what: str) -> ModelConfig:
    """The config itself. Raises ConfigError unless it is of the Llama family, whose layers `what` computes anew."""
    known = [name for name, found in ARCHITECTURES.items() if found == "llama.Llama" and name not in WITH_FACTORS]
    if config.architecture not in known:
        raise ConfigError(f"{what} does not support {config.architecture}; use a model of {', '.join(known)}")
    return config


def base_config(
    raw: Mapping[str, Any],
    where: str,
    *,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    act: Seq[str] = SILU,
    rotates: float | None = None,
) -> ModelConfig:
    """The fields that all families have. Raises ModelLoadError.

    `act`: the names of the family's activation. `rotates`: the share of a head that rotates where config.json does not
    say it; None: the family rotates whole heads.
    """
    architecture: str = raw["architectures"][0]
    whole = partial(whole_number, raw, where)
    hidden, heads, vocab_size = whole("hidden_size"), whole("num_attention_heads"), whole("vocab_size")
    kv_heads = whole("num_key_value_heads", heads)
    head_dim = whole("head_dim", hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise ModelLoadError(f"{where}: {kv_heads} KV heads must divide {heads} heads, and head_dim {head_dim} be even")
    one_of(raw.get("hidden_act", act[0]), act, f"{where}: hidden_act")
    layers, max_len = raw["num_hidden_layers"], whole("max_position_embeddings", 2048)
    rope = _rope(raw, max_len, where, head_dim, rotates)
    if rope.kind == "yarn":  # which users add without raising the model's own limit
        max_len = max(max_len, int(rope.original_max_len * rope.factor))
    bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=whole("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_model_len=max_len,
        rms_eps=positive_number(raw, "rms_norm_eps", 1e-6, where),
        rope=rope,
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias or bias,
        o_bias=bias and not qkv_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=qk_norm,
        windows=_windows(raw, layers, architecture, where),
        eos_token_ids=_token_ids(raw.get("eos_token_id"), f"{where}: eos_token_id", vocab_size),
        bos_token_id=next(iter(_token_ids(raw.get("bos_token_id"), f"{where}: bos_token_id", vocab_size)), None),
        suppress_tokens=_token_ids(raw.get("suppress_tokens") or [], f"{where}: suppress_tokens", vocab_size),
        mask_token=_mask_token(raw, where, vocab_size),
        num_parallel=whole("para_num", 0, least=0),
    )


LLAMA: Mapping[str, Any] = {  # the entries of a Llama's config.json that do not depend on its size
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
}


def sizes_of(shape: Any) -> dict[str, int]:
    """The sizes of a ModelConfig, or of an object with the same fields, under the keys of config.json."""
    own = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}
    fields = ("hidden_size", "intermediate_size", *own, "head_dim", "vocab_size")
    return {own.get(name, name): getattr(shape, name) for name in fields}


def is_parallel(folder: Path) -> bool:
    """Whether a folder holds a model that drafts several tokens in one pass: its config.json names a mask token."""
    if folder.is_file() or not (folder / "config.json").exists():
        return False
    raw = read_json(folder / "config.json")
    return raw.get("spd_type") in PARALLEL or any(raw.get(name) not in (None, -1) for name in MASK_TOKENS)


def is_assistant(folder: Path) -> bool:
    """Whether a folder or GGUF file holds a Gemma 4 assistant, which drafts in its target's cache."""
    from sameseed.models.loader import read_config

    return ARCHITECTURES[read_config(folder).architecture] == "gemma_assistant.Assistant"


def model_text(folder: Path) -> str:
    """The drafter for the model in a folder or file, which is no head."""
    if is_parallel(folder) or is_assistant(folder):
        return "parallel" if is_parallel(folder) else "assistant"
    return "mtp" if folder.is_file() and folder.match(MTP_BESIDE) else "draft_model"


def own_draft(model: str) -> str:
    """What was made to draft for a model: "mtp", an assistant's file beside it, the name of a packaged head, or "none".

    Models without any are told apart without importing torch. A model of the hub is fetched.
    """
    path = Path(os.path.expanduser(model))
    if not path.exists() and "/" in model and not model.startswith((".", "/", "~")):
        from sameseed.models.loader import resolve_model

        with suppress(ModelLoadError):  # which loading the model says later
            path = resolve_model(model)
    config = path if path.is_file() else path / "config.json"
    if not config.is_file():
        return "none"
    with config.open("rb") as file:
        begin = file.read(KEY_BYTES)
    beside = sorted(path.parent.glob(MTP_BESIDE)) if path.is_file() else []
    if not beside and not any(key in begin for key in (b"mtp_num_hidden_layers", b".nextn_predict_layers")):
        return packaged_head(path, begin)
    from sameseed.models.gemma_assistant import drafts_for
    from sameseed.models.mtp import mtp_bytes
    from sameseed.scheme import QuantScheme

    try:
        mtp_bytes(path, QuantScheme(), path)
        return "mtp"
    except (ConfigError, ModelLoadError) as error:
        log.info("no MTP block to draft with: %s", error)
    return next((str(file) for file in beside if drafts_for(file, path)), "none")


def packaged_head(model: Path, begin: bytes) -> str:
    """The name of the packaged head that was trained for a folder or GGUF file, in whatever format, or "none".

    `begin`: of config.json or of the file. Other widths are told apart without importing torch.
    """
    for name in PACKAGED_HEADS:
        width = read_json(ASSETS / EMBEDDED[name] / "config.json")["target_hidden_size"]
        key = rb'"hidden_size":\s*%d\b|\.embedding_length\x04\0\0\0%b' % (width, re.escape(width.to_bytes(4, "little")))
        if re.search(key, begin):
            from sameseed.models.eagle_loader import trained_for

            if trained_for(ASSETS / EMBEDDED[name], model):
                return name
    return "none"


def _mask_token(raw: Mapping[str, Any], where: str, vocab_size: int) -> int | None:
    """The id under either key, or None. Raises ModelLoadError for a parallel draft that cannot run."""
    if raw.get("spd_type") == "pard2":
        raise ModelLoadError(f"{where}: spd_type 'pard2' reads the target's states; take a draft of spd_type 'pard'")
    name = next((n for n in MASK_TOKENS if raw.get(n) not in (None, -1)), None)
    if name is not None:
        return whole_number(raw, where, name, least=0, most=vocab_size - 1)
    if raw.get("spd_type") in PARALLEL:
        raise ModelLoadError(f"{where}: spd_type 'pard' without a mask token; name it as pard_token, or take it out")
    return None


def whole_number(
    raw: Mapping[str, Any], where: str, name: str, default: int | None = None, least: int = 1, most: int = 2**31
) -> int:
    """A whole number of a config file, `default` where it has none. Raises ModelLoadError outside least..most."""
    value = raw.get(name)
    value = default if value is None else value
    if type(value) is not int or not least <= value <= most:
        raise ModelLoadError(f"{where}: {name} must be a whole number in {least}..{most}, got {value!r:.80}")
    return value


def positive_number(raw: Mapping[str, Any], name: str, default: float, where: str) -> float:
    """A number of a config file, `default` where it has none. Raises ModelLoadError unless it is above 0."""
    value = raw.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise ModelLoadError(f"{where}: {name} must be a positive number, got {value!r}")
    return float(value)


def _token_ids(value: object, name: str, vocab_size: int) -> tuple[int, ...]:
    """The given ids that lie in the vocabulary; the others are left out with a warning."""
    given = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int)]
    known = tuple(v for v in given if not isinstance(v, bool) and 0 <= v < vocab_size)
    if len(known) < len(given):
        left_out = [v for v in given if v not in known]
        say_once(f"{name}: left out {left_out}, beyond the model's {vocab_size} tokens")
    return known


def _rope(raw: Mapping[str, Any], max_len: int, where: str, head_dim: int, rotates: float | None) -> RopeConfig:
    # Newer files: all in rope_parameters, and what a user added in rope_scaling; older ones: there, beside rope_theta.
    scaling: dict[str, Any] = {}
    for rope in (raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}):
        if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
            raise ModelLoadError(f"{where}: rope settings must be one object for all layers, got {rope!r:.80}")
        scaling |= {k: v for k, v in {"rope_type": rope.get("type"), **rope}.items() if v is not None}
    if (length := raw.get("original_max_position_embeddings")) is not None:  # comes first, as in transformers
        scaling["original_max_position_embeddings"] = length
    theta = positive_number(scaling if "rope_theta" in scaling else raw, "rope_theta", 10000.0, where)
    kind = scaling.get("rope_type", "default")
    if kind == "factors":  # from a GGUF file, whose reader has checked the factors
        return RopeConfig(theta, "factors", factors=tuple(scaling.get("factors", ())))
    if kind == "yarn" and raw["architectures"][0] == "Phi3ForCausalLM" and LONGROPE[0] in scaling:
        kind = "longrope"  # an older name, as in transformers
    idle = "up to max_position_embeddings it changes nothing: take it out" if kind == "dynamic" else ""
    one_of(kind, ("default", "linear", "llama3", "yarn", "longrope", "su"), f"{where}: rope scaling", idle)
    share = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", rotates))
    if rotates is None:
        one_of(share, (None, 1), f"{where}: partial_rotary_factor")
    rotary_dim = int(head_dim * share) if isinstance(share, int | float) and 0 < share <= 1 else 0
    if rotates is not None and (rotary_dim < 2 or rotary_dim % 2):
        raise ModelLoadError(f"{where}: partial_rotary_factor {share!r} of {head_dim} dimensions is no even number")
    low, high = (positive_number(scaling, f"{n}_freq_factor", d, where) for n, d in (("low", 1.0), ("high", 4.0)))
    if low >= high:
        raise ModelLoadError(f"{where}: high_freq_factor {high:g} must be above low_freq_factor {low:g}")
    original = positive_number(scaling, "original_max_position_embeddings", max_len, where)
    factor = positive_number(scaling, "factor", max(max_len / original, 1.0) if kind == "yarn" else 1.0, where)
    # Of yarn: the growth for `mscale`, relative to that for `mscale_all_dim`; as in transformers, only where both are.
    both = scaling if all(scaling.get(n) for n in MSCALES) else {}
    growth = [0.1 * positive_number(both, n, 1.0, where) * math.log(max(factor, 1.0)) + 1.0 for n in MSCALES]
    magnitude = growth[0] / (growth[1] if both else 1.0) if kind == "yarn" else 1.0
    made = RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        beta_fast=positive_number(scaling, "beta_fast", 32.0, where),
        beta_slow=positive_number(scaling, "beta_slow", 1.0, where),
        truncate=bool(scaling.get("truncate", True)),
        magnitude=positive_number(scaling, "attention_factor", magnitude, where),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_len=int(original),
        rotary_dim=0 if rotary_dim == head_dim else rotary_dim,
    )
    return _longrope(made, {**raw, **scaling}, max_len, where, head_dim) if kind in ("longrope", "su") else made


def _longrope(rope: RopeConfig, given: Mapping[str, Any], max_len: int, where: str, head_dim: int) -> RopeConfig:
    """LongRoPE (Ding et al., 2024): factors for contexts up to the original length, and others for longer ones."""
    lists, count = [], (rope.rotary_dim or head_dim) // 2
    for name in LONGROPE:
        values = given.get(name)
        if not isinstance(values, list) or len(values) != count:
            raise ModelLoadError(f"{where}: {name} of longrope must list {count} numbers; mend config.json")
        lists.append(tuple(positive_number({name: value}, name, 0.0, where) for value in values))
    original = whole_number(given, where, "original_max_position_embeddings", max_len, least=2)
    growth = max(1.0, positive_number(given, "factor", max_len / original, where))
    magnitude = math.sqrt(1 + math.log(growth) / math.log(original))
    rope = replace(rope, magnitude=positive_number(given, "attention_factor", magnitude, where))
    return replace(rope, kind="factors", factors=lists[0], long_factors=lists[1], original_max_len=original)


def _windows(raw: Mapping[str, Any], layers: int, architecture: str, where: str) -> tuple[int | None, ...]:
    qwen = architecture.startswith("Qwen")
    # 4096 and 28 are what Hugging Face takes where the key is absent; null means no window.
    windowless = architecture in WINDOWLESS or raw.get("sliding_window", 4096) is None
    if windowless or (qwen and not raw.get("use_sliding_window", False)):
        return (None,) * layers
    window = whole_number(raw, where, "sliding_window", 4096)
    first = whole_number(raw, where, "max_window_layers", 28, least=0) if qwen else 0
    kinds = raw.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        if any(k not in ("sliding_attention", "full_attention") for k in kinds):
            raise ModelLoadError(f"{where}: layer_types knows sliding_attention and full_attention only, got {kinds!r}")
        return tuple(window if k == "sliding_attention" else None for k in kinds)
    return tuple(window if i >= first else None for i in range(layers))


def layer_shapes(
    c: ModelConfig,
    layer: str,
    norms: Seq[str],
    width: int | None = None,
    feed_forward: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Shapes of a decoder layer's tensors by Hugging Face name.

    `width`: of the input of q, k and v, if it is not C; `feed_forward`: shapes of what stands in place of the MLP.
    """
    heads, kv_heads, hidden = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size
    rows = {"q_proj": 2 * heads if c.gated else heads, "k_proj": kv_heads, "v_proj": kv_heads}
    shapes = matrices(f"{layer}.self_attn", {name: (size, width or hidden) for name, size in rows.items()}, c.qkv_bias)
    shapes |= matrices(f"{layer}.self_attn", {"o_proj": (hidden, heads)}, c.o_bias)
    shapes |= mlp_shapes(c, f"{layer}.mlp") if feed_forward is None else feed_forward
    if c.qk_norm:
        shapes |= {f"{layer}.self_attn.{n}_norm.weight": (c.head_dim,) for n in "qk"}
    return shapes | {f"{layer}.{n}.weight": (hidden,) for n in norms}


def mlp_shapes(c: ModelConfig, at: str) -> dict[str, tuple[int, ...]]:
    """Shapes of an MLP's tensors, whose names begin with `at`."""
    into = (c.intermediate_size, c.hidden_size)
    return matrices(at, {"gate_proj": into, "up_proj": into, "down_proj": into[::-1]}, c.mlp_bias)


def matrices(at: str, shapes: Mapping[str, tuple[int, ...]], bias: bool = False) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of some modules in `at`, with biases or without."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        found |= {f"{at}.{name}.weight": shape} | ({f"{at}.{name}.bias": shape[:1]} if bias else {})
    return found
