"""`sameseed train head`: the target writes texts, a head learns to guess them, and its acceptance is counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sameseed.models.config import ModelConfig
from sameseed.models.loader import load_tokenizer
from sameseed.train import head_measure
from sameseed.train.head_export import export_head
from sameseed.train.head_job import NAME, head_job, start_from_target
from sameseed.train.head_measure import measure_head
from sameseed.train.head_model import HeadForTraining
from sameseed.train.head_recipe import HeadRecipe, aux_layers, head_shape
from sameseed.train.own import Machine, Sources, check_run, open_target, read_seeds, texts_stage, write_results
from sameseed.train.own_card import write_head_card
from sameseed.train.resume import settle_texts, write_record
from sameseed.train.seeds import HeldOut, held_out
from sameseed.train.states import Texts
from sameseed.train.trainer import Log, checkpoint_path, train

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

    With `resume`, texts that are written stay and training goes on from its last checkpoint; of the recipe only what
    `resume.EDITABLE` names may be another then, `train.steps` among it. `stop_after` ends with a
    checkpoint after that many steps, as an interruption would. Raises ConfigError or ModelLoadError with the remedy.
    """
    machine = machine or Machine()
    folder, config, seeds = check_run(recipe, sources, out, resume)
    shape, layers = head_shape(recipe, config), aux_layers(recipe, config)
    prompts = held_out_prompts(sources, folder, config)
    checkpoint = checkpoint_path(out, NAME)
    lots, begun = settle_texts(recipe, layers, checkpoint, seeds, lambda n: read_seeds(recipe, sources, folder, n))
    target = open_target(recipe, folder, machine)
    write_record(begun, checkpoint)
    log, captures = Log(out / "log.jsonl"), tuple(i - 1 for i in layers)
    texts = texts_stage(recipe, target, captures, lots, out, log, quiet=quiet)
    # Texts that a resume adds must not change which tokens the LM head's rows stand for.
    target_ids = frequent_tokens(texts, len(lots[0]), shape.draft_vocab_size, shape.vocab_size)
    target_ids = None if target_ids is None else target_ids.to(machine.device)
    head = HeadForTraining(shape, recipe.seed)
    start_from_target(head, target, target_ids)
    head.to(machine.device)
    job = head_job(head, target, texts, captures, target_ids, recipe.loss, recipe.train, recipe.seed, out)
    progress = train(job, log, quiet=quiet, stop_after=stop_after)
    export_head(head, layers, target_ids, out / "head")
    more: dict[str, Any] = {"layers": layers}
    if prompts:
        more["acceptance"] = measure_head(out / "head", target, prompts, recipe)
    results = write_results(out, recipe, texts, head.num_parameters(), progress, **more)
    write_head_card(recipe, shape, results, out / "head")
    return HeadResult(out / "head", results)


def held_out_prompts(sources: Sources, folder: Path, config: ModelConfig) -> list[HeldOut]:
    """The prompts to measure on, read before anything is spent; none where none are named."""
    if sources.measure is None:
        return []
    return held_out(sources.measure, load_tokenizer(folder), config.max_model_len, head_measure.NEW_TOKENS)


def frequent_tokens(texts: Texts, first: int, count: int, vocab_size: int) -> Tensor | None:
    """The `count` tokens that the target writes most often in its `first` texts, int64 [count] in order of their ids;
    None: all.
    """
    if count >= vocab_size:
        return None
    seen: Counter[int] = Counter()
    for ids, given in zip(texts.ids[:first], texts.num_given[:first], strict=True):
        seen.update(ids[given:].tolist())
    order = sorted(range(vocab_size), key=lambda token: (-seen[token], token))
    return torch.tensor(sorted(order[:count]))
