"""The outcome of a request: tokens and arrival times from its chunks, and the metrics of many outcomes.

Definitions as in vLLM's `bench serve`. TTFT: from sending to the first token. TPOT: (latency - TTFT) / (tokens - 1).
ITL: between chunks, and between tokens.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence as Seq
from typing import Any

import numpy as np

from sameseed.measure.load.wire import Exchange


def read(made: Exchange) -> Exchange:
    """Parse the chunks of an exchange into its other fields. Errors are recorded in it, never raised."""
    ended = False
    for moment, data in events(made.chunks):
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
    made.chunks = []
    return made


def events(chunks: Seq[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The data of server-sent events, each with the arrival time of the chunk that completed it."""
    rest = b""
    for moment, chunk in [*chunks, (chunks[-1][0], b"\n")] if chunks else ():
        *lines, rest = (rest + chunk).split(b"\n")
        yield from ((moment, line[5:].strip()) for line in lines if line.startswith(b"data:"))


def _take(made: Exchange, moment: float, event: Mapping[str, Any]) -> bool:
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
        text = said.get("text") or said.get("content") or said.get("reasoning_content") or said.get("reasoning") or ""
        if text or ids:
            made.arrivals.append(moment)
            made.text += text
            made.token_ids += ids
            made.sizes.append(len(ids))
    return any(choice.get("finish_reason") for choice in choices)


# Names of the counts of drafts, drafted and accepted tokens: on a server's /metrics, in its answers, in our records.
COUNTERS = ("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
ANSWERED = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
RECORDED = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
PERCENTILES = (50, 90, 99)


def spread_ms(seconds: Seq[float]) -> dict[str, float | None]:
    """Mean and percentiles (linear interpolation) in milliseconds; all None if there are no values."""
    names = ("mean", *(f"p{p}" for p in PERCENTILES))
    values = [np.mean(seconds), *np.percentile(seconds, PERCENTILES)] if seconds else [None] * len(names)
    return {name: None if v is None else float(1e3 * v) for name, v in zip(names, values)}


def summarize(outcomes: Seq[Exchange], ttft_slo: float | None, tpot_slo: float | None) -> dict[str, Any]:
    """The metrics of one repetition; a good answer keeps both bounds (s). Failed requests count as requests alone."""
    done = [o for o in outcomes if o.error is None]
    start = min((o.sent for o in outcomes), default=0.0)
    seconds = max((o.arrivals[-1] for o in done), default=start) - start
    token_gaps = [gaps for o in done if (gaps := o.token_gaps) is not None]
    num_output = sum(o.num_output for o in done)
    prompts = [o.num_prompt for o in done if o.num_prompt is not None]
    most_ttft, most_tpot = (math.inf if bound is None else bound for bound in (ttft_slo, tpot_slo))
    good = sum(o.ttft <= most_ttft and (o.tpot or 0.0) <= most_tpot for o in done)

    def rate(count: float) -> float:
        return count / seconds if seconds > 0 else 0.0

    return {
        "seconds": seconds,
        "num_requests": len(outcomes),
        "num_completed": len(done),
        "num_cached_tokens": sum(o.num_cached for o in done),
        "num_prompt_tokens": sum(prompts) if len(prompts) == len(done) else None,
        "num_output_tokens": num_output,
        "output_tokens_per_s": rate(num_output),
        "requests_per_s": rate(len(done)),
        "goodput_requests_per_s": rate(good),
        "num_good": good,
        "ttft_ms": spread_ms([o.ttft for o in done]),
        "tpot_ms": spread_ms([o.tpot for o in done if o.tpot is not None]),
        "itl_chunk_ms": spread_ms([g for o in done for g in o.gaps]),
        "itl_token_ms": spread_ms([g for gaps in token_gaps for g in gaps]) if len(token_gaps) == len(done) else None,
        "e2e_ms": spread_ms([o.latency for o in done]),
        "tokens_per_chunk": num_output / max(1, sum(len(o.arrivals) for o in done)),
        "counted": dict(Counter(o.counted for o in done)),
        "errors": dict(Counter(o.error for o in outcomes if o.error is not None)),
        "error_details": sorted({o.detail for o in outcomes if o.error is not None})[:5],
        "retries": sum(o.retries for o in outcomes),
    }


def acceptance(found: Iterable[Mapping[str, Any]], names: Seq[str], source: str) -> dict[str, Any] | None:
    """Acceptance of counts in `found`; `names`: of drafts, drafted and accepted tokens. None if nothing was drafted."""
    found = list(found)
    drafts, drafted, accepted = (sum(f.get(name) or 0 for f in found) for name in names)
    if not drafts or not drafted:
        return None
    return {
        "source": source,
        "num_drafts": int(drafts),
        "num_draft_tokens": int(drafted),
        "num_accepted_tokens": int(accepted),
        "acceptance_rate": accepted / drafted,
        "mean_acceptance_length": 1 + accepted / drafts,
    }


def same_texts(mine: Seq[Exchange], theirs: Seq[Exchange]) -> tuple[int, int]:
    """(requests with equal texts, requests that both arms completed). Token ids are compared too if both have them."""
    both = zip(mine, theirs, strict=False)  # an arm whose time ran out sent only the first requests
    pairs = [(a, b) for a, b in both if a.error is None and b.error is None]

    def same(a: Exchange, b: Exchange) -> bool:
        return a.text == b.text and (not a.token_ids or not b.token_ids or a.token_ids == b.token_ids)

    return sum(same(a, b) for a, b in pairs), len(pairs)


def counters(page: str) -> Mapping[str, float]:
    """Speculation counters on a Prometheus page, by vLLM's names without prefix and `_total`, summed over labels."""
    found: dict[str, float] = {}
    for line in page.splitlines():
        head, _, value = line.rpartition(" ")
        name = head.partition("{")[0].rpartition(":")[2].removesuffix("_total")
        if name in COUNTERS and not line.startswith("#"):
            found[name] = found.get(name, 0.0) + float(value)
    return found
