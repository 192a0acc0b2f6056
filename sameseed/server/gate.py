"""Gate: how much may be inside at once. Asked before a prompt is tokenized; whom it turns away hears when to return."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import TracebackType

from sameseed.server.errors import ApiError, bad_request, unavailable

MAX_TEXT = 64 * 2**20  # bytes of all bodies inside
KEPT = 8  # one place in so many, of the queue and of the bytes, is for owners who have nothing inside


class Gate:
    """Counts sequences and the size of the bodies that ask for them; `close` lets nobody in any more."""

    def __init__(self, max_queue: int, num_owners: int = 1) -> None:
        """`max_queue`: sequences that may wait beyond those that run. `num_owners`: who may come; of several, one who
        fills the queue leaves some of it to the others.
        """
        self.max_queue = max_queue
        self.max_running = 1  # until an engine says better
        self.num_inside = 0
        self.size_inside = 0
        self.num_refused = 0
        self._several = num_owners > 1
        self._requests: Counter[str] = Counter()  # of each owner, inside
        self._closed: str | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    def enter(self, owner: str, num_seqs: int, size: int) -> Ticket:
        """Let a request of `num_seqs` sequences (0: only tokens are asked for) and a body of `size` bytes in.

        Raises ApiError: 503 closed, 429 full, 400 never to fit.
        """
        if self._closed is not None:
            raise unavailable(self._closed)
        room = self.max_running + self.max_queue
        if num_seqs > room:
            raise bad_request(f"{num_seqs} sequences in one request, and this server holds {room}; ask for fewer", "n")
        kept = self._several and owner in self._requests  # for others, who have nothing inside yet
        space = MAX_TEXT - (MAX_TEXT // KEPT if kept else 0)
        room -= -(-self.max_queue // KEPT) if kept else 0
        crowded = self.size_inside > 0 and self.size_inside + size > space
        if crowded or (num_seqs and self.num_inside + num_seqs > room):
            self.num_refused += 1
            what = "too much text is inside" if crowded else f"the queue is full ({self.num_inside} sequences)"
            raise ApiError(
                429,
                f"{what}; try again later",
                code="queue_full",
                retry_after=1 + min(30, self.num_inside // (4 * self.max_running)),
            )
        return Ticket(self, owner, num_seqs, size)

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

    def count(self, owner: str, num_requests: int, num_seqs: int, size: int) -> None:
        """What came in (or, negative, left)."""
        self.num_inside += num_seqs
        self.size_inside += size
        self._requests[owner] += num_requests
        if not self._requests[owner]:
            del self._requests[owner]
        if self._requests:
            self._empty.clear()
        else:
            self._empty.set()


class Ticket:
    """One request's place inside; a context manager that gives it back."""

    def __init__(self, gate: Gate, owner: str, num_seqs: int, size: int) -> None:
        self._gate, self._owner, self._num_seqs, self._size = gate, owner, num_seqs, size
        self._left = False
        gate.count(owner, 1, num_seqs, size)

    def leave(self) -> None:
        """Give the place back, once."""
        if not self._left:
            self._left = True
            self._gate.count(self._owner, -1, -self._num_seqs, -self._size)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()
