"""The stages of a pair's recipe, in order; a finished stage is skipped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from sameseed.store import replacing
from sameseed_train import data as corpus
from sameseed_train.checkpoint import export_model, load_checkpoint, read_tensors, save_tensors
from sameseed_train.distill import draft_job, rollout_rows, training_prompts
from sameseed_train.measure import measure
from sameseed_train.model import LlamaForTraining, ModelShape
from sameseed_train.recipe import Recipe
from sameseed_train.states import digest_of
from sameseed_train.tokenizer import BEGIN, END, PAD, save_tokenizer, token_id, train_tokenizer
from sameseed_train.trainer import Log, TrainJob, checkpoint_path, train
from sameseed_train.unlikelihood import unlikelihood_job

STAGES = ("target", "unlikelihood", "draft")


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
    for name, settings in (("target", recipe.target), ("draft", recipe.draft)):
        save_tokenizer(tokenizer, out / name, settings.shape.max_positions)
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


def target_job(recipe: Recipe, rows: Tensor, pad: int, out: Path, device: str) -> TrainJob:
    """The target's training: cross entropy on the corpus."""
    settings = recipe.target.train
    model = LlamaForTraining(recipe.target.shape, recipe.seed).to(device)
    if settings.compile:
        model.compile_layers()

    def batch(step: int) -> Tensor:
        return corpus.next_rows(rows, step * settings.rows, settings.rows, recipe.seed, stored_passes=1).to(device)

    def loss(batch_: Tensor) -> Tensor:
        return model.loss(*corpus.inputs_and_targets(batch_, pad))

    return TrainJob("target", model, settings, batch, loss, out)


def load_model(folder: Path, shape: ModelShape, device: str) -> LlamaForTraining:
    """Load an exported model (bfloat16 weights) as float32, so that the card measures the weights that users get."""
    model = LlamaForTraining(shape, 0)
    weights, _ = read_tensors(folder / "model.safetensors")
    model.load_state_dict({name: w.float() for name, w in weights.items()})
    return model.to(device)


def _digest_in(done: Path) -> object:
    """The digest of a finished stage; None if it is not finished, or if its file is damaged."""
    try:
        return json.loads(done.read_text(encoding="utf-8")).get("digest")
    except (OSError, ValueError, AttributeError):
        return None


def run_stages(
    recipe: Recipe, config: Path, data: Path, out: Path, device: str = "cpu", *, quiet: bool
) -> dict[str, Any]:
    """Run all stages (tokenizer, rows, target, rollouts, draft) on `device`, then measure; returns the measurements.

    Nothing is written before all data was read once. The recipe's file `config` is copied to `out`.
    """
    log = Log(out / "log.jsonl")
    held_out = corpus.held_out_documents(recipe, data)
    tokenizer = tokenizer_stage(recipe, data, out)
    shutil.copyfile(config, out / "recipe.toml")
    begin, end, pad = (token_id(tokenizer, name) for name in (BEGIN, END, PAD))
    rows = rows_stage(recipe, data, out, tokenizer)

    def stage(
        name: str, digest: str, shape: ModelShape, new_job: Callable[[], TrainJob], folder: str = ""
    ) -> LlamaForTraining:
        """Train a model and export it to `folder` (default: `name`), unless this is done for the same `digest`."""
        done = out / f"{name}.done.json"
        if _digest_in(done) != digest:
            job = new_job()
            progress = train(job, log, quiet=quiet)
            assert isinstance(job.model, LlamaForTraining)
            export_model(job.model, out / (folder or name), begin, (end,), pad)
            for later in STAGES[STAGES.index(name) + 1 :]:  # their checkpoints were trained for an earlier model
                checkpoint_path(out, later).unlink(missing_ok=True)
            with replacing(done) as file:
                file.write((json.dumps({"digest": digest, **progress}) + "\n").encode())
        return load_model(out / (folder or name), shape, device)

    digest = digest_of((recipe.seed, recipe.source, recipe.tokenizer, recipe.target, recipe.unlikelihood))
    target = stage("target", digest, recipe.target.shape, lambda: target_job(recipe, rows, pad, out, device))

    def new_unlikelihood() -> TrainJob:
        model = LlamaForTraining(recipe.target.shape, recipe.seed).to(device)
        load_checkpoint(checkpoint_path(out, "target"), model, None)  # float32 weights before unlikelihood
        return unlikelihood_job(recipe, model, rows, training_prompts(recipe, data, tokenizer), end, pad, out)

    if recipe.unlikelihood is not None:
        target = stage("unlikelihood", digest, recipe.target.shape, new_unlikelihood, "target")

    def new_draft() -> TrainJob:
        kept = out / "rollouts" / digest_of((digest, recipe.draft.rollouts))
        prompts = training_prompts(recipe, data, tokenizer)
        rollouts = rollout_rows(recipe, prompts, kept, tokenizer, target, log, quiet)
        return draft_job(recipe, target, rollouts, rows, pad, out)

    draft = stage("draft", digest_of((digest, recipe.draft)), recipe.draft.shape, new_draft)
    return measure(recipe, held_out, out, tokenizer, target, draft)
