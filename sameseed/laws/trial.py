"""Trials of an engine: requests run to their end, and laws 1 and 3 as functions of the results."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from sameseed.drafters._followers import Followers
from sameseed.engine.engine import Engine
from sameseed.errors import SameseedError
from sameseed.lengths.fixed import FixedLength
from sameseed.models.runner import ModelRunner
from sameseed.request import Completion, Delta, Request, Sequence
from sameseed.spec.drafter import Drafter


class ContradictionError(SameseedError):
    """Raised for an engine that makes no progress, so that a check cannot be finished."""


def run(
    engine: Engine, requests: Seq[Request], alone: bool = False, deltas: list[Delta] | None = None
) -> list[Completion]:
    """Completions of all requests, in their order, run together or (`alone`) one after the other.

    `deltas` collects what is streamed. Raises ContradictionError for an engine whose requests do not end.
    """
    done: dict[tuple[str, int], Completion] = {}
    steps = sum(len(r.prompt_token_ids) + r.params.max_tokens for r in requests) * 8 + 50
    for i, request in enumerate(requests):
        engine.add(request)
        while engine.has_work and (alone or i == len(requests) - 1):
            steps -= 1
            if steps < 0:
                raise ContradictionError("the engine does not get on: its requests do not end")
            for delta in engine.step():
                if deltas is not None:
                    deltas.append(delta)
                if delta.completion is not None:
                    done[delta.request_id, delta.index] = delta.completion
    return [done[r.request_id, r.index] for r in requests]


def outcome(completion: Completion) -> tuple[object, ...]:
    """What law 1 fixes: tokens, text, finish reason, seed, and the bits of log-probabilities."""
    c = completion
    return c.token_ids, c.text, c.finish_reason, c.seed, c.logprobs


def differing(expected: Seq[Completion], got: Seq[Completion]) -> list[int]:
    """Law 1, same seed, same text: the indices of completions that differ from the expected ones."""
    return [i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if outcome(a) != outcome(b)]


def leaks(engine: Engine) -> list[str]:
    """Law 3, nothing leaks: what an idle engine holds of requests, in its cache, its drafts' caches and its lists."""
    found, runners = [], [("target", engine.runner)]
    levels: list[Any] = [engine.drafter]
    while levels:
        level = levels.pop()
        below = getattr(level, "below", ())
        levels += [below] if isinstance(below, Drafter) else below
        name = type(level).__name__
        if isinstance(getattr(level, "runner", None), ModelRunner):
            runners.append((name, level.runner))
        kept = (len(getattr(level, part, ())) for part in ("followers", "_own"))
        found += [f"{name} remembers {n} sequences" for n in kept if n]
    lists = {"live": engine._live, "running": engine.scheduler.running, "waiting": engine.scheduler.waiting}
    found += [f"{len(part)} requests are {name}" for name, part in lists.items() if part]
    for name, runner in runners:
        blocks, free = runner.blocks, sorted(runner.blocks.free_blocks)
        if free != list(range(blocks.num_blocks)):
            found.append(f"{blocks.num_blocks - len(set(free))} of {blocks.num_blocks} blocks of {name} stayed taken")
        if blocks.num_free_slots != blocks.num_slots:
            found.append(f"{blocks.num_slots - blocks.num_free_slots} recurrent states of {name} stayed taken")
    return found


def shadows(drafter: Any, seq: Sequence) -> list[tuple[Any, Sequence]]:
    """Draft levels with a cache of their own that follow `seq`, each with its sequence in that cache."""
    followers, levels = getattr(drafter, "followers", None), getattr(drafter, "below", ())
    mine: list[tuple[Any, Sequence]] = []
    if isinstance(followers, Followers):  # a head reads rows of the target: it has no sequence of its own
        mine = [(drafter, followers[seq])] if seq.seq_id in followers._shadows else []
        seq = mine[0][1] if mine else seq  # lower levels follow the shadow
    every = [levels] if isinstance(levels, Drafter) else levels
    return mine + [found for level in every for found in shadows(level, seq)]


def draft_with(engine: Engine, drafter: Drafter, num_draft_tokens: int) -> Engine:
    """The engine with another drafter, which drafts `num_draft_tokens` tokens every round where there is room."""
    engine.drafter, engine.policy = drafter, FixedLength(num_draft_tokens)
    return engine
