"""sameseed's settings as vLLM's command line (0.33), or a refusal. Imports neither torch nor vLLM."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from sameseed.config import CacheConfig, EngineConfig
from sameseed.errors import ConfigError
from sameseed.models.config import read_json
from sameseed_vllm import draft
from sameseed_vllm.draft import Spread, Version

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# fp8 has one scale per layer, which all vLLM kernels support; the others have one per token and head, as in sameseed.
KV_FORMATS = {"bf16": "bfloat16", "fp16": "float16", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
KV_FORMATS |= {"int8": "int8_per_token_head", "int4": "int4_per_token_head"}
KV_FORMATS |= {name: name for name in ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head")}
# Settings that vLLM has nothing like, and what to do instead. Device "cuda" passes: vLLM's build decides that.
LACKED = {
    "backend": "chooses sameseed's kernels; vLLM has its own: leave it at auto",
    "device": "chooses sameseed's device; leave it out, and set CUDA_VISIBLE_DEVICES to choose among GPUs",
    "max_pass_ms": "bounds sameseed's passes; leave it out, and give --max-num-rows for vLLM's",
    "template_date": "is for sameseed's chat templates; leave it out, since vLLM's see the day of the request",
}
# vLLM's flags that sameseed itself sets: access, address, model, draft, a file of flags, sequences, metrics.
RESERVED = (
    *("host", "port", "uds", "api-key", "ssl-keyfile", "ssl-certfile", "grpc-port", "allowed-origins", "root-path"),
    *("model", "served-model-name", "speculative-config", "sc", "spec-method", "spec-model", "spec-tokens"),
    *("trust-remote-code", "middleware", "headless"),
    *("config", "max-num-seqs", "per-request-spec-decode-metrics"),
)


@dataclass(frozen=True)
class Installed:
    """An installed vLLM. `cpu`: a build for CPUs; `flags` that it may know; `modules`: libraries installed with it."""

    version: str
    cpu: bool = False
    flags: frozenset[str] = frozenset()  # empty: not known
    modules: frozenset[str] = frozenset()

    @property
    def tagged(self) -> bool:
        """Whether the version says how old it is: builds from sources without tags are all 0.1.dev."""
        return not self.version.startswith("0.1.dev")

    @property
    def number(self) -> Version:
        """The first two numbers, (0, 0) if there are none. A build without tags is taken for a new one."""
        if not self.tagged:
            return max(draft.OLDEST, *draft.SINCE.values())
        major, minor, *_ = *self.version.split("."), "0", "0"
        return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)


def arguments(
    model: str,
    settings: Mapping[str, Any],
    spread: Spread,
    served_names: Seq[str],
    detail: str = "summary",
    more: str = "",
    reasoning_parser: str | None = None,
) -> list[str]:
    """vLLM's arguments, the model first, for settings as `make_config` takes them.

    `served_names`: the model's names for clients; answers show the first. `detail`: metrics of each request's
    speculation, "summary" or "detailed". `more`: vLLM's own flags, as on a command line.
    `reasoning_parser`: a parser of thoughts, by vLLM's name; None or "none": thoughts stay in the text.
    Raises ConfigError for what vLLM cannot do, ModelLoadError for a model that does not exist.
    """
    folder = draft.model_path(model)
    made = [folder, "--served-model-name", *served_names, *_format(folder, settings), *_limits(settings)]
    made += spread.arguments()
    spec = draft.speculative_config(settings, spread)
    if spec is not None:
        made += ["--speculative-config", json.dumps(spec, separators=(",", ":"))]
        made += ["--per-request-spec-decode-metrics", detail]
    if reasoning_parser not in (None, "none"):
        made += ["--reasoning-parser", str(reasoning_parser)]
    return made + _own_flags(more)


def check(
    installed: Installed, words: Seq[str], spec: Mapping[str, Any] | None, spread: Spread, batch_invariant: bool = False
) -> None:
    """Raise ConfigError with a remedy, before vLLM is started, if this vLLM lacks what these arguments need."""
    spec = spec or {}
    method, version = spec.get("method"), installed.version
    caches = [after for word, after in pairwise([*words, ""]) if word == "--kv-cache-dtype"]
    cache = caches[-1] if caches else None  # the last one counts, as in parsers
    if installed.number < draft.OLDEST:
        raise ConfigError(f"vLLM {version} is too old, {_text(draft.OLDEST)} is the oldest; pip install -U vllm")
    if method == "suffix" and "arctic_inference" not in installed.modules:
        raise ConfigError("--draft suffix needs a library beside vLLM: pip install arctic-inference there")
    if spread.nodes > 1 and installed.cpu:  # 0.32.0: "current platform cpu does not support ray", after loading
        raise ConfigError("vLLM for CPUs starts no Ray workers; leave --nodes out: one server a node with a router")
    if spread.nodes > 1 and "ray" not in installed.modules:
        raise ConfigError("--nodes needs Ray beside vLLM: pip install ray there, and start a cluster with `ray start`")
    over = spread.stages > 1 and method in draft.WITH_WEIGHTS
    alone = method == "draft_model" and spec.get("draft_tensor_parallel_size", 1) < spread.tensor_parallel_size
    for word, wanted in ((draft.OVER_STAGES, over), (draft.ON_ONE, alone)):
        if wanted and installed.number < draft.SINCE[word]:
            raise ConfigError(f"vLLM {version} has no {word}; update it to {_text(draft.SINCE[word])}, or leave it out")
    if installed.cpu:  # what this build lacks
        if batch_invariant:
            raise ConfigError("--batch-invariant is of vLLM's GPU kernels, and this build is for CPUs; leave it out")
        if cache is not None and cache.endswith("_per_token_head"):
            raise ConfigError(f"vLLM keeps no {cache} cache on CPUs; take --kv-format auto, bf16 or fp8")
        if method in ("dspark", "ngram_gpu") or alone or over:  # `over`: 0.32.0 ends with an AttributeError
            what = draft.OVER_STAGES if over else "a draft_tensor_parallel_size of 1" if alone else f"--draft {method}"
            raise ConfigError(f"{what} is not to be had in vLLM's build for CPUs; leave it out, or take --draft ngram")
    _check_flags(installed, words)


def _check_flags(installed: Installed, words: Seq[str]) -> None:
    """Raise ConfigError for flags that this vLLM lacks. It also takes prefixes of flags, --flag.part and --no-flag."""
    for word in words if installed.flags else ():
        name = "--" + word.partition("=")[0].partition(".")[0].lstrip("-").replace("_", "-")
        plain = name.replace("--no-", "--", 1)
        if word.startswith("--") and not any(flag.startswith((name, plain)) for flag in installed.flags):
            near = difflib.get_close_matches(name, installed.flags, n=1)
            hint = f"did you mean {near[0]}?" if near else "see `vllm serve --help=all`"
            raise ConfigError(f"vLLM {installed.version} does not know the flag {name}; {hint}")


def notes(installed: Installed, spec: Mapping[str, Any] | None, batch_invariant: bool = False) -> list[str]:
    """Warnings to the operator about these settings."""
    made, method = [], (spec or {}).get("method")
    if not installed.tagged:
        made.append(f"vLLM {installed.version} does not say its age; {_text(draft.OLDEST)} is the oldest that works")
    if method == "suffix" or (method == "ngram" and installed.number < draft.SINCE[draft.NGRAM_AHEAD]):
        made.append(
            f"vLLM {installed.version} does not schedule ahead with --draft {method}: each step waits for the last"
            + ("; --draft ngram_gpu does not" if method == "ngram" and not installed.cpu else "")
        )
    if shares_past(spec):
        made.append("vLLM keeps one store of past texts: what one client was told may be drafted for another")
    if greedy_only(installed, spec):
        made.append(
            "vLLM samples wrongly with drafts on CPUs (vllm#55005): requests whose temperature is not 0 are refused"
        )
    if batch_invariant:
        made.append("--batch-invariant: slower, and drafts (sampled), another GPU or another vLLM still change texts")
    return made


def greedy_only(installed: Installed, spec: Mapping[str, Any] | None) -> bool:
    """Whether sampled requests must be refused: vLLM's CPU build loses their temperature beside a draft (#55005)."""
    return installed.cpu and spec is not None


def shares_past(spec: Mapping[str, Any] | None) -> bool:
    """Whether one client's texts may be used as drafts for another."""
    return (spec or {}).get("method") == "suffix" and (spec or {}).get("suffix_decoding_max_cached_requests") != 0


def _text(version: Version) -> str:
    return ".".join(map(str, version))


def stored_scheme(config: Mapping[str, Any]) -> str | None:
    """The scheme of the weights according to a checkpoint's config.json, by sameseed's name; None: not quantized."""
    found = config.get("quantization_config")
    if not found:
        return None
    if found.get("quant_method") in ("gptq", "awq"):
        group = found.get("group_size", 128) or -1  # -1: one scale per output
        return f"w{found.get('bits', 4)}a16" + (f"-g{group}" if group > 0 else "")
    if found.get("bnb_4bit_quant_type") == "nf4":
        return "nf4-dq" if found.get("bnb_4bit_use_double_quant") else "nf4"
    groups = [group for group in (found.get("config_groups") or {}).values() if group.get("weights")]
    names = {_group_scheme(group, group.get("format") or str(found.get("format"))) for group in groups}
    names = names if len(names) == 1 else {_any_group(name) for name in names}
    return names.pop() if len(names) == 1 else str(found.get("quant_method"))


def _group_scheme(group: Mapping[str, Any], layout: str) -> str:
    """The scheme of a group of compressed-tensors, by sameseed's name."""
    weights, rows = group["weights"], group.get("input_activations")
    if weights.get("type") == "float":
        name = "fp8" if weights["num_bits"] == 8 else layout.partition("-")[0]  # mxfp4, nvfp4
        return name + ("-a8" if rows else "") + ("-b128" if weights.get("strategy") == "block" else "")
    size = f"-g{weights['group_size']}" if (weights.get("group_size") or -1) > 0 else ""
    asym = "" if weights.get("symmetric", True) else "-asym"
    return f"w{weights['num_bits']}a{rows['num_bits'] if rows else 16}{size}{asym}"


def _any_group(scheme: str) -> str:
    """The scheme without its groups or blocks, which stands for any of them."""
    return re.sub("-[gb][0-9]+", "", scheme)


def _format(folder: str, settings: Mapping[str, Any]) -> list[str]:
    """Flags for the formats of weights (vLLM does not quantize while loading) and KV cache. Raises ConfigError."""
    asked, kv = settings.get("format", "auto"), settings.get("kv_format", "auto")
    made: list[str] = []
    config = Path(folder) / "config.json"
    stored = stored_scheme(read_json(config)) if config.is_file() else None
    short = _any_group(stored or "")
    if asked not in ("auto", stored, short, short.partition("-")[0]):
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
    """Flags for limits; those at our defaults are left to vLLM's, except max_num_seqs. Raises ConfigError."""
    own, cache = EngineConfig(), CacheConfig()
    for name, remedy in LACKED.items():
        default = getattr(own, name)
        if settings.get(name, default) not in (default, "cuda"):
            raise ConfigError(f"--{name.replace('_', '-')} {remedy}")
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


def _own_flags(more: str) -> list[str]:
    """vLLM's own flags as they were given. Raises ConfigError for those that sameseed sets.

    vLLM's parser takes a prefix of a flag for the flag, "_" for "-", and sets parts of a value by --flag.part.
    """
    made = shlex.split(more)
    for word in made:
        name = word.partition("=")[0].partition(".")[0].lstrip("-").replace("_", "-")
        if word.startswith("-") and any(name == r or (len(name) > 1 and r.startswith(name)) for r in RESERVED):
            raise ConfigError(f"--vllm-args: {word!r} is set by sameseed's own flags (serve --help); leave it out")
    return made
