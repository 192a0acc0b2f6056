"""The model cards of a run: data, licences, recipe and what was measured, written from the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sameseed.train.recipe import DraftSettings, ModelSettings, Recipe, SourceSettings

LIMITS = """## Limits

This model is a part of sameseed's tests and demonstrations. It writes text in the manner of its domains; it does not
know facts, its arithmetic is mostly wrong, and it must not be asked for advice. It was trained on rows of {row_tokens}
tokens: longer contexts run (up to {max_positions}) but were never seen. English and Python only; any UTF-8 text can be
encoded.
"""


def write_cards(recipe: Recipe, results: dict[str, Any], out: Path) -> None:
    """README.md in the folders of the target and of the draft."""
    (out / "target" / "README.md").write_text(target_card(recipe, results), encoding="utf-8")
    (out / "draft" / "README.md").write_text(draft_card(recipe, results), encoding="utf-8")


FRONT_MATTER = "---\nlicense: apache-2.0\nlanguage: en\nlibrary_name: sameseed\npipeline_tag: text-generation\n---\n\n"


def shape_line(settings: ModelSettings | DraftSettings, parameters: int) -> str:
    """Architecture and size in a sentence."""
    s = settings.shape
    return (
        f"Llama architecture, {parameters / 1e6:.2f} M parameters: {s.num_layers} layers, hidden {s.hidden_size}, "
        f"{s.num_heads} heads and {s.num_kv_heads} KV heads of {s.head_dim}, feed-forward {s.intermediate_size}, "
        f"{s.vocab_size} tokens (byte-level BPE), tied embeddings, bfloat16. Weights: Apache-2.0."
    )


def source_row(source: SourceSettings) -> str:
    """One line of the data table."""
    names = "standard library of the running Python (no tests, no data)" if source.kind == "stdlib" else ""
    names = names or ", ".join(f"`{n}`" for n in source.names)
    kept = f", at most {source.max_mb:g} MB" if source.max_mb < 1e6 else ""
    return f"| {source.domain} | {names} | {source.epochs:g}{kept} | {source.licence} |"


def data_section(recipe: Recipe, results: dict[str, Any]) -> str:
    """What was trained on, under which licence."""
    rows = "\n".join(source_row(s) for s in recipe.source)
    head = "| domain | source | times in a pass | licence |\n| --- | --- | --- | --- |"
    read = f"The target read {results['passes']:g} passes over this mixture, in a seeded random order."
    return f"## Data\n\n{head}\n{rows}\n\n{read}\n\n"


def perplexity_section(table: dict[str, dict[str, float]]) -> str:
    """One model's held-out perplexity by domain."""
    rows = "\n".join(
        f"| {d} | {v['tokens']} | {v['perplexity']:.2f} | {v['bits_per_byte']:.3f} |" for d, v in table.items()
    )
    head = "| domain | tokens | perplexity a token | bits a byte |\n| --- | ---: | ---: | ---: |"
    about = "On documents that no stage trained on, as many tokens of each as a training row has:"
    return f"## Held-out perplexity\n\n{about}\n\n{head}\n{rows}\n\n"


def acceptance_section(results: dict[str, Any]) -> str:
    """The pair's greedy acceptance by domain."""
    k = results["num_draft_tokens"]
    head = "| domain | tokens | drafted | accepted | acceptance | agreement a token |\n" + "| --- |" + " ---: |" * 5
    rows = "\n".join(
        f"| {d} | {v['tokens']} | {v['drafted']} | {v['accepted']} | {v['rate']:.3f} | {v['agreement']:.3f} |"
        for d, v in results["acceptance"].items()
    )
    return (
        f"## Acceptance\n\nGreedy, chains of {k} drafted tokens (what follows a rejected token counts as drafted; no "
        "token is drafted past the text's end), on "
        f"{results['prompts']} held-out prompts (`prompts_heldout.jsonl`):\n\n{head}\n{rows}\n\n"
    )


def training_line(settings: ModelSettings | DraftSettings, done: dict[str, Any]) -> str:
    """How long and with what a model was trained."""
    train = settings.train
    return (
        f"{done['step']} steps of {train.rows} rows of {train.row_tokens} tokens "
        f"({done['tokens'] / 1e6:.1f} M tokens) on a CPU in float32; Muon for the matrices, AdamW for the rest"
    )


def limits_section(recipe: Recipe, settings: ModelSettings | DraftSettings) -> str:
    """What not to expect, and the recipe's own note."""
    limits = LIMITS.format(row_tokens=settings.train.row_tokens, max_positions=settings.shape.max_positions)
    return limits + (f"\n{recipe.note.strip()}\n" if recipe.note else "")


def target_card(recipe: Recipe, results: dict[str, Any]) -> str:
    """The target's README.md."""
    settings = recipe.target
    return (
        FRONT_MATTER
        + f"# sameseed {recipe.name}: target\n\n"
        + shape_line(settings, results["parameters"]["target"])
        + f"\n\nMade by `sameseed train recipes/{recipe.name}.toml` (seed {recipe.seed}): "
        + training_line(settings, results["target"])
        + ".\n\n"
        + data_section(recipe, results)
        + perplexity_section(results["perplexity"]["target"])
        + acceptance_section(results)
        + limits_section(recipe, settings)
    )


def draft_card(recipe: Recipe, results: dict[str, Any]) -> str:
    """The draft's README.md."""
    settings, rollouts = recipe.draft, recipe.draft.rollouts
    return (
        FRONT_MATTER
        + f"# sameseed {recipe.name}: draft\n\n"
        + shape_line(settings, results["parameters"]["draft"])
        + f"\n\nDistilled from the target beside it (same tokenizer, same recipe, seed {recipe.seed}): "
        + training_line(settings, results["draft"])
        + f". The loss is KL(target || draft) plus {settings.argmax_weight:g} times the cross entropy on the target's "
        + f"argmax. {settings.corpus_share:.0%} of the rows are corpus text; the others are the target's own "
        + f"continuations of {rollouts.num_prompts} prompts cut from the training data ({rollouts.greedy:.0%} greedy, "
        + f"the others sampled at temperature {rollouts.temperature:g}), where only the tokens that the target wrote "
        + "count. Embeddings start as the principal components of the target's.\n\n"
        + data_section(recipe, results)
        + perplexity_section(results["perplexity"]["draft"])
        + acceptance_section(results)
        + limits_section(recipe, settings)
    )
