"""Fairness between owners (keys): an owner with few running sequences goes before one with many."""

from __future__ import annotations

from collections import Counter


class Fairness:
    """Counts each owner's waiting and running sequences, and its last start. Owners without any are forgotten."""

    def __init__(self) -> None:
        self.num_waiting: Counter[str] = Counter()
        self.num_running: Counter[str] = Counter()
        self._last_start: dict[str, float] = {}  # by owner: the number of its last start
        self._num_starts = 0

    def enter(self, owner: str) -> None:
        """Count a new waiting sequence. A new owner ranks after all others except the one that started last."""
        self._last_start.setdefault(owner, self._num_starts - 0.5)
        self.num_waiting[owner] += 1

    def start(self, owner: str) -> None:
        """Count a waiting sequence as running."""
        self._num_starts += 1
        self._last_start[owner] = self._num_starts
        self.num_running[owner] += 1
        _less(self.num_waiting, owner)

    def stop(self, owner: str) -> None:
        """Count a running sequence as waiting again."""
        self.num_waiting[owner] += 1
        _less(self.num_running, owner)

    def leave(self, owner: str, ran: bool) -> None:
        """Remove a sequence that was running (`ran`) or waiting."""
        _less(self.num_running if ran else self.num_waiting, owner)
        if owner not in self.num_running and owner not in self.num_waiting:
            del self._last_start[owner]

    def rank(self, owner: str) -> tuple[int, float]:
        """Sort key, the lowest owner goes first: fewest running sequences, then longest time since its last start."""
        return self.num_running[owner], self._last_start[owner]


def _less(counts: Counter[str], owner: str) -> None:
    counts[owner] -= 1
    if not counts[owner]:
        del counts[owner]
