"""From what a server sends, whole or streamed, to one answer: text, tokens, log-probabilities, what it tells."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sameseed.study.load import outcome
from sameseed.study.load.wire import Exchange

BUSY = ("HTTP 408", "HTTP 429")  # what is no answer to the question


@dataclass(frozen=True)
class ScoredToken:
    """A token's text with its log-probability, and the likeliest ones at its place. None: a prompt's first token."""

    token: str
    logprob: float | None
    top: tuple[tuple[str, float], ...] = ()


@dataclass
class ServedText:
    """One answer. None: the server does not tell. `moments`: when text came. `error`: a kind, None if all is well."""

    text: str = ""
    finish_reason: str | None = None
    num_tokens: int = 0
    num_prompt: int | None = None
    num_cached: int | None = None  # tokens of the prompt that the server knew
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
        """Did the server say that it does not do what was asked?"""
        said = self.error or ""
        return said.startswith("HTTP 4") and not said.startswith(BUSY)


def read(exchange: Exchange, streamed: bool) -> ServedText:
    """What an exchange comes to."""
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
    """The JSON objects of an answer, each with the moment at which it was complete."""
    if not streamed:
        yield exchange.chunks[-1][0], json.loads(b"".join(chunk for _, chunk in exchange.chunks))
        return
    for moment, data in outcome.events(exchange.chunks):
        if data != b"[DONE]":
            yield moment, json.loads(data)


def _take(made: ServedText, moment: float, body: Mapping[str, Any]) -> int:
    """Add a body, or a chunk of one; 1 if it brought text."""
    if usage := body.get("usage"):
        made.num_tokens = usage.get("completion_tokens") or 0
        made.num_prompt = usage.get("prompt_tokens")
        made.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", made.num_cached)
    metrics, timings = body.get("metrics") or {}, body.get("timings")
    if "speculative_decoding" in metrics:
        told = metrics["speculative_decoding"] or {}
        made.num_drafted = told.get("num_draft_tokens", 0)
        made.num_accepted = told.get("num_accepted_draft_tokens", 0)
    if isinstance(timings, dict):  # llama-server's, which names drafts only where there are some
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
    """Log-probabilities in either of the API's two forms: lists beside each other, or one entry a token."""
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
    """What an error says, out of its body."""
    try:
        return str(json.loads(detail)["error"]["message"])
    except (ValueError, TypeError, KeyError):
        return detail
