"""Link: the only way out of this process, to the unix socket of a vLLM that it started itself.

There is no host and no port in here: what a request says cannot choose where it goes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from sameseed.server.errors import ApiError, unavailable

STOPPED = "the engine stopped while this request ran; send it again"
IDLE = 2.0  # seconds that an unused connection is kept; vLLM closes one after 5, and a request must not meet that
CONNECTING = 5.0  # seconds for a connection
MAX_PAGE = 16 * 2**20  # bytes of an answer that is read whole


class NotReachedError(ApiError):
    """503: there was no connection, so that nothing of the request was seen."""

    def __init__(self) -> None:
        super().__init__(503, "the engine is not there; try again later", code="unavailable", retry_after=5)


class Response:
    """The beginning of an answer, and the rest as it comes."""

    def __init__(self, made: aiohttp.ClientResponse) -> None:
        self.status = made.status
        self.kind = made.headers.get("content-type", "application/json")
        self._content = made.content

    def chunks(self) -> AsyncIterator[bytes]:
        """The body; what has arrived at once is one chunk."""
        return self._content.iter_any()


class Link:
    """HTTP over one unix socket, with the key that only both ends know; made where an event loop runs.

    `doubted`: a connection broke, and nothing has said since that vLLM is well.
    """

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
        self.doubted = False
        self.said: int | None = None  # the status of its last answer about its health
        self._open: set[aiohttp.ClientResponse] = set()

    async def close(self) -> None:
        """Every stream that is still open ends, with ApiError 503."""
        for response in self._open:  # who waits for more of it would wait for ever if only the connection went
            response.close()
        await self._client.close()

    async def healthy(self, patience: float) -> bool | None:
        """Does it answer that it is well? None: no answer within `patience` seconds."""
        try:
            self.said = (await self._get("/health", patience))[0]
        except (aiohttp.ClientError, asyncio.TimeoutError):
            return None
        well = self.said == 200
        self.doubted = self.doubted and not well
        return well

    async def get(self, path: str, patience: float = 30.0) -> bytes:
        """A page, within so many seconds. Raises ApiError 503 where none comes."""
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
        """Send a body; the answer is read by whoever asked. Leaving early tells vLLM that its reader is gone.

        Raises NotReachedError where vLLM cannot be asked, ApiError 503 if it goes away meanwhile.
        """
        headers = {"content-type": "application/json"}
        try:
            async with self._client.post(path, data=body, headers=headers, allow_redirects=False) as response:
                self._open.add(response)
                try:
                    yield Response(response)
                finally:
                    self._open.discard(response)
        except aiohttp.ClientError as error:
            self.doubted = True
            reached = not isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError))
            raise (unavailable(STOPPED) if reached else NotReachedError()) from None


async def read_some(response: Response) -> bytes:
    """The body of an answer, as far as the limit."""
    parts, size = [], 0
    async for part in response.chunks():
        parts.append(part)
        size += len(part)
        if size > MAX_PAGE:
            break
    return b"".join(parts)
