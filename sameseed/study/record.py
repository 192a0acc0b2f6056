"""Records of measurements: one JSON line each, appended and never changed. The source of all numbers in the docs."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence as Seq
from dataclasses import asdict
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch

import sameseed
from sameseed import registry, store
from sameseed.config import SpecConfig
from sameseed.devices import cpu_name as cpu_name, native_isa as native_isa, native_threads as native_threads
from sameseed.engine.alarm import is_useless
from sameseed.engine.llm import LLM
from sameseed.errors import ConfigError
from sameseed.models.layers import ModelWeights
from sameseed.models.loader import resolve_model
from sameseed.study.measure import Bench, Run
from sameseed.study.schemas import BENCH_SCHEMA, check
from sameseed.study.usage import Usage
from sameseed.study.workload import Arm, Workload, spec_as_dict

log = logging.getLogger("sameseed")
RESULTS = Path("benchmarks/results")
SAMPLED = ("max_tokens", "temperature", "top_k", "top_p", "min_p")  # fields of SamplingParams that a record holds
COUNTED = (  # fields of SpecMetrics that a record holds
    "num_rounds",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "acceptance_rate",
    "mean_acceptance_length",
    "num_ahead",
    "num_ahead_kept",
)


def now() -> str:
    """The current time, ISO 8601, UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@cache
def commit() -> str:
    """The checkout's commit (12 digits), with "+" if a source file was changed; without a checkout, the version."""
    root = Path(sameseed.__file__).resolve().parent.parent
    git = ["git", "-C", str(root)]
    try:
        top = subprocess.run([*git, "rev-parse", "--show-toplevel", "HEAD"], capture_output=True, text=True, check=True)
        folder, head = top.stdout.splitlines()
        if Path(folder) != root:
            return sameseed.__version__
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no", "--", "sameseed", "csrc"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError, ValueError):
        return sameseed.__version__
    return head[:12] + ("+" if changed.stdout.strip() else "")


def machine() -> dict[str, object]:
    """Properties of the machine that the numbers depend on, without its host name."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu_name(),
        "cores": cores,
        "isa": native_isa(),
        "threads": native_threads(),
        "load_1min": round(os.getloadavg()[0], 2),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def model_name(model: str) -> str:
    """A model's name in a record: for a folder or file, its name without the path, which may be private."""
    return Path(model).resolve().name if Path(model).exists() else model


def speculation(spec: SpecConfig) -> dict[str, object]:
    """A SpecConfig as plain data for a record: draft models of all levels by name, without paths."""
    return _anonymous(spec_as_dict(spec))


def _anonymous(spec: Any) -> dict[str, object]:
    changed = dict(spec)
    if changed.get("draft_model"):
        changed["draft_model"] = model_name(changed["draft_model"])
    if "below" in changed:
        changed["below"] = [_anonymous(b) for b in changed["below"]]
    return changed


def stored_formats(weights: ModelWeights) -> str:
    """The formats that a model's matrices are stored in, e.g. "int8+q4_1"."""
    return "+".join(sorted({m.format for m in weights.matrices}))


def config_as_dict(llm: LLM, model: str, arm: Arm, workload: Workload) -> dict[str, object]:
    """The resolved configuration of an arm (without "auto" values), for its record."""
    engine, c, params = llm.engine, llm.config, workload.params
    weights = engine.runner.model.weights
    return {
        "label": arm.label,
        "model": model_name(model),
        "model_digest": store.weights_key(resolve_model(model)),
        "num_parameters": engine.runner.model.config.num_parameters,
        **speculation(arm.spec),
        "draft_digest": store.weights_key(resolve_model(arm.spec.model)) if arm.spec.model else None,
        "format": stored_formats(weights) if c.format == "auto" else c.format,
        "kv_format": engine.runner.cache.layers[0].format,
        "backend": engine.runner.model.ops.name,
        "device": c.device,
        "block_size": engine.runner.cache.block_size,
        "num_blocks": engine.runner.cache.num_blocks,
        **{name: getattr(c, name) for name in ("max_num_rows", "max_num_seqs")},
        "max_model_len": engine.max_model_len,
        "batch_size": workload.batch_size,
        "prompts": workload.name,
        "num_prompts": len(workload.prompts),
        "num_prompt_tokens": sum(map(len, workload.prompts)),
        **{name: getattr(params, name) for name in (*SAMPLED, "seed", "ignore_eos")},
    }


def make_records(
    bench: Bench, model: str, workload: Workload, runs: Mapping[Arm, Seq[Run]], run_id: str, here: Mapping[str, object]
) -> list[dict[str, Any]]:
    """The records of one measured workload, one per arm, plain decoding first."""
    plain = runs[bench.arms[0]]
    records = []
    for arm in bench.arms:
        made = make_record(config_as_dict(bench.llm, model, arm, workload), runs[arm], plain, run_id, here)
        middle = sorted(range(len(plain)), key=lambda i: made["repetitions"][i]["speedup"])[len(plain) // 2]
        found = bench.predict(arm, runs[arm][middle], plain[middle], workload.batch_size)
        records.append(made if found is None else {**made, "prediction": found.as_dict()})
    return records


def make_record(
    config: Mapping[str, object], runs: Seq[Run], plain: Seq[Run], run_id: str, machine_: Mapping[str, object]
) -> dict[str, Any]:
    """The record of one arm. `runs[i]` and `plain[i]` were interleaved, so `speedup` is the median of their ratios.

    `decode_speedup`: the same after the first tokens. `tokens_per_s` is plain decoding's median times `speedup`: the
    arm's own median could contradict `speedup`.
    """
    ratios = [mine.tokens_per_s / its.tokens_per_s for mine, its in zip(runs, plain, strict=True)]
    batch = int(str(config.get("batch_size", 1)))
    later = [(mine.decoded_per_s(batch), its.decoded_per_s(batch)) for mine, its in zip(runs, plain, strict=True)]
    equal = [mine.texts == its.texts for mine, its in zip(runs, plain, strict=True)]
    metrics = runs[0].metrics
    done = [c.metrics for run in runs for c in run.completions]
    return {
        "schema": BENCH_SCHEMA,
        "run": run_id,
        "time": now(),
        "commit": commit(),
        "machine": dict(machine_),
        "config": dict(config),
        "repetitions": [_repetition(*each) for each in zip(runs, ratios, equal, strict=True)],
        "tokens_per_s": median(run.tokens_per_s for run in plain) * median(ratios),
        "repeated": runs[0].repeated,
        "latency_s": spread([m.total_time for m in done]),
        "ttft_s": spread([m.time_to_first_token for m in done]),
        "time_per_output_token_s": spread([m.time_per_output_token for m in done if m.num_output_tokens > 1]),
        **{name: getattr(metrics, name) for name in COUNTED},
        "rollbacks": metrics.num_rollbacks,
        "accepted_per_pos": list(metrics.num_accepted_tokens_per_pos),
        "speedup": median(ratios),
        "decode_speedup": median(a / b for a, b in later) if all(b for _, b in later) else None,
        "equals_plain": all(equal),
        "time_split": {name: median(_split(run)[name] for run in runs) for name in _split(runs[0])},
        "overhead_ms_per_round": median(run.overhead / run.num_steps for run in runs) * 1e3,
        "usage": _usage(runs),
        "draft_lengths": runs[0].draft_lengths,
        **_remarks(str(config.get("draft", "none")), runs[0]),
    }


def _remarks(draft: str, run: Run) -> dict[str, object]:
    """Optional fields: counts of the lower-level drafters, and a flag if almost no draft token was accepted."""
    found: dict[str, object] = {}
    if run.levels:
        found["levels"] = {name: level.as_dict() for name, level in run.levels.items()}
    if draft != "none" and registry.load("drafters", draft).DRAFTER.owns and is_useless(run.metrics):
        found["useless_draft"] = True
    return found


def _usage(runs: Seq[Run]) -> dict[str, float | None]:
    """Machine usage of all runs together, as plain data."""
    whole = Usage()
    for run in runs:
        whole.add(run.usage)
    return whole.as_dict(sum(run.num_tokens for run in runs))


def _repetition(run: Run, ratio: float, same: bool) -> dict[str, Any]:
    found = {name: getattr(run, name) for name in ("seconds", "num_tokens", "tokens_per_s")}
    found |= {"speedup": ratio, "equals_plain": same}
    return {**found, "num_steps": run.num_steps, "time_split": _split(run)}


def _split(run: Run) -> dict[str, float]:
    t = run.times
    return {**asdict(t), "rest": run.seconds - t.draft - t.target - t.verify - t.schedule}


def spread(values: Seq[float]) -> dict[str, float | None]:
    """Median, mean and 95th percentile of `values`; all None if there are none."""
    if not values:
        return {"median": None, "mean": None, "p95": None}
    ordered = sorted(values)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return {"median": median(ordered), "mean": sum(ordered) / len(ordered), "p95": p95}


def prepare(path: Path, flag: str = "--out") -> None:
    """Check before a measurement that records can be written to `path`. Raises ConfigError naming the flag."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        path.open("a", encoding="utf-8").close()
        if new:
            path.unlink()  # a measurement that fails later should not leave an empty file
    except OSError as error:
        raise ConfigError(f"cannot write records to {path} ({error.strerror}); choose another with {flag}") from None


def require(what: str, extra: str, *modules: str) -> None:
    """Raise ConfigError naming the extra where one of these modules, which `what` needs, is not installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{what} needs {', '.join(missing)}; install with: pip install '.[{extra}]'")


def destination(out: Path | None, name: str) -> Path | None:
    """The file for a command's records: `out`, else NAME.jsonl in benchmarks/results/ if that folder exists, else None.

    The file is checked with `prepare`.
    """
    out = out or (RESULTS / f"{name}.jsonl" if RESULTS.is_dir() else None)
    if out is not None:
        prepare(out)
    return out


def append(path: Path, record: Mapping[str, object]) -> None:
    """Append one line to a record file, which is created if missing. Raises ConfigError if `record` is not valid."""
    check(record)
    prepare(path)
    with path.open("ab+") as file:
        file.seek(-1 if file.tell() else 0, os.SEEK_CUR)
        whole = file.read() in (b"", b"\n")  # a line may have been cut off when its process was killed
        file.write(b"" if whole else b"\n")
        file.write(json.dumps(record).encode() + b"\n")


def read(path: Path, skip_broken: bool = False) -> list[dict[str, Any]]:
    """All records of a file, checked. Raises ConfigError naming a broken line; `skip_broken`: it is logged instead."""
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            check(record)
        except (json.JSONDecodeError, ConfigError, AttributeError) as error:
            if not skip_broken:
                raise ConfigError(f"{path}:{number}: {error}") from None
            log.warning("%s:%d is broken (%s); it is measured again", path, number, error)
            continue
        records.append(record)
    return records
