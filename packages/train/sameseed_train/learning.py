"""One run for heads and drafts: a target writes texts, and a model learns from them and is measured on the way."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence as Seq, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sameseed import ops, scheme
from sameseed.cli.console import progress
from sameseed.errors import ConfigError, say_once
from sameseed.models.config import ModelConfig, llama_only
from sameseed.models.decoder import Decoder
from sameseed.models.head_config import HeadConfig
from sameseed.models.loader import load_model, load_tokenizer, read_config, resolve_model, target_scheme
from sameseed.scheme import QuantTensor, cache_format
from sameseed_train.card import acceptance as acceptance_of, write_card
from sameseed_train.checkpoint import read_tensors
from sameseed_train.prompts import Prompt, file_seeds, held_out, recipe_held_out, recipe_seeds
from sameseed_train.recipe import OwnRecipe, flat
from sameseed_train.states import Seed, States, StoredTexts, TextStates, captured_layers, collect, digest_of
from sameseed_train.trainer import Log, TrainJob, checkpoint_path, train

NUM_DRAFT_TOKENS = 4  # the chain length that cards report
NEW_TOKENS = 128  # of a text on which acceptance is measured
FIRST_MEASURED = 64  # updates
NUM_MEASURED = 128  # held-out prompts of a recipe's sources
CURVE = "acceptance"  # the stage of log.jsonl
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

Right = list[list[bool]]  # [s][t]: whether the draft of place t of a text is right when s drafted tokens precede it


@dataclass(frozen=True)
class Sources:
    """Where prompts come from: a file, or the recipe's data folder. `measure`: held-out prompts for the acceptance."""

    prompts: Path | None = None
    data: Path | None = None
    measure: Path | None = None


@dataclass(frozen=True)
class Own:
    """The target in the recipe's format, its texts, what the run began with (`settle`), and a reader of states."""

    recipe: OwnRecipe
    target: Decoder
    texts: StoredTexts
    begun: dict[str, Any]
    states: States

    def columns(self, head: HeadConfig) -> list[int]:
        """The indices of the layers that a head reads among those whose states are read."""
        return [self.states.captures.index(layer) for layer in head.captures(self.target.config.num_layers)]

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


@dataclass(frozen=True)
class Trained:
    """The folder of the trained head or draft, its results (also in `out/results.json`), and the measured texts."""

    folder: Path
    results: dict[str, Any]
    measured: StoredTexts | None = None


class Learner(Protocol):
    """A head or a draft in training, under the `name` of its job, its checkpoint and its folder."""

    name: str
    layers: tuple[int, ...]  # it reads what enters these layers of the target
    measured: bool
    about: str  # for the card: what it is
    facts: dict[str, Any]  # for results.json, known once there is a job

    @property
    def model(self) -> nn.Module: ...

    def job(self, own: Own, out: Path, device: str) -> TrainJob:
        """The training on the target's texts; `model` gets its initial weights."""

    def export(self, folder: Path) -> None:
        """Write what `--draft` accepts."""

    def right(self, folder: Path, own: Own) -> Callable[[TextStates], Right]:
        """What tells whether chains of NUM_DRAFT_TOKENS drafts of the exported model are right along a text."""


def learn(
    recipe: OwnRecipe,
    sources: Sources,
    out: Path,
    begin: Callable[[Path, ModelConfig], Learner],
    *,
    backend: str = "auto",
    device: str = "cpu",
    resume: bool = False,
    quiet: bool = False,
    stop_after: int | None = None,
    measured_tokens: int = NEW_TOKENS,
) -> Trained:
    """Train the learner that `begin` makes for the target in a folder; `backend` computes the target.

    The model is also written, and measured on held-out prompts, on the way: at `FIRST_MEASURED` updates and whenever
    their number has doubled. With `resume`, existing texts are kept and training continues from its last checkpoint;
    then only the settings in `EDITABLE` may differ from the first run, `train.steps` among them. `stop_after`
    ends the run with a checkpoint after that many steps, like an interruption. `measured_tokens`: of a text on which
    acceptance is measured, at most. Raises ConfigError or ModelLoadError with the remedy.
    """
    folder, config = check_run(recipe, sources, out, resume)
    learner = begin(folder, config)
    prompts = held_out_prompts(recipe, sources, folder, config, measured_tokens) if learner.measured else []
    log, made = Log(out / "log.jsonl"), out / learner.name
    longest = max((len(ids) for ids, _ in prompts), default=0) + measured_tokens
    how = {"backend": backend, "device": device, "quiet": quiet}
    seeds = not_measured(read_seeds(recipe, sources, folder), {ids for ids, _ in prompts}, recipe.texts.prompt_tokens)
    own = write_all(recipe, seeds, folder, learner, log, longest, how)
    job = replace(learner.job(own, out, device), begun=own.begun)
    held = [Seed(ids, measured_tokens) for ids, _ in prompts]
    texts = continued(own, held, out / "held-out") if held else None
    done: dict[str, Any] = {}
    for point in (points := measured_at(recipe.train.steps, stop_after)):
        done = train(job, log, quiet=quiet, stop_after=point)
        if done["step"] > point and point < points[-1]:  # it was measured before a resume
            continue
        learner.export(made)
        if texts is not None:
            found = acceptance(learner.right(made, own), own, texts, [domain for _, domain in prompts])
            counts = {"step": done["step"], "tokens": done["tokens"], "text_tokens": own.texts.num_tokens}
            log.write(stage=CURVE, **counts, acceptance=found)
    measured = [row for row in log.rows() if row["stage"] == CURVE] if texts is not None else []
    parameters = sum(p.numel() for p in learner.model.parameters())
    counts = {"parameters": parameters, "texts": len(own.texts), "text_tokens": own.texts.num_tokens}
    results = {"recipe": asdict(recipe), **counts, "training": done, **learner.facts}
    if measured:
        results |= {"acceptance": measured[-1]["acceptance"], "curve": curve(measured)}
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    trained = (
        f"{learner.about}; {parameters / 1e6:.2f} M parameters of its own. Trained for {done['step']} steps, "
        f"{done['tokens'] / 1e6:.2f} M drafts, on {len(own.texts)} texts with {own.texts.num_tokens / 1e6:.2f} M "
        "tokens to learn from."
    )
    write_card(made, results["recipe"], recipe.source, trained, acceptance_of(results))
    return Trained(made, results, texts)


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
    if longest > (most := config.max_model_len):
        raise ConfigError(f"prompt_tokens + new_tokens = {longest} exceed the context of {most}; lower one")
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
        raise ConfigError("no prompt to learn from: all are too short, or longer than texts.prompt_tokens; give others")
    shortest, kept = min(len(seed.ids) for seed in seeds), recipe.train.row_tokens
    if kept < shortest + LEARNED:
        raise ConfigError(f"train.row_tokens {kept} leaves no tokens to learn; raise it to {shortest + LEARNED}")
    return seeds


def not_measured(seeds: list[Seed], measured: Set[tuple[int, ...]], longest: int) -> list[Seed]:
    """The seeds that are not measured prompts, cut to `longest` tokens. Raises ConfigError where none is left."""
    cut = {ids[:longest] for ids in measured}
    left = [seed for seed in seeds if seed.ids not in cut]
    if not left:
        raise ConfigError("all prompts are those of --measure: what is learned tells nothing of others; give others")
    if len(left) < len(seeds):
        say_once(f"{len(seeds) - len(left)} of {len(seeds)} texts are left out: their prompts are those of --measure")
    return left


def dense(backend: ops.Ops, w: QuantTensor | tuple[QuantTensor, ...]) -> Tensor:
    """A stored matrix, or several joined along O, decoded to float32 [O, K]."""
    if isinstance(w, tuple):
        return torch.cat([dense(backend, one) for one in w])
    plain = backend.unpack(w)
    return scheme.get(plain.format).decode(plain).float()


def settle(recipe: OwnRecipe, layers: Seq[int], checkpoint: Path, seeds: Seq[Seed]) -> dict[str, Any]:
    """What a run began with, by its checkpoint if there is one. Raises ConfigError for other settings or seeds."""
    settings = {name: value for name, value in flat(asdict(recipe)).items() if name not in EDITABLE}
    settings["layers"] = list(layers)
    now: dict[str, Any] = {"settings": settings, "num_texts": len(seeds), "seeds": digest_of(list(seeds))}
    if not checkpoint.exists():
        return now
    begun: dict[str, Any] = read_tensors(checkpoint, ())[1]["begun"]
    then, first = begun["settings"], begun["num_texts"]
    changed = [f"{n} {then[n]} (now {value})" for n, value in now["settings"].items() if n in then and then[n] != value]
    if changed:
        wrong = f"with other settings: {', '.join(changed)}; restore them (may change: {', '.join(sorted(EDITABLE))})"
    elif len(seeds) < first:
        wrong = f"on {first} texts; --num-texts may grow on a resume, not fall to {len(seeds)}: leave it"
    elif digest_of(list(seeds[:first])) != begun["seeds"]:
        wrong = "on texts of other prompts; give the same --prompts or --data to go on"
    else:
        return begun
    raise ConfigError(f"{checkpoint} was trained {wrong}, or train anew with another --out")


def write_all(
    recipe: OwnRecipe, seeds: list[Seed], folder: Path, learner: Learner, log: Log, longest: int, how: dict[str, Any]
) -> Own:
    """Load the target and write its missing texts; `longest`: tokens of other texts to read. Raises ConfigError."""
    out = log.path.parent
    begun = settle(recipe, learner.layers, checkpoint_path(out, learner.name), seeds)
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
        ops.set_num_threads(recipe.threads)
    backend = ops.resolve(how["backend"], how["device"])
    target = load_model(folder, backend, target_scheme(recipe.format, folder), None, how["device"])
    cache, captures = cache_format(recipe.kv_format, target.weights.dense), tuple(i - 1 for i in learner.layers)
    written = (recipe.target, recipe.format, cache)
    texts, paths = out / "texts" / digest_of((*written, recipe.seed)), list[Path]()
    stored = captured_layers(captures, target.config.num_layers)
    kept = out / "states" / digest_of((*written, stored))
    longest = max(longest, recipe.texts.prompt_tokens + recipe.texts.new_tokens)
    states = States(target, stored, cache, longest, kept, recipe.states_gb * 1e9)
    with progress("texts", how["quiet"]) as (update, _):
        update(total=len(seeds))
        for done, path in collect(states, seeds, texts, recipe.batch, recipe.seed):
            paths.append(path)
            log.write(stage="texts", texts=done)
            update(completed=done)
    return Own(recipe, target, StoredTexts(paths), begun, states)


def held_out_prompts(
    recipe: OwnRecipe, sources: Sources, folder: Path, target: ModelConfig, new_tokens: int
) -> list[Prompt]:
    """Prompts to measure on: as `sources` names, else from held-out documents of the recipe. Raises ConfigError."""
    if sources.measure is not None:
        return held_out(sources.measure, load_tokenizer(folder), target.max_model_len, new_tokens)
    if sources.prompts is not None or sources.data is None:
        return []
    return recipe_held_out(recipe.source, sources.data, load_tokenizer(folder), recipe.texts, recipe.seed, NUM_MEASURED)


def measured_at(steps: int, stop_after: int | None) -> list[int]:
    """The updates after which a run is measured: FIRST_MEASURED, twice as many again and again, and the last."""
    last = steps if stop_after is None else min(steps, stop_after)
    points = list(itertools.takewhile(lambda n: n < last, (FIRST_MEASURED << i for i in itertools.count())))
    return [*points, last]


def continued(own: Own, seeds: Seq[Seed], folder: Path) -> StoredTexts:
    """The target's continuations of held-out prompts, kept in `folder`."""
    found = collect(own.states, seeds, folder / digest_of(seeds), min(own.recipe.batch, len(seeds)), 0)
    return StoredTexts([path for _, path in found])


@torch.no_grad()
def acceptance(
    right: Callable[[TextStates], Right], own: Own, texts: StoredTexts, domains: Seq[str]
) -> dict[str, dict[str, Any]]:
    """Acceptance counts on held-out texts, by domain and under `all` for all of them."""
    groups: dict[str, list[Right]] = {"all": []}
    for domain, text in zip(domains, zip(texts.ids, texts.num_given, strict=True), strict=True):
        groups["all"].append(right(own.states.of([text])[0]))
        groups.setdefault(domain, []).append(groups["all"][-1])
    return {domain: summary(group) for domain, group in groups.items()}


def summary(texts: Seq[Right]) -> dict[str, Any]:
    """Counts and rates of greedy chains; agreement[s]: how often the next draft is right after s right ones."""
    drafted, accepted = map(sum, zip(*map(count_chains, texts), strict=True))
    shares = []
    for step in range(NUM_DRAFT_TOKENS):
        right = [r for text in texts for r in text[step][step:]]
        shares.append(round(sum(right) / max(1, len(right)), 4))
    rate = round(accepted / max(1, drafted), 4)
    tokens = sum(len(text[0]) for text in texts)
    return {"drafted": drafted, "accepted": accepted, "tokens": tokens, "rate": rate, "agreement": shares}


def count_chains(right: Seq[Seq[bool]]) -> tuple[int, int]:
    """Drafted tokens (those after a rejected one count) and accepted ones of speculative decoding along a text."""
    drafted = accepted = at = 0
    while at < len(right[0]):
        size = min(len(right), len(right[0]) - at)
        run = next((s for s in range(size) if not right[s][at + s]), size)
        drafted, accepted, at = drafted + size, accepted + run, at + run + 1
    return drafted, accepted


def curve(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Acceptance against updates, tokens trained on and different tokens, from the log's rows; the last of a step."""
    found = {}
    for row in rows:
        whole = row["acceptance"]["all"]
        counts = {name: row[name] for name in ("step", "tokens", "text_tokens")}
        found[row["step"]] = {**counts, "rate": whole["rate"], "agreement": whole["agreement"]}
    return [found[step] for step in sorted(found)]
