"""From chunks to what a request got: its tokens, its moments, what the server says of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from sameseed.study.load.wire import Exchange


@dataclass(frozen=True)
class RequestOutcome:
    """One request. Moments in seconds; `sent` is that of its first try. Where `error` is set, the rest is what came.

    `arrivals`: moments of the chunks with tokens. `sizes`: tokens in each of them, None where the server does not tell.
    `counted`: where `num_output` is from: "usage", "token ids", or "chunks" (a guess: too few where tokens arrive
    together).
    """

    sent: float
    arrivals: tuple[float, ...] = ()
    sizes: tuple[int, ...] | None = None
    num_output: int = 0
    num_prompt: int | None = None
    counted: str = "chunks"
    text: str = ""
    token_ids: tuple[int, ...] | None = None
    speculation: Mapping[str, Any] | None = None  # as vLLM writes it
    metrics: bool = False  # did the server tell of its own metrics, if only to say that nothing was drafted?
    num_cached: int = 0  # tokens of the prompt that the server knew, as far as it says
    retries: int = 0
    error: str | None = None
    detail: str = ""

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
        """Seconds for each token but the first; None for a single token."""
        if self.num_output < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.num_output - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds from chunk to chunk."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def token_gaps(self) -> list[float] | None:
        """The same by tokens: a chunk of m tokens is m gaps of an m-th of its own. None where sizes are unknown."""
        if self.sizes is None:
            return None
        found: list[float] = []
        for gap, size in zip(self.gaps, self.sizes[1:], strict=True):
            found += [gap / size] * size
        return found


@dataclass
class _Reading:
    arrivals: list[float] = field(default_factory=list)
    sizes: list[int] | None = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    usage: Mapping[str, Any] | None = None
    metrics: Mapping[str, Any] | None = None
    ended: bool = False
    error: str | None = None
    detail: str = ""


def read(exchange: Exchange) -> RequestOutcome:
    """What an exchange comes to."""
    reading = _Reading(error=exchange.error, detail=exchange.detail)
    for moment, data in _events(exchange.chunks):
        if data == b"[DONE]":
            reading.ended = True
            continue
        try:
            event = json.loads(data)
            _take(reading, moment, event)
        except (ValueError, TypeError, AttributeError, KeyError, IndexError):
            reading.error, reading.detail = reading.error or "not the API's form", data[:200].decode("utf-8", "replace")
    return _outcome(exchange, reading)


def _events(chunks: Seq[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """The data of server-sent events, each with the moment of the chunk that completed it."""
    found: list[tuple[float, bytes]] = []
    rest = b""
    for moment, chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        found += [(moment, line[5:].strip()) for line in lines if line.startswith(b"data:")]
    if rest.startswith(b"data:") and chunks:
        found.append((chunks[-1][0], rest[5:].strip()))
    return found


def _take(reading: _Reading, moment: float, event: Mapping[str, Any]) -> None:
    if event.get("error"):
        fault = event["error"]
        if reading.error is None:
            reading.error = "error in the stream"
            reading.detail = str(fault.get("message", fault) if isinstance(fault, dict) else fault)[:300]
        return
    reading.usage = event.get("usage") or reading.usage
    reading.metrics = event.get("metrics") or reading.metrics
    for choice in event.get("choices") or ():
        delta = choice.get("delta")
        text = choice.get("text") if delta is None else (delta.get("content") or delta.get("reasoning_content"))
        ids = choice.get("token_ids")
        reading.ended = reading.ended or bool(choice.get("finish_reason"))
        if not text and not ids:
            continue
        reading.arrivals.append(moment)
        reading.texts.append(text or "")
        reading.token_ids += ids or ()
        if not ids:
            reading.sizes = None
        elif reading.sizes is not None:
            reading.sizes.append(len(ids))


def _outcome(exchange: Exchange, reading: _Reading) -> RequestOutcome:
    usage = reading.usage or {}
    counted, num_output = "chunks", len(reading.arrivals)
    if isinstance(usage.get("completion_tokens"), int):
        counted, num_output = "usage", usage["completion_tokens"]
    elif reading.sizes:
        counted, num_output = "token ids", sum(reading.sizes)
    error, detail = reading.error, reading.detail
    if error is None and not reading.ended:
        error, detail = "cut off", "the stream ended without a finish_reason or [DONE]"
    if error is None and not reading.arrivals:
        error, detail = "no token", "the answer holds no text"
    metrics = reading.metrics or {}
    return RequestOutcome(
        sent=exchange.sent,
        arrivals=tuple(reading.arrivals),
        sizes=tuple(reading.sizes) if reading.sizes and sum(reading.sizes) == num_output else None,
        num_output=num_output,
        num_prompt=usage.get("prompt_tokens"),
        num_cached=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        counted=counted,
        text="".join(reading.texts),
        token_ids=tuple(reading.token_ids) if reading.sizes else None,
        speculation=metrics.get("speculative_decoding"),
        metrics="speculative_decoding" in metrics,
        retries=exchange.retries,
        error=error,
        detail=detail,
    )
