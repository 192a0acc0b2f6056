"""`sameseed train head`: the target writes texts, a head is trained to predict them, and its acceptance is measured."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from sameseed.models.config import ModelConfig
from sameseed.models.decoder import Decoder
from sameseed.models.eagle_loader import embedding_signs
from sameseed.models.head_config import ROTATED_FOR, TARGET_SIGNS, rotation_of
from sameseed.models.loader import load_tokenizer
from sameseed.scheme import QuantScheme
from sameseed_train import head_measure
from sameseed_train.head_job import NAME, export_head, head_job, new_head, pack_head, start_from_target
from sameseed_train.head_recipe import HeadRecipe, head_config
from sameseed_train.own import Sources, Trained, check_run, write_all, write_results
from sameseed_train.own_card import write_head_card
from sameseed_train.parallel import mask_of
from sameseed_train.seeds import Prompt, held_out, recipe_held_out
from sameseed_train.states import StoredTexts
from sameseed_train.trainer import Log, train

FIRST_MEASURED = 64  # updates
NUM_MEASURED = 128  # held-out prompts of a recipe's sources
CURVE = "acceptance"  # the stage of log.jsonl


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

    The head is also written, and measured on held-out prompts, on the way: at `FIRST_MEASURED` updates and whenever
    their number has doubled. With `resume`, written texts are kept and training continues from its last checkpoint;
    then only the settings in `resume.EDITABLE` may differ from the first run, `train.steps` among them. `stop_after`
    ends the run with a checkpoint after that many steps, like an interruption. Raises ConfigError or ModelLoadError
    with the remedy.
    """
    folder, target_config = check_run(recipe, sources, out, resume)
    mask = mask_of(recipe.block.mask_token, folder, target_config) if recipe.kind == "block" else None
    config = head_config(recipe, target_config, mask)
    prompts = held_out_prompts(recipe, sources, folder, target_config)  # before the expensive stages
    log, layers, on = Log(out / "log.jsonl"), config.aux_layers or (), {"backend": backend, "device": device}
    longest = max((len(ids) for ids, _ in prompts), default=0) + head_measure.NEW_TOKENS
    own = write_all(recipe, sources, folder, layers, NAME, log, longest=longest, **on, quiet=quiet)
    target_ids = frequent_tokens(own.texts, own.num_first, config.draft_vocab_size, target_config.vocab_size)
    target_ids = None if target_ids is None else target_ids.to(device)
    head = new_head(config, recipe.seed)
    start_from_target(head, own.target, target_ids)
    job = head_job(head.to(device), own, target_ids, recipe, out)
    texts = head_measure.write_held_out(own, prompts, out / "held-out", recipe) if prompts else None
    facts, progress, found = target_facts(folder, own.target), dict[str, Any](), dict[str, Any]()
    for point in measured_at(recipe.train.steps, stop_after):
        progress = train(job, log, quiet=quiet, stop_after=point)
        if progress["step"] > point:  # measured before a resume
            continue
        export_head(head, target_ids, out / "head", facts=facts)
        if texts is not None:
            found = head_measure.measure_head(out / "head", own, texts, [domain for _, domain in prompts])
            counts = {"step": progress["step"], "tokens": progress["tokens"], "text_tokens": own.texts.num_tokens}
            log.write(stage=CURVE, **counts, acceptance=found)
    more: dict[str, Any] = {"layers": layers, "embedding": own.target.weights.embedding.format}
    if texts is not None:
        more |= {"acceptance": found, "curve": head_measure.curve(log.read(CURVE))}
    results = write_results(out, recipe, own.texts, head.num_parameters(), progress, **more)
    write_head_card(recipe, config, results, out / "head")
    if recipe.store:
        pack_head(out / "head", out / "packed", QuantScheme.parse(recipe.store))
        shutil.copy(out / "head" / "README.md", out / "packed")
    return Trained(out / "head", results)


def target_facts(folder: Path, target: Decoder) -> dict[str, Any]:
    """What a head's config.json says of its target: the signs of its embedding, and the seed of a rotation."""
    rotation = rotation_of(folder)
    return {TARGET_SIGNS: embedding_signs(target)} | ({} if rotation is None else {ROTATED_FOR: rotation})


def held_out_prompts(recipe: HeadRecipe, sources: Sources, folder: Path, target: ModelConfig) -> list[Prompt]:
    """Prompts to measure on: as `sources` names, else from held-out documents of the recipe. Raises ConfigError."""
    if sources.measure is not None:
        return held_out(sources.measure, load_tokenizer(folder), target.max_model_len, head_measure.NEW_TOKENS)
    if sources.prompts is not None or sources.data is None:
        return []
    return recipe_held_out(recipe.source, sources.data, load_tokenizer(folder), recipe.texts, recipe.seed, NUM_MEASURED)


def measured_at(steps: int, stop_after: int | None) -> list[int]:
    """The updates after which a run is measured: FIRST_MEASURED, twice as many again and again, and the last."""
    last = steps if stop_after is None else min(steps, stop_after)
    points = list(itertools.takewhile(lambda n: n < last, (FIRST_MEASURED << i for i in itertools.count())))
    return [*points, last]


def frequent_tokens(texts: StoredTexts, first: int, count: int, vocab_size: int) -> Tensor | None:
    """The `count` tokens that the target writes most often, int64 [count] in ascending order; None: all tokens.

    Only the `first` texts count, because texts that a resume adds must not change the tokens of the LM head's rows.
    """
    if count >= vocab_size:
        return None
    return texts.counts(vocab_size, first).argsort(descending=True, stable=True)[:count].sort().values
