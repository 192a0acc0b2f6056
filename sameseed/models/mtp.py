"""The MTP block of Qwen3.5, in its checkpoint or beside it: a layer that drafts from the target's last states.

Row t pairs the target's state at position t, after its final norm, with token t + 1, as in an EAGLE head. For further
tokens it reads its own output, after its own norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from torch import Tensor

from sameseed.errors import ConfigError, ModelLoadError
from sameseed.models.config import MTP_BESIDE
from sameseed.models.eagle import EagleHead, HeadWeights
from sameseed.models.head_config import HeadConfig
from sameseed.models.layers import LayerWeights
from sameseed.models.loader import open_checkpoint, open_model, read_config
from sameseed.models.qwen35 import Qwen35, Qwen35Config, member, mtp_names, mtp_shapes
from sameseed.models.weights import Progress, TensorSource, WeightReader, dense_format, expected_shapes, weight_bytes
from sameseed.ops import Ops, RowSource, normed_rows, plain_rows
from sameseed.scheme import QuantScheme

ENDS = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")  # that files of a block alone also hold

# What a model and its block must agree in.
sizes = attrgetter("architecture", "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")


class MtpHead(EagleHead):
    """The block with its weights: an EAGLE head whose layer is gated attention. `fc_norms[0]`: the embedding's norm."""

    def _entering(self, ops: Ops, embedding: Tensor, features: Tensor) -> tuple[RowSource, Tensor]:
        w, eps = self.weights, self.config.layer.rms_eps
        assert w.feature_norm is not None
        parts = (embedding, w.fc_norms[0]), (features, w.feature_norm)
        x = ops.product(plain_rows(ops.beside([ops.rms_norm(part, norm, eps) for part, norm in parts])), w.fc)
        return normed_rows(x, w.layer.input_norm, eps), x


def find_block(folder: Path) -> tuple[Path, Qwen35Config]:
    """Where the MTP block of the model in `folder` is: there, or in a file beside it; and the model's config there.

    `folder` may also be a file of the block alone. Raises ConfigError where there is none.
    """
    own = read_config(folder)
    beside = sorted(folder.parent.glob(MTP_BESIDE)) if folder.is_file() else []
    for place in (folder, *beside):
        with suppress(ModelLoadError):
            config = read_config(place)
            if isinstance(config, Qwen35Config) and config.num_mtp and sizes(config) == sizes(own):
                with open_checkpoint(place) as source:
                    if all(f"{name}.weight" in source for name in mtp_names(config)[:-1]):
                        return place, config
    if isinstance(own, Qwen35Config) and own.num_mtp:
        return folder, own  # which names what is missing
    raise ConfigError(f"{folder.name} holds no MTP block; leave out --draft mtp, or take a checkpoint that has one")


@contextmanager
def open_block(folder: Path) -> Iterator[tuple[TensorSource, Qwen35Config, Qwen35Config]]:
    """The checked source of an MTP block, the config of its model there, and that of a model of its layer alone.

    Raises ModelLoadError naming a tensor that is missing, ConfigError where there is no such block.
    """
    place, config = find_block(folder)
    with open_checkpoint(place) as source:
        alone = "model.layers.0.input_layernorm.weight" not in source
        source.check(config, ({} if alone else expected_shapes(config)) | mtp_shapes(config), ENDS if alone else ())
        yield source, config, replace(config, num_layers=1, recurrent=frozenset())


def mtp_bytes(folder: Path, quant: QuantScheme, target: Path) -> tuple[Qwen35Config, int, str]:
    """The config of the block's layer, bytes of its weights, and its dense format: that of `target`."""
    with open_block(folder) as (source, config, layer):
        size = weight_bytes(layer, source, quant, mtp_shapes(config))
    with open_model(target) as (own, source):
        return layer, size, dense_format(source, quant, expected_shapes(own))


def load_mtp(
    folder: Path, target: Qwen35, ops: Ops, quant: QuantScheme, device: str = "cpu", progress: Progress | None = None
) -> MtpHead:
    """The MTP block of `target`, whose embedding and LM head it shares. Raises as `open_block`."""
    with open_block(folder) as (source, config, layer):
        if sizes(config) != sizes(target.config):
            raise ConfigError(f"the MTP block of {folder} is of another model; name one of this target with --draft")
        fc, embedding, states, norm, at = mtp_names(config)
        reader = WeightReader(layer, source, quant, ops, device, progress, mtp_shapes(config))
        weights = HeadWeights(
            embedding=target.weights.embedding,
            fc=reader.matrix(fc),
            fc_bias=None,
            fc_norms=(reader.norm(embedding),),
            layer=LayerWeights(**reader.attention(at), **member(layer).read_mlp(reader, at)),
            feature_norm=reader.norm(states),
            norm=reader.norm(norm),
            target_norm=target.weights.norm,
            lm_head=target.weights.lm_head,
            target_ids=None,
            dense=target.weights.dense,
        )
    head = HeadConfig("eagle", layer, layer.vocab_size, layer.hidden_size, norm_output=True)
    return MtpHead(head, weights, ops, target.config.rms_eps, target.max_model_len)
