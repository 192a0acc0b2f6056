"""sameseed's settings as vLLM's command line (read against vLLM 0.32). What vLLM cannot do is refused, with a remedy.

No torch and no vLLM in here: the process that asks for this loads neither.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sameseed import habits
from sameseed.config import CacheConfig, EngineConfig, SpecConfig
from sameseed.errors import ConfigError, ModelLoadError
from sameseed.models.config import ASSETS, EMBEDDED, read_json
from sameseed.models.eagle_config import HEADS, is_head

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
KV_FORMATS = {"bf16": "bfloat16", "fp16": "float16", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
# Options that vLLM has too, with the drafters' own defaults (loading a drafter would load torch).
OPTIONS: dict[str, dict[str, Any]] = {
    "ngram": {"min_ngram": 2, "max_ngram": 4},
    "suffix": {"max_match": 24, "length_factor": 2.0, "min_probability": 0.1, "past": "tenant"},
}
# What sameseed decides: who may come in, where it listens, what runs.
RESERVED = (
    *("host", "port", "uds", "api-key", "ssl-keyfile", "ssl-certfile", "grpc-port", "allowed-origins", "root-path"),
    *("model", "served-model-name", "speculative-config", "sc", "trust-remote-code", "middleware", "headless"),
    # A file of flags; how many may come in; what is told.
    *("config", "max-num-seqs", "per-request-spec-decode-metrics"),
)


@dataclass(frozen=True)
class Spread:
    """Over what vLLM spreads a model: GPUs that share each layer, groups of layers, nodes of a Ray cluster."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int | None = None  # None: one group of layers a node
    nodes: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "nodes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")

    @property
    def stages(self) -> int:
        return self.pipeline_parallel_size or self.nodes

    def arguments(self) -> list[str]:
        """Where there are more nodes than one, Ray places the parts; a cluster of them must run."""
        made = []
        if self.tensor_parallel_size > 1:
            made += ["--tensor-parallel-size", str(self.tensor_parallel_size)]
        if self.stages > 1:
            made += ["--pipeline-parallel-size", str(self.stages)]
        return [*made, "--distributed-executor-backend", "ray"] if self.nodes > 1 else made


def arguments(
    model: str, settings: Mapping[str, Any], spread: Spread, served_name: str, detail: str = "summary", more: str = ""
) -> list[str]:
    """vLLM's arguments, the model first, for settings as `make_config` takes them.

    `detail`: of each request's speculation, "summary" or "detailed". `more`: vLLM's own flags, as on a command line.
    Raises ConfigError for what vLLM cannot do, ModelLoadError for a model that is not there.
    """
    folder = model_path(model)
    made = [folder, "--served-model-name", served_name, *_format(folder, settings), *_limits(settings)]
    made += spread.arguments()
    spec = speculative_config(settings, spread)
    if spec is not None:
        made += ["--speculative-config", json.dumps(spec, separators=(",", ":"))]
        made += ["--per-request-spec-decode-metrics", detail]
    return made + _own_flags(more)


def model_path(name: str) -> str:
    """A folder that vLLM finds, or a hub id as it is. Raises ModelLoadError for a file that vLLM does not read."""
    if name in EMBEDDED:
        return str(ASSETS / EMBEDDED[name])
    path = Path(name).expanduser()
    if path.is_file() or name.endswith(".gguf"):
        raise ModelLoadError(f"vLLM serves Hugging Face folders, and {name} is a file; give the checkpoint's folder")
    if not path.is_dir() and (name.startswith((".", "/", "~")) or name.count("/") != 1):
        raise ModelLoadError(f"there is no model {name}; give a folder or a hub id like org/name")
    return str(path.resolve()) if path.is_dir() else name


def environment(settings: Mapping[str, Any]) -> dict[str, str]:
    """Variables that say what flags cannot."""
    threads = settings.get("threads")
    if threads is None:
        return {}
    return {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def stored_scheme(config: Mapping[str, Any]) -> str | None:
    """The scheme that a checkpoint's config.json says its weights are in, in sameseed's words; None: not quantized."""
    found = config.get("quantization_config")
    if not found:
        return None
    if found.get("quant_method") in ("gptq", "awq"):
        return f"w{found.get('bits', 4)}a16-g{found.get('group_size', 128)}"
    groups = list((found.get("config_groups") or {}).values())
    if len(groups) != 1:
        return str(found.get("quant_method"))
    weights, rows = groups[0]["weights"], groups[0].get("input_activations")
    if weights.get("type") == "float" and weights["num_bits"] == 8:
        return "fp8"
    name = f"w{weights['num_bits']}a{rows['num_bits'] if rows else 16}"
    return f"{name}-g{weights['group_size']}" if weights.get("group_size") else name


def _format(folder: str, settings: Mapping[str, Any]) -> list[str]:
    """Flags for the formats of weights and cache; vLLM does not choose codes while it reads. Raises ConfigError."""
    asked, kv = settings.get("format", "auto"), settings.get("kv_format", "auto")
    made: list[str] = []
    config = Path(folder) / "config.json"
    stored = stored_scheme(read_json(config)) if config.is_file() else None
    if asked != "auto" and asked != stored:
        if asked not in DTYPES or stored is not None:
            raise ConfigError(
                f"vLLM serves weights as the checkpoint stores them ({stored or 'not quantized'}), not as --format "
                f"{asked}; write them first: sameseed quantize MODEL --scheme {asked} --out DIR, then serve "
                "--model DIR"
            )
        made += ["--dtype", DTYPES[asked]]
    if kv != "auto":
        if kv not in KV_FORMATS:
            raise ConfigError(f"vLLM has no KV cache in {kv!r}; it has auto, {', '.join(KV_FORMATS)}")
        made += ["--kv-cache-dtype", KV_FORMATS[kv]]
    return made


def _limits(settings: Mapping[str, Any]) -> list[str]:
    """Flags for limits; those that stand at sameseed's default are left to vLLM's, but for sequences at once."""
    if settings.get("backend", "auto") != "auto":
        raise ConfigError("--backend chooses sameseed's kernels; vLLM has its own: leave it at auto")
    own, cache = EngineConfig(), CacheConfig()
    made = ["--max-num-seqs", str(settings.get("max_num_seqs", own.max_num_seqs))]
    for name, default, flag in (
        ("max_model_len", own.max_model_len, "--max-model-len"),
        ("max_num_rows", own.max_num_rows, "--max-num-batched-tokens"),
        ("block_size", cache.block_size, "--block-size"),
        ("num_blocks", cache.num_blocks, "--num-gpu-blocks-override"),
        ("gpu_memory_utilization", own.gpu_memory_utilization, "--gpu-memory-utilization"),
    ):
        value = settings.get(name, default)
        if value != default:
            made += [flag, str(value)]
    return made if settings.get("prefix_cache", True) else [*made, "--no-enable-prefix-caching"]


def speculative_config(settings: Mapping[str, Any], spread: Spread) -> dict[str, Any] | None:
    """vLLM's --speculative-config for the draft and its settings; None where nothing is drafted. Raises ConfigError."""
    spec = settings.get("draft") or SpecConfig()
    given = {
        name: settings[name]
        for name in ("num_draft_tokens", "confidence", "policy", "overlap")
        if settings.get(name) not in (None, "auto")
    }
    options = settings.get("draft_options") or spec.options
    spec = replace(spec, **given, options=options, format=settings.get("draft_format", spec.format))
    if spec.method == "none" or spec.num_draft_tokens == 0:
        return None
    _check(spec, spread)
    made: dict[str, Any] = {"method": spec.method, "num_speculative_tokens": spec.num_draft_tokens}
    if spec.method in OPTIONS:
        chosen = _options(spec)
        made |= {theirs: chosen[ours] for theirs, ours in habits.OPTIONS[spec.method].items()}
        return made if chosen.get("past") != "none" else made | {"suffix_decoding_max_cached_requests": 0}
    if spec.model is None:
        raise ConfigError(f"--draft {spec.method}: vLLM needs the draft's checkpoint; give its folder or hub id")
    path = model_path(spec.model)
    made["model"] = path
    if Path(path).is_dir() and is_head(Path(path)):  # it says itself what it is
        raw = read_json(Path(path) / "config.json")
        name = str((raw.get("architectures") or ["?"])[0])
        made["method"] = str(raw.get("speculators_model_type") or HEADS.get(name, "eagle"))
    elif spec.method == "eagle":  # a head on the hub cannot be looked into from here
        made["method"] = "eagle3" if "eagle3" in path.lower().replace("-", "") else "eagle"
    else:
        made["method"] = "draft_model"
    if spread.tensor_parallel_size > 1:
        made["draft_tensor_parallel_size"] = spread.tensor_parallel_size  # vLLM takes no other
    return made


def _check(spec: SpecConfig, spread: Spread) -> None:
    if spec.method not in ("ngram", "suffix", "draft_model", "eagle"):
        raise ConfigError(
            f"vLLM has no drafter like {spec.method!r}; give ngram, suffix, a draft model or an EAGLE head, or serve "
            "with sameseed's own engine"
        )
    if spec.policy != "fixed":
        raise ConfigError(f"--policy {spec.policy} is sameseed's own; vLLM drafts --policy fixed numbers of tokens")
    if spec.confidence is not None or spec.overlap:
        raise ConfigError("--confidence and --overlap are sameseed's own; leave them out with --engine vllm")
    if spec.format != "auto":
        raise ConfigError("vLLM reads a draft as its checkpoint stores it; leave --draft-format at auto")
    if spread.stages > 1 and spec.method in ("draft_model", "eagle"):
        raise ConfigError(
            "vLLM keeps a draft model on its last group of layers, and speculation over several is not dependable; "
            "use --tensor-parallel-size alone, or --draft ngram"
        )


def _options(spec: SpecConfig) -> dict[str, Any]:
    known = OPTIONS[spec.method]
    if not set(spec.options) <= known.keys():
        raise ConfigError(
            f"of {spec.method}'s options vLLM has like ones for {', '.join(known)}; got {', '.join(spec.options)}"
        )
    return {**known, **spec.options}


def _own_flags(more: str) -> list[str]:
    """vLLM's own flags as they were given. Raises ConfigError for those that are sameseed's to decide.

    vLLM's parser takes the beginning of a flag for the flag, "_" for "-", and sets parts of a value by --flag.part.
    """
    made = shlex.split(more)
    for word in made:
        name = word.partition("=")[0].partition(".")[0].lstrip("-").replace("_", "-")
        if word.startswith("-") and any(name == r or (len(name) > 1 and r.startswith(name)) for r in RESERVED):
            raise ConfigError(
                f"--vllm-args: {word!r} is decided by sameseed's own flags; leave it out, or give sameseed's "
                "(sameseed serve --help)"
            )
    return made
