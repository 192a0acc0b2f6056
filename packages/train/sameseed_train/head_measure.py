"""Measure a head's acceptance rate on texts that the target writes greedily after held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from sameseed.models.head_config import BlockConfig, read_head_config
from sameseed.scheme import cache_format
from sameseed_train.block_job import block_batch, choose_anchors, inputs, whole_rows, whole_weight
from sameseed_train.block_model import BlockForTraining
from sameseed_train.head_job import dense, make_batch
from sameseed_train.head_model import HeadForTraining
from sameseed_train.head_recipe import HeadRecipe
from sameseed_train.measure import count_chains
from sameseed_train.own import Own
from sameseed_train.seeds import Prompt
from sameseed_train.states import Seed, StoredTexts, TextStates, collect, digest_of

NUM_DRAFT_TOKENS = 4  # the chain length that the model card reports
NEW_TOKENS = 128

Guesses = list[list[bool]]  # [s][t]: whether the guess of row t at step s is right, i.e. the text's token t + 2


def write_held_out(own: Own, prompts: Seq[Prompt], folder: Path, recipe: HeadRecipe) -> StoredTexts:
    """What the target writes greedily to held-out prompts: NEW_TOKENS tokens at most, kept in `folder`."""
    seeds = [Seed(ids, NEW_TOKENS) for ids, _ in prompts]
    cache, batch = cache_format(recipe.kv_format, own.target.weights.dense), min(recipe.batch, len(seeds))
    found = collect(own.target, seeds, folder / digest_of(seeds), own.states, batch=batch, kv_format=cache, seed=0)
    return StoredTexts([path for _, path in found])


def measure_head(folder: Path, own: Own, texts: StoredTexts, domains: Seq[str]) -> dict[str, dict[str, object]]:
    """Acceptance counts of the exported head on held-out texts, by domain and under `all` for all of them."""
    head = _ExportedHead(folder, own)
    groups: dict[str, list[Guesses]] = {"all": []}
    for domain, ids, given in zip(domains, texts.ids, texts.num_given, strict=True):
        (read,) = own.states.of([(ids, given)])
        groups["all"].append(head.guesses(read))
        groups.setdefault(domain, []).append(groups["all"][-1])
    return {domain: summary(group) for domain, group in groups.items()}


class _ExportedHead:
    """A head loaded from its folder, for its target."""

    def __init__(self, folder: Path, own: Own) -> None:
        config, target = read_head_config(folder), own.target
        weights = target.weights
        self._columns = own.columns(config.captures(own.num_layers))
        self._width, self._device = target.config.hidden_size, str(target.device)
        head = BlockForTraining(config, 0) if isinstance(config, BlockConfig) else HeadForTraining(config, 0)
        tensors = load_file(str(folder / "model.safetensors"))
        self._ids = torch.arange(config.layer.vocab_size)  # the target's token id of each token of the head
        if "d2t" in tensors:
            self._ids = torch.arange(len(tensors["d2t"])) + tensors.pop("d2t")
            tensors.pop("t2d")
        head.load_state_dict({n: t.float() for n, t in tensors.items()})
        self._head = head.to(self._device)
        self._embedding = dense(target.ops, weights.embedding)
        self._lm_head = dense(target.ops, weights.lm_head) if not hasattr(head, "lm_head") else head.lm_head.weight

    @torch.no_grad()
    def guesses(self, text: TextStates) -> Guesses:
        """Whether the head's guesses are right, along a text of the target."""
        if isinstance(self._head, BlockForTraining):
            return self._block_guesses(self._head, text)
        whole = TextStates(text.ids, 0, text.states)
        if len(text.states) < 2:
            return [[] for _ in range(NUM_DRAFT_TOKENS)]
        rows = make_batch([whole], self._columns, self._width, NUM_DRAFT_TOKENS, self._device)
        outputs = self._head(self._embedding[rows.tokens], rows.states, rows.rows, NUM_DRAFT_TOKENS)
        first = max(0, text.num_given - 1)  # the first token comes from the pass over the prompt
        best = (self._ids[(out @ self._lm_head.T).argmax(-1).cpu()] for out in outputs)
        return [(b == text.ids[2:].long())[first:].tolist() for b in best]

    def _block_guesses(self, head: BlockForTraining, text: TextStates) -> Guesses:
        num, count = head.config.num_guesses, len(text.ids) - 1 - max(1, text.num_given)
        right = [[False] * max(0, count) for _ in range(NUM_DRAFT_TOKENS)]
        if count < 1:
            return right
        anchors = [choose_anchors(text, count, None)]
        batch = block_batch([text], anchors, self._columns, self._width, num, self._device)
        outputs = head(inputs(head.config, batch, self._embedding), batch.states, batch.anchors)[0]  # [K, G, C]
        rows = whole_rows(head, outputs.flatten(0, 1), batch.tokens[0].flatten())
        best = self._ids[(rows @ whole_weight(head, self._lm_head).T).argmax(-1).cpu()].view(-1, num)
        for k, anchor in enumerate(batch.anchors[0].tolist()):
            for g in range(min(NUM_DRAFT_TOKENS, count - k)):
                right[g][k + g] = int(best[k, g]) == int(text.ids[anchor + 1 + g])
        return right


def curve(rows: Seq[dict[str, Any]]) -> list[dict[str, Any]]:
    """Acceptance against updates, tokens trained on and different tokens, from the log's rows; the last of a step."""
    found = {}
    for row in rows:
        whole = row["acceptance"]["all"]
        counts = {name: row[name] for name in ("step", "tokens", "text_tokens")}
        found[row["step"]] = {**counts, "rate": whole["rate"], "agreement": whole["agreement"]}
    return [found[step] for step in sorted(found)]


def summary(texts: list[Guesses]) -> dict[str, object]:
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
