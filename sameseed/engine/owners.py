"""Owners: whose turn it is, of those who asked for something."""

from __future__ import annotations

from collections import Counter


class Owners:
    """How many sequences of each owner wait and run, and who had a turn last. Whoever has none is forgotten."""

    def __init__(self) -> None:
        self.num_waiting: Counter[str] = Counter()
        self.num_running: Counter[str] = Counter()
        self._last: dict[str, float] = {}  # the number of each one's last turn
        self._num_turns = 0

    def enter(self, owner: str) -> None:
        """One more of theirs waits. Who is new is behind all others but the one who just had a turn."""
        self._last.setdefault(owner, self._num_turns - 0.5)
        self.num_waiting[owner] += 1

    def start(self, owner: str) -> None:
        """One that waited runs: this was its owner's turn."""
        self._num_turns += 1
        self._last[owner] = self._num_turns
        self.num_running[owner] += 1
        _less(self.num_waiting, owner)

    def stop(self, owner: str) -> None:
        """One that ran waits again."""
        self.num_waiting[owner] += 1
        _less(self.num_running, owner)

    def leave(self, owner: str, ran: bool) -> None:
        """One has left, and ran or waited until then."""
        _less(self.num_running if ran else self.num_waiting, owner)
        if owner not in self.num_running and owner not in self.num_waiting:
            del self._last[owner]

    def turn(self, owner: str) -> tuple[int, float]:
        """The lowest is next: who has the fewest running, and of those whose last turn is longest ago."""
        return self.num_running[owner], self._last[owner]


def _less(counts: Counter[str], owner: str) -> None:
    counts[owner] -= 1
    if not counts[owner]:
        del counts[owner]
