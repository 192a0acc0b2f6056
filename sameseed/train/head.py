"""`sameseed train head`: the target writes texts, a head is trained to guess them, and its acceptance is measured."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sameseed.models.block_config import BlockConfig
from sameseed.models.head_config import rotation_of
from sameseed.models.loader import load_tokenizer
from sameseed.train import block_job, head_measure
from sameseed.train.block_model import BlockForTraining
from sameseed.train.head_job import NAME, export_head, head_job, start_from_target
from sameseed.train.head_model import HeadForTraining
from sameseed.train.head_recipe import HeadRecipe, head_config
from sameseed.train.own import Sources, Trained, check_run, write_all, write_results
from sameseed.train.own_card import write_head_card
from sameseed.train.parallel import mask_of
from sameseed.train.seeds import held_out
from sameseed.train.states import StoredTexts
from sameseed.train.trainer import Log, train


def run_head(
    recipe: HeadRecipe,
    sources: Sources,
    out: Path,
    *,
    backend: str = "auto",
    device: str = "cpu",
    resume: bool = False,
    quiet: bool = False,
    stop_after: int | None = None,
) -> Trained:
    """Train a head for `recipe.target` into `out/head`, which `--draft` accepts; `backend` computes the target.

    With `resume`, written texts are kept and training continues from its last checkpoint; then only the settings in
    `resume.EDITABLE` may differ from the first run, `train.steps` among them. `stop_after` ends the run with a
    checkpoint after that many steps, like an interruption. Raises ConfigError or ModelLoadError with the remedy.
    """
    folder, target_config = check_run(recipe, sources, out, resume)
    mask = mask_of(recipe.block.mask_token, folder, target_config) if recipe.kind == "block" else None
    config = head_config(recipe, target_config, mask)
    prompts = []
    if sources.measure is not None:  # read first, so that errors come before the expensive stages
        context = target_config.max_model_len
        prompts = held_out(sources.measure, load_tokenizer(folder), context, head_measure.NEW_TOKENS)
    log, layers, on = Log(out / "log.jsonl"), config.aux_layers or (), {"backend": backend, "device": device}
    target, texts, num_first = write_all(recipe, sources, folder, layers, NAME, log, **on, quiet=quiet)
    target_ids = frequent_tokens(texts, num_first, config.draft_vocab_size, target_config.vocab_size)
    target_ids = None if target_ids is None else target_ids.to(device)
    head: HeadForTraining | BlockForTraining
    rotation = rotation_of(folder)
    if isinstance(config, BlockConfig):
        head = BlockForTraining(config, recipe.seed)
        block_job.start_from_target(head, target, target_ids)
        job = block_job.block_job(head.to(device), target, texts, target_ids, recipe, out)
        progress = train(job, log, quiet=quiet, stop_after=stop_after)
        block_job.export_block(head, target_ids, out / "head", rotation=rotation)
    else:
        head = HeadForTraining(config, recipe.seed)
        start_from_target(head, target, target_ids)
        job = head_job(head.to(device), target, texts, target_ids, recipe, out)
        progress = train(job, log, quiet=quiet, stop_after=stop_after)
        export_head(head, target_ids, out / "head", rotation=rotation)
    more: dict[str, Any] = {"layers": layers}
    if prompts:
        more["acceptance"] = head_measure.measure_head(out / "head", target, prompts, recipe.kv_format)
    results = write_results(out, recipe, texts, head.num_parameters(), progress, **more)
    write_head_card(recipe, config, results, out / "head")
    return Trained(out / "head", results)


def frequent_tokens(texts: StoredTexts, first: int, count: int, vocab_size: int) -> Tensor | None:
    """The `count` tokens that the target writes most often, int64 [count] in ascending order; None: all tokens.

    Only the `first` texts count, because texts that a resume adds must not change the tokens of the LM head's rows.
    """
    if count >= vocab_size:
        return None
    seen: Counter[int] = Counter()
    for ids, given in zip(texts.ids[:first], texts.num_given[:first], strict=True):
        seen.update(ids[given:].tolist())
    order = sorted(range(vocab_size), key=lambda token: (-seen[token], token))
    return torch.tensor(sorted(order[:count]))
