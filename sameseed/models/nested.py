"""The 4-bit model inside an 8-bit one: a Llama that shares its memory (any-precision nesting: Park et al., 2024)."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from sameseed import scheme
from sameseed.errors import ConfigError
from sameseed.models.decoder import Decoder
from sameseed.models.loader import open_checkpoint, read_config
from sameseed.models.weights import expected_shapes, resolve_scheme
from sameseed.scheme import QuantScheme, QuantTensor


def is_nested(folder: Path, quant: QuantScheme) -> bool:
    """Whether the model in `folder`, stored by `quant`, has matrices that contain 4-bit ones. Reads headers only."""
    config = read_config(folder)
    with open_checkpoint(folder) as checkpoint:
        checkpoint.check(config)
        modules = [n.removesuffix(".weight") for n, shape in expected_shapes(config).items() if len(shape) == 2]
        found = (resolve_scheme(config, checkpoint, quant, module) for module in modules)
        # "auto" remains only where the checkpoint's dense numbers stay, and those contain no 4-bit matrix
        nesting = ((scheme.get(s.weights).nests, s.activations) for s in found if s.weights != "auto")
        return any(rows is not None and rows == activations for rows, activations in nesting)


def nested_view(model: Decoder) -> Decoder:
    """The model with each matrix replaced by the 4-bit matrix inside it, where there is one.

    Nothing is copied. The embedding keeps its precision, because a pass reads only a few of its rows. Raises
    ConfigError where no matrix contains a 4-bit one.
    """
    w = model.weights
    weights = replace(w, layers=tuple(map(_lower, w.layers)), lm_head=_lower(w.lm_head))
    mine, its = ([m for layer in x.layers for m in layer.matrices] + [x.lm_head] for x in (weights, w))
    if all(a is b for a, b in zip(mine, its, strict=True)):
        formats = ", ".join(sorted({m.format for m in w.matrices}))
        raise ConfigError(f"weights in {formats} hold no 4-bit ones; load the target with --format w8a8n")
    return type(model)(model.config, weights, model.ops, model.max_model_len)


def _lower(w: Any) -> Any:
    """Weights of any kind, with each matrix replaced by the one inside it."""
    if isinstance(w, QuantTensor):
        return scheme.get(w.format).lower(w) or w
    if isinstance(w, tuple):
        return tuple(map(_lower, w))
    if is_dataclass(w) and not isinstance(w, type):
        return replace(w, **{f.name: _lower(getattr(w, f.name)) for f in fields(w)})
    return w
