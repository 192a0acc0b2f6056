"""The recipe of a pair: one .toml file, read into frozen dataclasses; a wrong key is reported with the nearest name."""

from __future__ import annotations

import sys
from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from sameseed import fields
from sameseed.errors import ConfigError, nearest
from sameseed.fields import within
from sameseed_train.model import ModelShape
from sameseed_train.optim import OptimSettings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")
ENDLESS = ("sums", "records")  # kinds of generated text, without end
MADE = ("stdlib", *ENDLESS)  # kinds that read no file of the data folder
KINDS = ("chat", "dialog", "text", *MADE)
RECIPES = Path(__file__).parent / "recipes"
PRECISIONS = ("float32", "bfloat16")


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
class TextSettings:
    """The texts that the target generates: their number, their length, and the greedy share.

    `corpus_share`: share of texts that are given documents rather than written by the target.
    """

    num_texts: int = within(4000, 1)
    prompt_tokens: int = within(200, 1)
    new_tokens: int = within(192, 1)
    greedy: float = within(0.85, 0, 1)
    temperature: float = 0.8
    corpus_share: float = within(0.1, 0, 1)

    def __post_init__(self) -> None:
        fields.check(self)


@dataclass(frozen=True)
class TrainSettings:
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
        fields.check(self)
        if self.precision not in PRECISIONS:
            raise ConfigError(f"train.precision is one of {', '.join(PRECISIONS)}, not {self.precision!r}")


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
class RolloutSettings:
    """The texts of the draft's training: continuations of training prompts by the target, or documents."""

    num_prompts: int  # texts
    prompt_tokens: int = 200
    new_tokens: int = 160
    batch: int = 64
    greedy: float = 0.75  # share of prompts continued greedily; the others are sampled
    temperature: float = 0.8


@dataclass(frozen=True)
class ModelSettings:
    """The target: its size and its training."""

    shape: ModelShape
    train: TrainSettings


@dataclass(frozen=True)
class DraftSettings(ModelSettings):
    """The draft: its size, its training, and its training data."""

    rollouts: RolloutSettings
    corpus_share: float = 0.25  # share of texts that are documents; the others are the target's own
    argmax_weight: float = 0.5  # cross entropy on the target's argmax, beside the KL divergence
    layers: tuple[int, ...] = ()  # one layer of the target per draft layer, to initialize from; empty: random


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the weights, except the data folder and the machine's arithmetic."""

    name: str
    seed: int
    source: tuple[SourceSettings, ...]
    tokenizer: TokenizerSettings
    target: ModelSettings
    draft: DraftSettings
    unlikelihood: UnlikelihoodSettings | None = None
    threads: int = 0  # 0: torch's default
    valid_file: str = "valid.jsonl.gz"
    note: str = ""  # extra text for the model cards


def load_recipe(path: Path) -> Recipe:
    """Read and check a recipe. Raises ConfigError naming the key and the remedy."""
    recipe, where = read_table(Recipe, path), path.name
    if not recipe.source:
        raise ConfigError(f"{where}: no [[source]]; name at least one")
    for name, settings in (("target", recipe.target), ("draft", recipe.draft)):
        shape = settings.shape
        for wrong, words in (
            (shape.vocab_size != recipe.tokenizer.vocab_size, "shape.vocab_size must equal tokenizer.vocab_size"),
            (shape.num_heads % shape.num_kv_heads, "shape.num_heads must be a multiple of num_kv_heads"),
            (shape.head_dim % 2, "shape.head_dim must be even"),
            (settings.train.row_tokens > shape.max_positions, "train.row_tokens exceeds shape.max_positions"),
        ):
            if wrong:
                raise ConfigError(f"{where}: {name}.{words}")
    _check_layers(recipe, where)
    return recipe


def _check_layers(recipe: Recipe, where: str) -> None:
    """Raise ConfigError unless the draft can be initialized from the target's layers in `draft.layers`."""
    layers, own, its = recipe.draft.layers, recipe.draft.shape, recipe.target.shape
    if not layers:
        return
    if len(layers) != own.num_layers or not all(0 <= j < its.num_layers for j in layers):
        raise ConfigError(
            f"{where}: draft.layers names one layer of the target, 0 to {its.num_layers - 1}, for each of the draft's "
            f"{own.num_layers}"
        )
    if replace(own, num_layers=its.num_layers) != its:
        raise ConfigError(f"{where}: draft.layers needs a draft of the target's sizes in all but num_layers")


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
