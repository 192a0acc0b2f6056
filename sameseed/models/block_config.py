"""BlockConfig: a block head (DFlash: Chen et al., 2026; DSpark: DeepSeek-AI, 2026), read from its config.json.

Three layouts are read: z-lab's (`dflash_config`), DeepSpec's (all settings on the same level as those of the layers)
and that of speculators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sameseed.batch import MAX_NODES
from sameseed.errors import ModelLoadError
from sameseed.models.config import layer_shapes, parse_config, whole_number
from sameseed.models.head_config import HeadConfig, layer_architecture, layer_settings


@dataclass(frozen=True)
class BlockConfig(HeadConfig):
    """Shape and flags of a block head; `layer` holds the number and the sizes of its layers.

    `block_size`: tokens of a block, which are the last known token and masks (`mask_token`). `from_anchor`: every place
    guesses the token after itself, also the known token's place; otherwise each mask guesses the token in its own
    place. `markov_rank`: rank of the Markov head, whose bias depends on the token before; 0 for none.
    """

    block_size: int = 8
    mask_token: int = 0
    from_anchor: bool = False
    markov_rank: int = 0

    @property
    def num_guesses(self) -> int:
        """The number of tokens that the head was trained to guess."""
        return self.block_size if self.from_anchor else self.block_size - 1

    def settings(self) -> dict[str, Any]:
        """The entries of config.json in the layout of speculators, without those of the layers."""
        spark = bool(self.markov_rank)
        own = {
            "architectures": ["DSparkSpeculator" if spark else "DFlashSpeculator"],
            "speculators_model_type": "dspark" if spark else "dflash",
            "aux_hidden_state_layer_ids": list(self.aux_layers or ()),
            "block_size": self.block_size,
            "draft_vocab_size": self.draft_vocab_size,
            "mask_token_id": self.mask_token,
            "sample_from_anchor": self.from_anchor,
            "target_hidden_size": self.target_hidden_size,
        }
        markov = {"markov_rank": self.markov_rank, "markov_head_type": "vanilla", "enable_confidence_head": False}
        return {**own, **markov} if spark else own

    def tensors(self, layer: str) -> dict[str, tuple[int, ...]]:
        c, hidden = self.layer, self.layer.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (c.vocab_size, hidden)}
        shapes["fc.weight"] = (hidden, self.num_captures * self.target_hidden_size)
        shapes["hidden_norm.weight"] = (hidden,)
        for i in range(c.num_layers):
            shapes |= layer_shapes(c, f"layers.{i}", ("input_layernorm", "post_attention_layernorm"))
        shapes["norm.weight"] = (hidden,)
        if self.markov_rank:
            shapes["markov_head.markov_w1.weight"] = (c.vocab_size, self.markov_rank)
            shapes["markov_head.markov_w2.weight"] = (self.draft_vocab_size, self.markov_rank)
        shapes["d2t"] = (self.draft_vocab_size,)
        return {**shapes, "lm_head.weight": (self.draft_vocab_size, hidden)}


def parse_block_config(raw: Mapping[str, Any], where: str) -> BlockConfig:
    """BlockConfig of a parsed config.json. Raises ModelLoadError naming the field."""
    inner, own = layer_settings(raw, where), raw.get("dflash_config") or {}
    if not isinstance(own, Mapping):
        raise ModelLoadError(f"{where}: dflash_config must be an object, got {str(own)[:80]}")
    settings = {**own, **raw}
    architecture = layer_architecture(inner, "qwen3", where)
    _refuse(inner, settings, where)
    layer = parse_config({**inner, "architectures": [architecture]}, where)
    layer = replace(layer, tied_embeddings=False, windows=(None,) * layer.num_layers)
    named = str(raw.get("speculators_model_type") or (raw.get("architectures") or ["?"])[0])
    spark = "dspark" in named.lower()
    rank = whole_number(settings, where, "markov_rank", 0, least=0) if spark else 0
    kind = settings.get("markov_head_type", "vanilla")
    if rank and kind != "vanilla":
        raise ModelLoadError(f"{where}: a Markov head of type {kind!r} is not supported; only 'vanilla' is")
    # Speculators list the layers whose inputs the head reads; the other layouts list those whose outputs it reads.
    name, later = "aux_hidden_state_layer_ids", 0
    if settings.get(name) is None:
        name, later = "target_layer_ids", 1
    aux = settings.get(name)
    if not isinstance(aux, list) or not aux or any(type(i) is not int for i in aux):
        raise ModelLoadError(f"{where}: {name} must list the target's layers that the head reads, got {str(aux)[:80]}")
    return BlockConfig(
        "block",
        layer,
        whole_number(settings, where, "draft_vocab_size", layer.vocab_size),
        whole_number(settings, where, "target_hidden_size", layer.hidden_size),
        tuple(i + later for i in aux),
        block_size=whole_number(settings, where, "block_size", least=2, most=MAX_NODES),
        mask_token=whole_number(settings, where, "mask_token_id", least=0, most=layer.vocab_size - 1),
        from_anchor=bool(settings.get("sample_from_anchor", spark)),
        markov_rank=rank,
    )


def _refuse(inner: Mapping[str, Any], settings: Mapping[str, Any], where: str) -> None:
    """Raise ModelLoadError for settings that change the computation and are not supported."""
    kinds = inner.get("layer_types") or (["sliding_attention"] if inner.get("use_sliding_window") else ())
    if "sliding_attention" in kinds or settings.get("is_causal") or settings.get("causal"):
        raise ModelLoadError(
            f"{where}: a block head whose layers are causal or see a sliding window is not supported; take one of full "
            "attention"
        )
    projector = settings.get("projector_type", "dflash")
    if projector != "dflash" or settings.get("shift_label"):
        raise ModelLoadError(
            f"{where}: a block head of projector_type {projector!r} is not supported; only 'dflash' is"
        )
    scale = settings.get("input_embedding_scale", 1.0)
    if scale != 1.0:
        raise ModelLoadError(f"{where}: input_embedding_scale {scale!r} is not supported; only 1 is")
