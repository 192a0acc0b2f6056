"""Speculation settings x number formats: cost of verifying, cost of drafting, tokens per round, and the speed-up.

After SpecMQuant (Zhang et al., 2025, arXiv 2505.22179): Llama-3-8B and 70B, EAGLE-2 and hierarchical, A100 and 3090.
No machine here holds a 70B target: costs of a few of its layers say what a hierarchy (head > 8B > 70B) would gain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sameseed import registry
from sameseed.measure.costs import Profile
from sameseed.measure.passes import ProfileGrid
from sameseed.measure.profiler import Profiler
from sameseed.measure.shapes import get_shape, shape_as_dict
from sameseed.measure.usage import Meter
from sameseed.report.schemas import PROFILE_SCHEMA
from sameseed_lab.studies._bench import BenchCell, SpecSetting, bench_rows, beside
from sameseed_lab.studies._setup import StudySetup
from sameseed_lab.studies._study import Cell, Records, Row, Study, Tell, matching, only

FORMATS = ("bf16", "w8a8", "w4a16-g128", "w4a8-channel", "w4a8-g128", "w4a8-qoq")
TREE, SMALL_TREE, CHAIN, MODEL, SELF = "head tree 60", "head tree 24", "head chain 4", "draft model 4", "own 4 bits 4"
CASCADE = "{} > draft model 6"  # by what drafts for the draft model
HEADS = (TREE, SMALL_TREE, CHAIN)
LARGE, MIDDLE, FORM = "llama-3.1-70b", "llama-3.1-8b", "w4a8-g128"
TIMES = ("ms", "p10", "p90", "memory_ms", "compute_ms")
LAYERS, LONGEST = (2, 6), 8  # layers of LARGE that are measured; most tokens that MIDDLE hands on


@dataclass(frozen=True)
class DepthCell:
    """Costs of passes of LARGE, with MIDDLE interleaved. LARGE is measured at `LAYERS` layers and extended to all."""

    name: str = "70b by layers"
    weight: float = 4.0

    def _profilers(self, setup: StudySetup) -> list[Profiler]:
        rows = tuple(range(1, LONGEST + 2))
        draft: dict[str, Any] = {"draft": MIDDLE, "draft_formats": (FORM,)}
        grid = ProfileGrid((FORM,), rows, (256,), "auto", 0, (), setup.threads, **draft)
        return [Profiler(replace(grid, layers=n), LARGE) for n in LAYERS]

    def check(self, setup: StudySetup) -> None:
        """Raise ConfigError if memory is short."""
        self._profilers(setup)

    def measure(self, setup: StudySetup, tell: Tell) -> list[dict[str, Any]]:
        """One record: a profile of LARGE, with MIDDLE as its draft."""
        meter = Meter()

        def report(stage: str, done: float, total: float) -> None:
            setup.progress(f"{LARGE}: {stage}", int(1000 * done / total), 1000)

        depths = [profiler.run(report) for profiler in self._profilers(setup)]
        if any(depth.interrupted for depth in depths):
            raise KeyboardInterrupt
        found = extended(*depths)
        config = {"model": LARGE, "draft_model": MIDDLE, "format": FORM, "layers": list(LAYERS)}
        return [
            {**found.as_dict(), "time": found.date, "config": config, "way": None, "usage": meter.read().as_dict(1)}
        ]


def extended(few: Profile, many: Profile) -> Profile:
    """The costs of all layers of LARGE from the sum of those of `LAYERS`, in proportion to the bytes of a token."""
    config, (a, b) = get_shape(LARGE), LAYERS
    # A line through both depths would fit bytes, but would multiply the noise of times.
    low, high = few.stored[0].bytes_per_token, many.stored[0].bytes_per_token
    grown = (low + (high - low) * (config.num_layers - a) / (b - a)) / (low + high)
    known = {x.rows: x for x in few.costs}
    one = known[1].ms + many.costs[0].ms
    costs = []
    for x in many.costs:
        times = {name: grown * (getattr(known[x.rows], name) + getattr(x, name)) for name in TIMES}
        costs.append(replace(x, **times, c=times["ms"] / (grown * one)))
    return replace(many, shape=shape_as_dict(LARGE, config), costs=tuple(costs), stored=())


def depth_rows(deep: Mapping[str, Any], model: Mapping[str, Any], gain: float) -> list[Row]:
    """A row for each draft length `k` of a hierarchy head > MIDDLE > LARGE: its speed by costs.

    `deep`: the record of a DepthCell. `model`: a draft model's record, beyond whose places the share accepted
    falls as in the mean over them. `gain`: of MIDDLE's head. `check`: c(k + 1) of LARGE. `head_gain`, `alone_gain`:
    over plain decoding of LARGE, with that head and without. `best`: the most.
    """
    costs = Profile.from_dict(deep)
    assert costs.draft is not None
    accepted = model["accepted_per_pos"]
    drafts = sum(accepted) / max(1e-9, model["mean_acceptance_length"] - 1.0)
    shares = [a / max(1.0, drafts) for a in accepted]  # of drafts whose tokens up to this one are right
    fall = (shares[-1] / shares[0]) ** (1 / max(1, len(shares) - 1)) if shares[0] else 0.0
    shares += [shares[-1] * fall**i for i in range(1, LONGEST)]
    passes, rows = costs.curve(FORM), list[Row]()
    plain_ms, alone = 1e3 * passes.at(1), 1e3 * costs.draft.curve(FORM).at(1)
    for k in range(1, LONGEST + 1):
        check, tokens = passes.at(k + 1) / passes.at(1), 1.0 + sum(shares[:k])
        row: Row = {"cell": DepthCell.name, "k": k, "check": check, "tokens": tokens, "plain_ms": plain_ms}
        for name, step in (("head", alone / gain), ("alone", alone)):
            row |= {f"{name}_share": k * step / plain_ms, f"{name}_gain": tokens / (check + k * step / plain_ms)}
        rows.append(row)
    return [{**row, "best": row["head_gain"] == max(r["head_gain"] for r in rows)} for row in rows]


def cells(setup: StudySetup) -> list[Cell]:
    """A cell per format with all ways; at size "true" only heads beside bf16, and also the costs of a 70B target."""
    draft, drafters = setup.source("1b"), registry.names("drafters")
    head, _, small = draft.rpartition(" > ") if setup.size == "real" else ("", "", "")
    small = small if head else "{1b}"  # of a draft "HEAD > SMALL", SMALL alone is a way too
    trees = {TREE: (60, 6, 10), SMALL_TREE: (24, 3, 10), CHAIN: (4, 4, 1)} if "head" in setup.names else {}
    models = {MODEL: (small, 4), CASCADE.format("ngram"): (f"ngram > {small}", 6)}
    models |= {CASCADE.format(head if head in drafters else "head"): ("{1b}", 6)} if head else {}
    if draft in drafters:
        models = {f"{draft} 4": ("{1b}", 4)}
    ways = tuple(
        SpecSetting("{head}", (k,), "bf16", None, (("depth", depth), ("top_k", width)), name)
        for name, (k, depth, width) in trees.items()
    ) + tuple(SpecSetting(way, (k,), "bf16", name=name) for name, (way, k) in models.items())
    own = SpecSetting("self_quant", (4,), "w4a8", None, (), SELF)
    some = {"w8a8": (*ways, own), "bf16": ways[:3] if setup.size == "true" else (*ways, own)}
    base = "" if setup.size == "true" else "bf16"  # beside the largest twins it does not fit
    made = [BenchCell(form, form, some.get(form, ways), base=base) for form in FORMATS]
    stored = tuple(replace(way, format="auto") for way in ways)
    made += [BenchCell("as stored", "auto", stored, base=base)] if setup.size == "real" else []
    return [*made, DepthCell()] if setup.size == "true" else [*made]


def derive(records: Records) -> list[Row]:
    """Rows; `over_bf16`: over plain decoding in bf16, `model`: tau over the sum of both costs, the paper's speed-up."""
    deep = [r for r in records if r["schema"] == PROFILE_SCHEMA]
    rows = bench_rows([r for r in records if r["schema"] != PROFILE_SCHEMA])
    beside(rows, only(rows, drafted=False, format="bf16"), "over_bf16")
    for row in rows:
        row["way"] = row["way"] or "plain"
        if row["drafted"]:
            row["by_costs"] = row["tau"] / max(1e-9, row["verify_cost"] + row["draft_cost"])
    model = only(rows, way=MODEL, format=FORM)
    gains = [row["speedup"] for way in HEADS for row in matching(rows, {"way": way, "format": FORM})]
    if deep and model is not None and gains:
        rows += depth_rows(deep[-1], model, max(gains))
    return rows


def findings(rows: list[Row]) -> list[str]:
    """The fastest way of all and of each format, and the hierarchy's result."""
    said, drafted = [], matching(rows, {"drafted": True})
    over = [row for row in drafted if "over_bf16" in row]
    if over:
        best = max(over, key=lambda r: float(r["over_bf16"]))
        said.append(
            f"The fastest: {best['way']}, target in {best['format']}: {best['over_bf16']:.2f} times plain bf16, "
            f"{best['speedup']:.2f} times plain decoding in its own format."
        )
    for form in dict.fromkeys(row["format"] for row in drafted):
        top = max(matching(drafted, {"format": form}), key=lambda r: float(r["speedup"]))
        said.append(f"{form}: best is {top['way']}, {top['speedup']:.2f} times.")
    for row in matching(rows, {"cell": DepthCell.name, "best": True}):
        said.append(
            f"A 70B target in {FORM}, by costs ({LAYERS[0]} and {LAYERS[1]} of its layers measured, acceptance of the "
            f"draft model above): {row['plain_ms']:.0f} ms a token; with drafts of {row['k']} by an 8B model that has "
            f"a head, {row['head_gain']:.2f} times plain decoding, without the head {row['alone_gain']:.2f} times."
        )
    return said


STUDY = Study(__file__, cells, derive, findings)
