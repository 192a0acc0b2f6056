"""Training against repetition: sequence-level unlikelihood (Welleck et al., 2020).

Greedy text of a small model falls into loops. The target continues prompts greedily, and tokens that complete an n-gram
which the continuation already contains are made less likely. Each step also trains on corpus rows, so that the target
stays a language model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence as Seq
from pathlib import Path

import torch
from torch import Tensor

from sameseed_train import data as corpus
from sameseed_train.model import LlamaForTraining
from sameseed_train.recipe import Recipe
from sameseed_train.states import TextStates
from sameseed_train.trainer import TrainJob

LEAST_REST = 0.05  # below this value of 1 - p, the loss is a straight line, lest a sure token outweigh all others
Batch = tuple[Tensor, Tensor, Tensor]  # corpus rows [B, S+1]; texts [P, N]; repeated tokens [P, N], elsewhere -1


def repeated(tokens: list[int], ngram: int) -> list[bool]:
    """For each token, whether it ends an n-gram that occurred earlier in the text."""
    grams = [tuple(tokens[end - ngram : end]) for end in range(ngram, len(tokens) + 1)]
    first = {gram: place for place, gram in reversed(list(enumerate(grams)))}
    return ([False] * (ngram - 1) + [first[gram] < place for place, gram in enumerate(grams)])[: len(tokens)]


def unlikelihood(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log(1 - p), p = softmax(logits [R, V])[targets [R]]; 0 without targets."""
    rest = 1 - torch.softmax(logits, dim=-1).gather(1, targets[:, None])
    beyond = (LEAST_REST - rest).clamp(min=0) / LEAST_REST
    return (beyond - rest.clamp(min=LEAST_REST).log()).sum() / max(1, len(targets))


def marked(texts: Seq[TextStates], ngram: int, pad: int) -> tuple[Tensor, Tensor]:
    """Padded texts [P, N], and targets: the repeated tokens of the continuations, -1 elsewhere."""
    size = max(len(text.ids) for text in texts)
    ids, targets = torch.full((len(texts), size), pad), torch.full((len(texts), size), -1)
    for row, text in enumerate(texts):
        new = text.ids[text.num_given :].long()
        loops = torch.tensor(repeated(new.tolist(), ngram), dtype=torch.bool)
        ids[row, : len(text.ids)] = text.ids
        targets[row, text.num_given : len(text.ids)] = new.masked_fill(~loops, -1)
    return ids, targets


def unlikelihood_job(
    recipe: Recipe,
    model: LlamaForTraining,
    rows: Tensor,
    continuations: Callable[[], Seq[TextStates]],
    pad: int,
    out: Path,
) -> TrainJob:
    """The target's second training, from the current weights of `model`; `continuations`: for all of its steps."""
    settings = recipe.unlikelihood
    assert settings is not None
    train, written = settings.train, functools.cache(continuations)

    def batch(step: int) -> Batch:
        first = recipe.target.train.steps * recipe.target.train.rows  # continue where the target's training ended
        own = corpus.next_rows(rows, first + step * train.rows, train.rows, recipe.seed, stored_passes=1)
        texts = written()[step * settings.prompts :][: settings.prompts]
        return tuple(t.to(model.device) for t in (own, *marked(texts, settings.ngram, pad)))  # type: ignore[return-value]

    def loss(batch_: Batch) -> Tensor:
        own, texts, targets = batch_
        counts = targets[:, 1:] >= 0
        logits = model.hidden(texts[:, :-1])[counts] @ model.model.embed_tokens.weight.T
        against = unlikelihood(logits.float(), targets[:, 1:][counts])
        return model.loss(*corpus.inputs_and_targets(own, pad)) + settings.weight * against

    return TrainJob("unlikelihood", model, train, batch, loss, out, lambda batch_: batch_[0][:, 1:].numel())
