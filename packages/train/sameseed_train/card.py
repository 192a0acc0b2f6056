"""The model cards of a pair: data, licences, recipe and measurements, written from the results."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sameseed_train.recipe import Recipe, SourceSettings

FRONT_MATTER = "---\nlicense: apache-2.0\nlanguage: en\nlibrary_name: sameseed\npipeline_tag: text-generation\n---\n\n"


def table(head: str, num_words: int, rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table; `head`: column titles, bars between; the first `num_words` columns are text, not numbers."""
    columns = head.count("|") + 1
    rule = ["---"] * num_words + ["---:"] * (columns - num_words)
    lines = [head, " | ".join(rule), *(" | ".join(map(str, row)) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)


def source_table(sources: Iterable[SourceSettings]) -> str:
    """A table of the training sources and their licences."""
    rows = []
    for s in sources:
        stdlib = "standard library of the running Python (no tests, no data)"
        made = {
            "stdlib": stdlib,
            "sums": "small sums in words, made up by sameseed",
            "records": "small records (people as JSON, tables, lists), made up by sameseed",
        }
        names = made.get(s.kind) or ", ".join(f"`{n}`" for n in s.names)
        kept = f", at most {s.max_mb:g} MB" if s.max_mb < 1e6 else ""
        rows.append((s.domain, names, f"{s.epochs:g}{kept}", s.licence))
    return table("domain | source | times in a pass | licence", 4, rows)


def write_cards(recipe: Recipe, results: dict[str, Any], out: Path) -> None:
    """README.md in the folders of the target and of the draft."""
    draft, rollouts = recipe.draft, recipe.draft.rollouts
    loss = (
        f" The loss is KL(target || draft) plus {draft.argmax_weight:g} times the cross entropy on the target's "
        f"argmax. {draft.corpus_share:.0%} of the rows are corpus text; the others are the target's own "
        f"continuations of {rollouts.num_prompts} prompts cut from the training data ({rollouts.greedy:.0%} greedy, "
        f"the others sampled at temperature {rollouts.temperature:g}), where only the tokens that the target wrote "
        "count. Embeddings start as the principal components of the target's."
    )
    target = f"Made by `sameseed train recipes/{recipe.name}.toml` (seed {recipe.seed})"
    against = ""
    if recipe.unlikelihood:
        steps, u = results["unlikelihood"]["step"], recipe.unlikelihood
        against = (
            f" Then {steps} steps against repetition (sequence-level unlikelihood, Welleck et al., 2020): the target "
            f"continued {u.prompts} training prompts greedily at each, and what ended an n-gram of {u.ngram} tokens "
            "that its text had before became less likely."
        )
    distilled = f"Distilled from the target beside it (same tokenizer, same recipe, seed {recipe.seed})"
    for name, made, more in (("target", target, against), ("draft", distilled, loss)):
        (out / name / "README.md").write_text(card(recipe, results, name, made, more), encoding="utf-8")


def card(recipe: Recipe, results: dict[str, Any], name: str, made: str, more: str) -> str:
    """The README.md of the target or the draft (`name`); `made`: how it was made, `more`: further text on this."""
    settings = recipe.target if name == "target" else recipe.draft
    s, train, done = settings.shape, settings.train, results[name]
    context = s.max_positions
    note = f"\n{recipe.note.strip()}\n" if recipe.note else ""
    precision = "float32" if train.precision == "float32" else "float32, with matrix products in bfloat16"
    return f"""{FRONT_MATTER}# sameseed {recipe.name}: {name}

Llama architecture, {results["parameters"][name] / 1e6:.2f} M parameters: {s.num_layers} layers, hidden \
{s.hidden_size}, {s.num_heads} heads and {s.num_kv_heads} KV heads of {s.head_dim}, feed-forward \
{s.intermediate_size}, {s.vocab_size} tokens (byte-level BPE), tied embeddings, bfloat16. Weights: Apache-2.0.

{made}: {done["step"]} steps of {train.rows} rows of {train.row_tokens} tokens ({done["tokens"] / 1e6:.1f} M tokens) \
on a CPU in {precision}; Muon for the matrices, AdamW for the rest.{more}

## Data

{source_table(recipe.source)}

The target read {results["passes"]:g} passes over this mixture, in a seeded random order.

{figures(results, name)}

## Limits

This model is a part of sameseed's tests and demonstrations. It writes text in the manner of its domains; it does not
know facts, and it must not be asked for advice. It was trained on rows of \
{train.row_tokens}
tokens: longer contexts run (up to {context}) but were never seen. English and Python only; any UTF-8 text can be
encoded.
{note}"""


def figures(results: dict[str, Any], name: str) -> str:
    """The card's section of measurements, for "target" or "draft"."""
    rows = [
        (d, v["tokens"], f"{v['perplexity']:.2f}", f"{v['bits_per_byte']:.3f}")
        for d, v in results["perplexity"][name].items()
    ]
    chains = [
        (d, v["tokens"], v["drafted"], v["accepted"], f"{v['rate']:.3f}", f"{v['agreement']:.3f}")
        for d, v in results["acceptance"].items()
    ]
    right = results["right_sums"]
    sums = f" Of {right['asked']} held-out sums it answered {right['right']} rightly." if right else ""
    return f"""## Held-out perplexity

On documents that no stage trained on, as many tokens of each as a training row has:

{table("domain | tokens | perplexity a token | bits a byte", 1, rows)}

## Acceptance

Greedy, chains of {results["num_draft_tokens"]} drafted tokens (what follows a rejected token counts as drafted; no \
token is drafted past the text's end), on {results["prompts"]} held-out prompts (`prompts_heldout.jsonl`):

{table("domain | tokens | drafted | accepted | acceptance | agreement a token", 1, chains)}

## Its greedy texts

On the same prompts, {results["repeated"]["all"]:.1%} of the 8-grams of the target's texts repeat one of the same text \
({", ".join(f"{d} {v:.1%}" for d, v in results["repeated"].items() if d != "all")}).{sums}"""
