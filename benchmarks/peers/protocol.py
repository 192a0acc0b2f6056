"""What an engine of the comparison offers. Apart from worker.py, which as a program goes by another name."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, Protocol


def die_with_parent() -> None:
    """Ask Linux to end this process with the one that started it: a frozen one could not see that by itself."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class UnsupportedError(Exception):
    """The engine does not offer this measurement; the text says why."""


class Engine(Protocol):
    """What a module in engines/ defines as `Engine`. Times in seconds, taken around the forward pass alone."""

    def load(self, model: Path, threads: int, max_len: int, batch: int, options: dict[str, Any]) -> dict[str, object]:
        """Make ready for sequences of max_len tokens, `batch` at once; returns versions and settings for the record."""

    def rows(self, tokens: Seq[int], context: int) -> float:
        """One pass over new tokens of one sequence that has `context` tokens cached, logits of each of them."""

    def prefill(self, tokens: Seq[int]) -> float:
        """One prompt from nothing; logits of its last token."""

    def batch(self, prompts: Seq[Seq[int]], steps: int) -> float:
        """`steps` decoding steps of all sequences together, after their prompts (which are not timed)."""

    def probe(self, tokens: Seq[int], count: int) -> list[float]:
        """Logits of vocabulary entries 0..count-1 after these tokens."""


class Writer(Protocol):
    """What a module in engines/ defines as `Writer`: texts, by speculation of its own where asked."""

    def load(
        self, model: Path, threads: int, max_len: int, draft: Path | None, options: dict[str, Any]
    ) -> dict[str, object]:
        """Make ready for one sequence of max_len tokens. `options`: "way" and "k", as the engine's arms have them.

        Returns versions and settings for the record.
        """

    def write(self, prompt: Seq[int], count: int) -> list[int]:
        """The greedy tokens after a prompt, to the text's natural end or `count` of them."""
