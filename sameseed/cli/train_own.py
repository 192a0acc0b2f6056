"""`sameseed train head` and `sameseed train draft`: learn from what a target writes by itself."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional

from sameseed.cli.options import option, parse
from sameseed.errors import ConfigError


@dataclass(frozen=True)
class OwnArgs:
    """What both take. Flags that are not given are as the recipe says, or its defaults."""

    recipe: Annotated[Path | None, Positional, option("[RECIPE.toml]")] = None
    target: Annotated[str | None, option("MODEL")] = None  # the model to learn from: a folder, a hub id, embedded
    prompts: Annotated[Path | None, option("FILE")] = None  # JSON lines with prompt, messages or text
    data: Annotated[Path | None, option("DIR")] = None  # the corpus of the recipe's mixture, where no prompts are given
    measure: Annotated[Path | None, option("FILE")] = None  # held-out prompts on which acceptance is counted
    out: Annotated[Path | None, option("DIR")] = None  # texts, checkpoints and the model (required)
    format: Annotated[str | None, option("FORMAT")] = None  # number format of the target's weights, e.g. w4a8
    kv_format: Annotated[str | None, option("FORMAT")] = None  # of its KV cache
    device: str = "cpu"  # cpu, cuda, cuda:1, ...
    backend: str = "auto"  # who computes the target
    threads: Annotated[int | None, option("N")] = None  # CPU threads
    seed: Annotated[int | None, option("N")] = None  # of the texts, the first weights and the order
    num_texts: Annotated[int | None, option("N")] = None  # texts that the target writes
    new_tokens: Annotated[int | None, option("N")] = None  # the longest text after its prompt
    steps: Annotated[int | None, option("N")] = None  # updates of the weights
    rows: Annotated[int | None, option("N")] = None  # texts of one update
    resume: Annotated[bool, option()] = False  # keep texts that are written and go on from the last checkpoint
    json: Annotated[bool, option()] = False  # one JSON line with the result instead of progress


@dataclass(frozen=True)
class HeadArgs(OwnArgs):
    """Train an EAGLE-3 head for a target, on the texts and hidden states that it makes itself. Use: --draft OUT/head"""

    layers: Annotated[tuple[int, ...] | None, option("N N N")] = None  # it reads what enters these layers of the target
    draft_vocab_size: Annotated[int | None, option("N")] = None  # of the target's tokens, the most frequent so many
    unroll: Annotated[int | None, option("N")] = None  # steps on its own features: how deep it learns to draft


@dataclass(frozen=True)
class DraftArgs(OwnArgs):
    """Train a small Llama draft for a target, on the texts that it writes itself. Use: --draft OUT/draft"""

    num_layers: Annotated[int | None, option("N")] = None  # sizes as config.json has them
    hidden_size: Annotated[int | None, option("N")] = None
    num_heads: Annotated[int | None, option("N")] = None
    num_kv_heads: Annotated[int | None, option("N")] = None
    head_dim: Annotated[int | None, option("N")] = None
    intermediate_size: Annotated[int | None, option("N")] = None


# Where a flag's field lies within a recipe, where not at its top.
WITHIN = {
    "num_texts": "texts",
    "new_tokens": "texts",
    "steps": "train",
    "rows": "train",
    "unroll": "loss",
    **{f.name: "size" for f in dataclasses.fields(DraftArgs) if f.name.startswith(("num_l", "num_h", "num_k", "hid"))},
    "head_dim": "size",
    "intermediate_size": "size",
    "draft_vocab_size": "size",
}
NOT_RECIPE = ("recipe", "prompts", "data", "measure", "out", "device", "backend", "resume", "json")


def with_flags(recipe: Any, args: OwnArgs) -> Any:
    """The recipe, changed by the flags that are given."""
    for f in dataclasses.fields(args):
        value = getattr(args, f.name)
        if value is None or f.name in NOT_RECIPE:
            continue
        part = WITHIN.get(f.name)
        if part is None:
            recipe = dataclasses.replace(recipe, **{f.name: value})
        else:
            inner = dataclasses.replace(getattr(recipe, part), **{f.name: value})
            recipe = dataclasses.replace(recipe, **{part: inner})
    return recipe


def run(what: str, argv: Seq[str], prog: str) -> int:
    """Parse, train, say where the result lies; `what` is "head" or "draft"."""
    kind: type[OwnArgs] = HeadArgs if what == "head" else DraftArgs
    args = parse(kind, argv, prog).args
    if args.out is None:
        raise ConfigError(
            f"--out is missing; e.g. sameseed train {what} --target MODEL --prompts FILE --out runs/{what}"
        )
    from sameseed.train.own import Machine, Sources, load_own_recipe

    sources = Sources(args.prompts, args.data, args.measure)
    machine = Machine(args.backend, args.device)
    try:
        if what == "head":
            from sameseed.train.head import run_head
            from sameseed.train.head_recipe import HeadRecipe

            recipe = with_flags(load_own_recipe(HeadRecipe, args.recipe, "recipes/embedded-head.toml"), args)
            done: Any = run_head(recipe, sources, args.out, machine, resume=args.resume, quiet=args.json)
        else:
            from sameseed.train.draft import DraftRecipe, run_draft

            own = with_flags(load_own_recipe(DraftRecipe, args.recipe, "none: flags suffice"), args)
            done = run_draft(own, sources, args.out, machine, resume=args.resume, quiet=args.json)
    except KeyboardInterrupt:
        print("stopped; the same command with --resume goes on from the last checkpoint", file=sys.stderr)
        raise
    folder = getattr(done, what)
    if args.json:
        print(json.dumps({what: str(folder), "results": done.results}))
        return 0
    print(f"{what}: {folder}")
    if "acceptance" in done.results:
        whole = done.results["acceptance"]["all"]
        print(f"greedy chains of 4 on held-out prompts: {whole['rate']:.1%} of {whole['drafted']} guesses accepted")
    print(f"to draft with it: sameseed generate '...' --model {done.results['recipe']['target']} --draft {folder}")
    return 0
