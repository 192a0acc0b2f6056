"""Recipes: .toml files, read into frozen dataclasses. A wrong key is reported with the nearest name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from sameseed import fields
from sameseed.batch import MAX_NODES
from sameseed.errors import ConfigError, nearest
from sameseed.fields import tomllib, within
from sameseed.models.config import ModelConfig, RopeConfig
from sameseed.models.head_config import HeadConfig
from sameseed.scheme import QuantScheme
from sameseed_train.model import ModelShape
from sameseed_train.optim import OptimSettings

T = TypeVar("T")
R = TypeVar("R", bound="OwnRecipe")
ENDLESS = ("sums", "records")  # kinds of generated text, without end
MADE = ("stdlib", *ENDLESS)  # kinds that read no file of the data folder
KINDS = ("chat", "dialog", "text", *MADE)
RECIPES = Path(__file__).parent / "recipes"
PRECISIONS = ("float32", "bfloat16")
# Keys of a `train draft` recipe that a pair's [draft] cannot have: the pair has its own, or drafts one token a pass.
NOT_OF_PAIR = ("name", "seed", "target", "begin", "mixture", "source", "threads", "note", "parallel")


@dataclass(frozen=True)
class Checked:
    """Settings whose types and ranges are checked. Raises ConfigError naming the setting."""

    def __post_init__(self) -> None:
        fields.check(self)


@dataclass(frozen=True)
class SourceSettings:
    """One source of training text: its file, how often it is read, and its licence."""

    domain: str
    kind: str  # how a row becomes tokens: one of KINDS
    licence: str
    file: str = ""  # a .jsonl.gz in the data folder; unused for the kinds of MADE
    names: tuple[str, ...] = ()  # values of a row's "source"; a trailing * matches any ending
    epochs: float = 1.0
    max_mb: float = 1e9  # megabytes of text kept, before epochs
    ascii_only: bool = False
    share: float = 1.0  # of the prompts of a head or a draft, beside the other sources' shares
    shown: bool = True  # do prompts for demonstrations come from it? (those for measuring always do)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            hint = nearest(self.kind, KINDS) + f" (there are: {', '.join(KINDS)})"
            raise ConfigError(f"source kind {self.kind!r} is unknown{hint}")
        if self.kind in ENDLESS and self.max_mb > 1000:
            raise ConfigError(f"source {self.domain!r} needs 'max_mb': {self.kind} have no end")
        if self.kind not in MADE and not (self.file and self.names):
            raise ConfigError(f"source {self.domain!r} needs 'file' and 'names'")
        if self.share <= 0:
            raise ConfigError(f"source {self.domain!r}: share must be above 0, got {self.share:g}")


@dataclass(frozen=True)
class TokenizerSettings:
    """The size of the vocabulary, and the megabytes of the mixture that the tokenizer is trained on."""

    vocab_size: int = 4096
    sample_mb: float = 12.0


@dataclass(frozen=True)
class TextSettings(Checked):
    """The texts that the target generates; `corpus_share` of them are given documents instead."""

    num_texts: int = within(4000, 1)
    prompt_tokens: int = within(200, 1)
    new_tokens: int = within(192, 1)
    greedy: float = within(0.85, 0, 1)
    temperature: float = 0.8
    corpus_share: float = within(0.1, 0, 1)


@dataclass(frozen=True)
class TrainSettings(Checked):
    """Length and schedule of a training: the rate rises over `warmup` steps, stays, then falls to 0 over `decay`."""

    steps: int = within(MISSING, 1)
    rows: int = within(12, 1)
    row_tokens: int = within(512, 8)
    warmup: int = 40
    decay: float = within(0.4, 0, 1)  # share of all steps; edit `steps` and resume to begin the decay early
    clip: float = 1.0
    checkpoint_minutes: float = 5.0
    precision: str = "float32"  # of matrix products; "bfloat16" (autocast) is faster where the processor has it
    compile: bool = False  # a pair's target by torch.compile, which needs a C++ compiler
    optim: OptimSettings = field(default_factory=OptimSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.precision not in PRECISIONS:
            raise ConfigError(f"train.precision is one of {', '.join(PRECISIONS)}, not {self.precision!r}")


@dataclass(frozen=True)
class OwnRecipe:
    """The settings that recipes of heads and drafts share."""

    name: str = ""
    seed: int = 1
    target: str = ""
    format: str = "auto"  # of the target's weights
    kv_format: str = "auto"  # of its KV cache
    mixture: str = ""  # a pair's recipe, in the folder of this one, that has the sources
    source: tuple[SourceSettings, ...] = ()  # where prompts come from
    batch: int = within(32, 1)  # texts that are written together
    states_gb: float = within(20.0, 0)  # most gigabytes of the target's states that are kept on the disk
    threads: int = within(0, 0)  # 0: the defaults of torch and the backend
    texts: TextSettings = field(default_factory=TextSettings)
    train: TrainSettings = field(default_factory=lambda: TrainSettings(600))
    note: str = ""

    def __post_init__(self) -> None:
        fields.check_ranges(self)
        if self.train.compile:
            raise ConfigError("compile is for [target.train]; a draft's rows have many lengths")


@dataclass(frozen=True)
class DraftSize:
    """Sizes of the draft, as in a Hugging Face config.json; 0: derived from the target's (`draft_shape`)."""

    num_layers: int = 2
    hidden_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    intermediate_size: int = 0


@dataclass(frozen=True)
class DraftRecipe(OwnRecipe):
    """Everything that determines a draft's weights, except the data and the machine's arithmetic."""

    name: str = "draft"
    begin: str = ""  # an existing model whose weights and sizes training starts from
    begin_layers: tuple[int, ...] = ()  # with these of its layers; empty: all
    parallel: int = 0  # tokens to draft in one pass, over mask tokens; 0: one token a pass
    mask_token: int = -1  # id of the masks; -1: one that no text has
    keep: float = 0.7  # a share max(keep^i, least_kept) of the drafts behind i masks is trained on
    least_kept: float = 0.2
    size: DraftSize = field(default_factory=DraftSize)
    argmax_weight: float = 0.5
    train: TrainSettings = field(default_factory=lambda: TrainSettings(600, rows=12, warmup=30, decay=0.5))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parallel != 0 and not 2 <= self.parallel <= MAX_NODES:
            raise ConfigError(f"parallel must be 2..{MAX_NODES} tokens, or 0 for a token a pass, got {self.parallel}")
        if self.mask_token >= 0 and not self.parallel:
            raise ConfigError("mask_token has an effect only with --parallel K; add that, or leave it out")
        if not 0.0 <= self.least_kept <= self.keep <= 1.0:
            raise ConfigError(f"0 <= least_kept <= keep <= 1 must hold, got {self.least_kept:g} and {self.keep:g}")


def draft_shape(recipe: DraftRecipe, target: ModelShape) -> ModelShape:
    """The draft's sizes for a target. Raises ConfigError for impossible sizes."""
    size = recipe.size
    dim, hidden = size.head_dim or target.head_dim, size.hidden_size or target.hidden_size // 2
    kv_heads = size.num_kv_heads or max(1, target.num_kv_heads // 2)
    heads = size.num_heads or kv_heads * (target.num_heads // target.num_kv_heads)
    if min(size.num_layers, hidden, dim, kv_heads, heads) < 1 or dim % 2 or heads % kv_heads:
        said = f"{size.num_layers} layers, {heads} heads, {kv_heads} KV heads of {dim}"
        raise ConfigError(f"{said}: sizes must be at least 1, head_dim even, num_heads a multiple of num_kv_heads")
    return ModelShape(
        vocab_size=target.vocab_size,
        hidden_size=hidden,
        num_layers=size.num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        intermediate_size=size.intermediate_size or 8 * hidden // 3,
        max_positions=target.max_positions,
    )


@dataclass(frozen=True)
class SizeSettings:
    """Sizes of the head; 0: the target's. `draft_vocab_size`: number of most frequent tokens to keep (0: all)."""

    num_heads: int = 0
    num_kv_heads: int = 0
    intermediate_size: int = 0
    draft_vocab_size: int = 0


@dataclass(frozen=True)
class LossSettings(Checked):
    """Settings of a head's loss."""

    unroll: int = within(4, 1)  # steps that the head takes on its own features
    falloff: float = 0.8  # step s has the weight falloff^s
    alone: float = 0.5  # share of updates, from the start, that train only the first step: cheap
    argmax_weight: float = 0.5  # of the cross entropy on the likeliest token, beside the KL divergence
    candidates: int = within(2048, 0)  # tokens in the loss: the texts' own, frequent and random ones; 0: all
    learn_prompts: bool = False  # learn the tokens of prompts too


@dataclass(frozen=True)
class HeadTraining(TrainSettings):
    """A head's training. Its rates are small enough to keep the layer that is copied from the target."""

    steps: int = within(600, 1)
    rows: int = within(24, 1)
    warmup: int = 20
    decay: float = within(0.5, 0, 1)
    precision: str = "bfloat16"
    optim: OptimSettings = field(default_factory=lambda: OptimSettings(0.02, 0.002))


@dataclass(frozen=True)
class HeadRecipe(OwnRecipe):
    """Everything that determines a head's weights, except the data and the machine's arithmetic."""

    name: str = "head"
    store: str = ""  # formats of `out/packed`, e.g. "w8a8,lm_head=w4a16-g32"; empty: none
    layers: tuple[int, ...] = ()  # whose inputs it reads (n: the last's output); empty: 2, n / 2, n - 3
    size: SizeSettings = field(default_factory=SizeSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    train: HeadTraining = field(default_factory=HeadTraining)

    def __post_init__(self) -> None:
        super().__post_init__()
        QuantScheme.parse(self.store or "auto")


def head_config(recipe: HeadRecipe, target: ModelConfig) -> HeadConfig:
    """The head's config, with the target's rotary embedding where a config.json can say it. Raises ConfigError."""
    size, n = recipe.size, target.num_layers
    vocab = size.draft_vocab_size or target.vocab_size
    heads, kv_heads = size.num_heads or target.num_heads, size.num_kv_heads or target.num_kv_heads
    layers = tuple(recipe.layers or (2, n // 2, n - 3))
    if not 1 <= vocab <= target.vocab_size:
        raise ConfigError(f"draft_vocab_size {vocab} is not in 1..{target.vocab_size}, the target's tokens; lower it")
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ConfigError(f"num_heads ({heads}) must be a multiple of num_kv_heads ({kv_heads})")
    if len(layers) != 3 or any(not 1 <= i <= n for i in layers):
        raise ConfigError(f"layers {list(layers)}: a head reads what enters three of the target's layers 1 to {n}")
    rope = target.rope if target.rope.kind in ("linear", "llama3") else RopeConfig(theta=target.rope.theta)
    layer = replace(target, num_heads=heads, num_kv_heads=kv_heads, rope=rope)
    layer = replace(layer, num_layers=1, windows=(None,), qkv_bias=False, o_bias=False, mlp_bias=False)
    layer = replace(layer, intermediate_size=size.intermediate_size or target.intermediate_size)
    return HeadConfig("eagle3", layer, vocab, target.hidden_size, layers)


@dataclass(frozen=True)
class UnlikelihoodSettings:
    """Training against repetition: the target continues prompts greedily and unlearns the tokens that it repeats."""

    train: TrainSettings
    prompts: int = 16  # continued at each step
    prompt_tokens: int = 120
    new_tokens: int = 160
    ngram: int = 4  # the last token of an n-gram that occurred earlier in the text is unlearned
    weight: float = 1.0  # of this loss, beside the cross entropy on the corpus rows of the step


@dataclass(frozen=True)
class ModelSettings:
    """The target: its size and its training."""

    shape: ModelShape
    train: TrainSettings


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the weights, except the data folder and the machine's arithmetic."""

    name: str
    seed: int
    source: tuple[SourceSettings, ...]
    tokenizer: TokenizerSettings
    target: ModelSettings
    draft: DraftRecipe  # its name, seed, target, sources, threads and note are those of the pair
    unlikelihood: UnlikelihoodSettings | None = None
    threads: int = within(0, 0)  # 0: torch's default
    valid_file: str = "valid.jsonl.gz"
    note: str = ""  # extra text for the model cards


def load_recipe(path: Path) -> Recipe:
    """Read and check a pair's recipe. Raises ConfigError naming the key and the remedy."""
    recipe, where = read_table(Recipe, path), path.name
    fields.check_ranges(recipe)
    shape, train, draft = recipe.target.shape, recipe.target.train, recipe.draft
    others = [f"draft.{key}" for key in NOT_OF_PAIR if getattr(draft, key) != getattr(DraftRecipe(), key)]
    for wrong, words in (
        (not recipe.source, "no [[source]]; name at least one"),
        (shape.vocab_size != recipe.tokenizer.vocab_size, "target.shape.vocab_size must equal tokenizer.vocab_size"),
        (shape.num_heads % shape.num_kv_heads, "target.shape.num_heads must be a multiple of num_kv_heads"),
        (shape.head_dim % 2, "target.shape.head_dim must be even"),
        (train.row_tokens > shape.max_positions, "target.train.row_tokens exceeds shape.max_positions"),
        (others, f"{', '.join(others)}: only for `sameseed train draft`; leave it out"),
        (
            not all(0 <= j < shape.num_layers for j in draft.begin_layers),
            f"draft.begin_layers names layers of the target, 0 to {shape.num_layers - 1}",
        ),
        (
            draft.begin_layers and draft.size != DraftSize(),
            "draft.begin_layers gives the draft its sizes; leave out [draft.size]",
        ),
    ):
        if wrong:
            raise ConfigError(f"{where}: {words}")
    draft_shape(draft, shape)
    return recipe


def load_own_recipe(kind: type[R], path: Path | None) -> R:
    """Read and check the recipe of a head or a draft; None: all defaults. Raises ConfigError as `load_recipe`."""
    if path is None:
        return kind()
    recipe: R = read_table(kind, path)
    return replace(recipe, source=load_recipe(path.parent / recipe.mixture).source) if recipe.mixture else recipe


def recipe_file(path: Path) -> Path:
    """The file itself, or the packaged recipe of that name. Raises ConfigError."""
    packaged = RECIPES / path.name
    if not path.is_file() and not packaged.is_file():
        names = ", ".join(sorted(p.name for p in RECIPES.glob("*.toml")))
        raise ConfigError(f"no recipe at {path}; give a .toml file, or one that comes with the package: {names}")
    return path if path.is_file() else packaged


def read_table(kind: type[T], path: Path) -> T:
    """Read a dataclass from a TOML file. Raises ConfigError."""
    try:
        table = tomllib.loads(recipe_file(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no valid TOML: {error}") from None
    return fields.parse(kind, table, path.name)


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings flattened to dotted names, with values as JSON reads them back."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        inner = isinstance(value, dict)
        found |= flat(value, f"{prefix}{name}.") if inner else {prefix + name: json.loads(json.dumps(value))}
    return found
