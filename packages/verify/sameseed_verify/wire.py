"""HTTP exchanges with a server: one request, the chunks of its response with their arrival times, how it ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import httpx

from sameseed_verify import VerifyError

BUSY = (429, 503)  # status codes after which a request is retried
LONGEST_WAIT = 30.0  # most seconds to wait for one Retry-After
MAX_DETAIL = 300  # characters of an error's body that are kept


@dataclass(frozen=True)
class Endpoint:
    """A server and its model. `url`: without /v1. `version`: of the API's routes; OpenVINO's server has /v3."""

    url: str
    model: str = ""
    chat: bool = False
    version: str = "v1"

    @property
    def routes(self) -> str:
        return f"{self.url}/{self.version}"


@dataclass
class Exchange:
    """One request. `refusals`: retries because the server was busy. `error`: kind of error, None if there was none."""

    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    retries: int = 0
    refusals: int = 0
    error: str | None = None
    detail: str = ""


def open_client(key: str | None, concurrency: int, timeout: float) -> httpx.AsyncClient:
    """An HTTP client with `concurrency` connections, which ignores proxy settings."""
    return httpx.AsyncClient(
        headers={"authorization": f"Bearer {key}"} if key else {},
        timeout=httpx.Timeout(timeout, connect=10.0),
        limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
        trust_env=False,
    )


async def introduce(client: httpx.AsyncClient, endpoint: Endpoint) -> dict[str, Any]:
    """The server's description of the endpoint's model, or of its first model; empty if the named model is not listed.

    Raises VerifyError if there is no such server.
    """
    try:
        response = await client.get(f"{endpoint.routes}/models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise VerifyError(f"no server at {endpoint.url} ({error or type(error).__name__}); is it running?") from None
    if response.status_code in (401, 403):
        raise VerifyError(
            f"{endpoint.url} wants an API key; give --api-key-file, or set the variable of --api-key-variable"
        )
    if response.status_code != 200:
        if endpoint.model:
            return {}
        raise VerifyError(f"{endpoint.routes}/models answers {response.status_code}; name the model with --name")
    try:
        models = [dict(m) for m in response.json().get("data") or [{}]]
    except (ValueError, TypeError, AttributeError):
        raise VerifyError(
            f"{endpoint.routes}/models is not the answer of a server with OpenAI's API; give the address of one"
        ) from None
    return next((m for m in models if m.get("id") == endpoint.model), models[0] if not endpoint.model else {})


async def exchange(
    client: httpx.AsyncClient, endpoint: Endpoint, body: Mapping[str, Any], timeout: float, max_retries: int
) -> Exchange:
    """Send one request and keep the response, for at most `timeout` seconds with retries. Errors are in the result."""
    result = Exchange()
    try:
        await asyncio.wait_for(_attempts(client, endpoint, body, max_retries, result), timeout)
    except asyncio.TimeoutError:
        result.error, result.detail = "timeout", f"not done after {timeout:g} s"
    except Exception as error:
        result.error, result.detail = _kind(error), f"{type(error).__name__}: {error}"[:MAX_DETAIL]
    return result


async def _attempts(
    client: httpx.AsyncClient, endpoint: Endpoint, body: Mapping[str, Any], max_retries: int, result: Exchange
) -> None:
    path = "/chat/completions" if endpoint.chat else "/completions"
    while True:
        answered = False
        try:
            async with client.stream("POST", endpoint.routes + path, json=body) as response:
                answered = True
                if response.status_code == 200:
                    async for chunk in response.aiter_raw():
                        result.chunks.append((time.perf_counter(), chunk))
                    return
                detail = (await response.aread()).decode("utf-8", "replace")
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            if answered or result.retries >= max_retries:  # else the server closed an idle connection (RFC 9112, 9.3)
                raise
            result.retries += 1
            continue
        result.error, result.detail = f"HTTP {response.status_code}", " ".join(detail.split())[:MAX_DETAIL]
        if response.status_code not in BUSY:
            return
        if result.retries >= max_retries:
            result.error += f" after {max_retries} retries"
            return
        result.retries, result.refusals, result.error = result.retries + 1, result.refusals + 1, None
        wait = response.headers.get("retry-after", "")  # a date instead of seconds is ignored
        await asyncio.sleep(min(LONGEST_WAIT, float(wait)) if wait.isdigit() else 1.0)


def _kind(error: Exception) -> str:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return "no connection"
    if isinstance(error, httpx.TimeoutException):
        return "timeout"
    return "connection lost" if isinstance(error, httpx.TransportError) else "client error"


def events(chunks: Seq[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The data of server-sent events, each with the arrival time of the chunk that completed it."""
    rest = b""
    for moment, chunk in [*chunks, (chunks[-1][0], b"\n")] if chunks else ():
        *lines, rest = (rest + chunk).split(b"\n")
        yield from ((moment, line[5:].strip()) for line in lines if line.startswith(b"data:"))
