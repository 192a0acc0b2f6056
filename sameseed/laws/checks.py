"""All checks of the laws, in the order in which they run."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from sameseed.errors import ConfigError
from sameseed.laws import acceptance, busy, closeness, kernels, law, logits, oracle, sampled, spelling, texts
from sameseed.laws.check import Check

# A1 judges what the text checks counted, and C2 judges leaks of all engines: both come last.
CHECKS: tuple[Check, ...] = (
    kernels.row_invariance,
    kernels.attention,
    closeness.backend_is_reference,
    logits.logits,
    logits.cache_rows,
    texts.greedy,
    texts.near_ties,
    oracle.texts,
    spelling.spelling,
    sampled.seeded,
    sampled.logprobs,
    sampled.stops,
    busy.coming_and_going,
    busy.beginnings,
    busy.scores,
    law.outputs,
    acceptance.own_target,
    acceptance.alarm,
    sampled.leaks,
)

# What no check covers, at any effort.
UNSEEN = (
    "grammars other than choices and one regular expression",
    "what a draft remembers of other requests, beyond its effect on texts",
    "the server: how it reads requests, its network, tools and compiled grammars (verify-server asks a running one)",
    "other models, number formats, machines, numbers of threads and versions than those named here",
    "whether the weights, the tokenizer and the chat template are the right ones",
    "texts longer than the longest here, and prompts of other kinds",
)


def chosen(ids: Seq[str]) -> tuple[Check, ...]:
    """The checks with these ids, or all where none is given, in the order in which they run.

    Raises ConfigError for an unknown id.
    """
    known = [c.id for c in CHECKS]
    for name in ids:
        if name not in known:
            raise ConfigError(f"--only: no check {name!r} (there are: {', '.join(known)})")
    return tuple(c for c in CHECKS if not ids or c.id in ids)
