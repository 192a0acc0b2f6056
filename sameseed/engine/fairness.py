"""Fairness per key: who asked for few goes before who asked for many."""

from __future__ import annotations

from collections import Counter


class Fairness:
    """How many sequences of each owner (a key) wait and run, and who started last; owners without any are forgotten."""

    def __init__(self) -> None:
        self.num_waiting: Counter[str] = Counter()
        self.num_running: Counter[str] = Counter()
        self._last_start: dict[str, float] = {}  # by owner: a count of starts
        self._num_starts = 0

    def enter(self, owner: str) -> None:
        """One more sequence waits. A new owner comes after all others, but before the one that started last."""
        self._last_start.setdefault(owner, self._num_starts - 0.5)
        self.num_waiting[owner] += 1

    def start(self, owner: str) -> None:
        """A waiting sequence runs."""
        self._num_starts += 1
        self._last_start[owner] = self._num_starts
        self.num_running[owner] += 1
        _less(self.num_waiting, owner)

    def stop(self, owner: str) -> None:
        """A running sequence waits again."""
        self.num_waiting[owner] += 1
        _less(self.num_running, owner)

    def leave(self, owner: str, ran: bool) -> None:
        """A sequence has left, which ran or waited until then."""
        _less(self.num_running if ran else self.num_waiting, owner)
        if owner not in self.num_running and owner not in self.num_waiting:
            del self._last_start[owner]

    def rank(self, owner: str) -> tuple[int, float]:
        """The lowest goes first: the fewest running, then the longest time since its last start."""
        return self.num_running[owner], self._last_start[owner]


def _less(counts: Counter[str], owner: str) -> None:
    counts[owner] -= 1
    if not counts[owner]:
        del counts[owner]
