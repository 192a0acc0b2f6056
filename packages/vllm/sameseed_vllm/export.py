"""Exports a tuned profile to vLLM 0.33, and to SGLang and llama.cpp of October 2026, noting what is lost."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sameseed.config import SpecConfig, parse_draft
from sameseed.errors import ConfigError, SameseedError
from sameseed.hub import PACKAGED, packaged
from sameseed.models.config import GGUF, is_parallel
from sameseed.models.draft_format import draft_scheme
from sameseed.models.head_config import is_block, is_head
from sameseed.scheme import QuantScheme
from sameseed.tuned import TABLE_END, Chosen, Tuned
from sameseed_vllm import draft as drafts, flags as vllm
from sameseed_vllm.environments import environment

STALLS = "a 0 in vLLM's table was reported to stall batches at its edge (vllm-project/vllm issue 49548): measure it"
UNTESTED = "vLLM tests its table by batch size with EAGLE and DFlash heads, not with draft models: measure it"
GGUF_TYPES = {"w8a8": "Q8_0", "w4a8": "Q4_0", "w4a16": "Q4_0", "bf16": "BF16", "fp16": "F16", "fp32": "F32"}
GGUF_TYPES |= {"q2_k": "Q2_K", "q4_k": "Q4_K_M", "q5_k": "Q5_K_M", "q6_k": "Q6_K"}
GGUF_TYPES |= {name: name.upper() for name in ("q4_1", "q5_0", "q5_1", "iq4_nl")}
GGUF_KV = {"bf16": "bf16", "fp16": "f16", "fp32": "f32", "int8": "q8_0", "int4": "q4_0"}


@dataclass(frozen=True)
class Exported:
    """What to run: words of a command, environment variables, files by name, and notes on what these cannot express."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def export(tuned: Tuned, engine: str) -> Exported:
    """Export the profile for "vllm", "sglang" or "llama.cpp". Raises ConfigError, ModelLoadError."""
    if engine not in ENGINES:
        raise ConfigError(f"no export to {engine!r}; there are {', '.join(ENGINES)}")
    made = ENGINES[engine](tuned)
    rates, notes = tuned.acceptance, [*made.notes]
    if tuned.chosen.policy == "goodput":
        notes.append("--policy goodput has no counterpart: lengths are fixed there, at most by batch size")
    files = dict(made.files)
    if rates.conditional_accept_rates:
        files["speculation_profile.json"] = json.dumps(_model_opt(tuned), indent=2) + "\n"
    return dataclasses.replace(made, files=files, notes=tuple(notes))


def _model_opt(tuned: Tuned) -> dict[str, Any]:
    """Measured acceptance under the names of ModelOpt's file, which planners of other engines read."""
    rates, scope = tuned.acceptance, tuned.scope
    conditions = {"dataset": scope.prompts, "num_samples": rates.num_samples, "temperature": list(scope.temperature)}
    return {
        "schema_version": 1,
        "method": tuned.chosen.draft or "none",
        "num_speculative_tokens": tuned.chosen.num_draft_tokens or 0,
        "conditional_accept_rates": list(rates.conditional_accept_rates),
        "marginal_accept_rates": list(rates.marginal_accept_rates),
        "mean_accept_length": rates.mean_accept_length,
        "measurement_conditions": conditions,
    }


def _place(model: str) -> Path:
    """A folder or GGUF file, or its name on the hub. Raises ModelLoadError."""
    name = str(packaged(model)) if model in PACKAGED else model
    return Path(name if name.endswith(GGUF) else drafts.model_path(name))


def _draft_format(tuned: Tuned, model: str) -> str:
    """The format in which a draft was measured: as named, else as it follows its target's, where both are local."""
    chosen = tuned.chosen
    if chosen.draft_format not in (None, "auto"):
        return str(chosen.draft_format)
    draft, target = _place(model), _place(tuned.model.id)
    if draft.exists() and target.exists():
        with suppress(SameseedError):
            return str(draft_scheme(draft, target, QuantScheme.parse(chosen.format or "auto")))
    return "auto"


def _one_drafter(tuned: Tuned, able: Mapping[str, str], notes: list[str], reads_folders: bool = True) -> SpecConfig:
    """The one drafter of the choice that another engine supports: of several, the last such one. Notes the rest."""
    chosen = tuned.chosen
    spec = parse_draft(chosen.draft) if chosen.draft and chosen.draft != "none" else SpecConfig()
    if spec.method == "none" or chosen.num_draft_tokens == 0:
        return SpecConfig()
    levels = list(spec.below) if spec.method == "first" else [spec]
    kept = next((level for level in reversed(levels) if _kind(level) in able), SpecConfig())
    if spec.method == "first" or kept.method == "none" or kept.below:
        what = kept.model or kept.method
        notes.append(
            f"--draft {chosen.draft!r} has no counterpart"
            + (": plain decoding" if kept.method == "none" else f": {what} alone; measure again, for k was for all")
        )
    if reads_folders and kept.model and (form := _draft_format(tuned, kept.model)) != "auto":
        how = f"write it first: sameseed quantize {kept.model} --scheme {form} --out DIR"
        notes.append(f"--draft-format {form}: a draft is read as stored; {how}")
    return SpecConfig("draft_model", kept.model) if kept.below else kept


def _kind(spec: SpecConfig) -> str:
    """The kind of a drafter: ngram, suffix, head (EAGLE), block or model; "" for one that other engines do not know."""
    if spec.method in ("ngram", "suffix"):
        return spec.method
    if spec.model is None:
        return ""
    path = _place(spec.model)
    if spec.method == "block" or (path.is_dir() and is_head(path) and is_block(path)):
        return "block"
    return "head" if spec.method == "eagle" or (path.is_dir() and is_head(path)) else "model"


def _note_losses(chosen: Chosen, spec: SpecConfig, notes: list[str], engine: str = "") -> None:
    """Note settings without a counterpart: drafts by batch size, a drafter's options, parallel drafting."""
    if chosen.by_batch and spec.method != "none":
        rows = ", ".join(f"from {first}: {k or 'off'}" for first, k in chosen.by_batch)
        notes.append(f"draft tokens by batch size ({rows}) have no counterpart: serve without a draft where it is off")
    if chosen.draft_options:
        notes.append(f"--draft-options {json.dumps(dict(chosen.draft_options))} have no counterpart")
    if engine and (spec.method == "parallel" or (spec.model and is_parallel(_place(spec.model)))):
        notes.append(f"{engine} has no parallel drafting: the draft writes a token a pass; measure again")


def _vllm(tuned: Tuned) -> Exported:
    chosen = tuned.chosen
    notes: list[str] = []
    able = {"ngram": "ngram", "suffix": "suffix", "head": "eagle3", "block": "dflash", "model": "draft_model"}
    spec = _one_drafter(tuned, able, notes)
    settings: dict[str, Any] = {"draft": spec, "num_draft_tokens": _most(chosen), "threads": chosen.threads}
    if chosen.max_num_seqs:
        settings["max_num_seqs"] = chosen.max_num_seqs
    known = spec.method in drafts.OPTIONS and set(chosen.draft_options or {}) <= drafts.OPTIONS[spec.method].keys()
    settings |= {"draft_options": dict(chosen.draft_options)} if known and chosen.draft_options else {}
    lost = dataclasses.replace(chosen, draft_options=None if known else chosen.draft_options)
    for name, value in (("format", chosen.format), ("kv_format", chosen.kv_format)):
        try:
            vllm.arguments(tuned.model.id, {name: value or "auto"}, drafts.Spread(), ("m",))
            settings[name] = value or "auto"
        except ConfigError as error:
            notes.append(f"--{name.replace('_', '-')} {value}: {error}")
    words = vllm.arguments(tuned.model.id, settings, drafts.Spread(), (tuned.model.id,))
    if chosen.by_batch and "--speculative-config" in words and _kind(spec) in ("head", "block", "model"):
        at, table = words.index("--speculative-config") + 1, [list(row) for row in chosen.ranges()]
        table[-1][1] = max(table[-1][0], chosen.max_num_seqs or TABLE_END)
        config = {**json.loads(words[at]), "num_speculative_tokens_per_batch_size": table}
        words[at] = json.dumps(config, separators=(",", ":"))
        notes += [STALLS] if any(k == 0 for *_, k in table) else []
        notes += [UNTESTED] if _kind(spec) == "model" else []
        lost = dataclasses.replace(lost, by_batch=())
    _note_losses(lost, spec, notes)
    return Exported(("vllm", "serve", *words), environment(settings), {}, tuple(notes))


def _most(chosen: Chosen) -> int:
    """The most draft tokens at any batch size, for which buffers are sized."""
    return max([chosen.num_draft_tokens or SpecConfig().num_draft_tokens, *(k for _, k in chosen.by_batch)])


def _sglang(tuned: Tuned) -> Exported:
    chosen = tuned.chosen
    notes: list[str] = []
    words = ["python", "-m", "sglang.launch_server", "--model-path", drafts.model_path(tuned.model.id)]
    if chosen.format in vllm.DTYPES:
        words += ["--dtype", vllm.DTYPES[chosen.format]]
    elif chosen.format not in (None, "auto"):
        how = f"sameseed quantize {tuned.model.id} --scheme {chosen.format} --out DIR, and give DIR as the model"
        notes.append(f"--format {chosen.format}: weights are served as stored; write them first: {how}")
    if chosen.kv_format in ("fp8", "fp8_e4m3", "fp8_e5m2", "bf16"):
        words += ["--kv-cache-dtype", vllm.KV_FORMATS[chosen.kv_format]]
    elif chosen.kv_format not in (None, "auto"):
        notes.append(f"--kv-format {chosen.kv_format} has no counterpart: SGLang keeps fp8_e4m3, fp8_e5m2 or bf16")
    spec, k = _one_drafter(tuned, {"ngram": "NGRAM", "head": "EAGLE3", "model": "STANDALONE"}, notes), _most(chosen)
    if spec.method == "ngram":
        words += ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(k)]
    elif spec.model is not None:
        path = drafts.model_path(spec.model)
        kind = (drafts.speculative_config({"draft": spec}, drafts.Spread()) or {})["method"]
        algorithm = {"draft_model": "STANDALONE", "eagle": "EAGLE"}.get(kind, "EAGLE3")
        words += ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", path]
        words += ["--speculative-num-steps", str(k), "--speculative-eagle-topk", "1"]
        words += ["--speculative-num-draft-tokens", str(k + 1)]
    _note_losses(chosen, spec, notes, "SGLang")
    words += ["--max-running-requests", str(chosen.max_num_seqs)] if chosen.max_num_seqs else []
    environment = {"OMP_NUM_THREADS": str(chosen.threads)} if chosen.threads else {}
    return Exported((*words, "--enable-metrics"), environment, {}, tuple(notes))


def _llama_cpp(tuned: Tuned) -> Exported:
    chosen = tuned.chosen
    notes: list[str] = []
    words = ["llama-server", *_gguf(tuned.model.id, chosen.format, notes)]
    if chosen.kv_format not in (None, "auto"):
        if (kind := GGUF_KV.get(str(chosen.kv_format))) is not None:
            words += ["-ctk", kind, "-ctv", kind, "-fa", "on"]
        else:
            notes.append(f"--kv-format {chosen.kv_format} has no counterpart: it keeps {', '.join(GGUF_KV.values())}")
    able = {"ngram": "ngram-simple", "head": "draft-eagle3", "model": "draft-simple"}
    spec = _one_drafter(tuned, able, notes, reads_folders=False)
    if spec.method != "none":
        words += ["--spec-type", able[_kind(spec)]]
        if spec.model is not None:
            words += _gguf(spec.model, _draft_format(tuned, spec.model), notes, draft=True)
        words += ["--spec-draft-n-max", str(_most(chosen)), "--spec-draft-p-min", "0"]
    _note_losses(chosen, spec, notes, "llama.cpp")
    words += ["-np", str(chosen.max_num_seqs)] if chosen.max_num_seqs else []
    if chosen.max_num_seqs and tuned.scope.context:
        words += ["-c", str(chosen.max_num_seqs * tuned.scope.context)]
        notes.append("-c is shared by all slots: the longest text that was tried, times --max-num-seqs")
    words += ["-t", str(chosen.threads)] if chosen.threads else []
    return Exported((*words, "--metrics"), {}, {}, tuple(notes))


def _gguf(model: str, number_format: str | None, notes: list[str], draft: bool = False) -> list[str]:
    """Flags for a model's GGUF file, here or on the hub; notes how to make the file where there is none."""
    here, there, file_there = ("-md", "-hfd", "-md") if draft else ("-m", "-hf", "-hff")
    folder, base = _place(model), (number_format or "auto").partition("-")[0]
    kind = GGUF_TYPES.get(base, "BF16")
    on_hub = not folder.exists() and not model.startswith((".", "/", "~"))
    labelled = on_hub and (":" in folder.name or folder.name.lower().endswith("-gguf"))
    if labelled or folder.suffix == GGUF:
        if base != "auto" and not draft:
            notes.append(f"--format {number_format}: the file is read as stored; llama-quantize makes one in {kind}")
        if on_hub and model.count("/") == 2:
            return [there, str(folder.parent), file_there, folder.name]
        return [there if labelled else here, str(folder)]
    file = f"{folder.name}-{kind}.gguf"
    like = "" if base in ("auto", *vllm.DTYPES) else f" ({kind} is the nearest to {number_format}, not the same)"
    notes.append(f"make {file}: python convert_hf_to_gguf.py {folder} --outfile {file} (llama-quantize: {kind}){like}")
    return [here, file]


ENGINES: dict[str, Callable[[Tuned], Exported]] = {"vllm": _vllm, "sglang": _sglang, "llama.cpp": _llama_cpp}
