"""`sameseed train draft`: a small Llama learns a target's distribution on the texts that the target writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from sameseed.errors import ConfigError
from sameseed.models.config import ModelConfig
from sameseed.models.llama import Llama
from sameseed.models.loader import load_tokenizer
from sameseed.train.checkpoint import export_model
from sameseed.train.head_job import dense, teacher
from sameseed.train.losses import fused_soft_cross_entropy, soft_targets
from sameseed.train.model import LlamaForTraining, ModelShape
from sameseed.train.own import OwnRecipe, Sources, Trained, check_run, write_all, write_results
from sameseed.train.own_card import write_draft_card
from sameseed.train.recipe import TrainSettings
from sameseed.train.states import StoredTexts, TextStates
from sameseed.train.trainer import Log, TrainJob, train

NAME = "draft"  # of the job, and so of its checkpoint


@dataclass(frozen=True)
class DraftSize:
    """Sizes of the draft, in the words of a Hugging Face config.json; 0: a half, or a third, of the target's."""

    num_layers: int = 2
    hidden_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    intermediate_size: int = 0


@dataclass(frozen=True)
class DraftRecipe(OwnRecipe):
    """Everything that decides a draft's weights, but for the data and the machine's arithmetic."""

    name: str = "draft"
    size: DraftSize = field(default_factory=DraftSize)
    argmax_weight: float = 0.5
    train: TrainSettings = field(default_factory=lambda: TrainSettings(600, rows=12, warmup=30, decay=0.5))


def draft_shape(recipe: DraftRecipe, target: ModelConfig) -> ModelShape:
    """The draft's sizes for a target. Raises ConfigError for sizes that make no model."""
    size = recipe.size
    dim = size.head_dim or target.head_dim
    hidden = size.hidden_size or target.hidden_size // 2
    kv_heads = size.num_kv_heads or max(1, target.num_kv_heads // 2)
    heads = size.num_heads or kv_heads * (target.num_heads // target.num_kv_heads)
    if min(size.num_layers, hidden, dim, kv_heads, heads) < 1 or dim % 2 or heads % kv_heads:
        raise ConfigError(
            f"a draft of {size.num_layers} layers, {heads} heads and {kv_heads} KV heads of {dim} is no model: sizes "
            "must be at least 1, head_dim even, num_heads a multiple of num_kv_heads"
        )
    return ModelShape(
        vocab_size=target.vocab_size,
        hidden_size=hidden,
        num_layers=size.num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        intermediate_size=size.intermediate_size or 8 * hidden // 3,
        max_positions=target.max_model_len,
    )


def run_draft(
    recipe: DraftRecipe,
    sources: Sources,
    out: Path,
    *,
    backend: str = "auto",
    device: str = "cpu",
    resume: bool = False,
    quiet: bool = False,
) -> Trained:
    """Train a draft for `recipe.target` into `out/draft`, a Hugging Face folder with the target's tokenizer.

    `backend` computes the target.

    With `resume`, texts that are written stay and training goes on from its last checkpoint; of the recipe only what
    `resume.EDITABLE` names may be another then. Raises ConfigError or ModelLoadError with the remedy.
    """
    if sources.measure is not None:
        raise ConfigError("a draft is not measured in training; leave --measure out, and use sameseed bench --prompts")
    folder, config = check_run(recipe, sources, out, resume)
    shape, log = draft_shape(recipe, config), Log(out / "log.jsonl")
    target, texts, _ = write_all(recipe, sources, folder, (), NAME, log, backend=backend, device=device, quiet=quiet)
    draft = LlamaForTraining(shape, recipe.seed)
    with torch.no_grad():
        components(draft.model.embed_tokens.weight, dense(target.ops, target.weights.lm_head).cpu())
    draft.to(device)
    progress = train(draft_job(draft, target, texts, recipe, out), log, quiet=quiet)
    export_model(draft, out / "draft", None, config.eos_token_ids)
    for name, content in load_tokenizer(folder).as_files().items():
        (out / "draft" / name).write_text(content, encoding="utf-8")
    results = write_results(out, recipe, texts, draft.num_parameters(), progress)
    write_draft_card(recipe, shape, results, out / "draft")
    return Trained(out / "draft", results)


def components(embedding: Tensor, weight: Tensor) -> None:
    """Set the first columns of embedding [V, C] to the principal components of weight [V, K]."""
    width = min(embedding.shape[1], weight.shape[1])
    _, basis = torch.linalg.eigh((weight.T @ weight).double())  # their shares rise
    embedding[:, :width] = weight @ basis.flip(1)[:, :width].to(weight.dtype)


DraftBatch = tuple[Tensor, Tensor, Tensor]


def draft_batch(texts: list[TextStates], width: int, longest: int, device: str) -> DraftBatch:
    """Padded texts: ids int64 [B, T]; counts bool [B, T]: where the next token is learned, first at the place of the
    last given one; last [R, C]: the target's states there.
    """
    lengths = [min(len(t.states), longest) for t in texts]
    ids = torch.zeros(len(texts), max(lengths), dtype=torch.long)
    counts = torch.zeros_like(ids, dtype=torch.bool)
    last = []
    for b, (text, n) in enumerate(zip(texts, lengths, strict=True)):
        first = min(n, max(0, text.num_given - 1))
        ids[b, :n] = text.ids[:n].long()
        counts[b, first:n] = True
        last.append(text.states[first:n, -width:].float())
    return ids.to(device), counts.to(device), torch.cat(last).to(device)


def draft_job(
    draft: LlamaForTraining, target: Llama, texts: StoredTexts, recipe: DraftRecipe, folder: Path
) -> TrainJob:
    """The draft's training on stored texts: KL(target || draft) + argmax_weight * CE on the target's likeliest."""
    settings, device, width = recipe.train, str(target.device), target.config.hidden_size

    def batch(step: int) -> DraftBatch:
        return draft_batch(texts.batch(step, settings.rows, recipe.seed), width, settings.row_tokens, device)

    def loss(rows: DraftBatch) -> Tensor:
        ids, counts, last = rows
        targets, entropy = soft_targets(teacher(target, last, None), recipe.argmax_weight)
        shares = torch.full_like(entropy, 1.0 / max(1, len(entropy)))
        hidden = draft.hidden(ids)[counts]  # [R, C]
        cross = fused_soft_cross_entropy(hidden, draft.model.embed_tokens.weight, targets, shares)
        return cross - (shares * entropy).sum()

    count: Callable[[DraftBatch], int] = lambda rows: int(rows[1].sum())  # noqa: E731
    return TrainJob(NAME, draft, settings, batch, loss, folder, count)
