"""Link: the server's only outgoing connection, to the unix socket of a vLLM that the server itself started.

It has no host and no port, so the content of a request cannot choose where the request goes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from sameseed.server.errors import unavailable

STOPPED = "the engine stopped while this request ran; send it again"
IDLE = 2.0  # seconds that an idle connection is kept; vLLM closes it after 5, which must not hit a request
CONNECTING = 5.0  # seconds to connect
MAX_PAGE = 16 * 2**20  # most bytes of an answer that is read whole


class Response:
    """An answer: its status and content type, and its body as it arrives."""

    def __init__(self, made: aiohttp.ClientResponse) -> None:
        self.status = made.status
        self.kind = made.headers.get("content-type", "application/json")
        self._content = made.content

    def chunks(self) -> AsyncIterator[bytes]:
        """The body in chunks, as they arrive."""
        return self._content.iter_any()


class Link:
    """HTTP over one unix socket, with a key that only the two ends know. Create it while an event loop runs."""

    def __init__(self, path: str, key: str) -> None:
        self._client = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path=path, limit=0, keepalive_timeout=IDLE),
            base_url="http://vllm",
            headers={"authorization": f"Bearer {key}", "accept-encoding": "identity"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECTING),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
        )
        self.said: int | None = None  # the status of the last answer to /health
        self._open: set[aiohttp.ClientResponse] = set()

    async def close(self) -> None:
        """Close all connections. Streams that are still open end with ApiError 503."""
        for response in self._open:  # without this its reader would wait forever
            response.close()
        await self._client.close()

    async def healthy(self, patience: float) -> bool | None:
        """Whether vLLM answers /health with 200. None: no answer within `patience` seconds."""
        try:
            self.said = (await self._get("/health", patience))[0]
        except (aiohttp.ClientError, asyncio.TimeoutError):
            return None
        return self.said == 200

    async def get(self, path: str, patience: float = 30.0) -> bytes:
        """GET a page within `patience` seconds; returns its body. Raises ApiError 503 if vLLM does not give it."""
        try:
            status, page = await self._get(path, patience)
        except (aiohttp.ClientError, asyncio.TimeoutError):
            raise unavailable("the engine does not answer; try again later") from None
        if status != 200:
            raise unavailable("the engine has no such page; try again later")
        return page

    async def _get(self, path: str, patience: float) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=patience)
        async with self._client.get(path, timeout=timeout, allow_redirects=False) as response:
            return response.status, await response.read()

    @asynccontextmanager
    async def post(self, path: str, body: bytes) -> AsyncIterator[Response]:
        """POST a body; yields the answer, which the caller reads. Leaving early closes the connection, so vLLM stops.

        Raises ApiError 503 if vLLM cannot be reached, or if the connection breaks later.
        """
        headers = {"content-type": "application/json"}
        try:
            async with self._client.post(path, data=body, headers=headers, allow_redirects=False) as response:
                self._open.add(response)
                try:
                    yield Response(response)
                finally:
                    self._open.discard(response)
        except aiohttp.ClientError:
            raise unavailable(STOPPED) from None


async def read_some(response: Response) -> bytes:
    """The body of an answer, read until it exceeds MAX_PAGE."""
    parts, size = [], 0
    async for part in response.chunks():
        parts.append(part)
        size += len(part)
        if size > MAX_PAGE:
            break
    return b"".join(parts)
