"""Measure a head's acceptance rate on texts that the target writes greedily after held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from sameseed.models.head_config import read_head_config
from sameseed.scheme import cache_format
from sameseed_train.head_job import new_head
from sameseed_train.head_model import Right
from sameseed_train.head_recipe import HeadRecipe
from sameseed_train.measure import count_chains
from sameseed_train.own import Own, dense
from sameseed_train.seeds import Prompt
from sameseed_train.states import Seed, StoredTexts, collect, digest_of

NUM_DRAFT_TOKENS = 4  # the chain length that the model card reports
NEW_TOKENS = 128


def write_held_out(own: Own, prompts: Seq[Prompt], folder: Path, recipe: HeadRecipe) -> StoredTexts:
    """What the target writes greedily to held-out prompts: NEW_TOKENS tokens at most, kept in `folder`."""
    seeds = [Seed(ids, NEW_TOKENS) for ids, _ in prompts]
    cache, batch = cache_format(recipe.kv_format, own.target.weights.dense), min(recipe.batch, len(seeds))
    found = collect(own.target, seeds, folder / digest_of(seeds), own.states, batch=batch, kv_format=cache, seed=0)
    return StoredTexts([path for _, path in found])


def measure_head(folder: Path, own: Own, texts: StoredTexts, domains: Seq[str]) -> dict[str, dict[str, object]]:
    """Acceptance counts of the exported head on held-out texts, by domain and under `all` for all of them."""
    config, tensors = read_head_config(folder), load_file(str(folder / "model.safetensors"))
    ids = torch.arange(config.draft_vocab_size) + tensors.pop("d2t", 0)  # the target's id of each token of the head
    tensors.pop("t2d", None)
    head = new_head(config, 0)
    head.load_state_dict({n: t.float() for n, t in tensors.items()})
    head.to(own.target.device)
    columns, weights, backend = own.columns(config.captures(own.num_layers)), own.target.weights, own.target.ops
    lm_head = head.lm_head.weight if hasattr(head, "lm_head") else dense(backend, weights.lm_head)
    embedding = dense(backend, weights.embedding)
    groups: dict[str, list[Right]] = {"all": []}
    for domain, ids_, given in zip(domains, texts.ids, texts.num_given, strict=True):
        (read,) = own.states.of([(ids_, given)])
        with torch.no_grad():
            groups["all"].append(head.right(read, columns, embedding, lm_head, ids, NUM_DRAFT_TOKENS))
        groups.setdefault(domain, []).append(groups["all"][-1])
    return {domain: summary(group) for domain, group in groups.items()}


def curve(rows: Seq[dict[str, Any]]) -> list[dict[str, Any]]:
    """Acceptance against updates, tokens trained on and different tokens, from the log's rows; the last of a step."""
    found = {}
    for row in rows:
        whole = row["acceptance"]["all"]
        counts = {name: row[name] for name in ("step", "tokens", "text_tokens")}
        found[row["step"]] = {**counts, "rate": whole["rate"], "agreement": whole["agreement"]}
    return [found[step] for step in sorted(found)]


def summary(texts: list[Right]) -> dict[str, object]:
    """Counts and acceptance rate of greedy chains of NUM_DRAFT_TOKENS over texts.

    agreement[s]: share of places where, after s right guesses along the text, the next guess is right too.
    """
    counts = [count_chains(text) for text in texts]
    drafted, accepted = sum(c[0] for c in counts), sum(c[1] for c in counts)
    shares = []
    for step in range(NUM_DRAFT_TOKENS):
        right = [r for text in texts for r in text[step][step:]]
        shares.append(round(sum(right) / max(1, len(right)), 4))
    rate = round(accepted / max(1, drafted), 4)
    tokens = sum(len(text[0]) for text in texts)
    return {"drafted": drafted, "accepted": accepted, "tokens": tokens, "rate": rate, "agreement": shares}
