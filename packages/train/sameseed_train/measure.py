"""Measurements of a finished pair: perplexity, repetition and sums, held-out prompts, and a plot of the losses."""

from __future__ import annotations

import json
import math
import random
import re
from collections import defaultdict
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from sameseed import ops
from sameseed.models.loader import load_model, load_tokenizer, target_scheme
from sameseed.report.plot import Panel, Series, draw
from sameseed.scheme import cache_format
from sameseed_train import data as corpus
from sameseed_train.data import Document
from sameseed_train.model import LlamaForTraining
from sameseed_train.recipe import Recipe
from sameseed_train.states import Seed, StoredTexts, TextStates, captured_layers, new_runner, write_texts
from sameseed_train.trainer import Log
from sameseed_train.unlikelihood import repeated

PROMPTS_PER_DOMAIN = 12
DEMO_PROMPTS_PER_DOMAIN = 8
NGRAM = 8  # length of the n-grams that `repetition` counts
TEXT_CHARACTERS = (160, 400)  # of a plain-text prompt, cut at a word's end
TOGETHER = 32  # texts that are continued together
POINTS = 60  # of a line in the plot of losses


@torch.inference_mode()
def perplexity(
    model: LlamaForTraining, documents: list[Document], tokenizer: Tokenizer, row_tokens: int
) -> dict[str, dict[str, float]]:
    """Per domain, over the first `row_tokens` tokens of every document: exp of the mean loss, and bits per byte."""
    model.eval()
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0])  # tokens, nats, bytes
    for document in documents:
        ids = corpus.encode(tokenizer, document)[: row_tokens + 1]
        row = torch.tensor([ids], device=model.device)
        own = sums[document.domain]
        own[0] += len(ids) - 1
        own[1] += float(model.loss(row[:, :-1], row[:, 1:])) * (len(ids) - 1)
        own[2] += len(tokenizer.decode(ids).encode())
    return {
        domain: {
            "tokens": tokens,
            "perplexity": round(math.exp(nats / tokens), 3),
            "bits_per_byte": round(nats / math.log(2) / max(1, size), 4),
        }
        for domain, (tokens, nats, size) in sums.items()
    }


def continued(target: Path, prompts: Seq[tuple[int, ...]], num_new: int, device: str) -> list[TextStates]:
    """Greedy continuations by the exported model, of `num_new` tokens at most."""
    model = load_model(target, ops.resolve("auto", device), target_scheme("auto", target), None, device)
    cache, layers = cache_format("auto", model.weights.dense), captured_layers((), model.config.num_layers)
    runner = new_runner(model, layers, cache, TOGETHER, max(map(len, prompts)) + num_new)
    return write_texts(runner, [Seed(ids, num_new) for ids in prompts], TOGETHER, 0)


def repetition(texts: StoredTexts, domains: Seq[str]) -> dict[str, float]:
    """Share of the n-grams of `NGRAM` tokens that occurred earlier in the same text, by domain and in all."""
    found: dict[str, list[bool]] = {"all": []}
    for ids, given, domain in zip(texts.ids, texts.num_given, domains, strict=True):
        ends = repeated(ids[given:].tolist(), NGRAM)[NGRAM - 1 :]
        found["all"] += ends
        found.setdefault(domain, []).extend(ends)
    return {domain: round(sum(ends) / max(1, len(ends)), 4) for domain, ends in found.items()}


def right_sums(recipe: Recipe, documents: list[Document], target: Path, device: str) -> dict[str, int]:
    """The number of held-out sums that were asked, and of those whose greedy answer ends with the right number."""
    domains = {s.domain for s in recipe.source if s.kind == "sums"}
    asked = [d for d in documents if d.domain in domains]
    if not asked:
        return {}
    tokenizer = load_tokenizer(target)
    prompts = [tuple(tokenizer.chat([{"role": "user", "content": d.turns[0][1]}], True)) for d in asked]
    answers = [tokenizer.decode(t.ids[t.num_given :].tolist()) for t in continued(target, prompts, 48, device)]
    last = [[re.findall(r"\d+", words)[-1:] for words in (a, d.turns[1][1])] for a, d in zip(answers, asked)]
    return {"asked": len(asked), "right": sum(said == known for said, known in last)}


def write_prompts(recipe: Recipe, documents: list[Document], out: Path, longest: int) -> list[dict[str, Any]]:
    """Write prompts of held-out `documents`, of `longest` bytes at most, for acceptance (returned) and to show."""
    rng = random.Random(recipe.seed)
    measured, shown = list[dict[str, Any]](), list[dict[str, Any]]()
    for domain, source in {s.domain: s for s in recipe.source}.items():
        own = [d for d in documents if d.domain == domain]
        measured += domain_prompts([d for i, d in enumerate(own) if i % 3], PROMPTS_PER_DOMAIN, longest, rng)
        shown += domain_prompts(own[::3], DEMO_PROMPTS_PER_DOMAIN, longest, rng) if source.shown else []
    for name, records in (("prompts_heldout.jsonl", measured), ("prompts.jsonl", shown)):
        lines = (json.dumps(r, ensure_ascii=False) + "\n" for r in records)
        (out / name).write_text("".join(lines), encoding="utf-8")
    return measured


def domain_prompts(documents: list[Document], most: int, longest: int, rng: random.Random) -> list[dict[str, Any]]:
    """At most `most` different prompts: first questions that are not too long, or the beginnings of texts."""
    found: dict[str, dict[str, Any]] = {}
    for document in rng.sample(documents, len(documents)):
        text = document.turns[0][1] if document.turns else document.text
        if not document.turns:
            text = text[: rng.randrange(*TEXT_CHARACTERS)].rsplit(" ", 1)[0]
        if len(text.encode()) <= longest and len(found) < most:
            asked = {"messages": [{"role": "user", "content": text}]} if document.turns else {"prompt": text}
            where = {"id": f"{document.domain}-{len(found):03}", "domain": document.domain}
            found.setdefault(text, {**where, **asked})
    return list(found.values())


def plot_losses(log: Log, path: Path) -> None:
    """Plot one panel per stage: the running mean of the loss (of a repeated step the last one)."""
    losses: dict[str, dict[int, float]] = defaultdict(dict)
    for row in log.rows():
        if "loss" in row:
            losses[row["stage"]][row["step"]] = row["loss"]
    panels = []
    for stage, by_step in losses.items():
        mean, points = by_step[min(by_step)], []
        for step in sorted(by_step):
            mean = 0.95 * mean + 0.05 * by_step[step]
            points.append((step + 1, mean))
        shown = points[:: max(1, len(points) // POINTS)]
        panels.append(Panel(stage, "step", [Series("loss, running mean", shown)], y="nats a token"))
    draw(panels, path)
