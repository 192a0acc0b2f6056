"""The recipe of a head: one .toml file, or none; what it leaves out has defaults that suit any Llama-like target."""

from __future__ import annotations

from dataclasses import dataclass, field

from sameseed.errors import ConfigError
from sameseed.models.config import ModelConfig
from sameseed.train.head_export import head_rope
from sameseed.train.head_job import LossSettings
from sameseed.train.head_model import HeadShape
from sameseed.train.optim import OptimSettings
from sameseed.train.own import OwnRecipe
from sameseed.train.recipe import TrainSettings


@dataclass(frozen=True)
class SizeSettings:
    """Sizes of the head; 0: the target's. `draft_vocab_size`: its most frequent tokens (0: all)."""

    num_heads: int = 0
    num_kv_heads: int = 0
    intermediate_size: int = 0
    draft_vocab_size: int = 0


def default_training() -> TrainSettings:
    """Small enough an update that a layer taken from the target is not thrown away at once."""
    return TrainSettings(600, rows=24, row_tokens=512, warmup=20, decay=0.5, optim=OptimSettings(0.02, 0.002))


@dataclass(frozen=True)
class HeadRecipe(OwnRecipe):
    """Everything that decides a head's weights, but for the data and the machine's arithmetic.

    `layers`: it reads what enters these layers of the target (n: what leaves the last of n); none: the published choice
    2, n / 2, n - 3.
    """

    name: str = "head"
    layers: tuple[int, ...] = ()
    size: SizeSettings = field(default_factory=SizeSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    train: TrainSettings = field(default_factory=default_training)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss.unroll < 1:
            raise ConfigError(
                f"unroll (the depth that a head is trained for) must be at least 1, got {self.loss.unroll}"
            )


def head_shape(recipe: HeadRecipe, target: ModelConfig) -> HeadShape:
    """The head's sizes for a target. Raises ConfigError for a vocabulary that the target has not, or odd groups."""
    size = recipe.size
    vocab = size.draft_vocab_size or target.vocab_size
    heads, kv_heads = size.num_heads or target.num_heads, size.num_kv_heads or target.num_kv_heads
    if not 1 <= vocab <= target.vocab_size:
        raise ConfigError(
            f"draft_vocab_size {vocab} is not in 1..{target.vocab_size}, the target's vocabulary; lower it"
        )
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ConfigError(f"num_heads ({heads}) must be a multiple of num_kv_heads ({kv_heads})")
    return HeadShape(
        vocab_size=target.vocab_size,
        draft_vocab_size=vocab,
        hidden_size=target.hidden_size,
        target_hidden=target.hidden_size,
        num_captures=len(aux_layers(recipe, target)),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=target.head_dim,
        intermediate_size=size.intermediate_size or target.intermediate_size,
        rms_eps=target.rms_eps,
        rope=head_rope(target),
        max_positions=target.max_model_len,
    )


def aux_layers(recipe: HeadRecipe, target: ModelConfig) -> tuple[int, ...]:
    """The target's layers whose inputs the head reads. Raises ConfigError for ones that it has not."""
    n = target.num_layers
    layers = recipe.layers or (2, n // 2, n - 3)
    if len(layers) != 3 or any(not 1 <= i <= n for i in layers):
        raise ConfigError(
            f"layers {list(layers)}: a head reads three of what enters the target's layers 1 to {n}; name them"
        )
    return tuple(layers)
