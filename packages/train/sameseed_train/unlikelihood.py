"""Training against repetition: sequence-level unlikelihood (Welleck et al., 2020).

Greedy text of a small model falls into loops. Here the target continues prompts greedily, and tokens that complete an
n-gram which the continuation already contains are made less likely. Each step also trains on corpus rows, so that the
target stays a language model.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sameseed.errors import ConfigError
from sameseed_train import data as corpus
from sameseed_train.losses import fused_unlikelihood
from sameseed_train.model import LlamaForTraining
from sameseed_train.recipe import Recipe, UnlikelihoodSettings
from sameseed_train.rollout import write_batch
from sameseed_train.trainer import TrainJob

Batch = tuple[Tensor, Tensor, Tensor]  # corpus rows [B, S+1]; texts [P, N]; repeated tokens [P, N], elsewhere -1


def repeated(tokens: list[int], ngram: int) -> list[bool]:
    """For each token, whether it ends an n-gram that occurred earlier in the text."""
    seen: set[tuple[int, ...]] = set()
    found = []
    for end in range(1, len(tokens) + 1):
        last = tuple(tokens[end - ngram : end]) if end >= ngram else None
        found.append(last in seen)
        if last is not None:
            seen.add(last)
    return found


def marked_texts(
    model: LlamaForTraining, prompts: list[list[int]], settings: UnlikelihoodSettings, end: int, pad: int
) -> tuple[Tensor, Tensor]:
    """Greedy continuations `[P, N]` of prompts, and targets: the repeated tokens, -1 elsewhere."""
    texts = write_batch(model, prompts, settings.new_tokens, end, torch.zeros(len(prompts)), 0)
    size = settings.prompt_tokens + settings.new_tokens
    ids, targets = torch.full((len(texts), size), pad), torch.full((len(texts), size), -1)
    for row, text in enumerate(texts):
        whole = torch.tensor(text.prompt + text.new)
        own = torch.tensor([-1] * len(text.prompt) + text.new)
        loops = torch.tensor([False] * len(text.prompt) + repeated(text.new, settings.ngram))
        ids[row, : len(whole)] = whole
        targets[row, : len(whole)] = own.masked_fill(~loops, -1)
    return ids, targets


def unlikelihood_job(
    recipe: Recipe, model: LlamaForTraining, rows: Tensor, prompts: list[list[int]], end: int, pad: int, out: Path
) -> TrainJob:
    """The target's second training, from the current weights of `model`. `prompts`: cut from training texts."""
    settings = recipe.unlikelihood
    assert settings is not None
    train = settings.train
    prompts = [p for p in prompts if len(p) <= settings.prompt_tokens]
    if train.compile:
        model.compile_layers()
    if not prompts:
        raise ConfigError(f"unlikelihood: no prompt has {settings.prompt_tokens} tokens or fewer; raise prompt_tokens")

    def batch(step: int) -> Batch:
        first = recipe.target.train.steps * recipe.target.train.rows  # continue where the target's training ended
        own = corpus.next_rows(rows, first + step * train.rows, train.rows, recipe.seed, stored_passes=1)
        places = [(step * settings.prompts + i) % len(prompts) for i in range(settings.prompts)]
        texts, targets = marked_texts(model, [prompts[p] for p in places], settings, end, pad)
        return own.to(model.device), texts.to(model.device), targets.to(model.device)

    def loss(batch_: Batch) -> Tensor:
        own, texts, targets = batch_
        hidden = model.hidden(texts[:, :-1]).flatten(0, 1)
        against = fused_unlikelihood(hidden, model.model.embed_tokens.weight, targets[:, 1:].flatten())
        return model.loss(*corpus.inputs_and_targets(own, pad)) + settings.weight * against

    return TrainJob("unlikelihood", model, train, batch, loss, out, lambda batch_: batch_[0][:, 1:].numel())
