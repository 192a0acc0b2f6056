"""Model cards: a README.md with what a model is, its data, measurements, settings and limits."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sameseed.models.config import ModelConfig
from sameseed_train.model import ModelShape
from sameseed_train.recipe import SourceSettings, flat

FRONT_MATTER = "---\nlicense: apache-2.0\nlanguage: en\nlibrary_name: sameseed\npipeline_tag: text-generation\n---"
APART = ("name", "source", "note")  # settings that stand elsewhere on a card


def table(head: str, num_words: int, rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table; `head`: column titles, bars between; the first `num_words` columns are text, not numbers."""
    columns = head.count("|") + 1
    rule = ["---"] * num_words + ["---:"] * (columns - num_words)
    lines = [head, " | ".join(rule), *(" | ".join(map(str, row)) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)


def write_card(folder: Path, recipe: Mapping[str, Any], sources: Iterable[SourceSettings], *parts: str) -> None:
    """README.md with these parts, the sources and their licences, the settings and the note of the recipe."""
    rows = [
        (
            s.domain,
            ", ".join(f"`{n}`" for n in s.names) or s.kind,
            f"{s.epochs:g}",
            "all" if s.max_mb > 1e6 else f"{s.max_mb:g}",
            s.licence,
        )
        for s in sources
    ]
    data = f"## Data\n\n{table('domain | source | times in a pass | most MB | licence', 2, rows)}" if rows else ""
    given = {name: value for name, value in flat(recipe).items() if name not in APART and value not in ("", [], None)}
    settings = "\n".join(f"{name} = {json.dumps(value)}" for name, value in given.items())
    note = f"## Limits\n\n{recipe['note'].strip()}" if recipe["note"].strip() else ""
    settings = f"## Settings\n\n```toml\n{settings}\n```"
    text = "\n\n".join([FRONT_MATTER, f"# sameseed {recipe['name']}", *filter(None, [*parts, data, settings, note])])
    (folder / "README.md").write_text(text + "\n", encoding="utf-8")


def sizes(shape: ModelShape | ModelConfig) -> str:
    """A model's sizes in words."""
    return (
        f"{shape.num_layers} layer{'s' * (shape.num_layers > 1)}, hidden {shape.hidden_size}, {shape.num_heads} heads "
        f"and {shape.num_kv_heads} KV heads of {shape.head_dim}, feed-forward {shape.intermediate_size}"
    )


def acceptance(results: Mapping[str, Any]) -> str:
    """The section on the acceptance of greedy chains, by domain, and while training; empty if it was not measured."""
    if "acceptance" not in results:
        return ""

    def shares(v: Mapping[str, Any]) -> list[str]:
        return [f"{share:.3f}" for share in (v["rate"], *v["agreement"])]

    depth = range(len(results["acceptance"]["all"]["agreement"]))
    drafts = "acceptance | " + " | ".join(f"draft {i + 1}" for i in depth)
    by_domain = [
        (domain, v["tokens"], v["drafted"], v["accepted"], *shares(v)) for domain, v in results["acceptance"].items()
    ]
    by_step = [(v["step"], v["tokens"], v["text_tokens"], *shares(v)) for v in results["curve"]]
    return f"""## Acceptance

Greedy chains of {len(depth)} drafts on the target's continuations of held-out prompts. What follows a rejected draft
counts as drafted. "draft i": how often the i-th draft is right after i - 1 right ones.

{table(f"domain | tokens | drafted | accepted | {drafts}", 1, by_domain)}

While training (measured while the learning rate was still high, except at the end of each run):

{table(f"updates | drafts trained on | different tokens | {drafts}", 0, by_step)}"""


def perplexity(by_domain: Mapping[str, Mapping[str, Any]]) -> str:
    """The section on held-out perplexity."""
    rows = [(d, v["tokens"], f"{v['perplexity']:.2f}", f"{v['bits_per_byte']:.3f}") for d, v in by_domain.items()]
    return "## Held-out perplexity\n\n" + table("domain | tokens | perplexity a token | bits a byte", 1, rows)
