"""`sameseed twin`: a checkpoint of a real model's shape that computes a small model's function."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from sameseed.cli.options import option, parse
from sameseed.errors import ConfigError

OUT_ALIAS = arg(metavar="DIR", aliases=["-o"], help_behavior_hint="")


@dataclass(frozen=True)
class TwinArgs:
    """Write a Llama checkpoint of a real model's shape that computes a small model's function. It has the speed of the
    real size, and real acceptance, in this engine and others. Its text is the small model's.
    """

    shape: Annotated[str | None, option("NAME")] = None  # a known shape (see profile --list), or a model's folder
    of: str = "embedded-target"  # the small model or draft head: embedded-target, embedded-draft, a folder, a hub id
    target: str = "embedded-target"  # for a head: the small model that it drafts for
    draft_vocab: Annotated[int | None, option("N")] = None  # for a head: tokens it may draft; unset: 32000, or all
    out: Annotated[Path | None, OUT_ALIAS] = None  # where the checkpoint goes (required)
    seed: int = 0  # of the random weights
    overwrite: Annotated[bool, option()] = False  # replace what is at the destination, once the new one is complete
    json: Annotated[bool, option()] = False  # one JSON object instead of text


def run(argv: Seq[str], prog: str) -> int:
    """Check, write, and print what was written."""
    args = parse(TwinArgs, argv, prog).args
    example = "e.g. sameseed twin --shape llama-3.2-1b --of embedded-target -o twins/1b"
    if args.shape is None:
        raise ConfigError(f"--shape is missing; {example}")
    if args.out is None:
        raise ConfigError(f"-o is missing; {example}")
    from sameseed.cli.console import weights_progress
    from sameseed_lab.twin import find_shape, make_twin

    with weights_progress(f"twin of {args.of}", args.json) as report:
        twin = make_twin(
            find_shape(args.shape),
            args.of,
            args.out,
            target=args.target,
            num_tokens=args.draft_vocab,
            name=args.shape,
            seed=args.seed,
            overwrite=args.overwrite,
            progress=report,
        )
    if twin.head is None:
        facts, small = twin.layout.as_dict(), twin.layout.small.num_parameters / 1e6
        what = f"{twin.layout.config.num_parameters / 1e6:,.0f} million parameters"
        does = f"computes what {args.of} ({small:.1f} million) computes"
    else:
        head = twin.head.config
        facts = {"draft_vocab_size": head.draft_vocab_size, "aux_layers": list(head.aux_layers or ())}
        what = f"an EAGLE-3 head with {head.draft_vocab_size} tokens for the twin of {args.target}"
        does = f"drafts what {args.of} drafts"
    if args.json:
        print(json.dumps({"folder": str(twin.folder), "bytes": twin.num_bytes, **facts}))
    else:
        print(f"{twin.folder}: {twin.num_bytes / 1e9:.2f} GB, {what} in the shape of {args.shape}; it {does}")
    return 0
