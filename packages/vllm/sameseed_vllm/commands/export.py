"""`sameseed export`: a tuned profile as another engine's command line and files."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional

from sameseed.cli.options import option, parse
from sameseed.errors import ConfigError


@dataclass(frozen=True)
class ExportArgs:
    """Print the equivalent command line of another engine; notes tell what has no counterpart there."""

    engine: Annotated[Literal["vllm", "sglang", "llama.cpp"], Positional]  # the engine to translate for
    profile: Annotated[Path, Positional]  # the file that `sameseed tune` wrote
    out: Annotated[Path | None, option("DIR")] = None  # write the files there; unset: only name them
    json: Annotated[bool, option()] = False  # one JSON object instead of text


def run(argv: Seq[str], prog: str) -> int:
    """Parse, translate, print."""
    args = parse(ExportArgs, argv, prog).args
    from sameseed.tuned import Tuned
    from sameseed_vllm.export import export

    made = export(Tuned.read(args.profile), args.engine)
    if args.out is not None:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
            for name, text in made.files.items():
                (args.out / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write files to {args.out} ({error.strerror}); choose another --out") from None
    if args.json:
        print(json.dumps(dataclasses.asdict(made)))
        return 0
    print(" ".join([*(f"{k}={shlex.quote(v)}" for k, v in made.environment.items()), shlex.join(made.command)]))
    for note in made.notes:
        print(f"note: {note}", file=sys.stderr)
    for name in made.files:
        where = "written to " + str(args.out / name) if args.out is not None else "give --out DIR to write it"
        print(f"file: {name} ({where})", file=sys.stderr)
    return 0
