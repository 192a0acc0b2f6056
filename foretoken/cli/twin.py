"""`foretoken twin`: a checkpoint of a real model's shape that computes a small model's function."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from foretoken.cli.options import option, parse
from foretoken.errors import ConfigError

OUT_ALIAS = arg(metavar="DIR", aliases=["-o"], help_behavior_hint="")


@dataclass(frozen=True)
class Args:
    """Write a Llama checkpoint of a real model's shape that computes a small model's function: speed at real size with
    real acceptance, for this engine and for others. Its text is the small model's.
    """

    shape: Annotated[str | None, option("NAME")] = None  # a known shape (see profile --list), or a model's folder
    of: str = "embedded-target"  # the small model: embedded-target, embedded-draft, a folder, or a hub id
    out: Annotated[Path | None, OUT_ALIAS] = None  # where the checkpoint goes (required)
    seed: int = 0  # of the random weights
    overwrite: Annotated[bool, option()] = False  # replace what is at the destination, once the new one is complete
    json: Annotated[bool, option()] = False  # one JSON object instead of text


def run(argv: Seq[str], prog: str) -> int:
    """Check, write, say what it is."""
    args = parse(Args, argv, prog).args
    example = "e.g. foretoken twin --shape llama-3.2-1b --of embedded-target -o twins/1b"
    if args.shape is None:
        raise ConfigError(f"--shape is missing; {example}")
    if args.out is None:
        raise ConfigError(f"-o is missing; {example}")
    from foretoken.cli.console import progress
    from foretoken.study.twin import find_shape, make_twin

    with progress(f"twin of {args.of}", args.json) as bar:

        def report(done: int, total: int) -> None:
            bar.update(bar.tasks[0].id, completed=done // 10**6, total=total // 10**6, note="million weights")

        shape = find_shape(args.shape)
        twin = make_twin(
            shape, args.of, args.out, name=args.shape, seed=args.seed, overwrite=args.overwrite, progress=report
        )
    if args.json:
        print(json.dumps({"folder": str(twin.folder), "bytes": twin.num_bytes, **twin.layout.as_dict()}))
        return 0
    small, big = twin.layout.small, twin.layout.config
    print(
        f"{twin.folder}: {twin.num_bytes / 1e9:.2f} GB, {big.num_parameters / 1e6:,.0f} million parameters in the "
        f"shape of {args.shape}; it computes what {args.of} ({small.num_parameters / 1e6:.1f} million) computes"
    )
    return 0
