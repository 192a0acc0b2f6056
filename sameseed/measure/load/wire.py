"""HTTP exchanges: one request and its chunks with their times; nothing is parsed meanwhile, as that takes time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from sameseed.errors import ConfigError, say_once

try:
    import httpx
except ImportError:
    raise ConfigError("asking a server needs httpx; install it: pip install '.[study]'") from None

LOADING = 300.0  # most seconds to wait for a server that loads its model
BUSY = (429, 503)  # status codes after which a request is retried
LONGEST_WAIT = 30.0  # most seconds to wait for one Retry-After
MAX_DETAIL = 300
KINDS: dict[type[Exception], str] = {  # what an error of the client is called; the first that fits
    httpx.ConnectError: "no connection",
    httpx.ConnectTimeout: "no connection",
    httpx.TimeoutException: "timeout",
    httpx.TransportError: "connection lost",
}


@dataclass(frozen=True)
class Endpoint:
    """A server with the fields of every request to it; an arm of a load test. `url`: without /v1."""

    label: str
    url: str
    model: str = ""
    chat: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    speculation: Mapping[str, Any] | None = None  # the server's description of its drafter, if it gives one

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"


@dataclass
class Exchange:
    """One request, and what `outcome.read` finds in its chunks. Times in seconds of `time.perf_counter`."""

    sent: float  # the first try
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    retries: int = 0
    error: str | None = None  # its kind; the other fields then hold what arrived before it
    detail: str = ""
    arrivals: list[float] = field(default_factory=list)  # of the chunks with tokens
    sizes: list[int] = field(default_factory=list)  # tokens in each of these chunks; empty if unknown
    num_output: int = 0
    num_prompt: int | None = None
    counted: str = "chunks"  # "usage", "token ids" or "chunks" (too low if tokens arrive together)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # empty if the server does not tell
    metrics: Mapping[str, Any] = field(default_factory=dict)  # the server's own; speculation in vLLM's form
    num_cached: int = 0  # prompt tokens found in the server's prefix cache; 0 if it does not tell

    @property
    def speculation(self) -> Mapping[str, Any] | None:
        """The server's speculation counts for this request; None if it gives none, or nothing was drafted."""
        return self.metrics.get("speculative_decoding")

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0] - self.sent

    @property
    def latency(self) -> float:
        """Seconds to the last token."""
        return self.arrivals[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None with fewer than two tokens."""
        if self.num_output < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.num_output - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds from chunk to chunk."""
        return [b - a for a, b in pairwise(self.arrivals)]

    @property
    def token_gaps(self) -> list[float] | None:
        """Seconds from token to token: the gap of a chunk with m tokens counts as m equal parts. None without sizes."""
        if not self.sizes:
            return None
        return [gap / size for gap, size in zip(self.gaps, self.sizes[1:], strict=True) for _ in range(size)]


def base_url(url: str) -> str:
    """The server's address without a trailing /v1. Raises ConfigError."""
    url = url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")) or len(url) < 9:
        raise ConfigError(f"--url takes a server's address, e.g. http://127.0.0.1:8000, got {url!r}")
    return url


def open_client(key: str | None, concurrency: int, timeout: float) -> httpx.AsyncClient:
    """An HTTP client with `concurrency` connections, which ignores proxy settings and reads bytes as they come."""
    headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {key}"} if key else {})
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    waits = httpx.Timeout(timeout, connect=10.0)
    return httpx.AsyncClient(headers=headers, timeout=waits, limits=limits, trust_env=False)


async def await_ready(client: httpx.AsyncClient, url: str) -> None:
    """Wait, at most `LOADING` seconds, while /ready (sameseed) or /health (llama-server) answers 503."""
    start = time.monotonic()
    with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL):  # `introduce` says what is wrong
        for path in ("/ready", "/health"):
            while time.monotonic() - start < LOADING and (await client.get(url + path)).status_code == 503:
                say_once(f"{url} is not ready yet; waiting")
                await asyncio.sleep(0.5)


async def introduce(client: httpx.AsyncClient, endpoint: Endpoint) -> dict[str, Any]:
    """The server's description of the endpoint's model, or of its first; empty if unlisted. Raises ConfigError."""
    page = f"{endpoint.url}/v1/models"
    try:
        response = await client.get(page)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"no server at {endpoint.url} ({error or type(error).__name__}); is it running?") from None
    if response.status_code in (401, 403):
        raise ConfigError(
            f"{endpoint.url} wants an API key; give --api-key-file, or set the variable of --api-key-variable"
        )
    if response.status_code != 200:
        if endpoint.model:
            return {}
        raise ConfigError(f"{page} answers {response.status_code}; name the model with --model")
    try:
        models = [dict(m) for m in response.json().get("data") or [{}]]
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(f"{page} does not answer as OpenAI's API does; give the address of such a server") from None
    return next((m for m in models if m.get("id") == endpoint.model), models[0] if not endpoint.model else {})


async def page(client: httpx.AsyncClient, url: str) -> str:
    """The text of a page; empty if there is none."""
    try:
        response = await client.get(url)
    except httpx.HTTPError:
        return ""
    return response.text if response.status_code == 200 else ""


async def exchange(
    client: httpx.AsyncClient,
    endpoint: Endpoint,
    body: Mapping[str, Any],
    timeout: float,
    max_retries: int,
    due: float | None = None,
) -> Exchange:
    """Send one request and keep the response, for at most `timeout` seconds with retries. Errors are in the result.

    `due`: time at which the request should have been sent. Times count from `due`, so that a delay in the load
    generator counts as waiting time.
    """
    made = Exchange(time.perf_counter() if due is None else due)
    try:
        await asyncio.wait_for(_attempts(client, endpoint, body, max_retries, made), timeout)
    except asyncio.TimeoutError:
        made.error, made.detail = "timeout", f"not done after {timeout:g} s"
    except Exception as error:
        made.error = next((name for kind, name in KINDS.items() if isinstance(error, kind)), "client error")
        made.detail = f"{type(error).__name__}: {error}"[:MAX_DETAIL]
    return made


async def _attempts(
    client: httpx.AsyncClient, endpoint: Endpoint, body: Mapping[str, Any], max_retries: int, made: Exchange
) -> None:
    clock = time.perf_counter
    while True:
        answered = False
        try:
            async with client.stream("POST", endpoint.url + endpoint.path, json=body) as response:
                answered = True
                if response.status_code == 200:
                    async for chunk in response.aiter_raw():
                        made.chunks.append((clock(), chunk))
                    return
                detail = (await response.aread()).decode("utf-8", "replace")
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            if answered or made.retries >= max_retries:  # else the server closed an idle connection (RFC 9112, 9.3)
                raise
            made.retries += 1
            continue
        made.error, made.detail = f"HTTP {response.status_code}", " ".join(detail.split())[:MAX_DETAIL]
        if response.status_code not in BUSY:
            return
        if made.retries >= max_retries:
            made.error += f" after {max_retries} retries"
            return
        made.retries, made.error = made.retries + 1, None
        wait = response.headers.get("retry-after", "")  # a date instead of seconds is ignored
        await asyncio.sleep(min(LONGEST_WAIT, float(wait)) if wait.isdigit() else 1.0)
