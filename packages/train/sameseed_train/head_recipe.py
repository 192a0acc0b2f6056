"""The recipe of a head: an optional .toml file; the defaults suit any Llama-like target."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from sameseed import fields
from sameseed.errors import ConfigError
from sameseed.fields import within
from sameseed.models.config import ModelConfig, RopeConfig
from sameseed.models.head_config import HeadConfig
from sameseed.scheme import QuantScheme
from sameseed_train.optim import OptimSettings
from sameseed_train.recipe import OwnRecipe, TrainSettings


@dataclass(frozen=True)
class SizeSettings:
    """Sizes of the head; 0: the target's. `draft_vocab_size`: number of most frequent tokens to keep (0: all)."""

    num_heads: int = 0
    num_kv_heads: int = 0
    intermediate_size: int = 0
    draft_vocab_size: int = 0


@dataclass(frozen=True)
class LossSettings:
    """Settings of the loss.

    `unroll`: steps that the head takes on its own features; step s has the weight falloff^s. `alone`: share of updates,
    from the start, that train only the first step, at a fraction of the cost. `argmax_weight`: weight of the cross
    entropy on the target's most likely token, beside the KL divergence. `candidates`: number of tokens in the loss of
    a batch: those that its texts have, the most frequent, and some random ones (0: all). `learn_prompts`: these too.
    """

    unroll: int = within(4, 1)
    falloff: float = 0.8
    alone: float = 0.5
    argmax_weight: float = 0.5
    candidates: int = 2048
    learn_prompts: bool = False

    def __post_init__(self) -> None:
        fields.check(self)


@dataclass(frozen=True)
class HeadTraining(TrainSettings):
    """Length and schedule of a head's training, also where a recipe names only some of them.

    Learning rates are small enough not to destroy at once the layer that is copied from the target.
    """

    steps: int = within(600, 1)
    rows: int = within(24, 1)
    warmup: int = 20
    decay: float = within(0.5, 0, 1)
    precision: str = "bfloat16"
    optim: OptimSettings = field(default_factory=lambda: OptimSettings(0.02, 0.002))


@dataclass(frozen=True)
class HeadRecipe(OwnRecipe):
    """Everything that determines a head's weights, except the data and the machine's arithmetic.

    `store`: formats in which `out/packed` has the head once more, e.g. "w8a8,lm_head=w4a16-g32" (empty: none).
    `layers`: the target's layers whose inputs the head reads (the number n of layers means the last layer's output);
    empty: the published choice 2, n / 2, n - 3.
    """

    name: str = "head"
    store: str = ""
    layers: tuple[int, ...] = ()
    size: SizeSettings = field(default_factory=SizeSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    train: HeadTraining = field(default_factory=HeadTraining)

    def __post_init__(self) -> None:
        super().__post_init__()
        QuantScheme.parse(self.store or "auto")


def head_config(recipe: HeadRecipe, target: ModelConfig) -> HeadConfig:
    """The config of the head for a target.

    The rotary embedding is the target's if a head's config.json can describe it, else one with only the target's base.
    Raises ConfigError for tokens or layers that the target does not have, or a number of heads that KV heads do not
    divide.
    """
    size, n = recipe.size, target.num_layers
    vocab = size.draft_vocab_size or target.vocab_size
    heads, kv_heads = size.num_heads or target.num_heads, size.num_kv_heads or target.num_kv_heads
    layers = tuple(recipe.layers or (2, n // 2, n - 3))
    if not 1 <= vocab <= target.vocab_size:
        raise ConfigError(
            f"draft_vocab_size {vocab} is not in 1..{target.vocab_size}, the target's vocabulary; lower it"
        )
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ConfigError(f"num_heads ({heads}) must be a multiple of num_kv_heads ({kv_heads})")
    if len(layers) != 3 or any(not 1 <= i <= n for i in layers):
        raise ConfigError(f"layers {list(layers)}: a head reads what enters three of the target's layers 1 to {n}")
    rope = target.rope if target.rope.kind in ("linear", "llama3") else RopeConfig(theta=target.rope.theta)
    layer = replace(target, num_heads=heads, num_kv_heads=kv_heads, rope=rope)
    layer = replace(layer, num_layers=1, windows=(None,), qkv_bias=False, o_bias=False, mlp_bias=False)
    layer = replace(layer, intermediate_size=size.intermediate_size or target.intermediate_size)
    return HeadConfig("eagle3", layer, vocab, target.hidden_size, layers)
