"""Trials of an engine: requests run to their end, and laws 1 and 3 as functions of what came of them."""

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
    """An engine that did what no right one does, so that a check could not even be finished."""


def run(
    engine: Engine, requests: Seq[Request], alone: bool = False, deltas: list[Delta] | None = None
) -> list[Completion]:
    """Completions of all requests, in their order; together, or one after the other. `deltas` get what is streamed.

    Raises ContradictionError for an engine that does not get on.
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
    """Law 1 fixes all of this: tokens, text, reason of the end, seed, and the bits of log-probabilities."""
    c = completion
    return c.token_ids, c.text, c.finish_reason, c.seed, c.logprobs


def differing(expected: Seq[Completion], got: Seq[Completion]) -> list[int]:
    """Law 1, same seed, same text: which of the completions are not what was expected."""
    return [i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if outcome(a) != outcome(b)]


def leaks(engine: Engine) -> list[str]:
    """Law 3, nothing leaks: what an idle engine keeps of requests, in its own cache, its drafts' and its lists."""
    found, runners = [], [("target", engine.runner)]
    levels: list[Any] = [engine.drafter]
    while levels:
        level = levels.pop()
        below = getattr(level, "below", ())
        levels += [below] if isinstance(below, Drafter) else below
        name = type(level).__name__
        if isinstance(getattr(level, "runner", None), ModelRunner):
            runners.append((name, level.runner))
        kept = (len(getattr(level, part, ())) for part in ("followers", "_indexes", "_own"))
        found += [f"{name} remembers {n} sequences" for n in kept if n]
    lists = {"live": engine._live, "running": engine.scheduler.running, "waiting": engine.scheduler.waiting}
    found += [f"{len(part)} requests are {name}" for name, part in lists.items() if part]
    for name, runner in runners:
        blocks, free = runner.blocks, sorted(runner.blocks.free_blocks)
        if free != list(range(blocks.num_blocks)):
            found.append(f"{blocks.num_blocks - len(set(free))} of {blocks.num_blocks} blocks of {name} stayed taken")
    return found


def shadows(drafter: Any, seq: Sequence) -> list[tuple[Any, Sequence]]:
    """Levels of drafting with a cache of their own that follow `seq`, each with its sequence there."""
    followers, levels = getattr(drafter, "followers", None), getattr(drafter, "below", ())
    mine: list[tuple[Any, Sequence]] = []
    if isinstance(followers, Followers):  # a head's contexts are rows of the target's: no sequence of its own
        mine = [(drafter, followers[seq])] if seq.seq_id in followers._shadows else []
        seq = mine[0][1] if mine else seq  # those below it follow the shadow
    every = [levels] if isinstance(levels, Drafter) else levels
    return mine + [found for level in every for found in shadows(level, seq)]


def draft_with(engine: Engine, drafter: Drafter, num_draft_tokens: int) -> Engine:
    """The engine with another drafter, which gets as many tokens every round as there is room for."""
    engine.drafter, engine.policy = drafter, FixedLength(num_draft_tokens)
    return engine
