"""What speculation did for an answer: in vLLM's words, and in ours."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any


def speculation_metrics(completions: Seq[dict[str, Any]], num_spec_tokens: int) -> dict[str, Any]:
    """`speculative_decoding` as vLLM writes it (null where nothing was drafted); `sameseed`: why, and where time went.

    With one completion whose drafts are listed, they are listed here too. Sums over completions; `time_split_s` are the
    sequences' shares of the engine's time, the other times its clock's from their arrival to the first token of any,
    and to the end of all, in seconds.
    """
    found = [c["metrics"] for c in completions]
    drafts, drafted, accepted = (
        sum(m[k] for m in found) for k in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    )
    depth = max((len(m["num_accepted_tokens_per_pos"]) for m in found), default=0)
    per_pos = [sum((m["num_accepted_tokens_per_pos"] + [0] * depth)[i] for m in found) for i in range(depth)]
    per_pos += [0] * max(1, num_spec_tokens + 1 - depth)
    reached = [drafts, *per_pos]
    speculative: dict[str, Any] | None = (
        {
            "mean_acceptance_length": 1 + accepted / drafts,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": [reached[i] - reached[i + 1] for i in range(len(reached) - 1)],
            "num_spec_steps": drafts,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": num_spec_tokens,
        }
        if drafts
        else None
    )
    if speculative is not None and len(found) == 1 and "rounds" in found[0]:  # vLLM's level "detailed"
        speculative["per_step_accepted"] = [accepted for _, accepted in found[0]["rounds"]]
        speculative["per_step_drafted"] = [drafted for drafted, _ in found[0]["rounds"]]
    undrafted: dict[str, int] = {}
    split = {"draft": 0.0, "target": 0.0, "verify": 0.0, "schedule": 0.0}
    for m in found:
        for why, count in m["undrafted"].items():
            undrafted[why] = undrafted.get(why, 0) + count
        for stage in split:
            split[stage] += m["time_split_s"][stage]
    own = {
        "num_rounds": sum(m["num_rounds"] for m in found),
        "undrafted": undrafted,
        "time_split_s": split,
        "time_to_first_token_s": min((m["time_to_first_token_s"] for m in found), default=0.0),
        "total_time_s": max((m["total_time_s"] for m in found), default=0.0),
        "num_preemptions": sum(m["num_preemptions"] for m in found),
        "seeds": [c["seed"] for c in completions],
    }
    return {"speculative_decoding": speculative, "sameseed": own}
