"""A variant: a model in a weight format and a KV cache format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sameseed import scheme
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
