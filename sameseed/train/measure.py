"""What a finished run is measured by, written as results.json, prompts, a loss curve and two model cards."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sameseed.train import data as corpus
from sameseed.train.card import write_cards
from sameseed.train.checkpoint import read_tensors
from sameseed.train.data import Document
from sameseed.train.evaluate import GreedyAcceptance, acceptance, perplexity
from sameseed.train.model import LlamaForTraining
from sameseed.train.plot import plot_losses
from sameseed.train.prompts import encode_prompt, held_out_prompts, read_prompts, write_prompts
from sameseed.train.recipe import Recipe
from sameseed.train.rollout import Rollout, write

NUM_DRAFT_TOKENS = 4  # the chain length that the card speaks of
PROMPTS_PER_DOMAIN = 12
DEMO_PROMPTS_PER_DOMAIN = 4
NEW_TOKENS = 128


def measure(
    recipe: Recipe, data: Path, out: Path, tokenizer: Tokenizer, target: LlamaForTraining, draft: LlamaForTraining
) -> dict[str, Any]:
    """Held-out perplexity of both models and greedy acceptance of the pair, by domain; all files beside them."""
    documents = corpus.held_out_documents(recipe, data)
    write_prompt_files(recipe, documents, out)
    records = read_prompts(out / "prompts_heldout.jsonl")
    rollouts = write(
        target,
        [encode_prompt(tokenizer, r) for r in records],
        tokenizer,
        new_tokens=NEW_TOKENS,
        batch=32,
        temperatures=[0.0] * len(records),
        seed=0,
    )
    row_tokens = recipe.target.train.row_tokens
    num_rows = read_tensors(out / "rows.safetensors")[0]["rows"].shape[0]
    results = {
        "recipe": recipe.name,
        "seed": recipe.seed,
        "parameters": {"target": target.num_parameters(), "draft": draft.num_parameters()},
        "passes": round(recipe.target.train.steps * recipe.target.train.rows / num_rows, 3),
        "target": json.loads((out / "target.done.json").read_text(encoding="utf-8")),
        "draft": json.loads((out / "draft.done.json").read_text(encoding="utf-8")),
        "perplexity": {
            name: {d: dataclasses.asdict(p) for d, p in perplexity(model, documents, tokenizer, row_tokens).items()}
            for name, model in (("target", target), ("draft", draft))
        },
        "acceptance": acceptance_by_domain(draft, [r["domain"] for r in records], rollouts),
        "num_draft_tokens": NUM_DRAFT_TOKENS,
        "prompts": len(records),
    }
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    plot_losses(out / "log.jsonl", out / "loss.png")
    write_cards(recipe, results, out)
    return results


def write_prompt_files(recipe: Recipe, documents: list[Document], out: Path) -> None:
    """prompts_heldout.jsonl for acceptance, prompts.jsonl for demonstrations: of different documents."""
    domains = list(dict.fromkeys(s.domain for s in recipe.source))
    by_domain = [[d for d in documents if d.domain == domain] for domain in domains]
    shown = [d for own in by_domain for d in own[::3]]
    measured = [d for own in by_domain for i, d in enumerate(own) if i % 3]
    for name, pool, count in (
        ("prompts_heldout.jsonl", measured, PROMPTS_PER_DOMAIN),
        ("prompts.jsonl", shown, DEMO_PROMPTS_PER_DOMAIN),
    ):
        write_prompts(held_out_prompts(pool, dict.fromkeys(domains, count), recipe.seed), out / name)


def acceptance_by_domain(
    draft: LlamaForTraining, domains: list[str], rollouts: list[Rollout]
) -> dict[str, dict[str, float]]:
    """Counts and rates by domain, and over all prompts under `all`."""
    grouped: dict[str, list[Rollout]] = {"all": rollouts}
    for domain, rollout in zip(domains, rollouts, strict=True):
        grouped.setdefault(domain, []).append(rollout)
    return {d: as_table(acceptance(draft, group, NUM_DRAFT_TOKENS)) for d, group in grouped.items()}


def as_table(counts: GreedyAcceptance) -> dict[str, float]:
    """Counts and rates, rounded for reading."""
    table = dataclasses.asdict(counts)
    return {**table, "agreement": round(counts.agreement, 4), "rate": round(counts.rate, 4)}
