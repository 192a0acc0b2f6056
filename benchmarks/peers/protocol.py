"""The interface of a compared engine.

It is not in worker.py, because that runs as `__main__`: an import of it would define the classes a second time.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, Protocol


def die_with_parent() -> None:
    """Ask Linux to end this process when its parent ends: a frozen process could not notice that itself."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class UnsupportedError(Exception):
    """The engine does not offer this measurement; the text says why."""


class Engine(Protocol):
    """The class that a module in engines/ defines as `Engine`. Times are seconds of the forward pass alone."""

    def load(self, model: Path, threads: int, max_len: int, batch: int, options: dict[str, Any]) -> dict[str, object]:
        """Load the model for `batch` sequences of max_len tokens; returns versions and settings for the record."""

    def rows(self, tokens: Seq[int], context: int) -> float:
        """One pass over new tokens of one sequence with `context` cached tokens, with logits of each new token."""

    def prefill(self, tokens: Seq[int]) -> float:
        """Prefill of one prompt with an empty cache, with logits of its last token."""

    def batch(self, prompts: Seq[Seq[int]], steps: int) -> float:
        """`steps` decode steps of all sequences together, after their prefills (which are not timed)."""

    def probe(self, tokens: Seq[int], count: int) -> list[float]:
        """Logits of token ids 0..count-1 after these tokens."""


class Writer(Protocol):
    """The class that a module in engines/ defines as `Writer`: it generates texts, speculating if the options ask."""

    def load(
        self, model: Path, threads: int, max_len: int, draft: Path | None, options: dict[str, Any]
    ) -> dict[str, object]:
        """Load for one sequence of max_len tokens. `options`: "way" and "k", as in the engine's arms (arms.py).

        Returns versions and settings for the record.
        """

    def write(self, prompt: Seq[int], count: int) -> list[int]:
        """The greedy tokens after a prompt, up to the text's end or at most `count` of them."""
