"""The MTP block of Qwen3.5: a layer inside the checkpoint that drafts from the target's last states.

Row t pairs the target's state at position t, after its final norm, with token t + 1, as in an EAGLE head. For further
tokens it reads its own output, after its own norm.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from sameseed.batch import Batch
from sameseed.errors import ConfigError
from sameseed.kvcache.cache import KVCache
from sameseed.models.eagle import EagleHead, HeadWeights
from sameseed.models.head_config import HeadConfig
from sameseed.models.loader import open_checkpoint, read_config
from sameseed.models.qwen35 import (
    GatedAttention,
    GatedLayer,
    Qwen35,
    Qwen35Config,
    mtp_names,
    mtp_shapes,
    read_attention,
)
from sameseed.models.weights import Progress, Shapes, TensorSource, WeightReader, weight_bytes
from sameseed.ops import Ops, normed_rows, plain_rows
from sameseed.scheme import QuantScheme


class MtpHead(EagleHead):
    """The block with its weights: an EAGLE head whose layer is gated attention. `fc_norms[0]`: the embedding's norm."""

    def __init__(self, config: HeadConfig, *args: Any) -> None:
        super().__init__(config, *args)
        assert isinstance(config.layer, Qwen35Config)
        self.attention = GatedAttention(config.layer, self.max_model_len, self.device)
        self.rope = self.attention.table

    def _forward(
        self, ops: Ops, batch: Batch, cache: KVCache, how: tuple[int, int], x: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        w, eps = self.weights, self.config.layer.rms_eps
        assert w.target_norm is not None and w.feature_norm is not None and w.norm is not None
        features = ops.rms_norm(x, w.target_norm, self.target_eps) if how[0] else x
        embedding = ops.rms_norm(ops.embedding(batch.token_ids, w.embedding), w.fc_norms[0], eps)
        both = ops.beside([embedding, ops.rms_norm(features, w.feature_norm, eps)])  # [T, 2 C]
        x = ops.product(plain_rows(both), w.fc)
        rows = normed_rows(x, w.layer.input_norm, eps)
        assert isinstance(w.layer, GatedLayer)
        x = self.attention.run(ops, w.layer, rows, x, batch, cache.layers[0], None)
        logits = ops.product(normed_rows(x, w.norm, eps, batch.logit_rows), w.lm_head)
        return logits, ops.capture([ops.rms_norm(x, w.norm, eps)]), self._chosen(ops, logits, batch)


def block_config(folder: Path) -> tuple[Qwen35Config, Qwen35Config, Shapes]:
    """Of the model in `folder`: its config with the block's tensors, the block's own, and their shapes.

    Raises ConfigError where the checkpoint has no such block.
    """
    config = read_config(folder)
    if not isinstance(config, Qwen35Config) or not config.num_mtp:
        raise ConfigError(f"{folder.name} holds no MTP block; leave out --draft mtp, or take a checkpoint that has one")
    layer = replace(config, num_layers=1, attends=(True,))
    return replace(config, reads_mtp=True), layer, mtp_shapes(config)


def mtp_bytes(folder: Path, quant: QuantScheme) -> tuple[Qwen35Config, int, TensorSource]:
    """The block's config, the bytes that its weights will take, and its source. Raises as `load_mtp`."""
    config, layer, shapes = block_config(folder)
    with open_checkpoint(folder) as source:
        source.check(config)
        return layer, weight_bytes(layer, source, quant, shapes), source


def load_mtp(
    folder: Path,
    target: Qwen35,
    ops: Ops,
    quant: QuantScheme,
    device: str = "cpu",
    progress: Progress | None = None,
) -> MtpHead:
    """The MTP block inside the checkpoint of `target`, whose embedding and LM head it shares.

    Raises ModelLoadError naming a tensor that is missing, ConfigError where the checkpoint has no such block.
    """
    config, layer, shapes = block_config(folder)
    fc, embedding, states, norm, at = mtp_names(config)
    with open_checkpoint(folder) as source:
        source.check(config)
        reader = WeightReader(layer, source, quant, ops, device, progress, shapes)
        weights = HeadWeights(
            embedding=target.weights.embedding,
            fc=reader.matrix(fc),
            fc_bias=None,
            fc_norms=(reader.norm(embedding),),
            layer=read_attention(reader, layer, at),
            feature_norm=reader.norm(states),
            norm=reader.norm(norm),
            target_norm=target.weights.norm,
            lm_head=target.weights.lm_head,
            target_ids=None,
            dense=target.weights.dense,
        )
    head = HeadConfig("eagle", layer, layer.vocab_size, layer.hidden_size)
    return MtpHead(head, weights, ops, target.config.rms_eps, target.max_model_len)
