"""`sameseed completion`: a script that makes a shell complete commands, flags and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sameseed.cli import COMMANDS


def run(parsed: Any) -> int:
    """Print the script."""
    print(f'_sameseed_commands="{" ".join(COMMANDS)}"')
    print(Path(__file__).with_suffix(".bash").read_text())
    return 0
