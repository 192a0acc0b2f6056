"""The models of `make bench-gpu`, made on the device in seconds: random models at true shapes, twins, and their heads.

The random weights that fill a twin are sliced and edited on the device; on the CPU this would take minutes for 70B.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sameseed.measure import usage as memory
from sameseed.measure.shapes import get_shape
from sameseed.models.config import ModelConfig, family, read_json
from sameseed.models.decoder import Decoder
from sameseed.models.eagle import EagleHead
from sameseed.models.eagle_loader import load_head, open_head, read_head, target_ids
from sameseed.models.layers import LayerWeights, ModelWeights
from sameseed.models.loader import open_checkpoint, read_config, resolve_model
from sameseed.models.save import source_config
from sameseed.models.synthetic import RandomCheckpoint
from sameseed.models.weights import TensorSource, WeightReader
from sameseed.ops import Ops
from sameseed.scheme import QuantScheme, QuantTensor
from sameseed_lab.twin.head import NAMES, HeadTwinSource, make_head_layout
from sameseed_lab.twin.layout import make_layout
from sameseed_lab.twin.source import TwinSource

LONGEST = 512  # most tokens of a twin's text, the length of its rope tables
TARGET, DRAFT, HEAD = "embedded-target", "embedded-draft", "embedded-head"


def forget(device: str) -> None:
    """Free unused memory, and reset the peak."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
    memory.reset_peak(device)


class There:
    """A tensor source that reads on the CPU and moves its tensors to the device."""

    place = "cpu"  # where its tensors come to be

    def __init__(self, source: Any, device: str) -> None:
        self.source, self.device = source, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def tensor(self, name: str) -> Tensor:
        """A whole tensor."""
        with torch.device(self.place):
            found: Tensor = self.source.tensor(name)
        return found.to(self.device)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop-1 of a matrix."""
        with torch.device(self.place):
            found: Tensor = self.source.rows(name, start, stop)
        return found.to(self.device)


class Made(There):
    """A tensor source that computes its tensors on the device, from noise and from `There` sources."""

    def __init__(self, source: Any, device: str) -> None:
        super().__init__(source, device)
        self.place = device
        source.__dict__["_device"] = device  # its noise is drawn on the CPU: the same values on every device


def copied(x: Any) -> Any:
    """A deep copy of weights, in separate memory."""
    if isinstance(x, Tensor):
        return x.clone()
    if isinstance(x, QuantTensor):
        return replace(x, parts={name: part.clone() for name, part in x.parts.items()})
    if isinstance(x, LayerWeights):
        return replace(x, **{name: copied(getattr(x, name)) for name in x.__dataclass_fields__})
    return tuple(copied(y) for y in x) if isinstance(x, tuple) else x


def assembled(
    config: ModelConfig,
    source: TensorSource,
    quant: QuantScheme,
    ops: Ops,
    device: str,
    longest: int,
    own: Seq[int] = (),
) -> Decoder:
    """A model that reads only the layers in `own` and one other layer. All remaining layers are copies of that one.

    The model takes as much memory as a normal one, but is made in a fraction of the time.
    """
    reader = WeightReader(config, source, quant, ops, device, None)
    embedding, other = reader.matrix("model.embed_tokens"), None
    layers = []
    for i in range(config.num_layers):
        if i in own or other is None:
            layers.append(reader.layer(f"model.layers.{i}"))
            other = other if i in own else layers[-1]
        else:
            layers.append(copied(other))
    head = embedding if config.tied_embeddings else reader.matrix("lm_head")
    dense = quant.dense_for(source.dtype("model.embed_tokens.weight"))
    weights = ModelWeights(embedding, tuple(layers), reader.vector("model.norm.weight"), head, dense)
    return family(config.architecture)(config, weights, ops, longest)


def random_model(config: ModelConfig, ops: Ops, quant: QuantScheme, longest: int, device: str) -> Decoder:
    """A model of that shape with random weights."""
    return assembled(config, Made(RandomCheckpoint(config), device), quant, ops, device, longest)


def twin(of: str, shape: str, quant: QuantScheme, ops: Ops, device: str, longest: int = LONGEST) -> Decoder:
    """The twin of an embedded model in a shape, made directly in the device's memory."""
    folder = resolve_model(of)
    small = read_config(folder)
    with open_checkpoint(folder) as checkpoint:
        if shape == "embedded":  # no twin: the small model itself
            return assembled(small, checkpoint, quant, ops, device, longest, range(small.num_layers))
        layout = make_layout(small, get_shape(shape), source_config(folder), shape)
        source = Made(TwinSource(layout, There(checkpoint, device)), device)
        # Layers without a part of the small model add nothing to the result, so they can be copies of one another.
        return assembled(layout.config, source, quant, ops, device, longest, layout.layers)


@contextmanager
def head_source(shape: str, device: str) -> Iterator[tuple[Any, Any]]:
    """The layout and the tensor source of the embedded head's twin in a shape."""
    folder, target_folder = resolve_model(HEAD), resolve_model(TARGET)
    target = make_layout(read_config(target_folder), get_shape(shape), source_config(target_folder), shape)
    raw = read_json(folder / "config.json")
    with open_checkpoint(target_folder) as theirs, open_head(folder) as (config, own, shapes, at):
        head = make_head_layout(config, target_ids(folder, config, own), target, raw, None, shape)
        source = HeadTwinSource(head, There(own, device), There(theirs, device), shapes, at)
        yield head, Made(source, device)


def head_twin(shape: str, target: Decoder, quant: QuantScheme, ops: Ops, device: str) -> EagleHead:
    """The twin of the embedded head for the target's twin in a shape."""
    if shape == "embedded":
        return load_head(resolve_model(HEAD), target, ops, quant, device)
    with head_source(shape, device) as (head, source):
        reader = WeightReader(head.config.layer, source, quant, ops, device, None, source.shapes)
        return read_head(head.config, reader, NAMES, head.target_ids.int(), target, ops)
