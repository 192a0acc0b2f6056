"""Link: the only way out of this process, to the unix socket of a vLLM that it started itself.

There is no host and no port in here: what a request says cannot choose where it goes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from sameseed.server.errors import ApiError, unavailable

STOPPED = "the engine stopped while this request ran; send it again"
IDLE = 2.0  # seconds that an unused connection is kept; vLLM closes one after 5, and a request must not meet that
MAX_PAGE = 16 * 2**20  # bytes of an answer that is read whole
Response = httpx.Response


class NotReachedError(ApiError):
    """503: there was no connection, so that nothing of the request was seen."""

    def __init__(self) -> None:
        super().__init__(503, "the engine is not there; try again later", code="unavailable", retry_after=5)


class Link:
    """HTTP over one unix socket, with the key that only both ends know.

    `doubted`: a connection broke, and nothing has said since that vLLM is well.
    """

    def __init__(self, path: str, key: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=IDLE)
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=path, limits=limits),
            base_url="http://vllm",
            headers={"authorization": f"Bearer {key}", "accept-encoding": "identity"},
            timeout=httpx.Timeout(None, connect=5.0),
            trust_env=False,
        )
        self.doubted = False

    async def close(self) -> None:
        """Every stream that is still open ends."""
        await self._client.aclose()

    async def healthy(self, patience: float) -> bool | None:
        """Does it answer that it is well? None: no answer within `patience` seconds."""
        try:
            well = (await self._client.get("/health", timeout=patience)).status_code == 200
        except httpx.HTTPError:
            return None
        self.doubted = self.doubted and not well
        return well

    async def get(self, path: str, patience: float = 30.0) -> bytes:
        """A page, within so many seconds. Raises ApiError 503 where none comes."""
        try:
            response = await self._client.get(path, timeout=patience)
        except httpx.HTTPError:
            raise unavailable("the engine does not answer; try again later") from None
        if response.status_code != 200:
            raise unavailable("the engine has no such page; try again later")
        return response.content

    @asynccontextmanager
    async def post(self, path: str, body: bytes) -> AsyncIterator[Response]:
        """Send a body; the answer is read by whoever asked. Leaving early tells vLLM that its reader is gone.

        Raises NotReachedError where vLLM cannot be asked, ApiError 503 if it goes away meanwhile.
        """
        headers = {"content-type": "application/json"}
        try:
            async with self._client.stream("POST", path, content=body, headers=headers) as response:
                yield response
        except httpx.TransportError as error:
            self.doubted = True
            reached = not isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
            raise (unavailable(STOPPED) if reached else NotReachedError()) from None


async def read_some(response: Response) -> bytes:
    """The body of an answer, as far as the limit."""
    parts, size = [], 0
    async for part in response.aiter_raw():
        parts.append(part)
        size += len(part)
        if size > MAX_PAGE:
            break
    return b"".join(parts)
