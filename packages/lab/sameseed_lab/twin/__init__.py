"""Twins: Llamas with a real model's shape that compute a small model's function."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sameseed.errors import ConfigError
from sameseed.measure.shapes import NAMES, get_shape
from sameseed.models.config import ModelConfig, llama_only, read_json
from sameseed.models.eagle_loader import open_head, target_ids
from sameseed.models.head_config import is_head
from sameseed.models.loader import open_checkpoint, read_config, resolve_model
from sameseed.models.safetensors_file import write_file
from sameseed.models.save import SHARD, copy_files, new_folder, source_config
from sameseed.models.weights import Progress
from sameseed_lab.twin.files import check_room, num_bytes, stream_weights
from sameseed_lab.twin.head import HeadLayout, HeadTwinSource, make_head_layout
from sameseed_lab.twin.layout import TwinLayout, make_layout
from sameseed_lab.twin.source import TwinSource

SCHEMA = "sameseed.twin/1"
RECORD = "twin.json"  # in the twin's folder: where in the twin the small model's weights are
CARD = f"""# {{of}} in the shape of {{name}}

Written by `sameseed twin`. {{said}}

It is for measuring speed. Where the small model lies in it, `{RECORD}` says.
"""
HEAD_SAID = """It drafts for the twin of {target} what {of} drafts for {target}, at the size and cost of an EAGLE-3 head
for such a target, and is of no use for any other target. What is not the small head's has no effect."""
SAID = """This is no trained model of its size: it computes the function of {of} ({small:.1f} million parameters) with
{big:.0f} million, nearly all of them random or zero and without effect. What it writes is worth what {of} writes, and
says nothing about {name}."""


@dataclass(frozen=True)
class Twin:
    """A twin on disk: its folder, its layout (of a draft head also `head`), and the bytes of its tensors."""

    folder: Path
    layout: TwinLayout
    num_bytes: int
    head: HeadLayout | None = None


def find_shape(name: str) -> ModelConfig:
    """A shape by its name, or the shape of a folder with a config.json. Raises ConfigError, ModelLoadError."""
    folder = Path(name)
    found = read_config(folder) if folder.is_dir() and name.lower() not in NAMES else get_shape(name, "its folder")
    return llama_only(found, "twin")


def make_twin(
    shape: ModelConfig,
    of: str,
    out: Path,
    *,
    target: str = "embedded-target",
    num_tokens: int | None = None,
    name: str = "the shape",
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress | None = None,
    shard: int = SHARD,
) -> Twin:
    """Write a checkpoint with the dimensions of `shape` (called `name`) that computes the function of the model `of`.

    An EAGLE-3 head's twin drafts for the twin of `target`, over `num_tokens` tokens (None: 32000 if possible). `out`
    appears when it is complete; the process needs a few megabytes. `shard`: most bytes of a file; `progress(done,
    total)`: values. Raises ConfigError, ModelSaveError (before anything is written), ModelLoadError.
    """
    small = resolve_model(of)
    if not is_head(small) and num_tokens is not None:
        raise ConfigError(f"--draft-vocab is for twins of draft heads, and {of} is a model; leave it out")
    opened = open_head_twin(shape, of, target, name, num_tokens, seed) if is_head(small) else None
    with opened or open_twin(shape, of, name, seed) as source:
        head = source.head if isinstance(source, HeadTwinSource) else None
        about = {"schema": SCHEMA, "of": of, "shape": name, "seed": seed, **source.layout.as_dict()}
        small_size, big_size = (c.num_parameters / 1e6 for c in (source.layout.small, source.layout.config))
        config, said = dict(source.layout.raw), SAID.format(of=of, name=name, small=small_size, big=big_size)
        if head is not None:
            about |= {"target": target, "draft_vocab_size": head.num_live}
            config, said = head.raw, HEAD_SAID.format(of=of, target=target)
        size = num_bytes(source, source.shapes)
        check_room(out, size)
        config["torch_dtype"] = str(source.dtype("q_proj.weight")).removeprefix("torch.")
        files = {f: json.dumps(table, indent=2) + "\n" for f, table in (("config.json", config), (RECORD, about))}
        with new_folder(out, overwrite, small) as partial:
            stream_weights(partial, source, source.shapes, progress, shard)
            copy_files(small, partial)
            for file, text in {**files, "README.md": CARD.format(of=of, name=name, said=said)}.items():
                write_file(partial / file, [text.encode()])
    return Twin(Path(os.path.abspath(out)), source.layout, size, head)


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
    shape: ModelConfig, of: str, target: str, name: str = "the shape", num_tokens: int | None = None, seed: int = 0
) -> Iterator[HeadTwinSource]:
    """The weights of the twin of a head as a source that computes them on demand. Raises what `make_twin` raises."""
    folder = resolve_model(of)
    raw = read_json(folder / "config.json")
    raw = raw.get("transformer_layer_config") or raw
    with open_twin(shape, target, name, seed) as theirs, open_head(folder) as (config, own, shapes, at):
        ids = target_ids(folder, config, own)
        head = make_head_layout(config, ids, theirs.layout, raw, num_tokens, name)
        yield HeadTwinSource(head, own, theirs.small, shapes, at, seed)
