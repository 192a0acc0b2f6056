"""A variant: a model in a weight format and a KV cache format, MODEL[@FORMAT[@KVFORMAT]], and its size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sameseed import scheme
from sameseed.engine.llm import LLM
from sameseed.errors import ConfigError
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


if __name__ == "__main__":  # run by `footprint` in a fresh process
    job = json.loads(sys.stdin.read())
    from sameseed.measure import usage
    from sameseed.request import SamplingParams

    usage.reset_peak()
    before = usage.resident()
    llm = LLM(job["model"], **job["settings"])
    llm.generate("Once upon a time", SamplingParams(max_tokens=job["tokens"], ignore_eos=True))
    print(json.dumps({"before": before, "peak": usage.peak()}))
