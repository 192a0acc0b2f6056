"""How often a head's guesses are right: counted on what the target writes greedily to held-out prompts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from foretoken.models.llama import Llama
from foretoken.tokenizer import Tokenizer
from foretoken.train.head_job import dense, make_batch
from foretoken.train.head_model import HeadForTraining
from foretoken.train.head_recipe import HeadRecipe, aux_layers, head_shape
from foretoken.train.prompts import read_prompts
from foretoken.train.states import Seed, Text, captured_layers, new_runner, write_texts

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
    folder: Path, target: Llama, tokenizer: Tokenizer, prompts: Path, recipe: HeadRecipe
) -> dict[str, dict[str, object]]:
    """Counts by domain, and over all prompts under `all`, of the head as it was exported."""
    records = read_prompts(prompts)
    layers = aux_layers(recipe, target.config)
    captures = tuple(i - 1 for i in layers)
    seeds = [Seed(tuple(encode(tokenizer, r)), NEW_TOKENS) for r in records]
    longest = max(len(s.ids) + s.num_new for s in seeds)
    stored = captured_layers(captures, target.config.num_layers)
    runner = new_runner(target, stored, min(32, len(seeds)), longest, "fp32")
    texts = write_texts(runner, seeds, min(32, len(seeds)), 0)
    head = HeadForTraining(head_shape(recipe, target.config), 0)
    tensors = load_file(str(folder / "model.safetensors"))
    ids = None
    if "d2t" in tensors:
        ids = torch.arange(len(tensors["d2t"])) + tensors.pop("d2t")
        tensors.pop("t2d")
    head.load_state_dict({n: t.float() for n, t in tensors.items()})
    columns = [stored.index(c) for c in captures]
    right = [agreement(head, target, t, columns, ids) for t in texts]
    groups: dict[str, list[list[list[bool]]]] = {"all": right}
    for record, found in zip(records, right, strict=True):
        groups.setdefault(record.get("domain", "prompts"), []).append(found)
    return {domain: asdict(count_chains(group)) for domain, group in groups.items()}


def encode(tokenizer: Tokenizer, record: dict[str, object]) -> list[int]:
    """Token ids of a prompt record."""
    if "messages" in record:
        return tokenizer.chat(json.loads(json.dumps(record["messages"])))
    return tokenizer.encode(str(record["prompt"]))


@torch.no_grad()
def agreement(
    head: HeadForTraining, target: Llama, text: Text, columns: list[int], ids: torch.Tensor | None
) -> list[list[bool]]:
    """[s][t]: along the text, is the guess of row t at step s the text's token t + 2? All rows of one text."""
    whole = Text(text.ids, 0, text.states)
    k = NUM_DRAFT_TOKENS
    if len(text.states) < 2:
        return [[] for _ in range(k)]
    batch = make_batch([whole], columns, target.config.hidden_size, k, len(text.ids), "cpu")
    embedding = dense(target.ops, target.weights.embedding)
    weight = dense(target.ops, target.weights.lm_head) if ids is None else head.lm_head.weight
    outputs = head(embedding[batch.tokens], batch.states, batch.rows, k)
    found = []
    first = max(0, text.num_given - 1)  # the first token comes from the pass over the prompt
    for out in outputs:
        best = (out @ weight.T).argmax(-1)
        best = best if ids is None else ids[best]
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
