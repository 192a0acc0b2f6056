"""Intake: reads the bodies of requests. Each is bounded, in size and in time, and so are all of them together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import ClientDisconnect, Request

from sameseed.server import limits
from sameseed.server.errors import ApiError, unavailable
from sameseed.server.guard import Visit, visit_of

INLINE = 2**16  # bytes of a body that are parsed on the spot
MAX_INSIDE = 128 * 2**20  # bytes of all bodies that are being read, parsed or checked


class Intake:
    """One a server. Bodies are read before the gate can know what they ask for, so they have a bound of their own."""

    def __init__(self) -> None:
        self.size_inside = 0

    @asynccontextmanager
    async def held(self, request: Request) -> AsyncIterator[dict[str, Any]]:
        """The JSON object of a request's body, whose bytes (the visit's `size`) count until this is left.

        Raises ApiError: 400, 408, 413, 415, 503.
        """
        visit = visit_of(request)
        try:
            yield await self._object(request, visit)
        finally:
            self.size_inside -= visit.size

    async def _object(self, request: Request, visit: Visit) -> dict[str, Any]:
        kind_of_body = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind_of_body != "application/json":  # anything else a page of another site could send unasked
            raise ApiError(415, "send JSON, with 'Content-Type: application/json'")
        parts: list[bytes] = []
        try:
            await asyncio.wait_for(self._collect(request, visit, parts), limits.BODY_TIMEOUT)
            if visit.size <= INLINE:
                return limits.parse_object(b"".join(parts))
            return await asyncio.to_thread(lambda: limits.parse_object(b"".join(parts)))
        except asyncio.TimeoutError:
            raise ApiError(408, "the body did not arrive in time", code="timeout") from None
        except ClientDisconnect:
            raise ApiError(400, "the client left") from None

    async def _collect(self, request: Request, visit: Visit, parts: list[bytes]) -> None:
        async for part in request.stream():
            if visit.size + len(part) > limits.MAX_BODY:
                raise limits.too_large()
            if self.size_inside + len(part) > MAX_INSIDE:
                raise unavailable("too many large requests arrive at once; try again later", retry_after=1)
            parts.append(part)
            visit.size += len(part)
            self.size_inside += len(part)
