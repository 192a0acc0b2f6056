"""Records of a load: one line of JSON for each arm of a cell, every repetition in it, and what a reader must know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import median
from typing import Any

from sameseed.study.load.bench import LoadBench, LoadCell, Repetition, ServerArm
from sameseed.study.load.figures import acceptance, same_texts
from sameseed.study.schemas import LOAD_SCHEMA

SPREADS = ("ttft_ms", "tpot_ms", "itl_chunk_ms", "itl_token_ms", "e2e_ms")
BUSY = 0.7  # share of a core above which the generator may be what is measured
LATE = 20.0  # ms


def config(bench: LoadBench, arm: ServerArm, cell: LoadCell) -> dict[str, Any]:
    """What was sent, without the server's address, which is nobody's business."""
    s, shape, level = bench.settings, cell.shape, cell.level
    name = s.prompts if s.prompts in ("text", "random") else s.prompts.rpartition("/")[2]
    return {
        "label": arm.label,
        "arms": [a.label for a in bench.arms],
        "model": arm.endpoint.model.rstrip("/").rpartition("/")[2],
        "served": None if arm.endpoint.speculation is None else dict(arm.endpoint.speculation),
        "chat": arm.endpoint.chat,
        "fields": dict(arm.endpoint.fields),
        "prompts": name,
        "lengths": shape.label,
        "num_input_tokens": shape.num_input,
        "max_tokens": shape.num_output,
        "concurrency": level.concurrency,
        "rate": level.rate,
        "burstiness": level.burstiness if level.rate is not None else None,
        "num_requests": s.count(level),
        "max_seconds": s.max_seconds,
        "warm_up": s.warm_up,
        "sampling": dict(s.sampling),
        "seed": s.seed,
        "ignore_eos": not s.strict,
        "ttft_bound_s": s.bounds.ttft,
        "tpot_bound_s": s.bounds.tpot,
    }


def make_records(bench: LoadBench, cell: LoadCell, head: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The records of a measured cell, one an arm; the first arm is what the others are compared with.

    `head`: run, time, commit and machine.
    """
    base = cell.repetitions[bench.arms[0].label]
    made = []
    for arm in bench.arms:
        mine = cell.repetitions[arm.label]
        record = {"schema": LOAD_SCHEMA, **head, "config": config(bench, arm, cell), **_figures(mine)}
        record |= {"speedup": None, "same_texts": None}
        if arm is not bench.arms[0]:
            record |= _against(mine, base)
        record["remarks"] = remarks(bench, record, min(r.summary["num_requests"] for r in (*mine, *base)))
        made.append(record)
    return made


def _figures(mine: list[Repetition]) -> dict[str, Any]:
    summaries = [r.summary for r in mine]
    errors: Counter[str] = Counter()
    for summary in summaries:
        errors.update(summary["errors"])
    made: dict[str, Any] = {"repetitions": summaries}
    for name in ("output_tokens_per_s", "requests_per_s", "goodput_requests_per_s"):
        made[name] = median(s[name] for s in summaries)
    for name in SPREADS:
        made[name] = _middle([s[name] for s in summaries])
    made["acceptance"] = _pooled([s["acceptance"] for s in summaries])
    return made | {"errors": dict(errors), "retries": sum(s["retries"] for s in summaries)}


def _middle(spreads: list[dict[str, float | None] | None]) -> dict[str, float | None] | None:
    """Each percentile's median over the repetitions; None if one has none."""
    known = [s for s in spreads if s is not None]
    if len(known) < len(spreads):
        return None
    values = {name: [v for s in known if (v := s[name]) is not None] for name in known[0]}
    return {name: median(found) if found else None for name, found in values.items()}


def _pooled(found: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Drafts of all repetitions together."""
    known = [f for f in found if f is not None]
    if not known:
        return None
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    drafts, drafted, accepted = (sum(f[name] for f in known) for name in names)
    return acceptance(drafts, drafted, accepted, known[0]["source"])


def _against(mine: list[Repetition], base: list[Repetition]) -> dict[str, Any]:
    """Median of the ratios of repetitions that took turns, and how many texts are the same."""
    pairs = list(zip(mine, base, strict=True))
    name = "output_tokens_per_s"
    ratios = [m.summary[name] / b.summary[name] for m, b in pairs if b.summary[name] > 0]
    first = [
        m.summary["ttft_ms"]["p50"] / b.summary["ttft_ms"]["p50"]
        for m, b in pairs
        if m.summary["ttft_ms"]["p50"] and b.summary["ttft_ms"]["p50"]
    ]
    same = [same_texts(m.outcomes, b.outcomes) for m, b in pairs]
    return {
        "speedup": median(ratios) if ratios else None,
        "speedups": ratios,
        "ttft_ratio": median(first) if first else None,
        "same_texts": [sum(s for s, _ in same), sum(n for _, n in same)],
    }


def remarks(bench: LoadBench, record: Mapping[str, Any], fewest: int) -> list[str]:
    """What makes figures less than they seem; said with them, not instead of them.

    `fewest`: requests of a repetition, of this arm or of the one that it is compared with.
    """
    found = []
    repetitions = record["repetitions"]
    counted = {name for r in repetitions for name in r["counted"]}
    if "chunks" in counted:
        found.append("the server tells no usage: output tokens are chunks, too few where tokens arrive together")
    if record["itl_token_ms"] is None and counted:
        found.append("the server does not tell which tokens a chunk holds: ITL by chunks only")
    wanted = record["config"]["max_tokens"]
    short = sum(r["num_output_tokens"] < r["num_completed"] * wanted for r in repetitions)
    if short and "chunks" not in counted:
        found.append("some answers ended before their length: compare throughput with care")
    asked = record["config"]["num_input_tokens"]
    if asked is not None and not bench.tokenized:
        found.append("the server has no /tokenize: prompts have about the asked length, by their characters")
    if any(r["num_cached_tokens"] for r in repetitions):
        found.append("the server knew parts of prompts from before: first tokens came sooner than of new prompts")
    if record["config"]["fields"].get("speculation") == "off" and record["acceptance"] is not None:
        found.append("the server drafted although speculation was off: the arms are alike")
    level, planned = record["config"]["concurrency"], record["config"]["num_requests"]
    if fewest < planned:
        found.append(
            f"--max-seconds ended a run after {fewest} of {planned} requests: arms may have sent different ones"
        )
    if level is not None and min(r["num_requests"] for r in repetitions) < 2 * level:
        found.append("fewer than two requests a client: this is a burst, and not all clients are busy throughout")
    if any(r["generator_cpu"] > BUSY for r in repetitions):
        found.append("the generator took most of a core: its own speed may be what was measured")
    if any((r["late_ms"] or 0) > LATE for r in repetitions):
        found.append(f"some requests were sent more than {LATE:g} ms late")
    if record["acceptance"] is not None and record["acceptance"]["source"] == "/metrics":
        found.append("acceptance is from the server's counters, which count everybody's requests")
    return found
