"""Gate: admission control, before a prompt is tokenized. A refusal says when to retry."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import ExitStack

from sameseed.server.errors import ApiError, bad_request, unavailable

MAX_TEXT = 64 * 2**20  # bytes of the bodies of all admitted requests
KEPT = 8  # one eighth of the queue, and of the bytes, is reserved for tenants without an admitted request
Ticket = ExitStack  # an admitted request's place; close() gives it back, and may be called more than once


class Gate:
    """Counts the sequences of admitted requests and the bytes of their bodies. Admits nothing once `closed` is set."""

    def __init__(self, max_queue: int, num_tenants: int = 1) -> None:
        """`max_queue`: sequences that may wait besides running ones. With several tenants, none may fill all of it."""
        self.max_queue, self.num_tenants = max_queue, num_tenants
        self.max_running = 1  # until an engine has told its own
        self.num_inside = 0
        self.size_inside = 0
        self.size_arriving = 0  # bytes of bodies that are being read, parsed or checked: not admitted yet
        self.num_refused = 0
        self._requests: Counter[str] = Counter()  # admitted requests of each tenant
        self.closed: str | None = None  # if set: why no request is admitted any more
        self.empty = asyncio.Event()  # set while no request is admitted
        self.empty.set()

    def enter(self, tenant: str, num_seqs: int, size: int) -> Ticket:
        """Admit a request of `num_seqs` sequences (0: only tokenization) and a body of `size` bytes.

        Raises ApiError: 503 if the gate is closed, 429 if it is full, 400 if the request can never fit.
        """
        if self.closed is not None:
            raise unavailable(self.closed)
        room = self.max_running + self.max_queue
        if num_seqs > room:
            raise bad_request(f"{num_seqs} sequences in one request, and this server holds {room}; ask for fewer", "n")
        kept = self.num_tenants > 1 and tenant in self._requests  # reserved for other tenants
        space = MAX_TEXT - (MAX_TEXT // KEPT if kept else 0)
        room -= -(-self.max_queue // KEPT) if kept else 0
        crowded = self.size_inside > 0 and self.size_inside + size > space
        if crowded or (num_seqs and self.num_inside + num_seqs > room):
            self.num_refused += 1
            what = "too much text is inside" if crowded else f"the queue is full ({self.num_inside} sequences)"
            seconds = 1 + min(30, self.num_inside // (4 * self.max_running))
            raise ApiError(429, f"{what}; try again later", code="queue_full", retry_after=seconds)
        self.count(tenant, 1, num_seqs, size)
        ticket = Ticket()
        ticket.callback(self.count, tenant, -1, -num_seqs, -size)
        return ticket

    def count(self, tenant: str, num_requests: int, num_seqs: int, size: int) -> None:
        """Add an admitted request to the counts, or, with negative numbers, remove one that has left."""
        self.num_inside += num_seqs
        self.size_inside += size
        self._requests[tenant] += num_requests
        if not self._requests[tenant]:
            del self._requests[tenant]
        (self.empty.clear if self._requests else self.empty.set)()
