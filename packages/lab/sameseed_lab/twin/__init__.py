"""Twins: Llamas with a real model's shape that compute a small model's function."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sameseed.measure.shapes import NAMES, get_shape
from sameseed.models.config import ModelConfig, read_json
from sameseed.models.eagle_loader import open_head, target_ids
from sameseed.models.loader import open_checkpoint, read_config, resolve_model
from sameseed.models.safetensors_file import write_file
from sameseed.models.save import SHARD, copy_files, new_folder, source_config
from sameseed.models.stream import check_room, num_bytes, stream_weights
from sameseed.models.weights import Progress
from sameseed_lab.twin.head import HeadLayout, HeadTwinSource, make_head_layout
from sameseed_lab.twin.layout import TwinLayout, make_layout
from sameseed_lab.twin.source import TwinSource

SCHEMA = "sameseed.twin/1"
RECORD = "twin.json"  # in the twin's folder: where in the twin the small model's weights are
Texts = tuple[Mapping[str, Any], Mapping[str, Any], str]  # config.json, the record, the model card


@dataclass(frozen=True)
class Twin:
    """A twin on disk: its folder, its layout, and the bytes of its tensors."""

    folder: Path
    layout: TwinLayout
    num_bytes: int


@dataclass(frozen=True)
class HeadTwin:
    """The twin of a draft head on disk."""

    folder: Path
    head: HeadLayout
    num_bytes: int


def find_shape(name: str) -> ModelConfig:
    """A shape by its name, or the shape of a folder with a config.json. Raises ConfigError, ModelLoadError."""
    folder = Path(name)
    return read_config(folder) if folder.is_dir() and name.lower() not in NAMES else get_shape(name, "its folder")


def make_twin(
    shape: ModelConfig,
    of: str,
    out: Path,
    *,
    name: str = "the shape",
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress | None = None,
    shard_bytes: int = SHARD,
) -> Twin:
    """Write a checkpoint with the dimensions of `shape` (called `name`) that computes the function of the model `of`.

    `out` appears only when it is complete; the process needs a few megabytes of memory. `progress(done, total)` counts
    values. Raises ConfigError if the model does not fit the shape, ModelSaveError if `out` is taken or the disk is too
    small (before anything is written), ModelLoadError for an invalid source.
    """
    with open_twin(shape, of, name, seed) as source:
        layout = source.layout
        about = {"of": of, "shape": name, "seed": seed, **layout.as_dict()}
        texts = layout.raw, about, _card(of, name, layout)
        size = _write(source, resolve_model(of), out, texts, overwrite, progress, shard_bytes)
    return Twin(Path(os.path.abspath(out)), layout, size)


def make_head_twin(
    shape: ModelConfig,
    of: str,
    target: str,
    out: Path,
    *,
    name: str = "the shape",
    num_tokens: int | None = None,
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> HeadTwin:
    """Write a draft head for the twin of `target` in `shape`. It drafts the same tokens as head `of` for `target`.

    `of`: an EAGLE-3 head. `num_tokens`: size of the draft vocabulary (None: 32000 if possible). Raises what `make_twin`
    raises.
    """
    with open_head_twin(shape, of, target, name, num_tokens, seed) as source:
        head = source.head
        about = {"of": of, "target": target, "shape": name, "seed": seed}
        about |= {**head.layout.as_dict(), "draft_vocab_size": head.num_live}
        texts = head.raw, about, _head_card(of, target, name)
        size = _write(source, resolve_model(of), out, texts, overwrite, progress, SHARD)
    return HeadTwin(Path(os.path.abspath(out)), head, size)


@contextmanager
def open_twin(shape: ModelConfig, of: str, name: str = "the shape", seed: int = 0) -> Iterator[TwinSource]:
    """The weights of `make_twin` as a source that computes them on demand. Raises what `make_twin` raises."""
    folder = resolve_model(of)
    config = read_config(folder)
    layout = make_layout(config, shape, source_config(folder), name)
    with open_checkpoint(folder) as checkpoint:
        checkpoint.check(config)
        yield TwinSource(layout, checkpoint, seed)


@contextmanager
def open_head_twin(
    shape: ModelConfig,
    of: str,
    target: str,
    name: str = "the shape",
    num_tokens: int | None = None,
    seed: int = 0,
) -> Iterator[HeadTwinSource]:
    """The weights of `make_head_twin` as a source that computes them on demand. Raises what `make_head_twin` raises."""
    folder = resolve_model(of)
    raw = read_json(folder / "config.json")
    raw = raw.get("transformer_layer_config") or raw
    with open_twin(shape, target, name, seed) as theirs, open_head(folder) as (config, own, shapes, at):
        ids = target_ids(folder, config, own)
        head = make_head_layout(config, ids, theirs.layout, raw, num_tokens, name)
        yield HeadTwinSource(head, own, theirs.small, shapes, at, seed)


def _write(
    source: TwinSource, small: Path, out: Path, texts: Texts, overwrite: bool, progress: Progress | None, shard: int
) -> int:
    """Write the weights, copies of the files in folder `small`, config.json, the record and the card.

    Returns the bytes of the tensors.
    """
    shape, (config, about, card) = source.layout.config, texts
    size = num_bytes(shape, source, source.shapes)
    check_room(out, size)
    dtype = str(source.dtype("q_proj.weight")).removeprefix("torch.")
    tables = {"config.json": {**config, "torch_dtype": dtype}, RECORD: {"schema": SCHEMA, **about}}
    files = {name: json.dumps(table, indent=2) + "\n" for name, table in tables.items()}
    with new_folder(out, overwrite, small) as partial:
        stream_weights(partial, shape, source, progress, shard, source.shapes)
        copy_files(small, partial)
        for name, text in {**files, "README.md": card}.items():
            write_file(partial / name, [text.encode()])
    return size


def _head_card(of: str, target: str, name: str) -> str:
    return f"""# {of} for a target in the shape of {name}

Written by `sameseed twin`. It drafts for the twin of {target} what {of} drafts for {target}, at the size and cost of an
EAGLE-3 head for such a target; what is not the small head's is random or zero and without effect. It is for measuring
speed, and of no use for any other target.

Where the small head lies in it, `{RECORD}` says.
"""


def _card(of: str, name: str, layout: TwinLayout) -> str:
    small, big = layout.small, layout.config
    return f"""# {of} in the shape of {name}

Written by `sameseed twin`. This is no trained model of its size: it computes the function of {of}
({small.num_parameters / 1e6:.1f} million parameters) with {big.num_parameters / 1e6:.0f} million, nearly all of them
random or zero and without effect. It is for measuring speed: a real model's size and arithmetic with a small model's
text. What it writes is worth what {of} writes, and says nothing about {name}.

Where the small model lies in it, `{RECORD}` says.
"""
