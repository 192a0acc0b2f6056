"""The 4-bit model inside an 8-bit one: a Llama on the same memory (any-precision nesting: Park et al., 2024)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from foretoken.errors import ConfigError
from foretoken.formats.int8n import FORMAT, high_view
from foretoken.formats.scheme import QuantScheme, QuantTensor
from foretoken.models.config import read_config
from foretoken.models.layers import LayerWeights
from foretoken.models.llama import Llama
from foretoken.models.loader import open_checkpoint
from foretoken.models.weights import expected_shapes, resolve_scheme

Stack = QuantTensor | tuple[QuantTensor, ...]


def is_nested(folder: Path, quant: QuantScheme) -> bool:
    """Whether the model in `folder`, stored by `quant`, has matrices that hold lower ones. Reads headers."""
    config = read_config(folder)
    with open_checkpoint(folder) as checkpoint:
        checkpoint.check(config)
        modules = [n.removesuffix(".weight") for n, shape in expected_shapes(config).items() if len(shape) == 2]
        found = (resolve_scheme(config, checkpoint, quant, module) for module in modules)
        return any(s.weights == FORMAT.name and s.activations == "int8" for s in found)


def nested_view(model: Llama) -> Llama:
    """The same model with the upper halves of its int8n matrices; other matrices, norms and biases are its own.

    Nothing is copied. The embedding stays whole: a pass reads only some rows of it. Raises ConfigError where the model
    has no such matrices.
    """
    w = model.weights
    head = high_view(w.lm_head) or w.lm_head
    weights = replace(w, layers=tuple(_layer(layer) for layer in w.layers), lm_head=head)
    if not any("high" in m.parts and "low" not in m.parts for m in weights.matrices):
        formats = ", ".join(sorted({m.format for m in w.matrices}))
        raise ConfigError(f"weights in {formats} hold no 4-bit ones; load the target with --format w8a8n")
    return Llama(model.config, weights, model.ops, model.max_model_len)


def _layer(w: LayerWeights) -> LayerWeights:
    return replace(
        w, qkv=_view(w.qkv), o=high_view(w.o) or w.o, gate_up=_view(w.gate_up), down=high_view(w.down) or w.down
    )


def _view(w: Stack) -> Stack:
    return tuple(high_view(p) or p for p in w) if isinstance(w, tuple) else high_view(w) or w
