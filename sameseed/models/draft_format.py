"""The default number format of a draft: that of its target if this has few bits, else a format with few bits."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from sameseed.errors import ConfigError
from sameseed.models.config import ModelConfig
from sameseed.models.eagle_loader import open_head
from sameseed.models.head_config import is_head
from sameseed.models.loader import open_model
from sameseed.models.weights import (
    Shapes,
    TensorSource,
    check_rules,
    expected_shapes,
    matrix_bits,
    resolve_scheme,
    usual,
    weight_bytes,
)
from sameseed.scheme import BLOCKS, DENSE, KQUANTS, QuantScheme, get

BESIDE_DENSE = QuantScheme.parse("w8a8")  # for drafts of dense targets on a CPU: half the bytes, equally good guesses


def draft_scheme(draft: Path, target: Path, quant: QuantScheme, device: str = "cpu") -> QuantScheme:
    """The default scheme of a draft model or head: that of its target. Reads headers only.

    A 16-bit draft step beside a 4-bit target costs half a target pass, and the draft's format cannot change the text.
    For a target in 16 bits or more, the draft is w8a8 on a CPU, and as stored elsewhere. A draft checkpoint that is
    quantized already keeps its format ("auto").
    Raises ConfigError or ModelLoadError for folders that hold no such model.
    """
    with open_model(target) as (config, checkpoint):
        own = few_bits(resolve_scheme(config, checkpoint, quant, usual(config)), device)
    if own.weights == "auto" or (own == BESIDE_DENSE and draft.resolve() == target.resolve()):
        return QuantScheme()  # the target was named as its own draft: a mistake that is reported elsewhere
    if is_head(draft):
        with open_head(draft) as (head, files, shapes, _):
            return following(own, head.layer, files, shapes)
    with open_model(draft) as (config, checkpoint):
        return following(own, config, checkpoint)


def few_bits(quant: QuantScheme, device: str = "cpu") -> QuantScheme:
    """The scheme without its rules; for a scheme of 16 bits or more, the default of a draft on this device.

    A format of llama.cpp becomes w4a8 or w8a8, because no kernel supports these on GPUs or in rows of any width.
    """
    if quant.weights in KQUANTS | BLOCKS:
        return QuantScheme.parse("w4a8" if get(quant.weights).bits <= 4 else "w8a8")
    if quant.weights in ("auto", *DENSE.values()):
        return BESIDE_DENSE if device == "cpu" else QuantScheme()
    return replace(quant, rules=())


def following(own: QuantScheme, config: ModelConfig, source: TensorSource, shapes: Shapes | None = None) -> QuantScheme:
    """`own` if the source's matrices are dense and can be stored in it (if need be without its group), else "auto".

    `shapes`: of the tensors of a draft head.
    """
    names = [name for name, shape in (shapes or expected_shapes(config)).items() if len(shape) == 2]
    if own.weights != "auto" and all(source.scheme(name) is None for name in names):
        for wanted in (own, replace(own, group=None)):
            with suppress(ConfigError):
                weight_bytes(config, source, wanted, shapes)
                return wanted
    return QuantScheme()


def is_smaller(folder: Path, quant: QuantScheme, than: QuantScheme) -> bool:
    """Whether the model in `folder` has a matrix that takes fewer bits per weight by `quant` than by `than`.

    Both schemes are resolved with the checkpoint first, so their spelling does not matter. Reads headers only. Raises
    ConfigError.
    """
    with open_model(folder) as (config, checkpoint):
        for each in (quant, than):
            check_rules(config, each)
        shapes = [(name, shape) for name, shape in expected_shapes(config).items() if len(shape) == 2]
        bits = ([matrix_bits(config, checkpoint, s, *matrix) for s in (quant, than)] for matrix in shapes)
        return any(mine < its for mine, its in bits)


def is_nested(folder: Path, quant: QuantScheme) -> bool:
    """Whether the model in `folder`, stored by `quant`, has matrices that contain 4-bit ones. Reads headers only."""
    with open_model(folder) as (config, checkpoint):
        modules = [n.removesuffix(".weight") for n, shape in expected_shapes(config).items() if len(shape) == 2]
        found = (resolve_scheme(config, checkpoint, quant, module) for module in modules)
        # "auto" remains only where the checkpoint's dense numbers stay, and those contain no 4-bit matrix
        nesting = ((get(s.weights).nests, s.activations) for s in found if s.weights != "auto")
        return any(rows is not None and rows == activations for rows, activations in nesting)
