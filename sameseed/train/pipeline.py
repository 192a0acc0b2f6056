"""The stages of a recipe, in order; a stage that is done is skipped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from sameseed.train import data as corpus
from sameseed.train.checkpoint import export_model, read_tensors, save_tensors
from sameseed.train.distill import draft_job, rollout_rows
from sameseed.train.measure import measure
from sameseed.train.model import LlamaForTraining, ModelShape
from sameseed.train.recipe import Recipe
from sameseed.train.tokenizer import BEGIN, END, PAD, save_tokenizer, token_id, train_tokenizer
from sameseed.train.trainer import Log, TrainJob, train


def tokenizer_stage(recipe: Recipe, data: Path, out: Path) -> Tokenizer:
    """Train the tokenizer on a sample of the mixture, or read the one that is there."""
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


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids that config.json names."""
    return {f"{name}_id": token_id(tokenizer, t) for name, t in (("begin", BEGIN), ("end", END), ("pad", PAD))}


def rows_stage(recipe: Recipe, data: Path, out: Path, tokenizer: Tokenizer) -> Tensor:
    """The corpus as rows int32 `[num_rows, S+1]`, packed once and kept."""
    path = out / "rows.safetensors"
    if path.exists():
        return read_tensors(path)[0]["rows"]
    documents = corpus.training_order(recipe, data)
    encoded = [corpus.encode(tokenizer, d) for d in documents]
    rows = corpus.pack(encoded, recipe.target.train.row_tokens + 1, token_id(tokenizer, PAD))
    # The pieces of a long document fill neighbouring rows; a step should see many documents.
    rows = rows[torch.randperm(rows.shape[0], generator=torch.Generator().manual_seed(recipe.seed))]
    save_tensors({"rows": rows}, path, {"tokens": sum(map(len, encoded)), "documents": len(documents)})
    return rows


def target_job(recipe: Recipe, rows: Tensor, pad: int, out: Path, device: str = "cpu") -> TrainJob:
    """The target's training: cross entropy on the corpus."""
    settings = recipe.target.train
    model = LlamaForTraining(recipe.target.shape, recipe.seed).to(device)

    def batch(step: int) -> Tensor:
        return corpus.batch_rows(rows, step, settings.rows, recipe.seed).to(device)

    def loss(batch_: Tensor) -> Tensor:
        return model.loss(*corpus.inputs_and_targets(batch_, pad))

    return TrainJob("target", model, settings, batch, loss, out)


def load_model(folder: Path, shape: ModelShape, device: str = "cpu") -> LlamaForTraining:
    """A published model (bfloat16 weights) back in float32: what the card measures is what users get."""
    model = LlamaForTraining(shape, 0)
    weights, _ = read_tensors(folder / "model.safetensors")
    model.load_state_dict({name: w.float() for name, w in weights.items()})
    return model.to(device)


def finished(out: Path, stage: str, digest: str) -> bool:
    """Whether a stage's end was recorded for this very recipe text of the stage."""
    path = out / f"{stage}.done.json"
    return path.exists() and json.loads(path.read_text(encoding="utf-8")).get("digest") == digest


def digest_of(settings: object) -> str:
    """A short name for settings, so that an edited recipe runs its stage again."""
    return hashlib.sha256(repr(settings).encode()).hexdigest()[:16]


def model_stage(job: TrainJob, digest: str, log: Log, out: Path, ids: dict[str, int], *, quiet: bool) -> None:
    """Train a model to its end, export it, and note that it is done."""
    started = Path(job.folder / f"{job.name}.done.json")
    progress = train(job, log, quiet=quiet)
    assert isinstance(job.model, LlamaForTraining)
    export_model(job.model, out / job.name, ids)
    started.write_text(json.dumps({"digest": digest, **progress}) + "\n", encoding="utf-8")


def run_stages(recipe: Recipe, data: Path, out: Path, device: str = "cpu", *, quiet: bool) -> dict[str, Any]:
    """Tokenizer, rows, target, rollouts, draft, then the measurements; returns these. Models are on `device`."""
    log = Log(out / "log.jsonl")
    tokenizer = tokenizer_stage(recipe, data, out)
    ids, pad = special_ids(tokenizer), token_id(tokenizer, PAD)
    rows = rows_stage(recipe, data, out, tokenizer)
    shared = (recipe.seed, recipe.source, recipe.tokenizer)
    target_digest = digest_of((*shared, recipe.target))
    if not finished(out, "target", target_digest):
        model_stage(target_job(recipe, rows, pad, out, device), target_digest, log, out, ids, quiet=quiet)
    target = load_model(out / "target", recipe.target.shape, device)
    draft_digest = digest_of((target_digest, recipe.draft))
    if not finished(out, "draft", draft_digest):
        digest = digest_of((target_digest, recipe.draft.rollouts))
        rollouts = rollout_rows(recipe, data, out, tokenizer, target, log, digest=digest, quiet=quiet)
        job = draft_job(recipe, target, rollouts, rows, pad, out)
        model_stage(job, draft_digest, log, out, ids, quiet=quiet)
    draft = load_model(out / "draft", recipe.draft.shape, device)
    return measure(recipe, data, out, tokenizer, target, draft)
