"""`sameseed train`: a recipe makes a pair of models; `train head` and `train draft` learn from any target."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from sameseed.cli.options import option, parse
from sameseed.errors import ConfigError

# The recipe of the embedded pair lies beside the package in a checkout.
DEFAULT_RECIPE = Path(__file__).resolve().parent.parent.parent / "recipes" / "embedded.toml"
OWN = ("head", "draft")


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


def run(argv: Seq[str], prog: str) -> int:
    """Parse and hand over to `sameseed.train.run`, or to the training of a head or a draft alone."""
    if argv and argv[0] in OWN and not Path(argv[0]).is_file():
        from sameseed.cli import train_own

        return train_own.run(argv[0], argv[1:], f"{prog} {argv[0]}")
    args = parse(TrainArgs, argv, prog).args
    for name in ("data", "out"):
        if getattr(args, name) is None:
            raise ConfigError(f"--{name} is missing; e.g. sameseed train --data corpus --out runs/embedded")
    recipe = args.recipe or DEFAULT_RECIPE
    if not recipe.is_file():
        raise ConfigError(f"no recipe at {recipe}; give the path of a .toml file as the first argument")
    assert args.data is not None and args.out is not None
    from sameseed import train

    try:
        result = train.run(
            recipe, data=args.data, out=args.out, device=args.device, resume=args.resume, quiet=args.json
        )
    except KeyboardInterrupt:
        print("stopped; the same command with --resume goes on from the last checkpoint", file=sys.stderr)
        raise
    if args.json:
        print(
            json.dumps(
                {
                    "target": str(result.target),
                    "draft": str(result.draft),
                    "loss_plot": str(result.loss_plot),
                    "results": result.results,
                }
            )
        )
    else:
        print(f"target: {result.target}\ndraft:  {result.draft}\nloss:   {result.loss_plot}")
    return 0
