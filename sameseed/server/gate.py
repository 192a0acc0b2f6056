"""Gate: admission control, before a prompt is tokenized. A refusal says when to retry."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

from sameseed.server.config import KeyLimits
from sameseed.server.errors import ApiError, bad_request, unavailable

MAX_TEXT = 64 * 2**20  # bytes of the bodies of all admitted requests
KEPT = 8  # one eighth of the queue, and of the bytes, is reserved for tenants without an admitted request
Ticket = ExitStack  # an admitted request's place; close() gives it back, and may be called more than once


class Gate:
    """Counts the sequences of admitted requests and the bytes of their bodies. Admits nothing once `closed` is set."""

    def __init__(
        self, max_queue: int, num_tenants: int = 1, limits: Callable[[str], KeyLimits] = lambda tenant: KeyLimits()
    ) -> None:
        """`max_queue`: sequences that may wait besides running ones. With several tenants, none may fill all of it.

        `limits`: those of each tenant.
        """
        self.max_queue, self.num_tenants = max_queue, num_tenants
        self._limits = limits
        self._left: dict[str, tuple[float, float]] = {}  # by limited tenant: tokens that are left, and when that was
        self.max_running = 1  # until an engine has told its own
        self.num_inside = 0
        self.size_inside = 0
        self.num_refused = 0
        self._requests: Counter[str] = Counter()  # admitted requests of each tenant
        self.closed: str | None = None  # if set: why no request is admitted any more
        self.empty = asyncio.Event()  # set while no request is admitted
        self.empty.set()

    def enter(self, tenant: str, num_seqs: int, size: int) -> Ticket:
        """Admit a request of `num_seqs` sequences (0: only tokenization) and a body of `size` bytes.

        Raises ApiError: 503 if the gate is closed, 429 if it is full or the tenant's limit is reached, 400 if the
        request can never fit.
        """
        if self.closed is not None:
            raise unavailable(self.closed)
        most = self._limits(tenant).requests
        if most is not None and self._requests[tenant] >= most:
            raise over_limit(
                f"the limit of requests at once of this API key is {most}; try again when one has ended", 1.0
            )
        if num_seqs:
            self._check_tokens(tenant, 1)
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
            raise ApiError(
                429,
                f"{what}; try again later",
                code="queue_full",
                retry_after=1 + min(30, self.num_inside // (4 * self.max_running)),
            )
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

    def reserve(self, tenant: str, most: int, ticket: Ticket, used: Callable[[], int]) -> None:
        """Take `most` tokens from what the tenant may use now; with the ticket's end all but `used()` are given back.

        A request for more than a minute's tokens waits until all of them are there. Raises ApiError 429.
        """
        limit = self._limits(tenant).tokens_per_minute
        if limit is None:
            return
        taken = min(most, limit)
        self._check_tokens(tenant, taken)
        self._add_tokens(tenant, -taken)
        ticket.callback(lambda: self._add_tokens(tenant, taken - used()))

    def _check_tokens(self, tenant: str, num_tokens: int) -> None:
        """Raise ApiError 429 if the tenant may not use so many tokens now."""
        limit = self._limits(tenant).tokens_per_minute
        if limit is not None and (missing := num_tokens - self._add_tokens(tenant, 0)) > 0:
            raise over_limit(
                f"this API key may use {limit} tokens a minute, those asked for by max_tokens included; ask for fewer, "
                "or try again later",
                60.0 * missing / limit,
            )

    def _add_tokens(self, tenant: str, num_tokens: int) -> float:
        """Add to what a tenant may use now; returns the sum. It grows by the minute's tokens in a minute, up to them.

        It falls below 0 after a request that used more than it could reserve.
        """
        limit, now = self._limits(tenant).tokens_per_minute or 0, time.monotonic()
        left, then = self._left.get(tenant, (float(limit), now))
        left = min(limit, left + (now - then) * limit / 60.0 + num_tokens)
        self._left[tenant] = left, now
        return left


def over_limit(message: str, seconds: float) -> ApiError:
    """The error 429 for a key that has reached its limit; `seconds`: after which to try again."""
    return ApiError(429, message, code="rate_limit_exceeded", retry_after=max(1, math.ceil(seconds)))
