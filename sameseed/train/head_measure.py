"""How often a head's guesses are right: counted on what the target writes greedily to held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

import torch
from safetensors.torch import load_file

from sameseed.models.block_config import BlockConfig
from sameseed.models.eagle_config import read_head_config
from sameseed.models.llama import Llama
from sameseed.scheme import cache_format
from sameseed.train.block_job import block_batch, choose_anchors, inputs, whole_rows, whole_weight
from sameseed.train.block_model import BlockForTraining
from sameseed.train.head_job import dense, make_batch
from sameseed.train.head_model import HeadForTraining
from sameseed.train.measure import count_chains
from sameseed.train.seeds import Prompt
from sameseed.train.states import Seed, TextStates, captured_layers, new_runner, write_texts

NUM_DRAFT_TOKENS = 4  # the chain length that the card speaks of
NEW_TOKENS = 128
BATCH = 32  # prompts that are continued together

Guesses = list[list[bool]]  # [s][t]: along a text, is the guess of row t at step s the text's token t + 2?


def measure_head(folder: Path, target: Llama, prompts: Seq[Prompt], kv_format: str) -> dict[str, dict[str, object]]:
    """Counts by domain, and over all prompts under `all`, of the head as it was exported, on the target's device."""
    config, device, weights = read_head_config(folder), str(target.device), target.weights
    is_block = isinstance(config, BlockConfig)
    captures = config.captures(target.config.num_layers)
    stored = captured_layers(captures, target.config.num_layers)
    columns = [stored.index(c) for c in captures]
    seeds = [Seed(ids, NEW_TOKENS) for ids, _ in prompts]
    cache, batch = cache_format(kv_format, weights.dense), min(BATCH, len(seeds))
    runner = new_runner(target, stored, batch, max(len(s.ids) for s in seeds) + NEW_TOKENS, cache)
    texts = write_texts(runner, seeds, batch, 0)
    head = BlockForTraining(config, 0) if isinstance(config, BlockConfig) else HeadForTraining(config, 0)
    tensors = load_file(str(folder / "model.safetensors"))
    ids = torch.arange(config.layer.vocab_size)  # the target's tokens that the head has
    if "d2t" in tensors:
        ids = torch.arange(len(tensors["d2t"])) + tensors.pop("d2t")
        tensors.pop("t2d")
    head.load_state_dict({n: t.float() for n, t in tensors.items()})
    head.to(device)
    embedding = dense(target.ops, weights.embedding)
    lm_head = dense(target.ops, weights.lm_head) if not hasattr(head, "lm_head") else head.lm_head.weight

    @torch.no_grad()
    def block_guesses(text: TextStates) -> Guesses:
        assert isinstance(head, BlockForTraining)
        num, count = head.config.num_guesses, len(text.ids) - 1 - max(1, text.num_given)
        right = [[False] * max(0, count) for _ in range(NUM_DRAFT_TOKENS)]
        if count < 1:
            return right
        anchors = [choose_anchors(text, count, None)]
        batch = block_batch([text], anchors, columns, target.config.hidden_size, num, device)
        outputs = head(inputs(head.config, batch, embedding), batch.states, batch.anchors)[0]  # [K, G, C]
        rows = whole_rows(head, outputs.flatten(0, 1), batch.tokens[0].flatten())
        best = ids[(rows @ whole_weight(head, lm_head).T).argmax(-1).cpu()].view(-1, num)
        for k, anchor in enumerate(batch.anchors[0].tolist()):
            for g in range(min(NUM_DRAFT_TOKENS, count - k)):
                right[g][k + g] = int(best[k, g]) == int(text.ids[anchor + 1 + g])
        return right

    @torch.no_grad()
    def guesses(text: TextStates) -> Guesses:
        if is_block:
            return block_guesses(text)
        assert isinstance(head, HeadForTraining)
        whole = TextStates(text.ids, 0, text.states)
        if len(text.states) < 2:
            return [[] for _ in range(NUM_DRAFT_TOKENS)]
        rows = make_batch([whole], columns, target.config.hidden_size, NUM_DRAFT_TOKENS, len(text.ids), device)
        outputs = head(embedding[rows.tokens], rows.states, rows.rows, NUM_DRAFT_TOKENS)
        first = max(0, text.num_given - 1)  # the first token comes from the pass over the prompt
        best = (ids[(out @ lm_head.T).argmax(-1).cpu()] for out in outputs)
        return [(b == text.ids[2:].long())[first:].tolist() for b in best]

    groups: dict[str, list[Guesses]] = {"all": []}
    for (_, domain), text in zip(prompts, texts, strict=True):
        groups["all"].append(guesses(text))
        groups.setdefault(domain, []).append(groups["all"][-1])
    return {domain: summary(group) for domain, group in groups.items()}


def summary(texts: list[Guesses]) -> dict[str, object]:
    """Greedy chains of NUM_DRAFT_TOKENS over texts; agreement[s]: share of places where, after s right guesses along
    the text, the next one is right too.
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
