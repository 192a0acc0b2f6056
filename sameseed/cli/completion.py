"""`sameseed completion`: a script that makes a shell complete commands, flags and files."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from sameseed.cli import COMMANDS
from sameseed.cli.options import parse


@dataclass(frozen=True)
class CompletionArgs:
    """Print a script that makes bash or zsh complete commands, flags and files: put `source <(sameseed completion)`
    into ~/.bashrc or ~/.zshrc.
    """


def run(argv: Seq[str], prog: str) -> int:
    """Print the script."""
    parse(CompletionArgs, argv, prog)
    print(f'_sameseed_commands="{" ".join(COMMANDS)}"')
    print(Path(__file__).with_suffix(".bash").read_text())
    return 0
