"""`foretoken train head`: the target writes texts, a head learns to guess them, and its acceptance is counted."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.models.loader import load_tokenizer
from foretoken.train.head_export import export_head
from foretoken.train.head_job import head_job, start_from_target
from foretoken.train.head_measure import measure_head
from foretoken.train.head_model import HeadForTraining
from foretoken.train.head_recipe import HeadRecipe, aux_layers, head_shape
from foretoken.train.own import Machine, Sources, check_run, open_target, texts_stage
from foretoken.train.own_card import write_head_card
from foretoken.train.states import Texts
from foretoken.train.trainer import Log, train

__all__ = ["HeadResult", "Machine", "Sources", "frequent_tokens", "run_head"]


@dataclass(frozen=True)
class HeadResult:
    """Where the head lies, and what is known of it (also in `out/results.json`)."""

    head: Path
    results: dict[str, Any]


def run_head(
    recipe: HeadRecipe,
    sources: Sources,
    out: Path,
    machine: Machine | None = None,
    *,
    resume: bool = False,
    quiet: bool = False,
    stop_after: int | None = None,
) -> HeadResult:
    """Train a head for `recipe.target` into `out/head`, as `--draft` takes it.

    With `resume`, texts that are written stay and training goes on from its last checkpoint; another `train.steps` is
    allowed. `stop_after` ends with a checkpoint after that many steps, as an interruption would. Raises ConfigError or
    ModelLoadError with the remedy.
    """
    machine = machine or Machine()
    folder, config, seeds = check_run(recipe, sources, out, resume)
    shape, layers = head_shape(recipe, config), aux_layers(recipe, config)
    target = open_target(recipe, folder, machine)
    out.mkdir(parents=True, exist_ok=True)
    log, captures = Log(out / "log.jsonl"), tuple(i - 1 for i in layers)
    texts = texts_stage(recipe, target, captures, seeds, out, log, quiet=quiet)
    target_ids = frequent_tokens(texts, shape.draft_vocab_size, shape.vocab_size)
    target_ids = None if target_ids is None else target_ids.to(machine.device)
    head = HeadForTraining(shape, recipe.seed)
    start_from_target(head, target, target_ids)
    head.to(machine.device)
    job = head_job(head, target, texts, captures, target_ids, recipe.loss, recipe.train, recipe.seed, out)
    progress = train(job, log, quiet=quiet, stop_after=stop_after)
    export_head(head, layers, target_ids, out / "head")
    results: dict[str, Any] = {
        "recipe": dataclasses.asdict(recipe),
        "layers": layers,
        "parameters": head.num_parameters(),
        "texts": len(texts),
        "text_tokens": texts.num_tokens,
        "training": progress,
    }
    if sources.measure is not None:
        results["acceptance"] = measure_head(out / "head", target, load_tokenizer(folder), sources.measure, recipe)
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    write_head_card(recipe, shape, results, out / "head")
    return HeadResult(out / "head", results)


def frequent_tokens(texts: Texts, count: int, vocab_size: int) -> Tensor | None:
    """The `count` tokens that the target writes most often, int64 [count] in order of their ids; None: all."""
    if count >= vocab_size:
        return None
    seen: Counter[int] = Counter()
    for ids, given in zip(texts.ids, texts.num_given, strict=True):
        seen.update(ids[given:].tolist())
    order = sorted(range(vocab_size), key=lambda token: (-seen[token], token))
    return torch.tensor(sorted(order[:count]))
