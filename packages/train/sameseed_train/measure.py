"""Measurements of a finished run, written as results.json, prompts, a plot of the losses and two model cards."""

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

from sameseed_train import data as corpus
from sameseed_train.card import write_cards
from sameseed_train.checkpoint import read_tensors
from sameseed_train.data import Document
from sameseed_train.model import LlamaForTraining
from sameseed_train.recipe import Recipe
from sameseed_train.rollout import Rollout, write
from sameseed_train.tokenizer import ASSISTANT, token_id
from sameseed_train.unlikelihood import repeated

NUM_DRAFT_TOKENS = 4  # the chain length that the model card reports
PROMPTS_PER_DOMAIN = 12
DEMO_PROMPTS_PER_DOMAIN = 8
NEW_TOKENS = 128
NGRAM = 8  # length of the n-grams that `repetition` counts
TEXT_CHARACTERS = (160, 400)  # of a plain-text prompt, cut at a line or word end
CHAT_CHARACTERS = 900  # a longer question would leave too little of the trained context for its answer


def measure(
    recipe: Recipe,
    documents: list[Document],
    out: Path,
    tokenizer: Tokenizer,
    target: LlamaForTraining,
    draft: LlamaForTraining,
) -> dict[str, Any]:
    """Measure perplexity on held-out `documents` and greedy acceptance, by domain; write results, plot and cards."""
    records = write_prompts(recipe, documents, out)
    prompts = [encode_prompt(tokenizer, r) for r in records]
    rollouts = write(target, prompts, tokenizer, NEW_TOKENS, 32, [0.0] * len(records), 0)
    groups: dict[str, list[Rollout]] = {"all": rollouts}
    for record, rollout in zip(records, rollouts, strict=True):
        groups.setdefault(record["domain"], []).append(rollout)
    num_rows = read_tensors(out / "rows.safetensors")[0]["rows"].shape[0]
    models, train = {"target": target, "draft": draft}, recipe.target.train
    stages = [*models, *(["unlikelihood"] if recipe.unlikelihood else [])]
    results = {
        "recipe": recipe.name,
        "seed": recipe.seed,
        "parameters": {name: model.num_parameters() for name, model in models.items()},
        "passes": round(train.steps * train.rows / num_rows, 3),
        **{name: json.loads((out / f"{name}.done.json").read_text(encoding="utf-8")) for name in stages},
        "perplexity": {
            name: perplexity(model, documents, tokenizer, train.row_tokens) for name, model in models.items()
        },
        "repeated": {d: repetition(g) for d, g in groups.items()},
        "right_sums": right_sums(recipe, documents, tokenizer, target),
        "acceptance": {d: acceptance(draft, g, NUM_DRAFT_TOKENS) for d, g in groups.items()},
        "num_draft_tokens": NUM_DRAFT_TOKENS,
        "prompts": len(records),
    }
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    plot_losses(out / "log.jsonl", out / "loss.png")
    write_cards(recipe, results, out)
    return results


def write_prompts(recipe: Recipe, documents: list[Document], out: Path) -> list[dict[str, Any]]:
    """Write prompts of held-out `documents`, for acceptance (returned) and for demonstrations."""
    domains = list(dict.fromkeys(s.domain for s in recipe.source))
    by_domain = [[d for d in documents if d.domain == domain] for domain in domains]
    shown = [d for own in by_domain for d in own[::3]]  # documents not used for acceptance
    measured = [d for own in by_domain for i, d in enumerate(own) if i % 3]
    records = held_out_prompts(measured, domains, PROMPTS_PER_DOMAIN, recipe.seed)
    shown_domains = list(dict.fromkeys(s.domain for s in recipe.source if s.shown))
    demos = held_out_prompts(shown, shown_domains, DEMO_PROMPTS_PER_DOMAIN, recipe.seed)
    for name, own in (("prompts_heldout.jsonl", records), ("prompts.jsonl", demos)):
        lines = (json.dumps(r, ensure_ascii=False) + "\n" for r in own)
        (out / name).write_text("".join(lines), encoding="utf-8")
    return records


def repetition(rollouts: list[Rollout]) -> float:
    """Share of the n-grams of `NGRAM` tokens that occurred earlier in the same text."""
    number = sum(max(0, len(r.new) - NGRAM + 1) for r in rollouts)
    return round(sum(sum(repeated(r.new, NGRAM)) for r in rollouts) / max(1, number), 4)


def right_sums(
    recipe: Recipe, documents: list[Document], tokenizer: Tokenizer, target: LlamaForTraining
) -> dict[str, int]:
    """The number of held-out sums that were asked, and of those whose greedy answer ends with the right number."""
    domains = {s.domain for s in recipe.source if s.kind == "sums"}
    asked = [d for d in documents if d.domain in domains]
    if not asked:
        return {}
    prompts = [encode_prompt(tokenizer, {"messages": [{"role": "user", "content": d.turns[0][1]}]}) for d in asked]
    answers = write(target, prompts, tokenizer, 48, 32, [0.0] * len(asked), 0)
    last = [(tokenizer.decode(a.new), d.turns[1][1]) for a, d in zip(answers, asked, strict=True)]
    right = sum(re.findall(r"\d+", said)[-1:] == re.findall(r"\d+", known)[-1:] for said, known in last)
    return {"asked": len(asked), "right": right}


def prompt_record(document: Document, number: int, rng: random.Random) -> dict[str, Any] | None:
    """A prompt from one held-out document, or None if its question is too long."""
    record = {"id": f"{document.domain}-{number:03}", "domain": document.domain}
    if document.turns:
        if len(document.turns[0][1]) > CHAT_CHARACTERS:
            return None
        return {**record, "messages": [{"role": "user", "content": document.turns[0][1]}]}
    length = rng.randrange(*TEXT_CHARACTERS)
    starts = [i + 2 for i in range(len(document.text) - 2000) if document.text[i : i + 2] == "\n\n"]
    start = rng.choice([0, *starts])
    text = document.text[start : start + length]
    for mark in ("\n", " "):
        cut = text.rfind(mark)
        if cut > length // 2:
            return {**record, "prompt": text[:cut]}
    return {**record, "prompt": text}


def held_out_prompts(documents: list[Document], domains: list[str], wanted: int, seed: int) -> list[dict[str, Any]]:
    """At most `wanted` different prompts of each domain; a plain document may give several, from different places."""
    rng = random.Random(seed)
    records: list[dict[str, Any]] = []
    for domain in domains:
        pool = [d for d in documents if d.domain == domain]
        rng.shuffle(pool)
        seen: dict[str, dict[str, Any]] = {}
        for attempt in range(3 * wanted):
            if len(seen) == wanted or (attempt >= len(pool) and pool and pool[0].turns) or not pool:
                break
            record = prompt_record(pool[attempt % len(pool)], len(seen), rng)
            if record is not None:
                seen.setdefault(str(record.get("prompt") or record["messages"]), record)
        records += seen.values()
    return records


def encode_prompt(tokenizer: Tokenizer, record: dict[str, Any]) -> list[int]:
    """Token ids of a prompt record: by the chat template, or the begin token and the text."""
    turns = tuple((m["role"], m["content"].strip()) for m in record.get("messages", ()))
    ids = corpus.encode(tokenizer, Document("", "", record.get("prompt", ""), turns))
    return [*ids, token_id(tokenizer, ASSISTANT)] if turns else ids[:-1]


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


@torch.inference_mode()
def acceptance(draft: LlamaForTraining, rollouts: list[Rollout], k: int) -> dict[str, float]:
    """Exact counts of greedy speculative decoding with chains of k draft tokens over the target's `rollouts`.

    Tokens after a rejected one count as drafted. `agreement`: share of tokens on which draft and target agree.
    Accepted tokens equal the target's text, so the draft's guess at a place depends only on that text. Therefore one
    pass of the draft over the text gives the outcome of every round.
    """
    draft.eval()
    drafted = accepted = tokens = agreed = 0
    for rollout in rollouts:
        ids = torch.tensor([rollout.prompt + rollout.new], device=draft.device)
        guess = draft(ids[:, :-1])[0, len(rollout.prompt) - 1 :].argmax(-1).cpu()
        agree = (guess == torch.tensor(rollout.new)).tolist()
        tokens, agreed = tokens + len(agree), agreed + sum(agree)
        counts = count_chains([agree[1:]] * k)  # the first token comes from the pass over the prompt
        drafted, accepted = drafted + counts[0], accepted + counts[1]
    share, rate = round(agreed / max(1, tokens), 4), round(accepted / max(1, drafted), 4)
    return {"drafted": drafted, "accepted": accepted, "tokens": tokens, "agreement": share, "rate": rate}


def count_chains(right: Seq[Seq[bool]]) -> tuple[int, int]:
    """The numbers of drafted and accepted tokens of speculative decoding along a text.

    right[s][t]: whether the guess of token t is right when s draft tokens precede it in the chain.
    """
    drafted = accepted = at = 0
    while at < len(right[0]):
        size = min(len(right), len(right[0]) - at)
        run = next((s for s in range(size) if not right[s][at + s]), size)
        drafted, accepted, at = drafted + size, accepted + run, at + run + 1
    return drafted, accepted


def plot_losses(log: Path, path: Path) -> None:
    """Plot one panel per stage: the loss of every step (the last one of a repeated step), and its running mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    losses: dict[str, dict[int, float]] = defaultdict(dict)
    for line in log.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # a line that was cut off when its run was killed
            continue
        if "loss" in row:
            losses[row["stage"]][row["step"]] = row["loss"]
    figure, panels = pyplot.subplots(1, max(1, len(losses)), figsize=(5 * max(1, len(losses)), 3.5), squeeze=False)
    for panel, (stage, by_step) in zip(panels[0], losses.items(), strict=True):
        steps = sorted(by_step)
        mean, means = by_step[steps[0]], []
        for step in steps:
            mean = 0.95 * mean + 0.05 * by_step[step]
            means.append(mean)
        panel.plot(steps, [by_step[s] for s in steps], color="0.8", linewidth=0.6)
        panel.plot(steps, means, color="tab:blue")
        panel.set(title=stage, xlabel="step", ylabel="loss (nats a token)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
