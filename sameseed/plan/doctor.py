"""Doctor: explains from an engine's counters why speculation does not pay, and says what to set.

Faults are found by rules, the main one first. Thresholds are rules of thumb; each says what it saw. What a fault says,
and the flags that mend it, are in `doctor.toml`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from sameseed.cost.curve import Curve
from sameseed.cost.round import Gap, ModelSteps, RoundCost
from sameseed.fields import tomllib
from sameseed.measure.costs import Profile
from sameseed.plan.metrics import Counted
from sameseed.plan.pricing import MARGIN, Rounds, rounds_of
from sameseed.tuned import TABLE_END

ENOUGH = 20  # least drafts for a share of them to be meaningful
USELESS, WEAK = 0.02, 0.35  # share of first draft tokens that are accepted
FLAT, SPLIT = 0.9, 0.65  # least share right at later places, and most at the first, that show two kinds of text
LARGE_SHARE, AS_LARGE = 0.4, 0.5  # share of a round's time that drafts take; a draft step's share of a target pass
BUSY, UNEVEN = 1.5, 5.0  # pass time over the table's; 95th percentile of gaps over their median
UNUSED = 0.85  # share accepted at the last place, where all before were
LOST = 0.2  # share of rounds without a draft that might have had one
SLOW, FEW = 0.3, 4  # share of a round that one more draft token may add, at no more than FEW sequences
LOOKUP = 0.02  # most of a round's time that a search in the text takes; a draft model takes more
LATE = 0.4  # share of a round's time outside both models
REPEATED = 0.7  # share of prompt tokens found in the prefix cache
REASONS = ("no drafter", "off", "cost", "no draft", "no room", "draft context")  # that sameseed counts
WORDS = tomllib.loads(Path(__file__).with_name("doctor.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Fault:
    """One fault: a name, a sentence, and the flags to set, in the engine's words."""

    name: str
    says: str
    flags: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """What it says, as a sentence of its own."""
        return self.says[0].upper() + self.says[1:]


def fault(engine: str, key: str, **figures: object) -> Fault:
    """A fault in the words of `doctor.toml`, with these figures in its sentence and its flags."""
    words = WORDS[key]
    flags = [flag for text in words.get(engine, words.get("any", ())) for flag in flags_of(engine, text, **figures)]
    return Fault(words.get("name", key), words["says"].format(**figures), tuple(flags))


Say = Callable[..., Fault]  # `fault` of an engine


def flags_of(engine: str, name: str, **figures: object) -> tuple[str, ...]:
    """An engine's flags that `doctor.toml` lists under a name such as {length}; another text is itself a flag."""
    texts = WORDS["flags"][name][engine] if name in WORDS["flags"] else (name,)
    for figure, value in figures.items():
        texts = [text.replace(f"{{{figure}}}", str(value)) for text in texts]
    return tuple(texts)


def undrafted(counted: Counted) -> Fault:
    """The fault that explains why nothing was drafted at all."""
    if reasons := {w: n for w, n in counted.undrafted.items() if w in REASONS}:
        return fault(counted.engine, max(reasons, key=reasons.__getitem__), rounds="nothing was drafted")
    if counted.drafts is None:
        return fault(counted.engine, "uncounted")
    # llama.cpp's counter is 0 in both cases.
    return fault(counted.engine, "none or nothing" if counted.engine == "llama.cpp" else "nothing found")


def find(rounds: Rounds) -> list[Fault]:
    """All faults that the counters show, the main one first; the last are remarks on what flatters the figures."""
    counted, say = rounds.counted, partial(fault, rounds.counted.engine)
    reasons = {why: n for why, n in counted.undrafted.items() if why in REASONS}
    able = (counted.drafts or 0.0) + sum(reasons.values())
    often = sorted((why for why, n in reasons.items() if n > LOST * able), key=lambda why: -reasons[why])
    lost = {why: say(why, rounds=f"{reasons[why] / able:.0%} of rounds had no draft") for why in often}
    remarks = [lost.pop("cost")] if "cost" in lost else []
    if counted.preemptions and (counted.cache_usage is None or counted.cache_usage > 0.9):
        lost["preempted"] = say("preempted", preemptions=counted.preemptions)
    if (counted.drafts or ENOUGH) < ENOUGH:
        return [*lost.values()] or [say("too few", drafts=counted.drafts)]
    if counted.prefix_queries and (counted.prefix_hits or 0.0) > REPEATED * counted.prefix_queries:
        remarks.append(say("repeated texts", share=(counted.prefix_hits or 0.0) / counted.prefix_queries))
    return [*_rightness(rounds, say), *lost.values(), *_time(rounds, say), *_lengths(rounds, say), *remarks]


def _rightness(rounds: Rounds, say: Say) -> Iterator[Fault]:
    """Faults of the draft's quality."""
    first, *rest = rounds.conditional
    shorter = (rounds.source not in (None, "bound") and rounds.best[0]) or 1
    if first < USELESS:
        yield say("useless draft", first=first)
    elif len(rest) >= 2 and first <= SPLIT and min(rest) >= FLAT:
        yield say("two kinds of text", first=first, rest=min(rest))
    elif first < WEAK:
        lookup = rounds.draft_share is not None and rounds.draft_share < LOOKUP
        yield say("weak lookup" if lookup else "weak draft", first=first, best=shorter)


def _time(rounds: Rounds, say: Say) -> Iterator[Fault]:
    """Faults in where a round's time goes."""
    r, counted = rounds, rounds.counted
    few_prompts = (counted.prompt_tokens or 0.0) < 0.5 * (counted.tokens or 0.0)  # their passes are long anyway
    if r.target_s and r.source == "costs":
        told = r.cost.target(r.batch * (1 + r.k))
        if r.target_s > BUSY * told:
            yield say("slower than the table", took=r.target_s * 1e3, told=told * 1e3)
    elif (uneven := _uneven(counted)) is not None and uneven > UNEVEN and few_prompts:
        yield say("uneven gaps", uneven=uneven)
    step = r.draft_s / r.k if r.draft_s is not None else None
    if step is not None and r.target_s and step > AS_LARGE * r.target_s:
        yield say("draft too large", share=step / r.target_s)
    elif r.draft_share is not None and r.draft_share > LARGE_SHARE:
        yield say("draft share", share=r.draft_share)
    if r.overhead_s is not None and r.round_s and r.overhead_s > LATE * r.round_s:
        yield say("overhead", share=r.overhead_s / r.round_s)


def _lengths(rounds: Rounds, say: Say) -> Iterator[Fault]:
    """Faults of the draft length at this batch size."""
    r = rounds
    if r.source is None:
        return
    longer = r.ratio(1) - 1.0
    if r.source == "plain" and r.target_s is None and longer > SLOW and r.batch <= FEW:
        yield say("slow rounds", longer=longer, batch=r.batch)
    need, (best, speed), table = r.need, r.best, r.table
    if r.source == "bound" and r.length >= need:
        return  # a bound only: unknown whether this or another length pays
    bound = "at least " if r.source == "bound" else ""
    have = f"a round of {r.now} draft tokens needs {bound}{need:.2f} tokens, it has {r.length:.2f}"
    if best == 0 and r.length < need and any(k for _, k in table):
        first = next(batch for batch, k in table if k == 0)
        rows = [[a, b - 1, k] for (a, k), (b, _) in pairwise([*table, (TABLE_END + 1, 0)])]
        yield say("batch too large", have=have, batch=r.batch, first=first, rows=rows, most=table[-1][0] - 1)
    elif best == 0 and r.length < need:
        yield say("never pays", have=have)
    elif 0 < best < r.now and (r.length < need or speed > 1.05 * r.speedup):
        yield say("k too large", have=have, best=best, speed=speed)
    elif best > r.now and r.conditional[-1] >= UNUSED and speed > 1.05 * r.speedup:
        yield say("k too small", last=r.conditional[-1], best=best, speed=speed)


def _uneven(counted: Counted) -> float | None:
    """The 95th percentile of gaps between streamed pieces over their median; None with fewer than 100 gaps."""
    bounds = sorted((float(le), n) for le, n in counted.gap_buckets.items())
    if not bounds or bounds[-1][1] < 100:
        return None
    total = bounds[-1][1]
    at = {share: next(le for le, n in bounds if n >= share * total) for share in (0.5, 0.95)}
    return at[0.95] / at[0.5] if at[0.95] != float("inf") else 2 * UNEVEN


def verdict(rounds: Rounds, found: Seq[Fault]) -> str:
    """The verdict, in one sentence or two."""
    main, bound, have = found[0] if found else None, rounds.source == "bound", f"{rounds.length:.2f}"
    if rounds.source is None:
        told = f"You have {have} tokens a drafted round; what you need is not known"
        told += " (give --plain-tokens-per-s, or --cost FILE)"
    else:
        need = f"{'at least ' * bound}{rounds.need:.2f} tokens a drafted round, you have {have}"
        if rounds.length < MARGIN * rounds.need:
            k, off = rounds.best[0], next((batch for batch, k in rounds.table if k == 0), None)
            use = f"use k = {k}" + (f", and none from {off} clients on" if off else "")
            told = f"You need {need}: {use if k else 'turn it off at this load'}"
        elif not bound:
            told = f"Speculation pays ({rounds.speedup:.2f} times plain decoding): you need {need}"
        else:
            hint = "" if main else ": it may pay or not; give --plain-tokens-per-s, or --cost FILE"
            told = f"You need {need}{hint}"
    return told if main is None else f"{told}. {main.sentence}"


def read_costs(path: Path) -> RoundCost:
    """Costs of rounds from `sameseed profile --json`: those of the first format. Raises ConfigError."""
    profile = Profile.read(path)
    cost, draft = profile.cost(profile.formats[0]), profile.draft
    return cost if draft is None else replace(cost, levels=(ModelSteps(draft.curve(draft.formats[0])),))


@dataclass(frozen=True)
class Diagnosis:
    """The result. `have`: tokens that a round decides; `need`: those that pay; `need_is`: where `need` comes from."""

    engine: str
    verdict: str
    faults: tuple[Fault, ...]
    k: float | None = None
    have: float | None = None
    need: float | None = None
    need_is: str | None = None
    best_k: int | None = None
    speedup: float | None = None
    best_speedup: float | None = None
    by_batch: tuple[tuple[int, int], ...] = ()
    survival: tuple[float, ...] = ()
    acceptance: float | None = None
    batch: float | None = None
    prompt_tokens: float | None = None  # mean of a request
    round_ms: float | None = None
    draft_share: float | None = None
    tokens: float | None = None


def diagnose(counted: Counted, cost: RoundCost | None = None, plain_tokens_per_s: float | None = None) -> Diagnosis:
    """Explain an engine's speculation from its counters."""
    rounds = rounds_of(counted)
    if rounds is None:
        why = undrafted(counted)
        return Diagnosis(counted.engine, why.sentence, (why,), tokens=counted.tokens)
    if cost is None and counted.pass_costs:
        gap = rounds.overhead_s or 0.0
        passes = sorted((int(rows), seconds) for rows, seconds in counted.pass_costs.items())
        cost = RoundCost(Curve(passes), gap=Gap(gap, gap))
    rounds = replace(rounds, known=cost, plain_tokens_per_s=plain_tokens_per_s)
    found, known = find(rounds), dict[str, Any]()
    if rounds.source is not None:
        known = {"need": rounds.need, "need_is": rounds.source, "speedup": rounds.speedup, "by_batch": rounds.table}
    if rounds.source not in (None, "bound"):
        known["best_k"], known["best_speedup"] = rounds.best
    return Diagnosis(
        counted.engine,
        verdict(rounds, found),
        tuple(found),
        rounds.k,
        rounds.length,
        survival=rounds.survival if counted.accepted_per_pos else (),  # else it is computed from the mean
        acceptance=rounds.acceptance,
        batch=rounds.batch if counted.running or counted.undrafted else None,  # else it is taken as 1
        prompt_tokens=(counted.prompt_tokens or 0.0) / counted.requests if counted.requests else None,
        round_ms=None if rounds.round_s is None else rounds.round_s * 1e3,
        draft_share=rounds.draft_share,
        tokens=counted.tokens,
        **known,
    )
