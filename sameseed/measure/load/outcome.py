"""Parse the chunks of a response into the outcome of a request: tokens, arrival times, the server's metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from sameseed.measure.load.wire import Exchange


@dataclass
class RequestOutcome:
    """The outcome of one request. Times in seconds; `sent` is that of the first try.

    `arrivals`: times of the chunks with tokens. `sizes`: tokens in each of these chunks; empty if unknown. `counted`:
    the source of `num_output`: "usage", "token ids", or "chunks" (too low if tokens arrive together). If `error` is
    set, the other fields hold what arrived before it.
    """

    sent: float
    arrivals: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    num_output: int = 0
    num_prompt: int | None = None
    counted: str = "chunks"
    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # empty if the server does not tell
    metrics: Mapping[str, Any] = field(default_factory=dict)  # the server's own; speculation in vLLM's form
    num_cached: int = 0  # prompt tokens found in the server's prefix cache; 0 if it does not tell
    retries: int = 0
    error: str | None = None
    detail: str = ""

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
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def token_gaps(self) -> list[float] | None:
        """Seconds from token to token: the gap of a chunk with m tokens counts as m equal parts. None without sizes."""
        if not self.sizes:
            return None
        return [gap / size for gap, size in zip(self.gaps, self.sizes[1:], strict=True) for _ in range(size)]


def read(exchange: Exchange) -> RequestOutcome:
    """Parse an exchange into an outcome. Errors are recorded in the outcome, never raised."""
    made = RequestOutcome(exchange.sent, retries=exchange.retries, error=exchange.error, detail=exchange.detail)
    ended = False
    for moment, data in events(exchange.chunks):
        try:
            ended = data == b"[DONE]" or _take(made, moment, json.loads(data)) or ended
        except (ValueError, TypeError, AttributeError, KeyError, IndexError):
            made.error, made.detail = made.error or "not the API's form", data[:200].decode("utf-8", "replace")
    if made.error is None and not ended:
        made.error, made.detail = "cut off", "the stream ended without a finish_reason or [DONE]"
    if made.error is None and not made.arrivals:
        made.error, made.detail = "no token", "the answer holds no text"
    if not all(made.sizes):
        made.sizes, made.token_ids = [], []
    if made.counted != "usage":
        told = sum(made.sizes)
        made.counted, made.num_output = ("token ids", told) if told else ("chunks", len(made.arrivals))
    if sum(made.sizes) != made.num_output:
        made.sizes = []
    return made


def events(chunks: Seq[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The data of server-sent events, each with the arrival time of the chunk that completed it."""
    rest = b""
    for moment, chunk in [*chunks, (chunks[-1][0], b"\n")] if chunks else ():
        *lines, rest = (rest + chunk).split(b"\n")
        yield from ((moment, line[5:].strip()) for line in lines if line.startswith(b"data:"))


def _take(made: RequestOutcome, moment: float, event: Mapping[str, Any]) -> bool:
    """Add an event to `made`; True if the event ends the answer."""
    if fault := event.get("error"):
        if made.error is None:
            made.error = "error in the stream"
            made.detail = str(fault.get("message", fault) if isinstance(fault, dict) else fault)[:300]
        return False
    if usage := event.get("usage"):
        made.num_prompt = usage.get("prompt_tokens")
        made.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if isinstance(usage.get("completion_tokens"), int):
            made.counted, made.num_output = "usage", usage["completion_tokens"]
    made.metrics = event.get("metrics") or made.metrics
    choices = event.get("choices") or ()
    for choice in choices:
        said, ids = choice.get("delta") or choice, choice.get("token_ids") or ()
        text = said.get("text") or said.get("content") or said.get("reasoning_content") or ""
        if text or ids:
            made.arrivals.append(moment)
            made.text += text
            made.token_ids += ids
            made.sizes.append(len(ids))
    return any(choice.get("finish_reason") for choice in choices)
