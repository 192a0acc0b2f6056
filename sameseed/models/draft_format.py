"""The number format of a draft: few bits, those of its target if it has few, unless somebody says otherwise."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from sameseed.errors import ConfigError
from sameseed.models.config import ModelConfig
from sameseed.models.eagle_loader import open_head
from sameseed.models.head_config import is_head
from sameseed.models.loader import open_checkpoint, read_config
from sameseed.models.weights import (
    Shapes,
    TensorSource,
    check_rules,
    expected_shapes,
    matrix_bits,
    resolve_scheme,
    weight_bytes,
)
from sameseed.scheme import DENSE, KQUANTS, QuantScheme, get

USUAL = "model.layers.0.mlp.down_proj"  # the matrix whose scheme counts as the model's
BESIDE_DENSE = QuantScheme.parse("w8a8")  # a draft's, on a CPU: half of the bytes, and guesses as good


def draft_scheme(draft: Path, target: Path, quant: QuantScheme, device: str = "cpu") -> QuantScheme:
    """The scheme of a draft model or head for which none is named: its target's. Reads headers.

    A draft in 16 bits beside a target in 4 costs half a pass a step. Its format cannot change the text. Beside a target
    in 16 bits or more it is w8a8 on a CPU, and as stored elsewhere. What the checkpoint stores in few bits stays so
    ("auto").
    Raises ConfigError or ModelLoadError for folders that hold no such model.
    """
    config = read_config(target)
    with open_checkpoint(target) as checkpoint:
        checkpoint.check(config)
        usual = few_bits(resolve_scheme(config, checkpoint, quant, USUAL), device)
    if usual.weights == "auto" or (usual == BESIDE_DENSE and draft.resolve() == target.resolve()):
        return QuantScheme()  # a target named as its own draft is a slip, that is told
    if is_head(draft):
        with open_head(draft) as (head, files, shapes, _):
            return following(usual, head.layer, files, shapes)
    config = read_config(draft)
    with open_checkpoint(draft) as checkpoint:
        checkpoint.check(config)
        return following(usual, config, checkpoint)


def few_bits(quant: QuantScheme, device: str = "cpu") -> QuantScheme:
    """The scheme without its rules; where it takes 16 bits or more, what a draft on this device takes instead.

    A K-quant's is w4a8 or w8a8: of rows that 256 does not divide, and on GPUs, no kernel has K-quants.
    """
    if quant.weights in KQUANTS:
        return QuantScheme.parse("w4a8" if get(quant.weights).bits <= 4 else "w8a8")
    if quant.weights in ("auto", *DENSE.values()):
        return BESIDE_DENSE if device == "cpu" else QuantScheme()
    return replace(quant, rules=())


def following(
    usual: QuantScheme, config: ModelConfig, source: TensorSource, shapes: Shapes | None = None
) -> QuantScheme:
    """The scheme `usual` where the source's matrices are dense and can be stored so (its group may go), else "auto".

    `shapes`: of a head's tensors.
    """
    names = [name for name, shape in (shapes or expected_shapes(config)).items() if len(shape) == 2]
    if usual.weights != "auto" and all(source.scheme(name) is None for name in names):
        for wanted in (usual, replace(usual, group=None)):
            with suppress(ConfigError):
                weight_bytes(config, source, wanted, shapes)
                return wanted
    return QuantScheme()


def is_smaller(folder: Path, quant: QuantScheme, than: QuantScheme) -> bool:
    """Whether the model in `folder`, stored by `quant`, has a matrix of fewer bits a weight than stored by `than`.

    However the two are spelled: what counts is what the checkpoint makes of them. Reads headers. Raises ConfigError.
    """
    config = read_config(folder)
    with open_checkpoint(folder) as checkpoint:
        checkpoint.check(config)
        for each in (quant, than):
            check_rules(config, each)
        shapes = [(name, shape) for name, shape in expected_shapes(config).items() if len(shape) == 2]
        bits = ([matrix_bits(config, checkpoint, s, *matrix) for s in (quant, than)] for matrix in shapes)
        return any(mine < its for mine, its in bits)
