"""Shared code for training heads and drafts: any target that the engine runs generates the training texts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sameseed import ops, scheme
from sameseed.errors import ConfigError
from sameseed.models.config import ModelConfig, llama_only
from sameseed.models.decoder import Decoder
from sameseed.models.loader import load_model, load_tokenizer, read_config, resolve_model, target_scheme
from sameseed.scheme import QuantTensor, cache_format
from sameseed_train.checkpoint import read_tensors
from sameseed_train.prompts import file_seeds, recipe_seeds
from sameseed_train.recipe import OwnRecipe, flat
from sameseed_train.states import Seed, States, StoredTexts, TextStates, captured_layers, collect, digest_of
from sameseed_train.trainer import Log, checkpoint_path, progress_bar

# Rows, padding included, of texts whose activations are in memory together. On a CPU 2,048 rows fill the matrix units;
# four steps on them take about 0.8 GB at a width of 576. A GPU needs more rows at once.
PART_ROWS, GPU_ROWS = 2048, 32768
LEARNED = 2  # a text needs at least this many tokens of the target, so that one row is trained on
# Settings that may change before a resume: duration, learning rates, threads and batch, and the text of the card.
# `texts.num_texts` may only grow. The path of the prompts may change, but not the prompts themselves.
EDITABLE = {
    *("name", "note", "store", "threads", "batch", "mixture", "source", "states_gb", "texts.num_texts", "train.steps"),
    *("train.checkpoint_minutes", "train.optim.matrix_lr", "train.optim.lr"),
}


@dataclass(frozen=True)
class Sources:
    """The sources of prompts: a file of JSON lines, or the data folder of the recipe's sources.

    `measure`: a file of held-out prompts to measure a head's acceptance on.
    """

    prompts: Path | None = None
    data: Path | None = None
    measure: Path | None = None


def check_empty(out: Path, resume: bool) -> None:
    """Raise ConfigError if there is something in `out` that is not to be resumed."""
    if out.exists() and any(out.iterdir()) and not resume:
        raise ConfigError(f"{out} is not empty; add --resume to go on, or choose another folder with --out")


def check_run(recipe: OwnRecipe, sources: Sources, out: Path, resume: bool) -> tuple[Path, ModelConfig]:
    """The target's folder and config. Checks the run early: raises ConfigError or ModelLoadError."""
    if not recipe.target:
        raise ConfigError("no target; name the model to learn from with --target")
    if sources.prompts is None and (not recipe.source or sources.data is None):
        raise ConfigError("nothing to write from; give --prompts FILE, or a recipe with sources and --data DIR")
    check_empty(out, resume)
    folder = resolve_model(recipe.target)
    config = llama_only(read_config(folder), "training")
    longest = recipe.texts.prompt_tokens + recipe.texts.new_tokens
    if longest > config.max_model_len:
        raise ConfigError(
            f"prompt_tokens + new_tokens = {longest} exceed the target's context of {config.max_model_len}; lower one"
        )
    return folder, config


def read_seeds(recipe: OwnRecipe, sources: Sources, folder: Path) -> list[Seed]:
    """The seeds of the texts of the target in `folder`. Raises ConfigError."""
    tokenizer = load_tokenizer(folder)
    if sources.prompts is not None:
        stream = file_seeds(sources.prompts, tokenizer, recipe.texts, recipe.seed)
    else:
        assert sources.data is not None
        stream = recipe_seeds(recipe.source, sources.data, tokenizer, recipe.texts, recipe.seed)
    seeds = list(itertools.islice(stream, recipe.texts.num_texts))
    if not seeds:
        raise ConfigError(
            "no prompt to learn from: texts must have at least 4 tokens, conversations at most texts.prompt_tokens "
            f"({recipe.texts.prompt_tokens}); give others with --prompts, or raise it"
        )
    shortest, kept = min(len(seed.ids) for seed in seeds), recipe.train.row_tokens
    if kept < shortest + LEARNED:
        raise ConfigError(
            f"train.row_tokens {kept} cuts every text before the target's own tokens (the shortest prompt has "
            f"{shortest}); raise it, or lower texts.prompt_tokens"
        )
    return seeds


def dense(backend: ops.Ops, w: QuantTensor | tuple[QuantTensor, ...]) -> Tensor:
    """A stored matrix, or several joined along O, decoded to float32 [O, K]."""
    if isinstance(w, tuple):
        return torch.cat([dense(backend, one) for one in w])
    plain = backend.unpack(w)
    return scheme.get(plain.format).decode(plain).float()


def settle(recipe: OwnRecipe, layers: Seq[int], checkpoint: Path, seeds: Seq[Seed]) -> dict[str, Any]:
    """What a run began with, to be kept in its checkpoint: that of the checkpoint if there is one.

    `layers`: of the target, that are read; `seeds` of the texts, which may be more than in the first run. Raises
    ConfigError where the checkpoint is of other settings or prompts, or of more texts.
    """
    settings = {name: value for name, value in flat(asdict(recipe)).items() if name not in EDITABLE}
    settings["layers"] = list(layers)
    now: dict[str, Any] = {"settings": settings, "num_texts": len(seeds), "seeds": digest_of(list(seeds))}
    if not checkpoint.exists():
        return now
    begun: dict[str, Any] = read_tensors(checkpoint, ())[1].get("begun") or {"settings": {}, "num_texts": 0}
    then, first = begun["settings"], begun["num_texts"]
    changed = [f"{n} {then[n]} (now {value})" for n, value in now["settings"].items() if n in then and then[n] != value]
    if not first:
        wrong = "in another way"
    elif changed:
        wrong = f"with other settings: {', '.join(changed)}; restore them (may change: {', '.join(sorted(EDITABLE))})"
    elif len(seeds) < first:
        wrong = f"on {first} texts; --num-texts may grow on a resume, not fall to {len(seeds)}: leave it"
    elif digest_of(list(seeds[:first])) != begun["seeds"]:
        wrong = "on texts of other prompts; give the same --prompts or --data to go on"
    else:
        return begun
    raise ConfigError(f"{checkpoint} was trained {wrong}, or train anew with another --out")


@dataclass(frozen=True)
class Own:
    """The target in the recipe's format, its texts, what the run began with (`settle`), and a reader of states."""

    recipe: OwnRecipe
    target: Decoder
    texts: StoredTexts
    begun: dict[str, Any]
    states: States

    @property
    def num_layers(self) -> int:
        return self.target.config.num_layers

    def columns(self, captures: Seq[int]) -> list[int]:
        """The indices of some layers among those whose states are read."""
        return [self.states.captures.index(layer) for layer in captures]

    def batch(self, step: int) -> list[TextStates]:
        """The texts of a training step, with their states."""
        train = self.recipe.train
        return self.states.of(self.texts.batch(step, train.rows, self.recipe.seed, train.row_tokens))

    def parts(self, step: int) -> list[list[TextStates]]:
        """The texts of a training step, in parts that a device has memory for."""
        texts = self.batch(step)
        most = PART_ROWS if self.target.device.type == "cpu" else GPU_ROWS
        count = max(1, most // max(len(text.ids) for text in texts))
        return [texts[i : i + count] for i in range(0, len(texts), count)]


def write_all(
    recipe: OwnRecipe,
    sources: Sources,
    folder: Path,
    layers: Seq[int],
    job: str,
    log: Log,
    *,
    longest: int = 0,
    backend: str,
    device: str,
    quiet: bool,
) -> Own:
    """Load the target and write its missing texts, for training job `job`, which reads the inputs of `layers`.

    `longest`: tokens of the longest other text whose states will be read. Raises ConfigError before anything is
    written.
    """
    out = log.path.parent
    checkpoint = checkpoint_path(out, job)
    seeds = read_seeds(recipe, sources, folder)
    begun = settle(recipe, layers, checkpoint, seeds)
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
        ops.set_num_threads(recipe.threads)
    target = load_model(folder, ops.resolve(backend, device), target_scheme(recipe.format, folder), None, device)
    cache, captures = cache_format(recipe.kv_format, target.weights.dense), tuple(i - 1 for i in layers)
    how = (recipe.target, recipe.format, cache)
    texts, paths = out / "texts" / digest_of((*how, recipe.seed)), list[Path]()
    stored = captured_layers(captures, target.config.num_layers)
    kept = out / "states" / digest_of((*how, stored))
    longest = max(longest, recipe.texts.prompt_tokens + recipe.texts.new_tokens)
    states = States(target, stored, cache, longest, kept, recipe.states_gb * 1e9)
    with progress_bar(quiet) as bar:
        task = bar.add_task("texts", total=len(seeds), said="")
        for done, path in collect(target, seeds, texts, states, batch=recipe.batch, kv_format=cache, seed=recipe.seed):
            paths.append(path)
            log.write(stage="texts", texts=done)
            bar.update(task, completed=done)
    return Own(recipe, target, StoredTexts(paths), begun, states)
