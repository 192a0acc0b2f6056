"""The assistant of a Gemma 4: a few layers that draft from the target's states, and read its cache in place of one.

A step reads the target's embedding of the last token beside the target's state before that token, after its final
norm; later steps read the assistant's own output. All steps of a draft stand at the position of the last known token,
and see the committed tokens only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from sameseed.batch import Batch
from sameseed.errors import ConfigError, ModelLoadError
from sameseed.models.config import ModelConfig, whole_number
from sameseed.models.decoder import Decoder
from sameseed.models.gemma import Gemma, GemmaConfig, GemmaWeights
from sameseed.models.gguf.header import GGUFFile
from sameseed.models.layers import rope_table
from sameseed.models.loader import read_config
from sameseed.models.weights import WeightReader
from sameseed.ops import normed_rows, plain_rows
from sameseed.scheme import KVLayer, QuantTensor


@dataclass(frozen=True)
class AssistantConfig(GemmaConfig):
    """`target_size`: values of a state of the target."""

    target_size: int = 0

    @cached_property
    def caches(self) -> tuple[int, ...]:
        """All layers read, none writes: -1 is the target's cache of all tokens, -2 that of a window."""
        return tuple(-1 if window is None else -2 for window in self.windows)


@dataclass(frozen=True)
class AssistantWeights(GemmaWeights):
    """`enter` [C, 2 S] takes an embedding and a state of the target, `leave` [S, C] gives a state."""

    enter: QuantTensor | None = None
    leave: QuantTensor | None = None


class Assistant(Gemma):
    """An assistant; only `draft` runs it."""

    config: AssistantConfig

    gguf_names: ClassVar = {
        **Gemma.gguf_names,
        "pre_projection": "nextn.pre_projection",
        "post_projection": "nextn.post_projection",
        "masked_embedding.centroids": "masked_embd_centroids",
        "masked_embedding.ordering": "masked_embd_ordering",
        "masked_embedding": "masked_embd",
    }

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str) -> GemmaConfig:
        none = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
        base = super().parse({**raw, **none}, where)
        size = whole_number(raw, where, "backbone_hidden_size")
        return AssistantConfig(**vars(replace(base, num_shared=base.num_layers)), target_size=size)

    @classmethod
    def gguf_config(cls, file: GGUFFile, raw: Mapping[str, Any]) -> dict[str, Any]:
        enter = file.tensors.get("nextn.pre_projection.weight")
        return super().gguf_config(file, raw) | {"backbone_hidden_size": enter.shape[1] // 2 if enter else 0}

    @classmethod
    def shapes(cls, config: Any) -> dict[str, tuple[int, ...]]:
        own, size = config.hidden_size, config.target_size
        ends = {"pre_projection.weight": (own, 2 * size), "post_projection.weight": (size, own)}
        return {**super().shapes(config), **ends}

    @classmethod
    def spare(cls, config: Any) -> list[str]:
        """Also the clusters of tokens of small assistants: here all logits are computed."""
        clusters = ("centroids.weight", "ordering.weight", "token_ordering")
        return [*super().spare(config), *(f"masked_embedding.{name}" for name in clusters)]

    @classmethod
    def read(cls, reader: WeightReader, dense: str) -> AssistantWeights:
        ends = reader.matrix("pre_projection"), reader.matrix("post_projection")
        return AssistantWeights(**vars(super().read(reader, dense)), enter=ends[0], leave=ends[1])

    def __init__(self, config: AssistantConfig, *args: Any, **more: Any) -> None:
        super().__init__(config, *args, **more)
        # Rows see the committed tokens, so they have the position of the last of these, and the angle of the next one.
        ropes = (config.rope, config.head_dim), (config.local_rope, config.local_head_dim)
        self.rope, self.local_rope = (rope_table(*r, self.max_model_len + 1)[1:].to(self.device) for r in ropes)

    def check_target(self, target: Decoder) -> None:
        """Raises ConfigError for a target that this assistant was not made for."""
        c, t = self.config, target.config
        if not fits(c, t):
            raise ConfigError(
                f"this assistant drafts for a Gemma 4 of hidden size {c.target_size} and {c.vocab_size} tokens, "
                f"not of {t.hidden_size} and {t.vocab_size}; take the assistant of this target"
            )

    @torch.inference_mode()
    def draft(self, x: Tensor, batch: Batch, caches: Seq[KVLayer]) -> tuple[Tensor, Tensor]:
        """One step: logits [B, V] after the last tokens of some sequences, and states [B, S] for the next step.

        x [B, 2 S]: the target's embedding of each token beside its state before it, or that of the step before.
        `batch` holds a row per sequence at its last committed position; `caches`: the target's of a window, and of all.
        """
        ops, w = self.ops, self.weights
        assert isinstance(w, AssistantWeights) and w.enter is not None and w.leave is not None
        batch = batch.on(self.device)
        x = ops.product(plain_rows(x), w.enter)  # [B, C]
        for i in range(self.config.num_layers):
            x = self._layer(ops, i, x, (), batch, caches)
        rows = normed_rows(x, w.norm, self.config.rms_eps)
        return ops.product(rows, w.lm_head), ops.product(rows, w.leave)

    def _forward(self, *args: Any) -> Any:
        raise ConfigError("an assistant drafts for its Gemma 4 only; name that as the model, and it as --draft")


def fits(own: ModelConfig, target: ModelConfig) -> bool:
    """Whether the config of an assistant goes with that of a target."""

    def sizes(of: GemmaConfig, hidden_size: int) -> tuple[int, ...]:
        return hidden_size, of.vocab_size, of.head_dim, of.local_head_dim

    if not isinstance(own, AssistantConfig) or not isinstance(target, GemmaConfig):
        return False
    return sizes(own, own.target_size) == sizes(target, target.hidden_size)


def drafts_for(file: Path, model: Path) -> bool:
    """Whether a file holds the assistant of a model."""
    with suppress(ModelLoadError):
        return fits(read_config(file), read_config(model))
    return False
