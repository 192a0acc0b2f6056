"""Speculation settings x number formats: cost of verifying, cost of drafting, tokens per round, and the speed-up.

After SpecMQuant (Zhang et al., 2025, arXiv 2505.22179): Llama-3-8B and 70B, EAGLE-2 and hierarchical, A100 and 3090.
"""

from __future__ import annotations

from sameseed import registry
from sameseed.report.schemas import PROFILE_SCHEMA
from sameseed_lab.studies._bench import BenchCell, SpecSetting, bench_rows, beside
from sameseed_lab.studies._depth import FORM, LAYERS, DepthCell, depth_rows
from sameseed_lab.studies._setup import StudySetup
from sameseed_lab.studies._study import Cell, Records, Row, Study, matching, only

FORMATS = ("bf16", "w8a8", "w4a16-g128", "w4a8-channel", "w4a8-g128", "w4a8-qoq")
TREE, SMALL_TREE, CHAIN, MODEL, SELF = "head tree 60", "head tree 24", "head chain 4", "draft model 4", "own 4 bits 4"
CASCADE = "ngram > draft model 6"
HEADS = (TREE, SMALL_TREE, CHAIN)


def cells(setup: StudySetup) -> list[Cell]:
    """A cell per format with all ways. The target's own 4-bit copy is one of them if the target has more bits.

    At size "true" heads alone beside bf16, as nothing more fits in 24 GiB; and also the costs of a 70B target.
    """
    wide, draft = (("depth", 6), ("top_k", 10)), setup.source("1b")
    drafter = draft in registry.names("drafters")  # no model
    every = (
        SpecSetting("{head}", (60,), "bf16", None, wide, TREE),
        SpecSetting("{head}", (24,), "bf16", None, (("depth", 3), ("top_k", 10)), SMALL_TREE),
        SpecSetting("{head}", (4,), "bf16", None, (("depth", 4), ("top_k", 1)), CHAIN),
        SpecSetting("{1b}", (4,), "bf16", None, (), f"{draft} 4" if drafter else MODEL),
        SpecSetting("ngram > {1b}", (6,), "bf16", None, (), CASCADE),
    )
    ways = tuple(way for way in every if all(role in setup.names for role in way.roles))
    if drafter:
        ways = tuple(way for way in ways if way.name != CASCADE)
    own = SpecSetting("self_quant", (4,), "w4a8", None, (), SELF)
    some = {"w8a8": (*ways, own), "bf16": ways[:3] if setup.size == "true" else (*ways, own)}
    base = "" if setup.size == "true" else "bf16"  # beside the largest twins it does not fit
    made = [BenchCell(form, form, some.get(form, ways), base=base) for form in FORMATS]
    made += [BenchCell("as stored", "auto", ways, base=base)] if setup.size == "real" else []
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
        best = max(over, key=lambda r: float(r["tokens_per_s"]))
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


STUDY = Study.read(__file__, cells, derive, findings)
