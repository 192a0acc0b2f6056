"""`sameseed twin`: a checkpoint of a real model's shape that computes a small model's function."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from sameseed.cli.options import option, parse
from sameseed.errors import ConfigError

if TYPE_CHECKING:
    from sameseed.study.twin import HeadTwin, Twin

OUT_ALIAS = arg(metavar="DIR", aliases=["-o"], help_behavior_hint="")


@dataclass(frozen=True)
class TwinArgs:
    """Write a Llama checkpoint of a real model's shape that computes a small model's function: speed at real size with
    real acceptance, for this engine and for others. Its text is the small model's.
    """

    shape: Annotated[str | None, option("NAME")] = None  # a known shape (see profile --list), or a model's folder
    of: str = "embedded-target"  # the small model or EAGLE-3 head: embedded-target, embedded-draft, a folder, a hub id
    target: str = "embedded-target"  # of a head: the small model that it drafts for
    draft_vocab: Annotated[int | None, option("N")] = None  # of a head: tokens that it may guess; unset: 32000
    out: Annotated[Path | None, OUT_ALIAS] = None  # where the checkpoint goes (required)
    seed: int = 0  # of the random weights
    device: str = "cpu"  # where matrices are put together: cpu, cuda, cuda:1, ...
    overwrite: Annotated[bool, option()] = False  # replace what is at the destination, once the new one is complete
    json: Annotated[bool, option()] = False  # one JSON object instead of text


def run(argv: Seq[str], prog: str) -> int:
    """Check, write, say what it is."""
    args = parse(TwinArgs, argv, prog).args
    example = "e.g. sameseed twin --shape llama-3.2-1b --of embedded-target -o twins/1b"
    if args.shape is None:
        raise ConfigError(f"--shape is missing; {example}")
    if args.out is None:
        raise ConfigError(f"-o is missing; {example}")
    from sameseed import devices
    from sameseed.cli.console import progress
    from sameseed.models.eagle_config import is_head
    from sameseed.models.loader import resolve_model
    from sameseed.study.twin import find_shape, make_head_twin, make_twin

    devices.check(args.device)
    of_head = is_head(resolve_model(args.of))
    if args.draft_vocab is not None and not of_head:
        raise ConfigError(f"--draft-vocab is for twins of draft heads, and {args.of} is a model; leave it out")
    with progress(f"twin of {args.of}", args.json) as bar:

        def report(done: int, total: int) -> None:
            bar.update(bar.tasks[0].id, completed=done // 10**6, total=total // 10**6, note="million weights")

        shape = find_shape(args.shape)
        shared: dict[str, Any] = {"name": args.shape, "progress": report}
        shared |= {"seed": args.seed, "device": args.device, "overwrite": args.overwrite}
        if of_head:
            head = make_head_twin(shape, args.of, args.target, args.out, num_tokens=args.draft_vocab, **shared)
        else:
            twin = make_twin(shape, args.of, args.out, **shared)
    return _tell_head(args, head) if of_head else _tell(args, twin)


def _tell(args: TwinArgs, twin: Twin) -> int:
    """Say what was written for a model."""
    if args.json:
        print(json.dumps({"folder": str(twin.folder), "bytes": twin.num_bytes, **twin.layout.as_dict()}))
        return 0
    small, big = twin.layout.small, twin.layout.config
    print(
        f"{twin.folder}: {twin.num_bytes / 1e9:.2f} GB, {big.num_parameters / 1e6:,.0f} million parameters in the "
        f"shape of {args.shape}; it computes what {args.of} ({small.num_parameters / 1e6:.1f} million) computes"
    )
    return 0


def _tell_head(args: TwinArgs, twin: HeadTwin) -> int:
    """Say what was written for a head."""
    vocab = twin.head.config.draft_vocab_size
    if args.json:
        told = {"folder": str(twin.folder), "bytes": twin.num_bytes, "draft_vocab_size": vocab}
        print(json.dumps(told | {"aux_layers": list(twin.head.config.aux_layers or ())}))
        return 0
    print(
        f"{twin.folder}: {twin.num_bytes / 1e9:.2f} GB, a head with {vocab} tokens for the twin of {args.target} in "
        f"the shape of {args.shape}; it drafts what {args.of} drafts"
    )
    return 0
