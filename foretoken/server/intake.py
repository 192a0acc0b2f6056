"""Intake: reads the bodies of requests. Each is bounded, in size and in time, and so are all of them together."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import ClientDisconnect, Request

from foretoken.server import limits
from foretoken.server.errors import ApiError, unavailable

INLINE = 2**16  # bytes of a body that are parsed on the spot
MAX_INSIDE = 128 * 2**20  # bytes of all bodies that are being read or parsed


class Intake:
    """One a server. Bodies are read before the gate can know what they ask for, so they have a bound of their own."""

    def __init__(self) -> None:
        self.size_inside = 0

    async def read_object(self, request: Request) -> dict[str, Any]:
        """The JSON object of a request's body. Raises ApiError: 400, 408, 413, 415, 503."""
        return (await self.read_sized(request))[0]

    async def read_sized(self, request: Request) -> tuple[dict[str, Any], int]:
        """As `read_object`, and how many bytes of a body it was: not every client says so before."""
        kind_of_body = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind_of_body != "application/json":  # anything else a page of another site could send unasked
            raise ApiError(415, "send JSON, with 'Content-Type: application/json'")
        parts: list[bytes] = []
        try:
            await asyncio.wait_for(self._collect(request, parts), limits.BODY_TIMEOUT)
            size = sum(map(len, parts))
            if size <= INLINE:
                return limits.parse_object(b"".join(parts)), size
            return await asyncio.to_thread(lambda: limits.parse_object(b"".join(parts))), size
        except asyncio.TimeoutError:
            raise ApiError(408, "the body did not arrive in time", code="timeout") from None
        except ClientDisconnect:
            raise ApiError(400, "the client left") from None
        finally:
            self.size_inside -= sum(map(len, parts))

    async def _collect(self, request: Request, parts: list[bytes]) -> None:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > limits.MAX_BODY:
                raise limits.too_large()
            if self.size_inside + len(part) > MAX_INSIDE:
                raise unavailable("too many large requests arrive at once; try again later", retry_after=1)
            parts.append(part)
            self.size_inside += len(part)
