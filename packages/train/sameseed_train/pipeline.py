"""The stages of a pair's recipe: tokenizer, rows, target, training against repetition, draft and measurements."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from sameseed import devices
from sameseed.errors import ConfigError
from sameseed.models.loader import load_tokenizer
from sameseed_train import card, data as corpus
from sameseed_train.checkpoint import export_model, load_exported, read_tensors, save_tensors
from sameseed_train.draft import run_draft
from sameseed_train.learning import NEW_TOKENS, NUM_DRAFT_TOKENS, Sources, Trained, check_empty
from sameseed_train.measure import continued, perplexity, plot_losses, repetition, right_sums, write_prompts
from sameseed_train.model import LlamaForTraining
from sameseed_train.prompts import recipe_seeds
from sameseed_train.recipe import Recipe, TextSettings, load_recipe
from sameseed_train.states import TextStates
from sameseed_train.tokenizer import BEGIN, END, PAD, save_tokenizer, token_id, train_tokenizer
from sameseed_train.trainer import Log, TrainJob, checkpoint_path, train
from sameseed_train.unlikelihood import unlikelihood_job

CHAT_CHARACTERS = 900  # a longer question would leave too little of the trained context for its answer
TEMPLATE = 8  # tokens that a chat template adds to a question, at most
LATER = {"target": ("unlikelihood", "draft"), "unlikelihood": ("draft",)}  # stages that learn from a stage's model


def run(
    config: Path, *, data: Path, out: Path, device: str = "cpu", resume: bool = False, quiet: bool = False
) -> dict[str, Any]:
    """Train `out/target` and `out/draft`; `resume`: by checkpoints. Returns `out/results.json`. Raises ConfigError."""
    devices.check(device)
    recipe = load_recipe(config)
    if not data.is_dir():
        raise ConfigError(f"no data folder at {data}; give the folder that holds {recipe.valid_file} with --data")
    check_empty(out, resume)
    threads = torch.get_num_threads()
    torch.set_flush_denormal(True)
    torch.set_num_threads(recipe.threads or threads)
    try:
        return run_stages(recipe, config, data, out, device, quiet)
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)


def run_stages(recipe: Recipe, config: Path, data: Path, out: Path, device: str, quiet: bool) -> dict[str, Any]:
    """Run all stages from their checkpoints; returns the measurements. All data is read before anything is written."""
    log = Log(out / "log.jsonl")
    documents = corpus.held_out_documents(recipe, data)
    tokenizer = tokenizer_stage(recipe, data, out)
    shutil.copyfile(config, out / "recipe.toml")
    begin, end, pad = (token_id(tokenizer, name) for name in (BEGIN, END, PAD))
    rows = rows_stage(recipe, data, out, tokenizer)
    model, results = LlamaForTraining(recipe.target.shape, recipe.seed).to(device), dict[str, Any]()

    def stage(job: TrainJob) -> None:
        """Train the target and export it; before more steps, what learned from its earlier weights is deleted."""
        if not job.checkpoint.exists() or read_tensors(job.checkpoint, ())[1]["step"] < job.settings.steps:
            forget(out, LATER[job.name])
        results[job.name] = train(job, log, quiet=quiet)
        export_model(model, out / "target", begin, (end,), pad)

    stage(target_job(recipe, model, rows, pad, out))
    if recipe.unlikelihood is not None:
        stage(unlikelihood_job(recipe, model, rows, lambda: loop_texts(recipe, data, out, device), pad, out))
    elif checkpoint_path(out, "unlikelihood").exists():  # no longer in the recipe
        forget(out, LATER["target"])
    context = recipe.target.shape.max_positions
    new_tokens = min(NEW_TOKENS, context // 2)
    prompts = write_prompts(recipe, documents, out, min(CHAT_CHARACTERS, context - new_tokens - TEMPLATE))
    draft = draft_stage(recipe, data, out, device=device, quiet=quiet, measured_tokens=new_tokens)
    assert draft.measured is not None
    models = {name: load_exported(out / name, device) for name in ("target", "draft")}
    schedule = recipe.target.train
    results |= {
        "recipe": recipe.name,
        "seed": recipe.seed,
        "draft": draft.results["training"],
        "parameters": {name: model.num_parameters() for name, model in models.items()},
        "passes": round(schedule.steps * schedule.rows / len(rows), 3),
        "perplexity": {
            name: perplexity(model, documents, tokenizer, schedule.row_tokens) for name, model in models.items()
        },
        "repeated": repetition(draft.measured, [record["domain"] for record in prompts]),
        "right_sums": right_sums(recipe, documents, out / "target", device),
        "acceptance": draft.results["acceptance"],
        "num_draft_tokens": NUM_DRAFT_TOKENS,
        "prompts": len(prompts),
    }
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    plot_losses(log, out / "loss.png")
    write_cards(recipe, results, out)
    return results


def write_cards(recipe: Recipe, results: dict[str, Any], out: Path) -> None:
    """The card of a pair's target; the draft's, which exists, gets its perplexity."""
    shape, right = recipe.target.shape, results["right_sums"]
    about = (
        f"Llama architecture: {card.sizes(shape)}, {shape.vocab_size} tokens (byte-level BPE), tied embeddings, "
        f"{results['parameters']['target'] / 1e6:.2f} M parameters in bfloat16; {results['passes']:g} passes over the "
        "data. It imitates the texts of its domains, knows no facts, and must not be asked for advice."
    )
    greedy = ", ".join(f"{domain} {share:.1%}" for domain, share in results["repeated"].items())
    greedy = f"## Its greedy texts\n\nRepeated 8-grams on held-out prompts: {greedy}."
    greedy += f" Right answers to held-out sums: {right['right']} of {right['asked']}." if right else ""
    measured = card.perplexity(results["perplexity"]["target"])
    card.write_card(out / "target", asdict(recipe), recipe.source, about, measured, greedy)
    with (out / "draft" / "README.md").open("a", encoding="utf-8") as file:
        file.write(f"\n{card.perplexity(results['perplexity']['draft'])}\n")


def forget(out: Path, stages: tuple[str, ...]) -> None:
    """Delete the checkpoints of stages that learned from other weights of the target, and all that it generated."""
    for name in stages:
        checkpoint_path(out, name).unlink(missing_ok=True)
    for name in ("texts", "states", "held-out"):
        shutil.rmtree(out / name, ignore_errors=True)


def tokenizer_stage(recipe: Recipe, data: Path, out: Path) -> Tokenizer:
    """Train the tokenizer on a sample of the mixture, or read an existing one."""
    path = out / "target" / "tokenizer.json"
    if path.exists():
        return Tokenizer.from_file(str(path))

    def sample() -> Iterator[str]:
        size = 0.0
        for document in corpus.training_order(recipe, data):
            size += document.num_bytes / 1e6
            if size > recipe.tokenizer.sample_mb:
                return
            yield from (content for _, content in document.turns) if document.turns else (document.text,)

    tokenizer = train_tokenizer(sample(), recipe.tokenizer.vocab_size)
    save_tokenizer(tokenizer, out / "target", recipe.target.shape.max_positions)
    return tokenizer


def rows_stage(recipe: Recipe, data: Path, out: Path, tokenizer: Tokenizer) -> Tensor:
    """The corpus as rows int32 `[num_rows, S+1]`, packed once and stored."""
    path = out / "rows.safetensors"
    if path.exists():
        return read_tensors(path)[0]["rows"]
    documents = corpus.training_order(recipe, data)
    encoded = [corpus.encode(tokenizer, d) for d in documents]
    rows = corpus.pack(encoded, recipe.target.train.row_tokens + 1, token_id(tokenizer, PAD))
    # Pieces of a long document fill neighbouring rows. Shuffling mixes many documents into each step.
    rows = rows[torch.randperm(rows.shape[0], generator=torch.Generator().manual_seed(recipe.seed))]
    save_tensors({"rows": rows}, path, {"tokens": sum(map(len, encoded)), "documents": len(documents)})
    return rows


def target_job(recipe: Recipe, model: LlamaForTraining, rows: Tensor, pad: int, out: Path) -> TrainJob:
    """The target's training: cross entropy on the corpus."""
    settings = recipe.target.train
    if settings.compile:
        model.compile_layers()

    def batch(step: int) -> Tensor:
        first = step * settings.rows
        return corpus.next_rows(rows, first, settings.rows, recipe.seed, stored_passes=1).to(model.device)

    def loss(batch_: Tensor) -> Tensor:
        return model.loss(*corpus.inputs_and_targets(batch_, pad))

    return TrainJob("target", model, settings, batch, loss, out)


def loop_texts(recipe: Recipe, data: Path, out: Path, device: str) -> list[TextStates]:
    """The target's greedy continuations of training prompts, for the steps of `[unlikelihood]`."""
    u = recipe.unlikelihood
    assert u is not None
    settings = TextSettings(prompt_tokens=u.prompt_tokens, corpus_share=0.0)
    seeds = recipe_seeds(recipe.source, data, load_tokenizer(out / "target"), settings, recipe.seed + 1)
    prompts = [seed.ids for seed in itertools.islice(seeds, u.train.steps * u.prompts)]
    return continued(out / "target", prompts, u.new_tokens, device)


def draft_stage(recipe: Recipe, data: Path, out: Path, **how: Any) -> Trained:
    """The draft learns the target's distribution on texts that the target generates, as in `sameseed train draft`."""
    target = str(out / "target")
    own = replace(
        recipe.draft,
        name=f"{recipe.name}: draft",
        seed=recipe.seed,
        target=target,
        begin=target if recipe.draft.begin_layers else "",
        source=recipe.source,
        threads=recipe.threads,
        note=recipe.note,
    )
    return run_draft(own, Sources(data=data, measure=out / "prompts_heldout.jsonl"), out, resume=True, **how)
