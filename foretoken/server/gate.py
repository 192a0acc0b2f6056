"""Gate: how much may be inside at once. Asked before a prompt is tokenized; whom it turns away hears when to return."""

from __future__ import annotations

import asyncio
from types import TracebackType

from foretoken.server.errors import ApiError, bad_request, unavailable

MAX_TEXT = 64 * 2**20  # bytes of all bodies inside


class Gate:
    """Counts sequences and the size of the bodies that ask for them; `close` lets nobody in any more."""

    def __init__(self, max_queue: int) -> None:
        """`max_queue`: sequences that may wait beyond those that run."""
        self.max_queue = max_queue
        self.max_running = 1  # until an engine says better
        self.num_inside = 0
        self.size_inside = 0
        self.num_refused = 0
        self._closed: str | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    def enter(self, num_seqs: int, size: int) -> Ticket:
        """Let a request of `num_seqs` sequences (0: only tokens are asked for) and a body of `size` bytes in.

        Raises ApiError: 503 closed, 429 full, 400 never to fit.
        """
        if self._closed is not None:
            raise unavailable(self._closed)
        room = self.max_running + self.max_queue
        if num_seqs > room:
            raise bad_request(f"{num_seqs} sequences in one request, and this server holds {room}; ask for fewer", "n")
        crowded = self.size_inside > 0 and self.size_inside + size > MAX_TEXT
        if crowded or (num_seqs and self.num_inside + num_seqs > room):
            self.num_refused += 1
            what = "too much text is inside" if crowded else f"the queue is full ({self.num_inside} sequences)"
            raise ApiError(
                429,
                f"{what}; try again later",
                code="queue_full",
                retry_after=1 + min(30, self.num_inside // (4 * self.max_running)),
            )
        return Ticket(self, num_seqs, size)

    def close(self, why: str) -> None:
        """Refuse everybody from now on."""
        self._closed = why

    @property
    def closed(self) -> bool:
        """Is nobody let in?"""
        return self._closed is not None

    async def wait_empty(self) -> None:
        """Until all have left."""
        await self._empty.wait()

    def count(self, num_seqs: int, size: int) -> None:
        """What came in (or, negative, left)."""
        self.num_inside += num_seqs
        self.size_inside += size
        if self.num_inside or self.size_inside:
            self._empty.clear()
        else:
            self._empty.set()


class Ticket:
    """One request's place inside; a context manager that gives it back."""

    def __init__(self, gate: Gate, num_seqs: int, size: int) -> None:
        self._gate, self._num_seqs, self._size = gate, num_seqs, size
        gate.count(num_seqs, size)

    def leave(self) -> None:
        """Give the place back, once."""
        self._gate.count(-self._num_seqs, -self._size)
        self._num_seqs = self._size = 0

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()
