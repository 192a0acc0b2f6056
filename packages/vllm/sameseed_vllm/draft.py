"""vLLM's --speculative-config (0.29 to 0.33): translates drafts, and knows vLLM's own methods and keys."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sameseed import habits
from sameseed.config import SpecConfig
from sameseed.errors import ConfigError, ModelLoadError
from sameseed.hub import PACKAGED
from sameseed.models.config import ASSETS, EMBEDDED, is_parallel, read_json
from sameseed.models.head_config import is_head

Version = tuple[int, int]
OLDEST: Version = (0, 29)  # has --per-request-spec-decode-metrics, and the server's present module
OVER_STAGES = "a draft with weights over several groups of layers"
ON_ONE = "a draft model with a draft_tensor_parallel_size of 1"
NGRAM_AHEAD = "ngram with asynchronous scheduling"
# Since which version vLLM has a feature that the oldest one lacks.
SINCE: Mapping[str, Version] = {OVER_STAGES: (0, 30), ON_ONE: (0, 31), NGRAM_AHEAD: (0, 32)}
# Options that vLLM has too, with the drafters' own defaults, copied: loading a drafter would load torch.
OPTIONS: dict[str, dict[str, Any]] = {
    "ngram": {"min_ngram": 2, "max_ngram": 4},
    "suffix": {"max_match": 24, "length_factor": 2.0, "min_probability": 0.1, "past": "tenant"},
}
OWN = ("dspark", "dflash", "ngram_gpu")  # methods that sameseed has no drafter for
WITHIN = ("mtp", "dspark")  # methods whose weights the target's checkpoint may hold
WITH_WEIGHTS = ("draft_model", "eagle", "eagle3", "mtp", "dflash", "dspark")
# vLLM's own keys: the methods that take it, and what its value must be.
KEYS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "draft_tensor_parallel_size": (WITH_WEIGHTS, "1 or the target's --tensor-parallel-size"),
    "parallel_drafting": (("draft_model", "eagle", "eagle3"), "true or false (the draft must be trained for it)"),
    "draft_sample_method": (WITH_WEIGHTS, "'greedy' or 'probabilistic'"),
    "num_speculative_tokens_per_batch_size": (
        ("ngram", "ngram_gpu", *WITH_WEIGHTS),
        "a list of [first, last, tokens], ranges of batch sizes from 1 on without overlap, tokens up to --k",
    ),
    "suffix_decoding_max_cached_requests": (("suffix",), "a number of requests, 0 or more"),
}
_DRAFTERS = {name: name for name in ("ngram", "suffix", "draft_model", "eagle", "mtp")}
_DRAFTERS |= {"parallel": "draft_model", "block": "dflash", "assistant": "mtp"}
# Method by part of an architecture's name, or of a hub id; the first that is found counts.
_MARKS = {
    "eagle3": "eagle3",
    "peagle": "eagle3",
    "dspark": "dspark",
    "dflash": "dflash",
    "xpress": "dflash",
    "eagle": "eagle",
    "mtp": "mtp",
}


@dataclass(frozen=True)
class Spread:
    """How vLLM distributes a model: GPUs that share each layer, groups of layers, nodes of a Ray cluster."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int | None = None  # None: one group of layers per node
    nodes: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "nodes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")

    @property
    def stages(self) -> int:
        return self.pipeline_parallel_size or self.nodes

    @property
    def workers(self) -> int:
        return self.tensor_parallel_size * self.stages

    def arguments(self) -> list[str]:
        """vLLM's flags. With more than one node, Ray places the workers; a Ray cluster must be running."""
        made = []
        if self.tensor_parallel_size > 1:
            made += ["--tensor-parallel-size", str(self.tensor_parallel_size)]
        if self.stages > 1:
            made += ["--pipeline-parallel-size", str(self.stages)]
        return [*made, "--distributed-executor-backend", "ray"] if self.nodes > 1 else made


def model_path(name: str) -> str:
    """A folder that vLLM finds, or a hub id as it is. Raises ModelLoadError for a file, or for no such model."""
    if name in EMBEDDED:
        return str(ASSETS / EMBEDDED[name])
    path = Path(os.path.expanduser(name))
    if path.is_file() or name.endswith(".gguf") or name in PACKAGED:
        raise ModelLoadError(f"vLLM serves Hugging Face folders, and {name} is a file; give the checkpoint's folder")
    if not path.is_dir() and (name.startswith((".", "/", "~")) or name.count("/") != 1):
        raise ModelLoadError(f"there is no model {name}; give a folder or a hub id like org/name")
    return str(path.resolve()) if path.is_dir() else name


def speculative_config(settings: Mapping[str, Any], spread: Spread) -> dict[str, Any] | None:
    """vLLM's --speculative-config for the draft and its settings; None if nothing is drafted. Raises ConfigError."""
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
    method, model = _named(spec)
    if spec.policy != "fixed":
        raise ConfigError(f"--policy {spec.policy} is sameseed's own; vLLM drafts --policy fixed numbers of tokens")
    if spec.confidence is not None or spec.overlap:
        raise ConfigError("--confidence and --overlap are sameseed's own; leave them out with --engine vllm")
    if spec.format != "auto":
        raise ConfigError("vLLM reads a draft as its checkpoint stores it; leave --draft-format at auto")
    made: dict[str, Any] = {"num_speculative_tokens": spec.num_draft_tokens}
    if model is not None:
        made["model"] = model_path(model)
        method = method or _method_of(made["model"])
    elif method in ("draft_model", "parallel", "eagle", "block", "dflash", "assistant"):
        raise ConfigError(f"--draft {method}: vLLM needs the draft's checkpoint; give its folder or hub id")
    assert method is not None
    made = {"method": method, **made}
    if spec.method == "parallel" or (model is not None and is_parallel(Path(made["model"]))):
        made["parallel_drafting"] = True
    made |= _options(method, spec.options)
    if method in WITH_WEIGHTS and spread.tensor_parallel_size > 1:
        made.setdefault("draft_tensor_parallel_size", spread.tensor_parallel_size)
    return {**made, **_own_keys(method, spec, spread)}


def _named(spec: SpecConfig) -> tuple[str | None, str | None]:
    """Method and model of a draft; method None: see the checkpoint. Raises ConfigError for what vLLM lacks."""
    name, colon, model = (spec.model or "").partition(":")
    if spec.method == "draft_model" and name in OWN and not Path(spec.model or "").exists():
        if name == "ngram_gpu" and colon:
            raise ConfigError("--draft ngram_gpu looks into the text and has no model; leave it out")
        return name, model or None
    if spec.method not in _DRAFTERS:
        known = ", ".join(dict.fromkeys((*OPTIONS, *WITHIN, *OWN)))
        raise ConfigError(f"vLLM has no drafter like {spec.method!r}; give {known}, a draft model or an EAGLE head")
    if spec.model is None or spec.method in WITHIN:
        return spec.method, spec.model
    if spec.method == "assistant":
        return "mtp", spec.model
    if spec.method == "eagle" and not Path(model_path(spec.model)).is_dir():  # on the hub: only its name is known
        return ("eagle3" if "eagle3" in spec.model.lower().replace("-", "") else "eagle"), spec.model
    return None, spec.model


def _method_of(path: str) -> str:
    """The method for a draft's checkpoint: by its config.json, or, on the hub, by its name (as in vLLM)."""
    folder = Path(path)
    if not folder.is_dir():
        marks = {mark: method for mark, method in _MARKS.items() if mark in ("eagle3", "dflash", "dspark")}
        return _marked(path.lower(), {**marks, "eagle-": "eagle"}) or "draft_model"
    raw = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    name = str((raw.get("architectures") or [""])[0])
    kind = str(raw.get("speculators_model_type") or "") or name
    return _marked(kind.lower(), _MARKS) or ("eagle" if is_head(folder) else "draft_model")


def _marked(text: str, marks: Mapping[str, str]) -> str | None:
    return next((method for mark, method in marks.items() if mark in text), None)


def _options(method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """A drafter's own options as vLLM's keys; past texts, which all tenants share, are off. Raises ConfigError."""
    drafter = "ngram" if method == "ngram_gpu" else method
    known = OPTIONS.get(drafter, {})
    if unknown := [name for name in options if name not in known and name not in KEYS]:
        ours = f"of {drafter}'s options vLLM has like ones for {', '.join(known)}; " if known else ""
        raise ConfigError(f"{ours}its own are {', '.join(KEYS)}; got {', '.join(unknown)}")
    chosen = {**known, **{name: value for name, value in options.items() if name in known}}
    made = {theirs: chosen[ours] for theirs, ours in habits.OPTIONS.get(drafter, {}).items()}
    if options.get("past") == "tenant":
        raise ConfigError("past 'tenant': vLLM has one store of past texts for all; leave it out, or give 'all'")
    if drafter == "suffix" and chosen["past"] != "all":
        made["suffix_decoding_max_cached_requests"] = 0
    return made


def _own_keys(method: str, spec: SpecConfig, spread: Spread) -> dict[str, Any]:
    """vLLM's own keys among the options, checked. Raises ConfigError."""
    good: dict[str, Callable[[Any], bool]] = {
        "draft_tensor_parallel_size": lambda value: type(value) is int and value in (1, spread.tensor_parallel_size),
        "parallel_drafting": lambda value: isinstance(value, bool),
        "draft_sample_method": lambda value: value in ("greedy", "probabilistic"),
        "num_speculative_tokens_per_batch_size": lambda value: _is_table(value, spec.num_draft_tokens),
        "suffix_decoding_max_cached_requests": lambda value: type(value) is int and value >= 0,
    }
    made = {name: value for name, value in spec.options.items() if name in KEYS}
    for name, value in made.items():
        methods, what = KEYS[name]
        if method not in methods:
            raise ConfigError(f"{name} is for {', '.join(methods)}, not for {method}; leave it out")
        if not good[name](value):
            raise ConfigError(f"{name} must be {what}, got {value!r}")
    return made


def _is_table(value: Any, most: int) -> bool:
    """Whether `value` lists [first, last, tokens] of ranges of batch sizes, from 1 on, without overlap."""
    last = 0
    for row in value if isinstance(value, list) and value else [None]:
        if not (isinstance(row, list) and len(row) == 3 and all(type(v) is int for v in row)):
            return False
        if not (last < row[0] <= row[1] and 0 <= row[2] <= most):
            return False
        last = row[1]
    return bool(value[0][0] == 1)
