"""TensorRT Model Optimizer's checkpoints: FP8 with a scale per tensor, and NVFP4 in blocks of 16."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from sameseed.errors import ModelLoadError
from sameseed.models.layouts.base import FLOATS, Files, Layout, StoredMatrix, listed
from sameseed.models.layouts.patterns import covers
from sameseed.models.layouts.scaled import float8, nvfp4


class ModelOpt(Layout):
    """The settings of hf_quant_config.json (under "quantization"), or the same in config.json."""

    unread = (".input_scale",)

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        inner = config.get("quantization")
        settings = inner if isinstance(inner, dict) else config
        self.where, self.method = where, settings.get("quant_algo")
        if self.method not in ("FP8", "NVFP4"):
            raise ModelLoadError(
                f"{where}: checkpoints of quant_algo {str(self.method)[:40]!r} cannot be read; FP8 and NVFP4 can: take "
                "another, or the unquantized model and --format"
            )
        lists = [listed(settings.get(n), f"{where}: {n}") for n in ("exclude_modules", "ignore")]
        self.skip = [name for names in lists for name in names]

    def find(self, name: str, shape: tuple[int, int], files: Files) -> StoredMatrix | None:
        weight = f"{name}.weight"
        if weight not in files or files.kind(weight)[0] in FLOATS:
            return None
        if any(fnmatchcase(name, s) or covers(s, name) for s in self.skip):
            raise ModelLoadError(f"{self.where} excludes {name}, and its tensor is {files.kind(weight)[0]}")
        if self.method == "NVFP4":
            return nvfp4(name, shape, files, "weight", "weight_scale_2", inverse=False)
        return float8(name, shape, files, None, f"{weight}_scale")
