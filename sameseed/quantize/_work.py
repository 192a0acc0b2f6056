"""The work folder of a run: a manifest with the settings of the run, and a file for each finished layer.

The folder lies beside the destination, as NAME.partial. So an interrupted run can be resumed, and the final name never
holds an unfinished checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sameseed.errors import ConfigError, ModelSaveError
from sameseed.quantize._decoder import CPU, Block, Linear
from sameseed.quantize._walk import ModuleError
from sameseed.scheme import QuantTensor
from sameseed.store import replacing

MANIFEST = "manifest.json"


class WorkFolder:
    """The work folder of one run; `open` creates it, or reopens it to resume."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def open(cls, out: Path, manifest: Mapping[str, Any], resume: bool, overwrite: bool) -> WorkFolder:
        """Create or reopen the work folder beside `out`. Raises ConfigError, naming what differs, for another run's."""
        out = Path(os.path.abspath(out))  # "." has no name
        work = cls(out.with_name(f"{out.name}.partial"))
        if work.folder.exists():
            if not work.has(MANIFEST):
                raise ConfigError(
                    f"{work.folder} already exists and was not created by this command; move or delete it"
                )
            if resume:
                begun = work.read_json(MANIFEST)
                if not isinstance(begun, dict):
                    raise ConfigError(f"{work.folder / MANIFEST} is damaged; begin anew with --overwrite")
                for key, wanted in manifest.items():
                    if begun.get(key) != wanted:
                        raise ConfigError(
                            f"{work.folder} was begun with {key} {begun.get(key)!r}, not {wanted!r}; give the same "
                            "options, or begin anew with --overwrite"
                        )
                return work
            if not overwrite:
                raise ConfigError(
                    f"{work.folder} holds an interrupted run; --resume goes on with it, --overwrite begins anew"
                )
            shutil.rmtree(work.folder)
        try:
            work.folder.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"cannot make {work.folder} ({error.strerror}); choose another -o") from None
        try:
            work.write_json(MANIFEST, manifest)
        except ModelSaveError:
            shutil.rmtree(work.folder, ignore_errors=True)  # a folder without a manifest would block the next run
            raise
        return work

    def has(self, name: str) -> bool:
        return (self.folder / name).is_file()

    def write_json(self, name: str, value: object) -> None:
        """Write a JSON file, all or nothing. Raises ModelSaveError where it cannot be written."""
        self._write(name, lambda file: file.write(json.dumps(value, indent=1).encode()))

    def _write(self, name: str, write: Callable[[IO[bytes]], object]) -> None:
        path = self.folder / name
        try:
            with replacing(path) as file:
                write(file)
        except (OSError, SafetensorError) as error:
            raise ModelSaveError(
                f"{path} cannot be written ({error}); make room, and the same command with --resume goes on from there"
            ) from None

    def read_json(self, name: str) -> Any:
        """The inverse of write_json. Raises ConfigError where it cannot be read."""
        path = self.folder / name
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read ({error}); begin anew with --overwrite") from None

    # --- layers ---

    def has_layer(self, index: int) -> bool:
        return self.has(_layer_name(index))

    def write_layer(self, block: Block, errors: list[ModuleError]) -> None:
        """Write a finished layer (stored weights, norms, biases, errors), all or nothing. Raises ModelSaveError."""
        block = block.to(CPU)
        tensors: dict[str, Tensor] = {f"norm:{name}": norm for name, norm in block.norms.items()}
        linears = {}
        for name, linear in block.linears.items():
            assert linear.q is not None
            linears[name] = {"format": linear.q.format, "shape": linear.q.shape, "activations": linear.q.activations}
            tensors |= {f"part:{name}:{part}": value.contiguous() for part, value in linear.q.parts.items()}
            if linear.bias is not None:
                tensors[f"bias:{name}"] = linear.bias
        about = {"linears": json.dumps(linears), "errors": json.dumps([asdict(e) for e in errors])}
        self._write(_layer_name(block.index), lambda file: save_file(tensors, file.name, metadata=about))

    def read_layer(self, index: int) -> tuple[Block, list[ModuleError]]:
        """The inverse of write_layer, bit for bit. Raises ConfigError where the file is damaged."""
        path = self.folder / _layer_name(index)
        try:
            with safe_open(str(path), framework="pt") as file:
                about = file.metadata() or {}
                linears = json.loads(about["linears"])
                errors = [ModuleError(**e) for e in json.loads(about["errors"])]
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            if not all(t.float().isfinite().all() for t in tensors.values() if t.is_floating_point()):
                raise ValueError("numbers that are not finite")
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is damaged ({error}); delete it and give --resume again") from None
        norms = {n.removeprefix("norm:"): t for n, t in tensors.items() if n.startswith("norm:")}
        block = Block(index, {}, norms)
        for name, text in linears.items():
            head = f"part:{name}:"
            parts = {n.removeprefix(head): t for n, t in tensors.items() if n.startswith(head)}
            linear = Linear(torch.empty(0), tensors.get(f"bias:{name}"))
            linear.store(QuantTensor(text["format"], tuple(text["shape"]), parts, text["activations"]))
            block.linears[name] = linear
        return block, errors

    def remove(self) -> None:
        shutil.rmtree(self.folder)


def _layer_name(index: int) -> str:
    return f"layer-{index:05d}.safetensors"


def digest(tensor: Tensor) -> str:
    """Digest of a tensor's values."""
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]
