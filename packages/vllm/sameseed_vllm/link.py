"""Link: the server's only outgoing connection, to the unix socket of its vLLM, whatever a request contains."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from sameseed.server.errors import unavailable

Response = aiohttp.ClientResponse
STOPPED = "the engine stopped while this request ran; send it again"
IDLE = 2.0  # seconds that an idle connection is kept; vLLM closes it after 5, which must not hit a request
CONNECTING = 5.0  # seconds to connect


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

    async def close(self) -> None:
        """Close all connections; whoever reads an answer must have left."""
        await self._client.close()

    async def get(self, path: str, patience: float = 30.0) -> tuple[int, bytes]:
        """GET a page; returns its status and body, or status 0 if it did not come within `patience` seconds."""
        timeout = aiohttp.ClientTimeout(total=patience)
        try:
            async with self._client.get(path, timeout=timeout, allow_redirects=False) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, asyncio.TimeoutError):
            return 0, b""

    @asynccontextmanager
    async def post(self, path: str, body: bytes) -> AsyncIterator[Response]:
        """POST a body; yields the answer. Leaving early closes the connection, so vLLM stops. Raises ApiError 503."""
        headers = {"content-type": "application/json"}
        try:
            async with self._client.post(path, data=body, headers=headers, allow_redirects=False) as response:
                yield response
        except aiohttp.ClientError:
            raise unavailable(STOPPED) from None
