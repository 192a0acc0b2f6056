"""Load a draft head: a folder with config.json and safetensors, checked against its config and its target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from sameseed import scheme
from sameseed.errors import ConfigError, ModelLoadError
from sameseed.models.block import BlockConv, BlockHead, BlockWeights, Selector
from sameseed.models.checkpoint import Checkpoint
from sameseed.models.config import ModelConfig, read_json
from sameseed.models.decoder import Decoder
from sameseed.models.eagle import EagleHead, HeadWeights
from sameseed.models.head_config import OPTIONAL, SELECTOR, TARGET_SIGNS, BlockConfig, HeadConfig, read_head_config
from sameseed.models.inner import take_rows
from sameseed.models.loader import open_model
from sameseed.models.weights import Progress, WeightReader, dense_format, weight_bytes
from sameseed.ops import Ops
from sameseed.scheme import QuantScheme, QuantTensor

SPARE = ("d2t", "t2d")  # integer tensors; t2d is redundant and not read
UNREAD = "confidence_head."  # prefix of block heads' unused tensors: a length policy measures confidence itself
SIGNS = 64  # rows of an embedding, and columns of each, whose signs tell targets apart
MOST_DIFFERING = 0.25  # unrelated: half of all signs, +- 0.8 %; the same rounded to 4 bits: those below half a step
CHUNK = 4096  # rows of an LM head that are floats at one time


@contextmanager
def open_head(
    folder: Path, target: ModelConfig | None = None
) -> Iterator[tuple[HeadConfig, Checkpoint, dict[str, tuple[int, ...]], str]]:
    """Open a draft head: its config, its tensors, the shapes of those present, and the name of its decoder layer.

    Raises ModelLoadError, and ConfigError or VocabularyError where the head does not fit `target`.
    """
    config = read_head_config(folder)
    with Checkpoint(folder) as files:
        if any(n.startswith("model.fc.") for n in files.names()):
            files.rename(lambda name: name.removeprefix("model."))
        files.rename(lambda name: f"{name}.weight" if name in SELECTOR else name)  # codebooks are bare parameters
        # Speculators builds Qwen3 layers, with norms of queries and keys, also where it writes another model_type.
        if config.kind == "block" and "layers.0.self_attn.q_norm.weight" in files:
            config = replace(config, layer=replace(config.layer, qk_norm=True))
        layer = "layers.0" if any(n.startswith("layers.0.") for n in files.names()) else "midlayer"
        shapes = config.tensors(layer)
        present = {n.rsplit(".", 1)[0] if n not in SPARE else n for n in files.names()}  # modules, also quantized ones
        for name in OPTIONAL:
            module = name.removesuffix(".weight")
            if name in shapes and name not in files and (name.endswith(".bias") or module not in present):
                del shapes[name]
        shapes.pop("d2t", None)
        unread = [n for n in files.names() if n.startswith(UNREAD)] if config.kind == "block" else []
        files.check(config.layer, shapes, (*SPARE, *unread))
        if target is not None:
            config.check_target(target)
            for name in ("embed_tokens.weight", "lm_head.weight"):
                fits = config.layer.hidden_size == config.target_hidden_size
                fits = fits and (name.startswith("embed") or config.draft_vocab_size == config.layer.vocab_size)
                if name not in shapes and not fits:
                    raise ModelLoadError(
                        f"{folder}: {name} is missing, and the target's has another shape; download the head again"
                    )
        yield config, files, shapes, layer


def head_bytes(folder: Path, quant: QuantScheme, target: ModelConfig) -> tuple[ModelConfig, int, str]:
    """The config of the head's layer, bytes of its weights stored by `quant`, and its dense format; reads no weights.

    Raises ModelLoadError, ConfigError or VocabularyError where the head is invalid or does not fit this target.
    """
    with open_head(folder, target) as (config, files, shapes, _):
        target_ids(folder, config, files)
        dense = dense_format(files, quant, shapes)
        return config.layer, weight_bytes(config.layer, files, quant, shapes), dense


def load_head(
    folder: Path,
    target: Decoder,
    ops: Ops,
    quant: QuantScheme | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> EagleHead | BlockHead:
    """The head in `folder` for `target`, its weights stored by `quant` (default: as in the checkpoint).

    An embedding or LM head that the folder lacks is shared with the target, the LM head in the format of `quant`.
    """
    quant = quant or QuantScheme()
    check_signs(folder, target)
    with open_head(folder, target.config) as (config, files, shapes, layer):
        weight_bytes(config.layer, files, quant, shapes)
        reader = WeightReader(config.layer, files, quant, ops, device, progress, shapes)
        return read_head(config, reader, layer, target_ids(folder, config, files), target, ops)


def embedding_signs(target: Decoder) -> str:
    """Signs of SIGNS x SIGNS values of the target's embedding, as hexadecimal digits: they survive quantization."""
    rows = _sampled(target.config.vocab_size).int().to(target.device)
    return _signs(target.ops.embedding(rows, target.weights.embedding).cpu())


def _sampled(count: int) -> Tensor:
    return torch.linspace(0, count - 1, SIGNS).long()


def _signs(values: Tensor) -> str:
    """Of values [SIGNS, C], those of the sampled columns."""
    return np.packbits(values[:, _sampled(values.shape[1])].numpy() > 0).tobytes().hex()


def check_signs(folder: Path, target: Decoder) -> None:
    """Raise ConfigError if the head's config.json holds the signs of another target's embedding."""
    recorded = read_json(folder / "config.json").get(TARGET_SIGNS)
    if recorded is not None and not _same_signs(folder, recorded, embedding_signs(target)):
        raise ConfigError(f"the head {folder} was trained for another target; use one that was trained for this target")


def trained_for(folder: Path, target: Path) -> bool:
    """Whether a head records the signs of a target in a folder or GGUF file; False where these cannot be read."""
    with suppress(ConfigError, ModelLoadError, LookupError), open_model(target) as (config, source):
        rows = _sampled(config.vocab_size).tolist()
        values = torch.cat([source.rows("model.embed_tokens.weight", i, i + 1).float() for i in rows])
        return _same_signs(folder, read_json(folder / "config.json")[TARGET_SIGNS], _signs(values))
    return False


def _same_signs(folder: Path, recorded: object, signs: str) -> bool:
    """Whether a head's recorded signs are these, but for a few. Raises ModelLoadError if they are damaged."""
    try:
        return (int(str(recorded), 16) ^ int(signs, 16)).bit_count() <= MOST_DIFFERING * SIGNS**2
    except ValueError:
        raise ModelLoadError(f"{folder}: {TARGET_SIGNS} in config.json is damaged; download the head again") from None


def read_head(
    config: HeadConfig, reader: WeightReader, layer: str, ids: Tensor | None, target: Decoder, ops: Ops
) -> EagleHead | BlockHead:
    """A head from the tensors of `reader`; `layer`: name of an EAGLE head's layer; `ids`: as `target_ids`."""
    shapes = reader.shapes
    shared: dict[str, Any] = {
        "embedding": reader.matrix("embed_tokens") if "embed_tokens.weight" in shapes else target.weights.embedding,
        "lm_head": reader.matrix("lm_head") if "lm_head.weight" in shapes else _borrowed(reader, target, ops),
        "fc": reader.matrix("fc"),
        "norm": reader.vector("norm.weight") if "norm.weight" in shapes else None,
        "target_ids": ids,
        "dense": dense_format(reader.source, reader.quant, shapes),
    }

    def conv(at: str) -> BlockConv:
        return BlockConv(reader.vector(f"{at}.base_kernel"), reader.matrix(f"{at}.kernel_projection"))

    if isinstance(config, BlockConfig):
        markov = "markov_head.markov_w"
        block = BlockWeights(
            **shared,
            hidden_norm=reader.vector("hidden_norm.weight"),
            layers=tuple(reader.layer(f"layers.{i}") for i in range(config.layer.num_layers)),
            markov=(reader.matrix(f"{markov}1"), reader.matrix(f"{markov}2")) if config.markov_rank else None,
            convs=tuple((conv(attention), conv(mlp)) for attention, mlp in config.convs),
            selector=Selector(*map(reader.matrix, SELECTOR)) if config.selector_rank else None,
        )
        return BlockHead(config, block, ops, target.max_model_len)
    third = config.kind == "eagle3"
    names = ["input_norm"] if config.norm_before_fc else []
    names += [f"fc_norm.{i}" for i in range(config.num_captures)] if config.fc_norm else []
    weights = HeadWeights(
        **shared,
        fc_bias=reader.vector("fc.bias") if "fc.bias" in shapes else None,
        fc_norms=tuple(reader.vector(f"{n}.weight") for n in names),
        layer=reader.layer(layer, first_norm=third),  # EAGLE-1 has no norm before attention
        feature_norm=reader.vector(f"{layer}.hidden_norm.weight") if third else None,
        target_norm=None if third else target.weights.norm,
    )
    return EagleHead(config, weights, ops, target.config.rms_eps, target.max_model_len)


def _borrowed(reader: WeightReader, target: Decoder, ops: Ops) -> QuantTensor:
    """The target's LM head in the requested format."""
    w, quant = target.weights.lm_head, reader.quant.at("lm_head")
    if quant.weights == "auto" or (quant.weights == w.format and quant.activations == w.activations):
        return w
    plain = ops.unpack(w)
    stored = scheme.get(plain.format)
    if quant.rows_together != 1:
        return ops.pack(quant.encode(stored.decode(plain)))
    rows = torch.arange(w.shape[0], device=next(iter(plain.parts.values())).device)
    parts = [quant.encode(stored.decode_rows(plain, some)) for some in torch.split(rows, CHUNK)]
    return ops.pack(parts[0] if len(parts) == 1 else scheme.get(quant.weights).concat(parts))


def target_ids(folder: Path, config: HeadConfig, files: Checkpoint) -> Tensor | None:
    """The target's token id of each head token i: i + d2t[i]; None if all are the same. Raises ModelLoadError."""
    size, full = config.draft_vocab_size, config.layer.vocab_size
    if "d2t" not in files:
        if size != full:
            raise ModelLoadError(f"{folder}: tensor d2t is missing, and the head has {size} of the {full} tokens")
        return None
    files.expect("d2t", ("I64", "I32"), (size,))
    ids = torch.arange(size) + files.raw("d2t").long()
    if int(ids.min()) < 0 or int(ids.max()) >= full or len(set(ids.tolist())) != size:
        raise ModelLoadError(f"{folder}: d2t names tokens outside 0..{full - 1}, or one twice; download the head again")
    return None if size == full and bool((ids == torch.arange(size)).all()) else ids.int()


H = TypeVar("H", EagleHead, BlockHead)


def with_vocabulary(head: H, ids: Tensor) -> H:
    """The head with a smaller vocabulary (FR-Spec: Zhao et al., 2025): token ids `ids` [n] of the target, each once.

    Ids that the head does not have are left out. Raises ConfigError where none is left.
    """
    w = head.weights
    own = torch.arange(w.lm_head.shape[0], dtype=torch.int32) if w.target_ids is None else w.target_ids
    kept = torch.isin(own, ids.to(own.dtype)).nonzero().flatten()
    if not len(kept):
        raise ConfigError("the head has none of the tokens of `vocabulary`; name others, or leave the option out")
    taken: dict[str, Any] = {"lm_head": take_rows(head.ops, w.lm_head, kept), "target_ids": own[kept].int()}
    if isinstance(head, EagleHead):
        return type(head)(head.config, replace(head.weights, **taken), head.ops, head.target_eps, head.max_model_len)
    if head.weights.markov is not None:
        before, after = head.weights.markov
        taken["markov"] = before, take_rows(head.ops, after, kept)
    return BlockHead(head.config, replace(head.weights, **taken), head.ops, head.max_model_len)
