"""The draft stage: the target continues training prompts, and the draft learns the target's distribution on them.

The training texts are on-policy, because in speculative decoding the draft reads text that the target chose.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence as Seq
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from sameseed_train import data as corpus
from sameseed_train.checkpoint import read_tensors, save_tensors
from sameseed_train.losses import fused_distillation
from sameseed_train.model import LlamaForTraining
from sameseed_train.recipe import Recipe
from sameseed_train.rollout import prompt_of, write
from sameseed_train.tokenizer import PAD, token_id
from sameseed_train.trainer import Log, TrainJob, progress_bar

# Marks a token of a prompt in a stored row: the draft reads it, but no loss counts it.
PROMPT_BIT = 1 << 20
PART = 512  # prompts whose continuations are stored in one file, so that an interruption loses little
LEAST_SHARE = 0.04  # least share of all prompts for a source


def training_prompts(recipe: Recipe, data: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """Prompts cut from training documents, in a seeded order; a source's share is its share of the training bytes."""
    rng = random.Random(recipe.seed + 1)
    settings = recipe.draft.rollouts
    sources = [corpus.source_documents(s, data, recipe.seed) for s in recipe.source]
    sizes = [s.epochs * sum(d.num_bytes for d in own) for s, own in zip(recipe.source, sources, strict=True)]
    prompts: list[list[int]] = []
    for documents, size in zip(sources, sizes, strict=True):
        wanted = round(settings.num_prompts * max(LEAST_SHARE, size / sum(sizes)))
        found: dict[tuple[int, ...], None] = {}  # a document may give several prompts, but no prompt twice
        for attempt in range(4 * wanted):
            if len(found) == wanted:
                break
            prompt = prompt_of(tokenizer, documents[attempt % len(documents)], settings.prompt_tokens, rng)
            if prompt is not None:
                found[tuple(prompt)] = None
        prompts += map(list, found)
    rng.shuffle(prompts)
    return prompts


def rollout_rows(
    recipe: Recipe,
    prompts: list[list[int]],
    folder: Path,
    tokenizer: Tokenizer,
    target: LlamaForTraining,
    log: Log,
    quiet: bool,
) -> Tensor:
    """The target's own texts as rows int32 `[num_rows, S+1]`; parts that exist in `folder` are not written again."""
    texts: list[list[int]] = []
    with progress_bar(quiet) as bar:
        task = bar.add_task("rollouts", total=len(prompts), said="")
        for number, start in enumerate(range(0, len(prompts), PART)):
            path = folder / f"{number:03}.safetensors"
            if not path.exists():
                settings, rng = recipe.draft.rollouts, random.Random(recipe.seed + 2 + number)
                own, seed = prompts[start : start + PART], recipe.seed + 1000 * number
                heat = [0.0 if rng.random() < settings.greedy else settings.temperature for _ in own]
                written = write(target, own, tokenizer, settings.new_tokens, settings.batch, heat, seed)
                marked = [[t | PROMPT_BIT for t in r.prompt] + r.new for r in written]
                ids = torch.tensor([t for text in marked for t in text], dtype=torch.int32)
                lengths = torch.tensor([len(t) for t in marked], dtype=torch.int32)
                save_tensors({"ids": ids, "lengths": lengths}, path, {"prompts": len(own)})
            stored, _ = read_tensors(path)
            part = [t.tolist() for t in torch.split(stored["ids"], stored["lengths"].tolist())]
            texts += part
            log.write(stage="rollouts", part=number, prompts=len(part), tokens=sum(map(len, part)))
            bar.update(task, completed=start + len(part))
    return corpus.pack(texts, recipe.draft.train.row_tokens + 1, token_id(tokenizer, PAD))


def draft_batch(recipe: Recipe, rollouts: Tensor, rows: Tensor, step: int) -> Tensor:
    """Rows `[B, S+1]` of a step: corpus rows (as many as `corpus_share` says, evenly spread), then rollouts."""
    num_rows = recipe.draft.train.rows
    share = recipe.draft.corpus_share * num_rows
    # Both streams are read in their own order, whatever the share: the position is the rows read before this step.
    first, end = int(share * step), int(share * (step + 1))
    index = torch.arange(first, end) % rows.shape[0]
    others = corpus.next_rows(rollouts, step * num_rows - first, num_rows - (end - first), recipe.seed)
    return torch.cat((rows[index].long(), others))


def _begin_as(draft: LlamaForTraining, target: LlamaForTraining, layers: Seq[int]) -> None:
    """Initialize the draft from the target: with `layers`, copy these, embedding and norm; else only the embedding.

    Without `layers` the embedding starts as the principal components of the target's embedding.
    """
    if layers:
        own, its = draft.model, target.model
        pairs = [(own.embed_tokens, its.embed_tokens), (own.norm, its.norm)]
        pairs += [(layer, its.layers[j]) for layer, j in zip(own.layers, layers, strict=True)]
        for mine, other in pairs:
            mine.load_state_dict(other.state_dict())
        return
    weight = target.model.embed_tokens.weight.detach().to(draft.device)
    width = min(draft.shape.hidden_size, target.shape.hidden_size)
    _, _, basis = torch.linalg.svd(weight, full_matrices=False)
    with torch.no_grad():
        draft.model.embed_tokens.weight[:, :width] = weight @ basis[:width].T


def draft_job(
    recipe: Recipe, target: LlamaForTraining, rollouts: Tensor, rows: Tensor, pad: int, out: Path
) -> TrainJob:
    """The draft's training: the target's distribution on rows of its own text and of the corpus."""
    draft = LlamaForTraining(recipe.draft.shape, recipe.seed + 7)
    _begin_as(draft, target, recipe.draft.layers)
    draft.to(target.device)  # moved after initialization, so that initial weights are the same on every device
    target.eval()
    teacher = target
    if recipe.draft.train.compile:
        draft.compile_layers()
        teacher = copy.copy(target)  # shares the weights; only the copy is compiled, for rows of one length
        teacher.compile_layers()

    def loss(batch: Tensor) -> Tensor:
        batch = batch.to(target.device)
        ids = batch & ~PROMPT_BIT
        counts = (batch[:, 1:] < PROMPT_BIT) & (ids[:, 1:] != pad)  # [B, S]
        with torch.no_grad():
            t_hidden = teacher.hidden(ids[:, :-1]).flatten(0, 1)  # [B*S, C]
        return fused_distillation(
            draft.hidden(ids[:, :-1]).flatten(0, 1),
            draft.model.embed_tokens.weight,
            t_hidden,
            target.model.embed_tokens.weight.detach(),
            counts.flatten(),
            recipe.draft.argmax_weight,
        )

    def batch(step: int) -> Tensor:
        return draft_batch(recipe, rollouts, rows, step)

    return TrainJob("draft", draft, recipe.draft.train, batch, loss, out)
