"""How often a head's guesses are right: counted on what the target writes greedily to held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from sameseed.models.llama import Llama
from sameseed.scheme import cache_format
from sameseed.train.head_job import dense, make_batch
from sameseed.train.head_model import HeadForTraining
from sameseed.train.head_recipe import HeadRecipe, aux_layers, head_shape
from sameseed.train.seeds import HeldOut
from sameseed.train.states import Seed, TextStates, captured_layers, new_runner, write_texts

NUM_DRAFT_TOKENS = 4  # the chain length that the card speaks of
NEW_TOKENS = 128


@dataclass(frozen=True)
class Counts:
    """Greedy chains of NUM_DRAFT_TOKENS: `agreement[s]`: share of places where guess s + 1 of a right path is right."""

    drafted: int
    accepted: int
    tokens: int
    rate: float
    agreement: list[float]


def measure_head(
    folder: Path, target: Llama, prompts: Seq[HeldOut], recipe: HeadRecipe
) -> dict[str, dict[str, object]]:
    """Counts by domain, and over all prompts under `all`, of the head as it was exported, on the target's device."""
    layers = aux_layers(recipe, target.config)
    captures = tuple(i - 1 for i in layers)
    seeds = [Seed(p.ids, NEW_TOKENS) for p in prompts]
    longest = max(len(s.ids) + s.num_new for s in seeds)
    stored = captured_layers(captures, target.config.num_layers)
    runner = new_runner(
        target, stored, min(32, len(seeds)), longest, cache_format(recipe.kv_format, target.weights.dense)
    )
    texts = write_texts(runner, seeds, min(32, len(seeds)), 0)
    judge = load_judge(folder, target, recipe, [stored.index(c) for c in captures])
    right = [agreement(judge, t) for t in texts]
    groups: dict[str, list[list[list[bool]]]] = {"all": right}
    for prompt, found in zip(prompts, right, strict=True):
        groups.setdefault(prompt.domain, []).append(found)
    return {domain: asdict(count_chains(group)) for domain, group in groups.items()}


@dataclass(frozen=True)
class Judge:
    """An exported head with what it shares with its target, all on one device.

    embedding [V, C]; lm_head [Vd, C]; `ids` int64 [Vd]: the target's tokens that the head has (None: all); `columns`:
    places of its captures among the stored states.
    """

    head: HeadForTraining
    embedding: Tensor
    lm_head: Tensor
    ids: Tensor | None
    columns: list[int]

    @property
    def device(self) -> str:
        return str(self.embedding.device)


def load_judge(folder: Path, target: Llama, recipe: HeadRecipe, columns: list[int]) -> Judge:
    """The head in `folder`, on the target's device."""
    device = str(target.device)
    head = HeadForTraining(head_shape(recipe, target.config), 0)
    tensors = load_file(str(folder / "model.safetensors"))
    ids = None
    if "d2t" in tensors:
        ids = (torch.arange(len(tensors["d2t"])) + tensors.pop("d2t")).to(device)
        tensors.pop("t2d")
    head.load_state_dict({n: t.float() for n, t in tensors.items()})
    head.to(device)
    weight = dense(target.ops, target.weights.lm_head) if ids is None else head.lm_head.weight.detach()
    return Judge(head, dense(target.ops, target.weights.embedding).to(device), weight.to(device), ids, columns)


@torch.no_grad()
def agreement(judge: Judge, text: TextStates) -> list[list[bool]]:
    """[s][t]: along the text, is the guess of row t at step s the text's token t + 2? All rows of one text."""
    whole = TextStates(text.ids, 0, text.states)
    k = NUM_DRAFT_TOKENS
    if len(text.states) < 2:
        return [[] for _ in range(k)]
    width = judge.embedding.shape[1]
    batch = make_batch([whole], judge.columns, width, k, len(text.ids), judge.device)
    outputs = judge.head(judge.embedding[batch.tokens], batch.states, batch.rows, k)
    found = []
    first = max(0, text.num_given - 1)  # the first token comes from the pass over the prompt
    for out in outputs:
        best = (out @ judge.lm_head.T).argmax(-1)
        best = (best if judge.ids is None else judge.ids[best]).cpu()
        found.append((best == text.ids[2:].long())[first:].tolist())
    return found


def count_chains(texts: list[list[list[bool]]]) -> Counts:
    """Rounds of speculation over texts of which `agreement` tells every guess: accepted ones equal the text."""
    k = NUM_DRAFT_TOKENS
    drafted = accepted = tokens = 0
    right, places = [0] * k, [0] * k
    for text in texts:
        length = len(text[0])
        tokens += length
        for step in range(k):
            right[step] += sum(text[step][step:])
            places[step] += max(0, length - step)
        at = 0
        while at < length:
            size = min(k, length - at)
            run = next((s for s in range(size) if not text[s][at + s]), size)
            drafted, accepted, at = drafted + size, accepted + run, at + run + 1
    shares = [round(r / max(1, p), 4) for r, p in zip(right, places, strict=True)]
    return Counts(drafted, accepted, tokens, round(accepted / max(1, drafted), 4), shares)
