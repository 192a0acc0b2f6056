"""What speculation did for an answer: in vLLM's words, and in ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from itertools import pairwise
from typing import Any


def speculation_metrics(completions: Seq[dict[str, Any]], num_spec_tokens: int) -> dict[str, Any]:
    """`speculative_decoding` as vLLM writes it (null where nothing was drafted); `sameseed`: why, and where time went.

    With one completion whose drafts are listed, they are listed here too. Sums over completions; `time_split_s` are the
    sequences' shares of the engine's time, the other times its clock's from their arrival to the first token of any,
    and to the end of all, in seconds.
    """
    found = [c["metrics"] for c in completions]
    undrafted: Counter[str] = Counter()
    for m in found:
        undrafted.update(m["undrafted"])
    stages = ("draft", "target", "verify", "schedule")
    own = {
        "num_rounds": sum(m["num_rounds"] for m in found),
        "undrafted": dict(undrafted),
        "time_split_s": {stage: sum((m["time_split_s"][stage] for m in found), 0.0) for stage in stages},
        "time_to_first_token_s": min((m["time_to_first_token_s"] for m in found), default=0.0),
        "total_time_s": max((m["total_time_s"] for m in found), default=0.0),
        "num_preemptions": sum(m["num_preemptions"] for m in found),
        "seeds": [c["seed"] for c in completions],
    }
    return {"speculative_decoding": _speculative(found, num_spec_tokens), "sameseed": own}


def _speculative(found: Seq[dict[str, Any]], num_spec_tokens: int) -> dict[str, Any] | None:
    drafts, drafted, accepted = (
        sum(m[k] for m in found) for k in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    )
    if not drafts:
        return None
    depth = max(len(m["num_accepted_tokens_per_pos"]) for m in found)
    per_pos = [sum((m["num_accepted_tokens_per_pos"] + [0] * depth)[i] for m in found) for i in range(depth)]
    reached = [drafts, *per_pos, *[0] * max(1, num_spec_tokens + 1 - depth)]
    made: dict[str, Any] = {
        "mean_acceptance_length": 1 + accepted / drafts,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": [before - after for before, after in pairwise(reached)],
        "num_spec_steps": drafts,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": num_spec_tokens,
    }
    if len(found) == 1 and "rounds" in found[0]:  # vLLM's level "detailed"
        made["per_step_accepted"] = [accepted for _, accepted in found[0]["rounds"]]
        made["per_step_drafted"] = [drafted for drafted, _ in found[0]["rounds"]]
    return made
