"""Speculation settings x number formats: cost of verifying, cost of drafting, tokens per round, and the speed-up.

After SpecMQuant (Zhang et al., 2025, arXiv 2505.22179): Llama-3-8B and 70B, EAGLE-2 and hierarchical, A100 and 3090.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sameseed.report.schemas import PROFILE_SCHEMA
from sameseed_lab.studies._bench import BenchCell, SpecSetting
from sameseed_lab.studies._depth import FORM, LAYERS, DepthCell, Hierarchy, hierarchy
from sameseed_lab.studies._study import (
    Cell,
    Panel,
    Plot,
    Published,
    Records,
    Report,
    Series,
    Study,
    Table,
    figure,
    only,
    pick,
)

# Read from the paper's figure (MT-Bench): speed of plain decoding and with EAGLE-2, both over plain fp16 (70B: over
# w8a8), and the gain as printed.
A100: Mapping[str, tuple[float, float, float]] = {
    "bf16": (1.0, 2.3, 2.3),
    "w8a8": (1.4, 2.75, 2.0),
    "w4a16-g128": (2.1, 2.65, 1.3),
    "w4a8-channel": (2.1, 2.9, 1.4),
    "w4a8-g128": (2.0, 2.6, 1.3),
    "w4a8-qoq": (1.6, 2.65, 1.7),
}
RTX3090: Mapping[str, tuple[float, float, float]] = {
    "bf16": (1.0, 2.2, 2.2),
    "w8a8": (1.7, 3.1, 1.8),
    "w4a16-g128": (2.6, 2.6, 1.0),
    "w4a8-channel": (2.8, 3.35, 1.2),
    "w4a8-g128": (2.6, 3.15, 1.2),
    "w4a8-qoq": (2.4, 3.2, 1.3),
}
VERIFY = {"bf16": 1.2, "w8a8": 1.2, "w4a16-g128": 1.8}  # published T_v(60) / T_t
HIERARCHICAL = 2.78  # published speed-up of 70B in w4a16 over its own plain decoding
TREE, SMALL_TREE, CHAIN, MODEL, SELF = "head tree 60", "head tree 24", "head chain 4", "draft model 4", "own 4 bits 4"
CASCADE = "ngram > draft model 6"
WAYS = (TREE, SMALL_TREE, CHAIN, MODEL, SELF, CASCADE)
WIDE = (("depth", 6), ("top_k", 10))


def cells(size: str) -> list[Cell]:
    """A cell per format with all ways. The target's own 4-bit copy is one of them if the target has more bits.

    At size "true" heads alone beside bf16, as nothing more fits in 24 GiB; and also the costs of a 70B target.
    """
    ways = (
        SpecSetting("{head}", (60,), "bf16", None, WIDE, TREE),
        SpecSetting("{head}", (24,), "bf16", None, (("depth", 3), ("top_k", 10)), SMALL_TREE),
        SpecSetting("{head}", (4,), "bf16", None, (("depth", 4), ("top_k", 1)), CHAIN),
        SpecSetting("{1b}", (4,), "bf16", None, (), MODEL),
        SpecSetting("ngram > {1b}", (6,), "bf16", None, (), CASCADE),
    )
    own = SpecSetting("self_quant", (4,), "w4a8", None, (), SELF)
    some = {"w8a8": (*ways, own), "bf16": ways[:3] if size == "true" else (*ways, own)}
    made = [BenchCell(form, form, some.get(form, ways)) for form in A100]
    return [*made, DepthCell()] if size == "true" else [*made]


def report(records: Records) -> Report:
    """The paper's figure and the three terms of its cost model, with our values, in one plot and one table."""
    deep = [r for r in records if r["schema"] == PROFILE_SCHEMA]
    records = [r for r in records if r["schema"] != PROFILE_SCHEMA]
    base, plan = only(records, draft="none", format="bf16"), _hierarchy(records, deep[-1] if deep else None)
    tables = [_table(records, base)] + ([] if plan is None else [plan.table()])
    found = _findings(records, base) + ([] if plan is None else [plan.finding()])
    return Report(found, _published(records, base, plan), [_plot(records, base)] if records else [], tables)


def _hierarchy(records: Records, deep: Mapping[str, Any] | None) -> Hierarchy | None:
    model = only(records, way=MODEL, format=FORM)
    gains = [_gain(r) for way in (TREE, SMALL_TREE, CHAIN) for r in pick(records, way=way, format=FORM)]
    return None if deep is None or model is None or not gains else hierarchy(deep, model, max(gains))


def _over(record: Mapping[str, Any] | None, base: Mapping[str, Any] | None) -> float | None:
    """Speed-up over plain decoding in bf16; None if either record is missing."""
    return None if record is None or base is None else float(record["tokens_per_s"] / base["tokens_per_s"])


def _gain(record: Mapping[str, Any]) -> float:
    return float(record["speedup"])


def _checking(record: Mapping[str, Any]) -> float:
    """T_v(n) / T_t: time to verify a round's rows over the time of a plain decode step, measured interleaved."""
    return float(record["verify_cost"])


def _drafting(record: Mapping[str, Any]) -> float:
    """d T_d / T_t: drafting time of a round over the time of a plain decode step."""
    return float(record["draft_cost"])


def _tokens(record: Mapping[str, Any]) -> float:
    return float(record["prediction"]["tokens_per_round"])


def _model(record: Mapping[str, Any]) -> float:
    """The speed-up by the paper's cost model: tau over the sum of both costs."""
    return _tokens(record) / max(1e-9, _checking(record) + _drafting(record))


def _findings(records: Records, base: Mapping[str, Any] | None) -> list[str]:
    said = []
    drafted = [r for r in records if r["way"]]
    if drafted and base:
        best = max(drafted, key=lambda r: float(r["tokens_per_s"]))
        said.append(
            f"The fastest: {best['way']}, target in {best['config']['format']}: {_over(best, base):.2f} times plain "
            f"bf16, {best['speedup']:.2f} times plain decoding in its own format."
        )
    for form in A100:
        if mine := pick(drafted, format=form):
            top = max(mine, key=_gain)
            said.append(f"{form}: best is {top['way']}, {_gain(top):.2f} times (EAGLE-2 on an A100: {A100[form][2]}).")
    return said


def _published(records: Records, base: Mapping[str, Any] | None, plan: Hierarchy | None) -> list[Published]:
    made = []
    for machine, theirs in (("A100", A100), ("3090", RTX3090)):
        for form, (plain, drafted, gain) in theirs.items():
            mine = only(records, draft="none", format=form)
            tree = only(records, way=TREE, format=form)
            made.append(Published(f"{form}, 8B on {machine}: plain over bf16", plain, _over(mine, base)))
            made.append(Published(f"{form}, 8B on {machine}: tree of 60 over bf16", drafted, _over(tree, base)))
            own = None if tree is None else _gain(tree)
            made.append(Published(f"{form}, 8B on {machine}: tree of 60 over its own plain", gain, own))
    for form, cost in VERIFY.items():
        tree = only(records, way=TREE, format=form)
        note = "quoted by others; ours at the rows that its trees have"
        ours = None if tree is None else _checking(tree)
        made.append(Published(f"{form}: T_v(60) / T_t", cost, ours, note))
    cascade = only(records, way=CASCADE, format="bf16")
    note = "theirs: head > 8B > 70B, both w4a16; ours: n-grams > draft model > target in bf16"
    ours = None if cascade is None else _gain(cascade)
    made.append(Published("hierarchical over its own plain", HIERARCHICAL, ours, note))
    note = f"head > 8B > 70B; theirs in w4a16, ours in {FORM} by costs: {LAYERS[1]} of 80 layers measured"
    ours = None if plan is None else plan.gain(plan.best)
    made.append(Published("70B: hierarchical over its own plain", HIERARCHICAL, ours, note))
    return made


def _plot(records: Records, base: Mapping[str, Any] | None) -> Plot:
    terms: tuple[tuple[str, Callable[[Any], float], float | None], ...] = (
        ("speed-up over its own plain decoding", _gain, 1.0),
        ("T_v(n) / T_t: checking over one pass", _checking, 1.0),
        ("d T_d / T_t: drafting over one pass", _drafting, None),
        ("tau: tokens a round", _tokens, None),
    )
    plain = [(f, v) for f in A100 if (v := _over(only(records, draft="none", format=f), base)) is not None]
    tree, chain = (
        [(f, v) for f in A100 if (v := _over(only(records, way=way, format=f), base)) is not None]
        for way in (TREE, CHAIN)
    )
    speeds = [
        Series("plain", plain),
        Series("plain", [(f, A100[f][0]) for f, _ in plain], True),
        Series(TREE, tree),
        Series(TREE, [(f, A100[f][1]) for f, _ in tree], True),
        Series(CHAIN, chain),
    ]
    panels = [Panel("speed over plain bf16 (theirs: A100)", "", speeds, "bars", level=1.0)] if plain else []
    for title, of, level in terms:
        found = [(way, [(f, of(r)) for f in A100 if (r := only(records, way=way, format=f))]) for way in WAYS]
        panels.append(Panel(title, "", [Series(way, bars) for way, bars in found if bars], "bars", level=level))
    return Plot("formats", "By the target's format", panels)


def _table(records: Records, base: Mapping[str, Any] | None) -> Table:
    heads = ("format", "way", "tokens/s", "over bf16", "over its own", "T_v(n)/T_t", "d T_d/T_t", "tau", "tau / costs")
    rows = []
    for r in records:
        c, p, drafted = r["config"], r.get("price") or {}, bool(r["way"])
        rows.append(
            [
                c["format"],
                r["way"] or "plain",
                figure(r["tokens_per_s"], ".1f"),
                figure(_over(r, base)),
                figure(r["speedup"] if drafted else None),
                *(figure(of(r) if drafted else None) for of in (_checking, _drafting, _tokens, _model)),
                figure(r["acceptance_rate"], ".0%"),
                figure(r["usage"]["cpu_share"], ".0%"),
                figure(p.get("coupled"), ".1%"),
                figure(p.get("min_pq"), ".1%"),
                ("yes" if r["equals_plain"] else "NO") if drafted else "",
            ]
        )
    return Table("All measurements", (*heads, "accepted", "CPU", "coupled", "min(p, q)", "same text"), rows)


STUDY = Study(
    title="Drafters in number formats: costs of checking and drafting, tokens a round, speed-up",
    source="SpecMQuant, 2025 (arXiv 2505.22179): Llama-3-8B on an A100 and a 3090, 70B on an A100; read off its figure",
    differs=(
        "Theirs are trained models with EAGLE-2 heads. Ours at --size small is the embedded target with its EAGLE-3 "
        "head and draft, at --size true their twins at 8B: true cost, the small family's acceptance.",
        "A pass of the embedded target fits the caches: 60 rows cost many times one, and large trees cannot pay. At "
        "--size true one row reads all weights from memory, but few cores compute 60 rows as long as several passes.",
        "Their speeds leave the prefill out, ours have it in. Both are greedy, at batch 1.",
        "Our w4a8-channel and w4a8-g128 stand beside their QQQ and QQQ-g128, w4a8-qoq beside QoQ-g128.",
        "Their hierarchy is EAGLE > 8B > 70B. Ours is n-grams > draft model > target: no head for the draft is there. "
        "At --size true theirs is predicted too: two depths of the 70B shape are measured and extended to 80 layers, "
        "in turns with an 8B model. A token of 8B gains by its head what it gains in this study; 70B accepts it as the "
        "target here accepts its draft model's.",
        "T_d has the draft's reading of the prompt in it.",
        "Coupled and min(p, q) are at temperature 0.7, on the greedy texts, for the draft model.",
    ),
    data="Theirs are MT-Bench, Spec-Bench, GSM8K and HumanEval. --prompts mt-bench (gsm8k, humaneval) fetches a set "
    "from the hub, --prompts mt-bench:DIR reads its file there; fetch Spec-Bench's question.jsonl "
    "from its repository and give it with --prompts spec-bench:FILE. Without, the packaged prompts are taken.",
    cells=cells,
    report=report,
)
