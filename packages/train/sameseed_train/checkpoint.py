"""Checkpoints: one safetensors file that holds weights, optimizer state and progress, replaced atomically."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence as Seq
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from sameseed.errors import ConfigError
from sameseed.models.loader import read_config
from sameseed.models.safetensors_file import write_model
from sameseed_train.model import LlamaForTraining, llama_config, shape_of
from sameseed_train.optim import MuonAdamW


def save_tensors(tensors: dict[str, torch.Tensor], path: Path, progress: dict[str, Any]) -> None:
    """Write tensors and a JSON object to one file, which is replaced atomically. Raises ConfigError on a full disk."""
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, str(partial), metadata={"format": "pt", "progress": json.dumps(progress)})
        os.replace(partial, path)
    except (SafetensorError, OSError) as error:
        with suppress(OSError):
            partial.unlink()
        raise ConfigError(f"{path} cannot be written ({error}); free space on the disk, then --resume") from None


def read_tensors(path: Path, names: Seq[str] | None = None) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The inverse of `save_tensors`; `names`: of the tensors to read (None: all). ConfigError on a damaged file."""
    try:
        with safe_open(str(path), framework="pt") as file:
            progress = json.loads((file.metadata() or {}).get("progress", "{}"))
            names = list(file.keys()) if names is None else names
            return {name: file.get_tensor(name) for name in names}, progress
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); delete it and run again") from None


def save_checkpoint(path: Path, model: nn.Module, optimizer: MuonAdamW, progress: dict[str, Any]) -> None:
    """Save all that determines the next step: float32 weights, optimizer state, and `progress` with the step count."""
    tensors = {f"model.{n}": p.detach().cpu() for n, p in model.named_parameters()}
    tensors |= {f"optim.{n}": t.cpu() for n, t in optimizer.state().items()}
    save_tensors(tensors, path, {**progress, "optim_steps": optimizer.num_steps})


def load_checkpoint(path: Path, model: nn.Module, optimizer: MuonAdamW) -> dict[str, Any]:
    """Load what `save_checkpoint` wrote; returns the progress. Raises ConfigError for a file that is unfit."""
    tensors, progress = read_tensors(path)
    counts = [progress.get(name) for name in ("step", "tokens", "seconds", "loss", "optim_steps")]
    right = all(isinstance(count, int | float) and math.isfinite(count) for count in counts)
    if not right or not all(t.float().isfinite().all() for t in tensors.values() if t.is_floating_point()):
        raise ConfigError(f"{path} holds numbers that are not finite; delete it and run again")
    weights = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
    try:
        model.load_state_dict(weights)
        optimizer.load({n.removeprefix("optim."): t for n, t in tensors.items()}, progress.pop("optim_steps"))
    except (RuntimeError, KeyError):
        raise ConfigError(f"{path} was written for another model shape; delete it or restore the recipe") from None
    return progress


def export_model(
    model: LlamaForTraining,
    folder: Path,
    begin: int | None,
    ends: Seq[int],
    pad: int | None = None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write the model in Hugging Face layout, bfloat16; `ends`: tokens that end a text; `more`: keys of config.json."""
    shape = model.shape
    ids = {"bos_token_id": begin, "eos_token_id": ends[0] if ends else None, "pad_token_id": pad}
    config = llama_config(shape, shape.max_positions, shape.rope_theta) | ids | dict(more or {})
    generation = {**ids, "eos_token_id": list(ends), "do_sample": False}
    weights = {n: p.to(torch.bfloat16) for n, p in model.named_parameters()}
    write_model(folder, weights, {"config.json": config, "generation_config.json": generation})


def load_exported(folder: Path, device: str) -> LlamaForTraining:
    """Load an exported model (bfloat16 weights) as float32, so that the weights which users get are measured."""
    model = LlamaForTraining(shape_of(read_config(folder)), 0)
    weights, _ = read_tensors(folder / "model.safetensors")
    model.load_state_dict({name: w.float() for name, w in weights.items()})
    return model.to(device).eval()
