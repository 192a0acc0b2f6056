"""One run for heads and drafts: the target generates texts, a model learns from them and is measured on the way."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence as Seq
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from sameseed.models.config import ModelConfig
from sameseed.models.loader import load_tokenizer
from sameseed.scheme import cache_format
from sameseed_train.card import acceptance as acceptance_of, write_card
from sameseed_train.own import Own, Sources, check_run, write_all
from sameseed_train.prompts import Prompt, held_out, recipe_held_out
from sameseed_train.recipe import OwnRecipe
from sameseed_train.states import Seed, StoredTexts, TextStates, collect, digest_of
from sameseed_train.trainer import Log, TrainJob, train

NUM_DRAFT_TOKENS = 4  # the chain length that cards report
NEW_TOKENS = 128  # of a text on which acceptance is measured
FIRST_MEASURED = 64  # updates
NUM_MEASURED = 128  # held-out prompts of a recipe's sources
CURVE = "acceptance"  # the stage of log.jsonl

Right = list[list[bool]]  # [s][t]: whether the draft of place t of a text is right when s drafted tokens precede it


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
    then only the settings in `own.EDITABLE` may differ from the first run, `train.steps` among them. `stop_after`
    ends the run with a checkpoint after that many steps, like an interruption. `measured_tokens`: of a text on which
    acceptance is measured, at most. Raises ConfigError or ModelLoadError with the remedy.
    """
    folder, config = check_run(recipe, sources, out, resume)
    learner = begin(folder, config)
    prompts = held_out_prompts(recipe, sources, folder, config, measured_tokens) if learner.measured else []
    log, made = Log(out / "log.jsonl"), out / learner.name
    longest = max((len(ids) for ids, _ in prompts), default=0) + measured_tokens
    how: dict[str, Any] = {"longest": longest, "backend": backend, "device": device, "quiet": quiet}
    own = write_all(recipe, sources, folder, learner.layers, learner.name, log, **how)
    job = replace(learner.job(own, out, device), begun=own.begun)
    seeds = [Seed(ids, measured_tokens) for ids, _ in prompts]
    texts = continued(own, seeds, out / "held-out") if seeds else None
    progress: dict[str, Any] = {}
    for point in measured_at(recipe.train.steps, stop_after):
        progress = train(job, log, quiet=quiet, stop_after=point)
        if progress["step"] <= point:  # else it was measured before a resume
            learner.export(made)
        if progress["step"] <= point and texts is not None:
            found = acceptance(learner.right(made, own), own, texts, [domain for _, domain in prompts])
            counts = {"step": progress["step"], "tokens": progress["tokens"], "text_tokens": own.texts.num_tokens}
            log.write(stage=CURVE, **counts, acceptance=found)
    measured = [row for row in log.rows() if row["stage"] == CURVE] if texts is not None else []
    parameters = sum(p.numel() for p in learner.model.parameters())
    counts = {"parameters": parameters, "texts": len(own.texts), "text_tokens": own.texts.num_tokens}
    results = {"recipe": asdict(recipe), **counts, "training": progress, **learner.facts}
    if measured:
        results |= {"acceptance": measured[-1]["acceptance"], "curve": curve(measured)}
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    trained = (
        f"{learner.about}; {parameters / 1e6:.2f} M parameters of its own. Trained for {progress['step']} steps, "
        f"{progress['tokens'] / 1e6:.2f} M drafts, on {len(own.texts)} texts with {own.texts.num_tokens / 1e6:.2f} M "
        "tokens to learn from."
    )
    write_card(made, results["recipe"], recipe.source, trained, acceptance_of(results))
    return Trained(made, results, texts)


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
    cache, batch = cache_format(own.recipe.kv_format, own.target.weights.dense), min(own.recipe.batch, len(seeds))
    found = collect(own.target, seeds, folder / digest_of(seeds), own.states, batch=batch, kv_format=cache, seed=0)
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
    """Counts and acceptance rate of greedy chains over texts.

    agreement[s]: share of places where, after s right drafts along the text, the next one is right too.
    """
    drafted, accepted = map(sum, zip(*map(count_chains, texts), strict=True))
    shares = []
    for step in range(NUM_DRAFT_TOKENS):
        right = [r for text in texts for r in text[step][step:]]
        shares.append(round(sum(right) / max(1, len(right)), 4))
    rate = round(accepted / max(1, drafted), 4)
    tokens = sum(len(text[0]) for text in texts)
    return {"drafted": drafted, "accepted": accepted, "tokens": tokens, "rate": rate, "agreement": shares}


def count_chains(right: Seq[Seq[bool]]) -> tuple[int, int]:
    """The numbers of drafted and accepted tokens of speculative decoding along a text.

    Tokens after a rejected one count as drafted; none is drafted past the text's end.
    """
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
