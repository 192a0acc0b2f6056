"""Faults of speculation, found by rules, the main one first. Thresholds are rules of thumb; each says what it saw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

from sameseed.plan.metrics import START, Counted
from sameseed.plan.pricing import MARGIN, Pricing, State

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
PLAIN = {
    "sameseed": ("--draft none",),
    "vllm": ("leave --speculative-config out",),
    "llama.cpp": ("--spec-type none",),
}
NO_DRAFT_WHY = {
    "no drafter": ("no drafter", "the server has no drafter", "--draft MODEL"),
    "off": ("off", "drafts are off, by the request's speculation or by --k 0", "--k 4"),
    "cost": ("cost", "goodput found that drafts would not pay at this load, which is no fault", ""),
    "no draft": ("no draft", "the drafter finds nothing to draft from, as these outputs do not repeat", "--draft HEAD"),
    "no room": (
        "no room",
        "there was no room for drafts in rows of a pass, or in blocks of the cache",
        "--max-num-rows 1024",
    ),
    "draft context": ("draft context", "texts are longer than the draft's context", "--draft 'ngram'"),
}


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


def length_flags(engine: str, k: int) -> tuple[str, ...]:
    """Flags that make an engine draft `k` tokens; 0 is plain decoding."""
    if k == 0:
        return PLAIN[engine]
    return {
        "sameseed": (f"--k {k}", "or --policy goodput, which decides by itself"),
        "vllm": (f"--speculative-config '{{..., \"num_speculative_tokens\": {k}}}'",),
        "llama.cpp": (f"--spec-draft-n-max {k}",),
    }[engine]


def table_flags(engine: str, table: Seq[tuple[int, int]]) -> tuple[str, ...]:
    """Flags that make an engine choose its draft length by batch size."""
    if engine == "sameseed":
        return ("--policy goodput",)
    if engine != "vllm":
        return (f"-np {table[-1][0] - 1}",)
    rows = [[a, b - 1, k] for (a, k), (b, _) in pairwise([*table, (4097, 0)])]
    return (f"--speculative-config '{{..., \"num_speculative_tokens_per_batch_size\": {rows}}}'",)


def undrafted(counted: Counted) -> Fault:
    """The fault that explains why nothing was drafted at all."""
    engine, reasons = counted.engine, {w: n for w, n in counted.undrafted.items() if w in NO_DRAFT_WHY}
    if reasons:
        name, says, flag = NO_DRAFT_WHY[max(reasons, key=reasons.__getitem__)]
        return Fault(name, f"nothing was drafted: {says}", (flag,) if flag else ())
    if counted.drafts is None:
        return Fault("no drafter", "this server counts no drafts: it runs without speculation", (START[engine],))
    if engine == "llama.cpp":  # its counter is 0 in both cases
        says = "nothing was drafted: this server runs without a draft, or its n-gram drafter found nothing"
        return Fault("no drafter", says, (START[engine],))
    return Fault(
        "no draft",
        "speculation is on, but nothing was drafted: an n-gram drafter found nothing, or a table says 0 here",
        (START[engine],),
    )


def find(state: State, pricing: Pricing) -> Iterator[Fault]:
    """All faults that the counters show, the main one first."""
    counted = state.counted
    if (counted.drafts or ENOUGH) < ENOUGH:
        reasons = list(_lost(state))
        yield from reasons or [
            Fault("too few", f"only {counted.drafts:g} drafts: send more load, or give more --seconds")
        ]
        return
    yield from _rightness(state, pricing)
    yield from _lost(state)
    yield from _time(state, pricing)
    yield from _lengths(state, pricing)
    yield from _remarks(state)


def _rightness(state: State, pricing: Pricing) -> Iterator[Fault]:
    """Faults of the draft's quality."""
    engine, first, rest = state.counted.engine, state.conditional[0], state.conditional[1:]
    known = pricing.source not in (None, "bound")
    shorter = length_flags(engine, (known and pricing.best(state.batch)[0]) or 1)
    if first < USELESS:
        says = (
            f"{first:.1%} of first draft tokens are right: a draft of another target, other layers of it, another "
            "tokenizer or template; or a head that quantizing broke"
        )
        flags = ("--draft-format bf16",) if engine == "sameseed" else ()
        yield Fault("useless draft", says, (*flags, "take a draft of this very target, in bf16", *PLAIN[engine]))
    elif len(rest) >= 2 and first <= SPLIT and min(rest) >= FLAT:
        says = (
            f"the first draft token is right in {first:.0%} of drafts, and after it nearly all are ({min(rest):.0%}): "
            "two kinds of text; most likely some lie beyond the draft's context window"
        )
        own = {"vllm": '"max_model_len" of --speculative-config', "sameseed": "--draft 'ngram' for long texts"}
        yield Fault("draft context", says, (own.get(engine, "a draft whose context is the target's"),))
    elif first < WEAK and state.draft_share is not None and state.draft_share < LOOKUP:
        says = f"only {first:.0%} of first draft tokens are right: these outputs repeat little of what came before"
        yield Fault("weak draft", says, ("--draft HEAD, or a draft model", *shorter))
    elif first < WEAK:
        says = (
            f"only {first:.0%} of first draft tokens are right: a head in too few bits, texts unlike its training, "
            "another chat template, a high temperature, penalties or a grammar"
        )
        flag = "--draft-format bf16" if engine == "sameseed" else "the draft in bf16"
        yield Fault("weak draft", says, (flag, *shorter))


def _lost(state: State) -> Iterator[Fault]:
    """Faults that left rounds without a draft, though they might have had one."""
    counted = state.counted
    for why, share in _without(counted):
        if why != "cost":
            name, says, flag = NO_DRAFT_WHY[why]
            yield Fault(name, f"{share:.0%} of rounds had no draft: {says}", (flag,) if flag else ())
    if counted.preemptions and (counted.cache_usage is None or counted.cache_usage > 0.9):
        says = f"{counted.preemptions:g} sequences were preempted: the cache is full, and texts are computed again"
        flags = {"sameseed": ("--num-blocks N", "--kv-format int8", "--max-num-seqs N")}
        yield Fault("no room", says, flags.get(counted.engine, ("--max-num-seqs N",)))


def _without(counted: Counted) -> list[tuple[str, float]]:
    """Reasons for which many rounds had no draft, with their shares, the largest first."""
    reasons = {why: n for why, n in counted.undrafted.items() if why in NO_DRAFT_WHY}
    able = (counted.drafts or 0.0) + sum(reasons.values())
    shares = ((why, n / able) for why, n in reasons.items() if n > LOST * able)
    return sorted(shares, key=lambda pair: -pair[1])


def _time(state: State, pricing: Pricing) -> Iterator[Fault]:
    """Faults in where a round's time goes."""
    s, engine, costs = state, state.counted.engine, pricing.costs
    few_prompts = (s.counted.prompt_tokens or 0.0) < 0.5 * (s.counted.tokens or 0.0)  # their passes are long anyway
    if s.target_s and costs is not None and costs.rows:
        told = pricing.cost.target(s.batch * (1 + s.k))
        if s.target_s > BUSY * told:
            says = f"a pass takes {s.target_s * 1e3:.1f} ms, the table says {told * 1e3:.1f}: something else runs here"
            yield Fault("busy machine", says, ("end what else runs", "fewer --threads than cores", "profile again"))
    elif (uneven := _uneven(s.counted)) is not None and uneven > UNEVEN and few_prompts:
        says = f"one gap in twenty is {uneven:.0f} times the median: something else runs on this machine"
        yield Fault("busy machine", says, ("end what else runs", "fewer threads than cores"))
    step = s.draft_s / s.k if s.draft_s is not None else None
    if step is not None and s.target_s and step > AS_LARGE * s.target_s:
        says = f"one draft token costs {step / s.target_s:.0%} of a pass of the target: the draft is nearly as large"
        yield Fault("draft too large", says, ("a draft of a tenth of the size, or a head", *PLAIN[engine]))
    elif s.draft_share is not None and s.draft_share > LARGE_SHARE:
        says = f"drafting takes {s.draft_share:.0%} of the time"
        other = "the draft in fewer bits", "a smaller draft vocabulary"
        own = "--draft-format w4a8", "--draft-vocabulary auto"
        yield Fault("draft share", says, (*(own if engine == "sameseed" else other), "a head"))
    if s.overhead_s is not None and s.round_s and s.overhead_s > LATE * s.round_s:
        says = f"{s.overhead_s / s.round_s:.0%} of a round lies outside both models: sampling, scheduling, Python"
        yield Fault("overhead", says, ("longer drafts, fewer rounds", "no penalties or logprobs where none are needed"))


def _lengths(state: State, pricing: Pricing) -> Iterator[Fault]:
    """Faults of the draft length at this batch size."""
    if pricing.source is None:
        return
    longer = pricing.ratio(1, state.batch) - 1.0
    if pricing.source == "plain" and state.target_s is None and longer > SLOW and state.batch <= FEW:
        says = (
            f"each draft token makes a round {longer:.0%} longer at {state.batch:.0f} sequences at once: too much for"
        )
        says += " checking; rounds may run without async scheduling or without graphs"
        own = {"vllm": ("no ngram (ngram_gpu), no other tokenizer, no --enforce-eager", "a smaller draft")}
        yield Fault("slow rounds", says, own.get(state.counted.engine, ("a smaller draft",)))
    engine, now = state.counted.engine, round(state.k) or 1
    need, (best, speed) = pricing.ratio(now, state.batch), pricing.best(state.batch)
    if pricing.source == "bound" and state.length >= need:
        return  # a bound only: unknown whether this or another length pays
    bound = "at least " if pricing.source == "bound" else ""
    have = f"a round of {now} draft tokens needs {bound}{need:.2f} tokens, it has {state.length:.2f}"
    table = pricing.table()
    if best == 0 and state.length < need and any(k for _, k in table):
        first = next(batch for batch, k in table if k == 0)
        says = f"{have}; at {state.batch:.0f} sequences at once no length pays, below {first} some do"
        yield Fault("batch too large", says, (*table_flags(engine, table), *PLAIN[engine]))
    elif best == 0 and state.length < need:
        yield Fault("never pays", f"{have}; no other length pays either", PLAIN[engine])
    elif 0 < best < now and (state.length < need or speed > 1.05 * state.length / need):
        yield Fault(
            "k too large", f"{have}; {best} would give {speed:.2f} times plain decoding", length_flags(engine, best)
        )
    elif best > now and state.conditional[-1] >= UNUSED and speed > 1.05 * state.length / need:
        says = (
            f"{state.conditional[-1]:.0%} are right at the last place: longer drafts bring more ({speed:.2f} at {best})"
        )
        yield Fault("k too small", says, length_flags(engine, best))


def _remarks(state: State) -> Iterator[Fault]:
    """Remarks that are no faults, but make the figures look better or worse than they are."""
    counted = state.counted
    for why, share in _without(counted):
        if why == "cost":
            yield Fault(why, f"{share:.0%} of rounds had no draft: {NO_DRAFT_WHY[why][1]}")
    if counted.prefix_queries and (counted.prefix_hits or 0.0) > REPEATED * counted.prefix_queries:
        share = (counted.prefix_hits or 0.0) / counted.prefix_queries
        says = f"{share:.0%} of prompts were in the prefix cache: texts that repeat flatter suffix and n-gram drafts"
        yield Fault("repeated texts", says, ("measure with prompts of your own traffic",))


def _uneven(counted: Counted) -> float | None:
    """The 95th percentile of gaps between streamed pieces over their median; None with fewer than 100 gaps."""
    bounds = sorted((float(le), n) for le, n in counted.gap_buckets.items())
    if not bounds or bounds[-1][1] < 100:
        return None
    total = bounds[-1][1]
    at = {share: next(le for le, n in bounds if n >= share * total) for share in (0.5, 0.95)}
    return at[0.95] / at[0.5] if at[0.95] != float("inf") else 2 * UNEVEN


def verdict(state: State, pricing: Pricing, found: Seq[Fault]) -> str:
    """The verdict, in one sentence or two."""
    now, main = round(state.k) or 1, found[0] if found else None
    if pricing.source is None:
        told = f"You have {state.length:.2f} tokens a round; what you need is not known"
        told += " (give --plain-tokens-per-s, or --cost FILE)"
        return _joined(told, main)
    need = pricing.ratio(now, state.batch)
    bound = pricing.source == "bound"
    told = f"you need {'at least ' * bound}{need:.2f} tokens a round, you have {state.length:.2f}"
    if state.length >= MARGIN * need:
        if not bound:
            return _joined(f"Speculation pays ({state.length / need:.2f} times plain decoding): {told}", main)
        hint = "" if main else ": it may pay or not; give --plain-tokens-per-s, or --cost FILE"
        return _joined(f"Y{told[1:]}{hint}", main)
    if best := pricing.best(state.batch)[0]:
        told += f": use k = {best}"
        off = next((batch for batch, k in pricing.table() if k == 0), None)
        told += f", and none from {off} clients on" if off else ""
    else:
        told += ": turn it off at this load"
    return _joined(f"Y{told[1:]}", main)


def _joined(told: str, main: Fault | None) -> str:
    return told if main is None else f"{told}. {main.sentence}"
