"""Parse a server's response, whole or streamed, into one answer: text, tokens, log-probabilities and counts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sameseed_verify.wire import Exchange, events

BUSY = ("HTTP 408", "HTTP 429")  # errors that do not mean a refusal


@dataclass(frozen=True)
class ScoredToken:
    """A token's text, its log-probability (None: first token of a prompt), and the likeliest tokens at its position."""

    token: str
    logprob: float | None
    top: tuple[tuple[str, float], ...] = ()


@dataclass
class ServedText:
    """One answer; a count is None if the server does not tell it.

    `moments`: times at which text arrived. `error`: kind of error, None if there was none.
    """

    text: str = ""
    finish_reason: str | None = None
    num_tokens: int = 0
    num_prompt: int | None = None
    num_cached: int | None = None  # prompt tokens found in the server's prefix cache
    num_drafted: int | None = None
    num_accepted: int = 0
    token_ids: tuple[int, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    scored: list[ScoredToken] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    error: str | None = None
    detail: str = ""

    @property
    def refused(self) -> bool:
        """Whether the server refused the request (HTTP 4xx, except busy ones)."""
        said = self.error or ""
        return said.startswith("HTTP 4") and not said.startswith(BUSY)


def read(exchange: Exchange, streamed: bool) -> ServedText:
    """Parse an exchange into an answer. Errors are recorded in the answer, never raised."""
    made = ServedText(error=exchange.error, detail=_message(exchange.detail))
    if made.error is not None:
        return made
    num_chunks = 0
    try:
        for moment, body in _bodies(exchange, streamed):
            if fault := body.get("error"):
                said = fault.get("message", fault) if isinstance(fault, dict) else fault
                made.error, made.detail = "error in the answer", str(said)[:300]
                return made
            num_chunks += _take(made, moment, body)
    except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        made.error, made.detail = "not the API's form", f"{type(error).__name__}: {error}"[:300]
        return made
    if made.finish_reason is None:
        made.error, made.detail = "cut off", "the answer has no finish_reason"
    made.num_tokens = made.num_tokens or len(made.token_ids) or num_chunks
    return made


def _bodies(exchange: Exchange, streamed: bool) -> Iterator[tuple[float, dict[str, Any]]]:
    """The JSON objects of a response, each with the time at which it was complete."""
    if not streamed:
        yield exchange.chunks[-1][0], json.loads(b"".join(chunk for _, chunk in exchange.chunks))
        return
    for moment, data in events(exchange.chunks):
        if data != b"[DONE]":
            yield moment, json.loads(data)


def _take(made: ServedText, moment: float, body: Mapping[str, Any]) -> int:
    """Add a body, or a chunk of one, to `made`; 1 if it contained text, else 0."""
    if usage := body.get("usage"):
        made.num_tokens = usage.get("completion_tokens") or 0
        made.num_prompt = usage.get("prompt_tokens")
        made.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", made.num_cached)
    metrics, timings = body.get("metrics") or {}, body.get("timings")
    if "speculative_decoding" in metrics:
        told = metrics["speculative_decoding"] or {}
        made.num_drafted = told.get("num_draft_tokens", 0)
        made.num_accepted = told.get("num_accepted_draft_tokens", 0)
    if isinstance(timings, dict):  # llama-server's; draft counts are present only if there were drafts
        made.num_drafted, made.num_accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
        made.num_cached = timings.get("cache_n", made.num_cached)
    choices = body.get("choices") or ()
    if not choices:
        return 0
    choice = choices[0]
    said = choice.get("delta") or choice.get("message") or choice
    text = (said.get("reasoning_content") or "") + (said.get("text") or said.get("content") or "")
    made.text += text
    made.token_ids += tuple(choice.get("token_ids") or ())
    made.prompt_token_ids = tuple(choice.get("prompt_token_ids") or body.get("prompt_token_ids") or ()) or (
        made.prompt_token_ids
    )
    made.scored += scored_tokens(choice.get("logprobs"))
    made.finish_reason = choice.get("finish_reason") or made.finish_reason
    if text:
        made.moments.append(moment)
    return int(bool(text))


def scored_tokens(told: Any) -> list[ScoredToken]:
    """Log-probabilities from either form of the API: parallel lists (completions), or one entry per token (chat)."""
    if not isinstance(told, dict):
        return []
    if told.get("content") is not None:
        return [
            ScoredToken(
                e["token"], float(e["logprob"]), _top((t["token"], t["logprob"]) for t in e.get("top_logprobs") or ())
            )
            for e in told["content"]
        ]
    tokens, values = told.get("tokens") or (), told.get("token_logprobs") or ()
    tops = told.get("top_logprobs") or [None] * len(tokens)
    return [
        ScoredToken(t, None if v is None else float(v), _top((top or {}).items()))
        for t, v, top in zip(tokens, values, tops, strict=True)
    ]


def _top(pairs: Iterable[tuple[str, Any]]) -> tuple[tuple[str, float], ...]:
    return tuple((token, float(value)) for token, value in pairs)


def _message(detail: str) -> str:
    """The message in an error's JSON body; the whole body if it has none."""
    try:
        return str(json.loads(detail)["error"]["message"])
    except (ValueError, TypeError, KeyError):
        return detail
