"""A variant, MODEL[@FORMAT[@KVFORMAT]]: its size and memory, and which of its parts should keep more bits."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sameseed import scheme
from sameseed.engine.llm import LLM
from sameseed.errors import ConfigError, ModelLoadError
from sameseed.measure.quality.perplexity import perplexity
from sameseed.measure.quality.tasks import Report, silent
from sameseed.models.config import ModelConfig
from sameseed.models.loader import resolve_model
from sameseed.report import record
from sameseed.scheme import QuantScheme

WEIGHTS = ("*.safetensors", "*.gguf", "*.bin")


@dataclass(frozen=True)
class Variant:
    """A model in a weight format and a KV cache format. "auto": the checkpoint's format, and the cache's to match."""

    model: str
    format: str = "auto"
    kv_format: str = "auto"

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Parse MODEL[@FORMAT[@KVFORMAT]]. A path that exists is a model, even if it contains "@".

        Raises ConfigError or RegistryError.
        """
        parts = [text] if Path(text).exists() else text.split("@")
        if len(parts) > 3 or not all(parts):
            raise ConfigError(f"a variant is MODEL, MODEL@FORMAT or MODEL@FORMAT@KVFORMAT, got {text!r}")
        found = cls(*parts)
        QuantScheme.parse(found.format)
        if found.kv_format != "auto":
            scheme.kv_formats(found.kv_format)
        return found

    @property
    def label(self) -> str:
        """Short name for tables and messages."""
        parts = (record.model_name(self.model), self.format, f"kv {self.kv_format}")
        return " ".join(p for p in parts if p not in ("auto", "kv auto"))

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of LLM."""
        return {"format": self.format, "kv_format": self.kv_format}

    def disk_bytes(self) -> int:
        """Bytes of the checkpoint's weight files on disk, regardless of the format in which they are loaded."""
        folder = resolve_model(self.model)
        files = [folder] if folder.is_file() else next((f for p in WEIGHTS if (f := sorted(folder.glob(p)))), [])
        return sum(f.stat().st_size for f in files)


def stored(llm: LLM) -> dict[str, str]:
    """Formats and backend of a loaded model, for a record. For format "auto": the formats of its matrices."""
    runner = llm.engine.runner
    formats = sorted({m.format for m in runner.model.weights.matrices})
    asked = llm.config.format
    return {
        "format": ", ".join(formats) if asked == "auto" else asked,
        "kv_format": runner.cache.format,
        "backend": runner.model.ops.name,
    }


@dataclass(frozen=True)
class Footprint:
    """Resident bytes of a fresh process: `before` loading a variant, and the `peak` while it loads and generates."""

    peak: int
    before: int

    @property
    def added(self) -> int:
        """Bytes that model and engine add at the peak to an interpreter with all modules imported."""
        return max(0, self.peak - self.before)


def footprint(variant: Variant, settings: dict[str, Any], tokens: int = 16) -> Footprint:
    """Measure a variant's memory in a fresh process. Raises ConfigError with the process's last line if it fails."""
    job = {"model": variant.model, "tokens": tokens, "settings": {**settings, **variant.settings, "max_num_seqs": 1}}
    done = subprocess.run(
        [sys.executable, "-m", "sameseed.measure.quality.variant"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    try:
        told = json.loads(done.stdout.splitlines()[-1])
        return Footprint(told["peak"], told["before"])
    except (IndexError, KeyError, TypeError, json.JSONDecodeError):
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(f"the process that measures the memory of {variant.label} failed: {said}") from None


RECORDED = "quantization.json"  # written by `sameseed quantize` beside the weights
TOKENS, WINDOW, STRIDE = 4096, 512, 256
MIN_SHARE = 0.1  # least share of the lost log-likelihood that a recommended part recovers
MAX_ADVICE = 3


@dataclass(frozen=True)
class Recommendation:
    """A part of the model (globs over module names) that should keep more bits, and the reason.

    If measured: `recovered`, the share of the lost log-likelihood that it recovers, and `added_bytes`.
    """

    modules: tuple[str, ...]
    reason: str
    recovered: float | None = None
    added_bytes: int | None = None


def recorded_advice(variant: Variant) -> list[Recommendation]:
    """The recommendations in the checkpoint's quantization.json; empty if there are none."""
    folder = resolve_model(variant.model)
    path = folder / RECORDED if folder.is_dir() else folder.with_name(RECORDED)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        return []
    rows = found.get("recommendation") if isinstance(found, dict) else None
    advice = []
    for row in rows if isinstance(rows, list) else []:
        modules = row.get("modules") if isinstance(row, dict) else None
        if isinstance(modules, list) and modules:
            advice.append(Recommendation(tuple(map(str, modules)), str(row.get("reason", "named by the quantizer"))))
    return advice


def parts(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Parts of a model to try, as globs over module names, by a readable name."""
    last = config.num_layers - 1
    return {
        "embedding and head" if config.tied_embeddings else "embedding, head": ("model.embed_tokens", "lm_head"),
        "first layer": ("model.layers.0.*",),
        **({"last layer": (f"model.layers.{last}.*",)} if last else {}),
        "attention": ("model.layers.*.self_attn.*",),
        "down projections": ("model.layers.*.mlp.down_proj",),
    }


def measured_advice(
    variant: Variant, baseline: Variant, text: str, settings: dict[str, Any], progress: Report = silent
) -> list[Recommendation]:
    """Reload the variant with one part at a time in the checkpoint's own precision, and measure a short text.

    A part is recommended if it recovers at least a tenth of the log-likelihood that the format lost; parts that recover
    most per byte come first. Only for formats chosen at load time: a quantized checkpoint has no higher precision left.
    """
    if variant.format == "auto" or variant.model != baseline.model:
        return []

    def read(format: str) -> tuple[float, int, str, ModelConfig]:
        llm = LLM(variant.model, **{**settings, "format": format, "kv_format": variant.kv_format, "max_num_seqs": 1})
        nats = perplexity(llm, text, WINDOW, STRIDE, TOKENS).nats
        model = llm.engine.runner.model
        return nats, sum(m.nbytes for m in model.weights.matrices), model.weights.dense, model.config

    best, _, _, _ = read(baseline.format)
    nats, size, dense, config = read(variant.format)
    lost = nats - best
    if lost <= 0:
        return []
    found: list[Recommendation] = []
    tried = parts(config)
    for i, (name, globs) in enumerate(tried.items()):
        progress(f"{variant.label}: what to keep, {name}", i, len(tried))
        kept = ",".join([variant.format, *(f"{glob}={dense}" for glob in globs)])
        try:
            its, larger, _, _ = read(kept)
        except (ConfigError, ModelLoadError):
            continue  # not every part of every model can have its own scheme
        gc.collect()
        share, added = (nats - its) / lost, larger - size
        if share >= MIN_SHARE and added > 0:
            reason = f"{name}: in {dense} wins back {share:.0%} of the lost log-likelihood for {added / 1e6:.1f} MB"
            found.append(Recommendation(globs, reason, share, added))
    found.sort(key=lambda a: (a.recovered or 0.0) / (a.added_bytes or 1), reverse=True)
    return found[:MAX_ADVICE]


if __name__ == "__main__":  # run by `footprint` in a fresh process
    job = json.loads(sys.stdin.read())
    from sameseed.measure import usage
    from sameseed.request import SamplingParams

    usage.reset_peak()
    before = usage.resident()
    llm = LLM(job["model"], **job["settings"])
    llm.generate("Once upon a time", SamplingParams(max_tokens=job["tokens"], ignore_eos=True))
    print(json.dumps({"before": before, "peak": usage.peak()}))
