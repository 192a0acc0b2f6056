"""Texts that a model writes itself (rollouts), on which the draft is trained and acceptance is measured."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from sameseed_train import data as corpus
from sameseed_train.data import Document
from sameseed_train.model import LlamaForTraining
from sameseed_train.tokenizer import ASSISTANT, END, token_id


@dataclass(frozen=True)
class Rollout:
    """A prompt and its continuation, which ends with the end token if the model wrote it."""

    prompt: list[int]
    new: list[int]


def prompt_of(tokenizer: Tokenizer, document: Document, limit: int, rng: random.Random) -> list[int] | None:
    """A prompt from a document: a conversation up to an answer (None if too long), or a piece of a plain text."""
    ids = corpus.encode(tokenizer, document)
    if not document.turns:
        start = rng.choice([1, rng.randrange(1, max(2, len(ids) - 64))])
        return [ids[0], *ids[start : start + rng.randrange(16, min(limit, 128))]]
    answer = token_id(tokenizer, ASSISTANT)
    places = [i + 1 for i, token in enumerate(ids) if token == answer and i < limit]
    return ids[: rng.choice(places)] if places else None


@torch.inference_mode()
def write_batch(
    model: LlamaForTraining, prompts: list[list[int]], new_tokens: int, end: int, temperature: Tensor, seed: int
) -> list[Rollout]:
    """Continue prompts of any lengths together; temperature `[B]`, 0 for greedy.

    Rows with shorter prompts start to write while longer prompts are still read, so no row is padded. The sampling
    noise comes from the CPU's generator on every device.
    """
    device, generator = model.device, torch.Generator().manual_seed(seed)
    lengths = torch.tensor([len(p) for p in prompts])
    total = int(lengths.max()) + new_tokens
    ids = torch.zeros(len(prompts), total, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    cache = model.new_cache(len(prompts), total)
    alive = torch.arange(len(prompts))  # rows that are still in the cache
    stop = lengths + new_tokens
    step_ids, place = ids[:, : int(lengths.min())], int(lengths.min())
    while place < total:
        logits = model.hidden(step_ids.to(device), cache)[:, -1] @ model.model.embed_tokens.weight.T  # [A, V]
        noise = -torch.empty(logits.shape).exponential_(generator=generator).log()  # Gumbel
        heat, noise = temperature[alive].to(device), noise.to(device)
        drawn = (logits / heat.clamp(min=1e-6)[:, None] + noise).argmax(-1)
        chosen = torch.where(heat > 0, drawn, logits.argmax(-1)).cpu()
        chosen = torch.where(place < lengths[alive], ids[alive, place], chosen)
        ids[alive, place] = chosen
        place += 1
        ended = (chosen == end) & (place > lengths[alive]) & (place < stop[alive])  # its first end token
        stop[alive[ended]] = place
        keep = place < stop[alive]
        if not keep.any():
            break
        if keep.sum() <= 0.75 * len(alive) or place == total:  # finished rows cost time: drop them
            alive, chosen = alive[keep], chosen[keep]
            kept = keep.nonzero().squeeze(1).to(device)
            cache.k, cache.v = [t[kept] for t in cache.k], [t[kept] for t in cache.v]
        step_ids = chosen[:, None]
    rows = ids.tolist()
    return [Rollout(p, rows[b][len(p) : int(stop[b])]) for b, p in enumerate(prompts)]


def write(
    model: LlamaForTraining,
    prompts: list[list[int]],
    tokenizer: Tokenizer,
    new_tokens: int,
    batch: int,
    temperatures: list[float],
    seed: int,
) -> list[Rollout]:
    """Continue every prompt, in batches of `batch` prompts with similar lengths."""
    model.eval()
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    result: dict[int, Rollout] = {}
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        own, heat = [prompts[i] for i in chosen], torch.tensor([temperatures[i] for i in chosen])
        rollouts = write_batch(model, own, new_tokens, token_id(tokenizer, END), heat, seed + start)
        result |= dict(zip(chosen, rollouts, strict=True))
    return [result[i] for i in range(len(prompts))]
