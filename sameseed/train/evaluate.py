"""What the card says of the pair: held-out perplexity, and how much of the target's greedy text the draft guesses."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from sameseed.train import data as corpus
from sameseed.train.data import Document
from sameseed.train.model import LlamaForTraining
from sameseed.train.rollout import Rollout


@dataclass(frozen=True)
class DomainPerplexity:
    """Of one domain: exp of the mean loss per token, and bits per byte of the same text."""

    tokens: int
    perplexity: float
    bits_per_byte: float


@dataclass(frozen=True)
class GreedyAcceptance:
    """Counts of greedy speculation with chains of k drafted tokens; a rejected tail counts as drafted."""

    drafted: int
    accepted: int
    tokens: int
    agreement: float  # share of single tokens on which draft and target agree

    @property
    def rate(self) -> float:
        return self.accepted / max(1, self.drafted)


@torch.inference_mode()
def perplexity(
    model: LlamaForTraining, documents: list[Document], tokenizer: Tokenizer, row_tokens: int
) -> dict[str, DomainPerplexity]:
    """Per domain, over the first `row_tokens` tokens of every document."""
    model.eval()
    sums: dict[str, tuple[int, float, int]] = {}
    for document in documents:
        ids = corpus.encode(tokenizer, document)[: row_tokens + 1]
        row = torch.tensor([ids], device=model.device)
        mean = float(model.loss(row[:, :-1], row[:, 1:]))
        num_bytes = len(tokenizer.decode(ids).encode())
        tokens, nats, size = sums.get(document.domain, (0, 0.0, 0))
        sums[document.domain] = (tokens + len(ids) - 1, nats + mean * (len(ids) - 1), size + num_bytes)
    return {
        domain: DomainPerplexity(tokens, round(math.exp(nats / tokens), 3), round(nats / math.log(2) / max(1, size), 4))
        for domain, (tokens, nats, size) in sums.items()
    }


@torch.inference_mode()
def acceptance(draft: LlamaForTraining, rollouts: list[Rollout], k: int) -> GreedyAcceptance:
    """Exact counts for chains of k over the target's greedy `rollouts`.

    Accepted drafted tokens equal the target's text, so whether the draft agrees at a place depends on that text alone:
    one pass of the draft over it tells every round's outcome.
    """
    draft.eval()
    drafted = accepted = tokens = agreed = 0
    for rollout in rollouts:
        ids = torch.tensor([rollout.prompt + rollout.new], device=draft.device)
        guess = draft(ids[:, :-1])[0, len(rollout.prompt) - 1 :].argmax(-1).cpu()
        agree = (guess == torch.tensor(rollout.new)).tolist()
        tokens, agreed = tokens + len(agree), agreed + sum(agree)
        place = 1  # the first token comes from the pass over the prompt
        while place < len(agree):
            window = agree[place : place + k]
            run = window.index(False) if False in window else len(window)
            drafted, accepted = drafted + len(window), accepted + run
            place += run + 1
    return GreedyAcceptance(drafted, accepted, tokens, agreed / max(1, tokens))
