"""Asking a server: one question at a time or several at once, within bounds; answers as text, tokens and counts."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from sameseed_verify import VerifyError

MAX_RETRIES = 3  # if the server is busy
BUSY = (429, 503)  # status codes after which a request is retried
LONGEST_WAIT = 30.0  # most seconds to wait for one Retry-After
MAX_DETAIL = 300  # characters of an error's text that are kept
NOT_SENT = "not sent"
NO_KEY = "wants an API key; give --api-key-file, or set the variable of --api-key-variable"
_UNREADABLE = (ValueError, TypeError, AttributeError, KeyError, IndexError)


@dataclass(frozen=True)
class ScoredToken:
    """A token's text, its log-probability (None: first token of a prompt), and the likeliest tokens at its position."""

    token: str
    logprob: float | None
    top: tuple[tuple[str, float], ...] = ()


@dataclass
class ServedText:
    """One answer; a count is None if the server does not tell it."""

    text: str = ""  # thoughts first, if the server shows them
    finish_reason: str | None = None
    num_tokens: int = 0
    num_cached: int | None = None  # prompt tokens found in the server's prefix cache
    num_drafted: int | None = None
    num_accepted: int = 0
    token_ids: tuple[int, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    scored: list[ScoredToken] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)  # times at which text arrived
    error: str | None = None  # its kind; None if there was none
    detail: str = ""
    has_thoughts: bool = False  # whose marks are not in the text

    @property
    def refused(self) -> bool:
        """Whether the server refused the request (HTTP 4xx, except busy ones)."""
        said = self.error or ""
        return said.startswith("HTTP 4") and not said.startswith(("HTTP 408", "HTTP 429"))


@dataclass(frozen=True)
class ServerQuestion:
    """One request."""

    prompt: Mapping[str, Any]  # fields of its body
    max_tokens: int  # to generate
    stream: bool = True
    salt: str | None = None  # equal ones share a prefix cache; None: shared with none, if the server can
    fields: Mapping[str, Any] = field(default_factory=dict)  # further ones of its body


def open_client(url: str, key: str | None, concurrency: int, timeout: float) -> httpx.AsyncClient:
    """An HTTP client; proxies of the environment are for servers that are not near. Raises VerifyError."""
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    transport = None  # httpx's own, with the environment's proxies and certificates
    try:
        if is_near(url):
            transport = httpx.AsyncHTTPTransport(limits=limits, trust_env=url.startswith("https:"))
        return httpx.AsyncClient(
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout, connect=10.0),
            limits=limits,
            transport=transport,
        )
    except (ImportError, OSError, ValueError) as error:
        raise VerifyError(f"{error}; mend or unset HTTPS_PROXY, HTTP_PROXY, ALL_PROXY or SSL_CERT_FILE") from None


def is_near(url: str) -> bool:
    """Whether a server is on this machine or in a private network, by its address or a name without a dot."""
    host = ""
    with suppress(httpx.InvalidURL, ValueError):
        host = httpx.URL(url).host
        return not ipaddress.ip_address(host).is_global
    return "." not in host


@dataclass
class Asker:
    """Sends questions to a model of a server, within bounds."""

    client: httpx.AsyncClient
    url: str  # what the server's routes begin with, e.g. http://127.0.0.1:8000/v1
    requests: int  # at most, retries too
    seconds: float
    timeout: float
    model: str = ""
    chat: bool = False
    extras: bool = True  # send fields beyond OpenAI's API
    spent: int = 0
    ended: str = ""  # why nothing more is sent
    died: bool = False  # the server is gone
    failures: Counter[str] = field(default_factory=Counter)  # failed requests by kind of error
    began: float = field(default_factory=time.monotonic)

    @property
    def passed(self) -> float:
        """Seconds since the inquiry began."""
        return time.monotonic() - self.began

    def _left(self) -> bool:
        """Whether seconds are left and nothing has ended the inquiry."""
        if not self.ended and self.passed >= self.seconds:
            self.ended = f"the {self.seconds:g} seconds of --seconds were over"
        return not self.ended

    async def introduce(self) -> dict[str, Any]:
        """The server's description of the named or first model; empty if that is not listed. Raises VerifyError."""
        try:
            response = await self.client.get(f"{self.url}/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise VerifyError(f"no server at {self.url} ({error or type(error).__name__}); is it running?") from None
        code = response.status_code
        if response.has_redirect_location:
            raise VerifyError(f"{self.url}/models has moved; give {response.url.join(response.headers['location'])}")
        if code == 401 or (code == 403 and not self.model):
            raise VerifyError(f"{self.url} {NO_KEY}")
        models: list[dict[str, Any]] = []
        if code == 200:
            with suppress(*_UNREADABLE):
                models = [dict(m) for m in response.json().get("data") or [{}]]
        if self.model:
            return next((m for m in models if m.get("id") == self.model), {})
        if not models:
            raise VerifyError(f"{self.url}/models ({code}) is no list of OpenAI's API; name the model with --name")
        return models[0]

    def salt(self) -> str:
        """A new salt, so that a request finds nothing of other requests in the prefix cache."""
        return f"verify-server {secrets.token_hex(8)}"

    def body(self, question: ServerQuestion) -> dict[str, Any]:
        """The request body of a question; greedy, unless its fields say otherwise."""
        made: dict[str, Any] = {"model": self.model, **question.prompt, "max_tokens": question.max_tokens}
        made |= {"temperature": 0.0, "stream": question.stream}
        made |= {"stream_options": {"include_usage": True}} if question.stream else {}
        if self.extras:
            shared = question.salt is not None
            made |= {"return_token_ids": True, "cache_salt": question.salt or self.salt(), "cache_prompt": shared}
            made["repetition_penalty"] = 1.0  # unset, vLLM takes the model's, which its log-probabilities leave out
        return {**made, **question.fields}

    async def ask(self, question: ServerQuestion) -> ServedText:
        """Send one question and return the answer. Never raises: errors are in the answer's `error`."""
        if not self.ended and self.spent >= self.requests:
            self.ended = f"the {self.requests} requests of --requests were sent"
        if not self._left():
            return ServedText(error=NOT_SENT, detail=self.ended)
        self.spent += 1
        timeout = min(self.timeout, max(self.seconds - self.passed, 0.0))
        try:
            answer = await asyncio.wait_for(self._exchange(self.body(question)), timeout)
        except asyncio.TimeoutError:
            if not self._left():
                return ServedText(error=NOT_SENT, detail=self.ended)
            answer = ServedText(error="timeout", detail=f"not done after {timeout:g} s")
        except Exception as error:
            answer = ServedText(error=_kind(error), detail=f"{type(error).__name__}: {error}"[:MAX_DETAIL])
        if answer.error is not None and not answer.refused:
            self.failures[answer.error] += 1
            if not self.ended and not await self._alive():
                self.ended, self.died = f"the server is gone ({answer.error}: {answer.detail})", True
        return answer

    async def _exchange(self, body: dict[str, Any]) -> ServedText:
        """The answer to one request, sent again while the server is busy and the bounds allow."""
        url = self.url + ("/chat/completions" if self.chat else "/completions")
        most = min(MAX_RETRIES, self.requests - self.spent)
        retries = -1
        while True:
            retries, answered = retries + 1, False
            try:
                async with self.client.stream("POST", url, json=body) as response:
                    answered = True
                    if response.status_code == 200:
                        return await read(response, body["stream"])
                    detail = _message((await response.aread()).decode("utf-8", "replace"))
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                if answered or retries >= most:  # else the server closed an idle connection (RFC 9112, 9.3)
                    raise
                continue
            busy = response.status_code in BUSY
            if not busy or retries >= most:
                after = f" after {most} retries" if busy else ""
                return ServedText(error=f"HTTP {response.status_code}{after}", detail=detail)
            self.spent += 1
            wait = response.headers.get("retry-after", "")  # a date instead of seconds is ignored
            await asyncio.sleep(min(LONGEST_WAIT, float(wait)) if wait.isdigit() else 1.0)

    async def ask_together(self, questions: Seq[ServerQuestion], concurrency: int) -> list[ServedText]:
        """Answers in the order of the questions, with `concurrency` requests at once."""
        places = asyncio.Semaphore(concurrency)

        async def one(question: ServerQuestion) -> ServedText:
            async with places:
                return await self.ask(question)

        return await asyncio.gather(*map(one, questions))

    async def _alive(self) -> bool:
        try:
            await self.client.get(f"{self.url}/models", timeout=10.0)
        except httpx.HTTPError:
            return False
        return True


def _kind(error: Exception) -> str:
    """The kind of an error: of the connection, or of what the server sent."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return "no connection"
    if isinstance(error, httpx.TimeoutException):
        return "timeout"
    if isinstance(error, httpx.TransportError):
        return "connection lost"
    return "not the API's form" if isinstance(error, _UNREADABLE) else "client error"


def _message(detail: str) -> str:
    """The message in an error's JSON body; the whole body if it has none."""
    with suppress(ValueError, TypeError, KeyError):
        detail = str(json.loads(detail)["error"]["message"])
    return " ".join(detail.split())[:MAX_DETAIL]


async def read(response: httpx.Response, streamed: bool) -> ServedText:
    """Parse a response as it arrives. Raises ValueError and the like for what is not the API's form."""
    made = ServedText()
    async for body in _bodies(response, streamed):
        if fault := body.get("error"):
            said = fault.get("message", fault) if isinstance(fault, dict) else fault
            return ServedText(error="error in the answer", detail=str(said)[:MAX_DETAIL])
        _take(made, body)
    if made.finish_reason is None:
        made.error, made.detail = "cut off", "the answer has no finish_reason"
    made.num_tokens = made.num_tokens or len(made.token_ids) or len(made.moments)
    return made


async def _bodies(response: httpx.Response, streamed: bool) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a response, each as soon as it is complete."""
    if not streamed:
        yield json.loads(await response.aread())
        return
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for body in _events(lines):
            yield body
    for body in _events([rest]):
        yield body


def _events(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    data = (line[5:].strip() for line in lines if line.startswith(b"data:"))
    return [json.loads(each) for each in data if each != b"[DONE]"]


def _take(made: ServedText, body: Mapping[str, Any]) -> None:
    """Add a body, or a chunk of one, to `made`."""
    if usage := body.get("usage"):
        made.num_tokens = usage.get("completion_tokens") or 0
        made.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", made.num_cached)
    metrics, timings = body.get("metrics") or {}, body.get("timings")
    if "speculative_decoding" in metrics:
        told = metrics["speculative_decoding"] or {}
        made.num_drafted = told.get("num_draft_tokens", 0)
        made.num_accepted = told.get("num_accepted_draft_tokens", 0)
    if isinstance(timings, dict):  # llama-server's; draft counts are present only if there were drafts
        made.num_drafted, made.num_accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
        made.num_cached = timings.get("cache_n", made.num_cached)
    for choice in (body.get("choices") or ())[:1]:
        said = choice.get("delta") or choice.get("message") or choice
        thought = said.get("reasoning_content") or said.get("reasoning") or ""
        made.has_thoughts = made.has_thoughts or bool(thought)
        if text := thought + (said.get("text") or said.get("content") or ""):
            made.text += text
            made.moments.append(time.perf_counter())
        made.token_ids += tuple(choice.get("token_ids") or ())
        ids = choice.get("prompt_token_ids") or body.get("prompt_token_ids") or ()
        made.prompt_token_ids = tuple(ids) or made.prompt_token_ids
        made.scored += scored_tokens(choice.get("logprobs"))
        made.finish_reason = choice.get("finish_reason") or made.finish_reason


def scored_tokens(told: Any) -> list[ScoredToken]:
    """Log-probabilities from either form of the API: parallel lists (completions), or one entry per token (chat)."""
    if not isinstance(told, dict):
        return []
    rows: list[tuple[str, Any, Iterable[tuple[str, Any]]]]
    if (content := told.get("content")) is not None:
        rows = [
            (e["token"], e["logprob"], [(t["token"], t["logprob"]) for t in e.get("top_logprobs") or ()])
            for e in content
        ]
    else:
        tokens, values = told.get("tokens") or (), told.get("token_logprobs") or ()
        tops = told.get("top_logprobs") or [None] * len(tokens)
        rows = [(t, v, (top or {}).items()) for t, v, top in zip(tokens, values, tops, strict=True)]
    return [
        ScoredToken(token, None if value is None else float(value), tuple((name, float(v)) for name, v in top))
        for token, value, top in rows
    ]
