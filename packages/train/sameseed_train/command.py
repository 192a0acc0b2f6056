"""`sameseed train`: a recipe makes a pair of models; `train head` and `train draft` learn from any target."""

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

DEFAULT_RECIPE = Path("recipes/embedded.toml")


@dataclass(frozen=True)
class TrainArgs:
    """Train the models of a recipe. A run that was stopped goes on with --resume.

    `sameseed train head` and `sameseed train draft` train a draft head, or a small draft, for any target that runs
    here: see their --help.
    """

    recipe: Annotated[Path | None, Positional, option("[RECIPE.toml]")] = None  # default: recipes/embedded.toml
    data: Annotated[Path | None, option("DIR")] = None  # the corpus (required)
    out: Annotated[Path | None, option("DIR")] = None  # where checkpoints and models go (required)
    device: str = "cpu"  # where models are trained: cpu, cuda, cuda:1, ...
    resume: Annotated[bool, option()] = False  # skip finished stages and go on from the last checkpoint
    json: Annotated[bool, option()] = False  # one JSON line with the result instead of progress


@dataclass(frozen=True)
class OwnArgs:
    """Flags of `train head` and `train draft`. A flag that is not given is as in the recipe, or its default."""

    recipe: Annotated[Path | None, Positional, option("[RECIPE.toml]")] = None
    target: Annotated[str | None, option("MODEL")] = None  # the model to learn from: a folder, a hub id, embedded
    prompts: Annotated[Path | None, option("FILE")] = None  # JSON lines with prompt, messages or text
    data: Annotated[Path | None, option("DIR")] = None  # the corpus of the recipe's sources, if no prompts are given
    measure: Annotated[Path | None, option("FILE")] = None  # held-out prompts on which acceptance is counted
    out: Annotated[Path | None, option("DIR")] = None  # texts, checkpoints and the model (required)
    format: Annotated[str | None, option("FORMAT")] = None  # number format of the target's weights, e.g. w4a8
    kv_format: Annotated[str | None, option("FORMAT")] = None  # number format of the target's KV cache
    device: str = "cpu"  # cpu, cuda, cuda:1, ...
    backend: str = "auto"  # backend (kernels) that runs the target
    threads: Annotated[int | None, option("N")] = None  # CPU threads
    seed: Annotated[int | None, option("N")] = None  # of texts, initial weights and data order
    num_texts: Annotated[int | None, option("N")] = None  # texts that the target generates
    new_tokens: Annotated[int | None, option("N")] = None  # most tokens of a text after its prompt
    steps: Annotated[int | None, option("N")] = None  # updates of the weights
    rows: Annotated[int | None, option("N")] = None  # texts per update
    precision: Annotated[str | None, option("bfloat16|float32")] = None  # of matrix products in training
    states_gb: Annotated[float | None, option("GB")] = None  # most of the disk that holds the target's states
    resume: Annotated[bool, option()] = False  # keep finished texts and go on from the last checkpoint
    json: Annotated[bool, option()] = False  # one JSON line with the result instead of progress


@dataclass(frozen=True)
class HeadArgs(OwnArgs):
    """Train a draft head (EAGLE-3) for a target, on the target's own texts and states. Use: --draft OUT/head"""

    layers: Annotated[tuple[int, ...] | None, option("N N N")] = None  # it reads the inputs of these target layers
    draft_vocab_size: Annotated[int | None, option("N")] = None  # tokens it can draft: the target's most frequent
    unroll: Annotated[int | None, option("N")] = None  # steps on its own features: the draft depth it learns
    store: Annotated[str | None, option("FORMATS")] = None  # write it to OUT/packed in few bits too, e.g. w8a8
    candidates: Annotated[int | None, option("N")] = None  # tokens in the loss of a batch; 0: all, slower


@dataclass(frozen=True)
class DraftArgs(OwnArgs):
    """Train a small Llama draft for a target, on the target's own texts. Use: --draft OUT/draft"""

    begin: Annotated[str | None, option("MODEL")] = None  # a draft to start from, in place of new weights
    parallel: Annotated[int | None, option("K")] = None  # learn to draft K tokens in one pass, over mask tokens
    mask_token: Annotated[int | None, option("ID")] = None  # the mask's id; unset: one that no text has
    num_layers: Annotated[int | None, option("N")] = None  # number of layers; sizes as in config.json
    hidden_size: Annotated[int | None, option("N")] = None  # width of a token's hidden state
    num_heads: Annotated[int | None, option("N")] = None  # query heads
    num_kv_heads: Annotated[int | None, option("N")] = None  # key and value heads
    head_dim: Annotated[int | None, option("N")] = None  # width of one head
    intermediate_size: Annotated[int | None, option("N")] = None  # inner width of a layer's feed-forward


OWN: dict[str, type[OwnArgs]] = {"head": HeadArgs, "draft": DraftArgs}


def with_flags(recipe: Any, args: OwnArgs) -> Any:
    """The recipe, with the given flags put in, also into its tables."""
    parts = [f.name for f in dataclasses.fields(recipe) if dataclasses.is_dataclass(getattr(recipe, f.name))]
    for name, value in vars(args).items():
        if value is not None and name != "recipe" and hasattr(recipe, name):
            recipe = dataclasses.replace(recipe, **{name: value})
        for part in parts:
            if value is not None and hasattr(getattr(recipe, part), name):
                changed = dataclasses.replace(getattr(recipe, part), **{name: value})
                recipe = dataclasses.replace(recipe, **{part: changed})
    return recipe


def run(argv: Seq[str], prog: str) -> int:
    """Parse and train the pair of a recipe, or a head or a draft alone. An interruption prints how to resume."""
    try:
        if argv and argv[0] in OWN and not Path(argv[0]).is_file():
            return run_own(argv[0], argv[1:], f"{prog} {argv[0]}")
        return run_pair(argv, prog)
    except KeyboardInterrupt:
        print("stopped; the same command with --resume goes on from the last checkpoint", file=sys.stderr)
        raise


def run_pair(argv: Seq[str], prog: str) -> int:
    """Parse, train, say where the models lie."""
    args = parse(TrainArgs, argv, prog).args
    for name in ("data", "out"):
        if getattr(args, name) is None:
            raise ConfigError(f"--{name} is missing; e.g. sameseed train --data corpus --out runs/embedded")
    assert args.data is not None and args.out is not None
    from sameseed_train.pipeline import run as run_recipe
    from sameseed_train.recipe import recipe_file

    recipe = recipe_file(args.recipe or DEFAULT_RECIPE)
    how: dict[str, Any] = {"device": args.device, "resume": args.resume, "quiet": args.json}
    results = run_recipe(recipe, data=args.data, out=args.out, **how)
    target, draft, plot = (str(args.out / name) for name in ("target", "draft", "loss.png"))
    if args.json:
        print(json.dumps({"target": target, "draft": draft, "loss_plot": plot, "results": results}))
    else:
        print(f"target: {target}\ndraft:  {draft}\nloss:   {plot}")
    return 0


def run_own(what: str, argv: Seq[str], prog: str) -> int:
    """Parse, train, say where the result lies; `what` is "head" or "draft"."""
    args = parse(OWN[what], argv, prog).args
    if args.out is None:
        raise ConfigError(f"--out is missing; e.g. sameseed train {what} --target MODEL --prompts FILE --out DIR")
    from sameseed_train.draft import run_draft
    from sameseed_train.head import run_head
    from sameseed_train.learning import Sources
    from sameseed_train.recipe import DraftRecipe, HeadRecipe, load_own_recipe

    sources = Sources(args.prompts, args.data, args.measure)
    how: dict[str, Any] = {"backend": args.backend, "device": args.device, "resume": args.resume, "quiet": args.json}
    kind, train = (HeadRecipe, run_head) if what == "head" else (DraftRecipe, run_draft)
    recipe = with_flags(load_own_recipe(kind, args.recipe), args)
    done = train(recipe, sources, args.out, **how)
    if args.json:
        print(json.dumps({what: str(done.folder), "results": done.results}))
        return 0
    print(f"{what}: {done.folder}")
    if "acceptance" in done.results:
        whole = done.results["acceptance"]["all"]
        print(f"greedy chains of 4 on held-out prompts: {whole['rate']:.1%} of {whole['drafted']} drafts accepted")
    print(f"to draft with it: sameseed generate '...' --model {done.results['recipe']['target']} --draft {done.folder}")
    return 0
