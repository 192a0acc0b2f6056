"""Assisted generation with a smaller model: lengths x confidence x sampling, and all mixes of 8 and 4 bits.

After the HPML study of Columbia University (2025): Llama-3.1-8B with Llama-3.2-1B and 3B, bitsandbytes, one L4.
"""

from __future__ import annotations

from collections import Counter

from sameseed.report.plot import Panel, Series
from sameseed_lab.studies._bench import BenchCell, SpecSetting, bench_rows, beside
from sameseed_lab.studies._quality import SAMPLED, quality_cells, quality_rows
from sameseed_lab.studies._setup import StudySetup
from sameseed_lab.studies._study import Cell, Plot, Records, Row, Study, Table, matching

KS, THRESHOLDS = (3, 5, 7), (1e-4, 0.2)
BITS = {"bf16": "bf16", "w8a8": "8 bit", "nf4": "4 bit (nf4)", "w4a8": "4 bit (w4a8)"}
STORED = "as stored"  # of a real model
WIDTH = 20  # tokens per bar in the histogram of prompt lengths


def cells(setup: StudySetup) -> list[Cell]:
    """Cells of draft lengths in bf16, greedy and sampled; of all format mixes at k = 3; of each format's quality."""
    made: list[Cell] = []
    forms = {**BITS, "auto": STORED} if setup.size == "real" else BITS
    base = "" if setup.size == "true" else "bf16"  # beside the largest twins it does not fit
    for role in (r for r in ("1b", "3b") if r in setup.names):
        draft, name = f"{{{role}}}", setup.names[role]
        ways = tuple(SpecSetting(draft, KS, "bf16", threshold) for threshold in THRESHOLDS)
        for how, temperature in (("greedy", 0.0), ("sampled", SAMPLED)):
            made.append(BenchCell(f"{name} lengths {how}", "bf16", ways, temperature))
        mixed = tuple(SpecSetting(draft, (3,), form, 0.2) for form in forms)
        made += [BenchCell(f"{name} mixes of {form}", form, mixed, base=base) for form in forms]
    return [*made, *quality_cells(tuple(forms))]


def derive(records: Records) -> list[Row]:
    """Rows of speed and of quality. `over_bf16`: over plain greedy decoding in bf16, the study's only baseline."""
    rows = bench_rows([r for r in records if "perplexity" not in r])
    plain = matching(rows, {"drafted": False, "format": "bf16", "how": "greedy"})
    beside(rows, next((r for r in plain if "mixes" in r["cell"]), next(iter(plain), None)), "over_bf16")
    rows += quality_rows([r for r in records if "perplexity" in r])
    for row in rows:
        row["bits"] = BITS.get(row["format"], STORED)
        if row.get("draft_format"):
            row["draft_bits"] = BITS.get(row["draft_format"], STORED) if row["draft_model"] else row["draft_name"]
        row["row"] = row["cell"] if row["drafted"] else f"{row['cell']}: plain"
    return rows


def findings(rows: list[Row]) -> list[str]:
    """The fastest setting, what speculation gains by format, and the price of exactness."""
    drafted = matching(rows, {"drafted": True})
    if not drafted:
        return []
    best = max(drafted, key=lambda r: float(r["tokens_per_s"]))
    total = best.get("over_bf16")
    said = [
        f"The fastest: target {best['bits']}, draft {best['draft_bits']}, k = {best['num_draft_tokens']}, "
        f"{best['how']}: {best['tokens_per_s']:.0f} tokens/s. That is {best['speedup']:.2f} times plain decoding in "
        "its own format"
        + (f", and {total:.2f} times one plain bf16 baseline (published best: 1.35 times)." if total else ".")
    ]
    every = dict.fromkeys(str(row["bits"]) for row in drafted)
    gains = {bits: max(r["speedup"] for r in matching(drafted, {"bits": bits})) for bits in every}
    known = ", ".join(f"{gain:.2f} in {bits}" for bits, gain in gains.items())
    said.append(f"What speculation gains over its own format, at best: {known}.")
    for row in [r for r in drafted if r["coupled"] is not None and r["how"] == "sampled"][:1]:
        said.append(
            f"The price of exactness: sampled, coupled sampling accepts {row['coupled']:.1%} of "
            f"{row['price']['positions']} tokens; min(1, p/q), which does not keep the text, would accept "
            f"{row['min_pq']:.1%} on the same positions."
        )
    return said


def more(rows: list[Row]) -> tuple[list[Plot], list[Table]]:
    """The histogram of prompt lengths."""
    lengths: list[int] = next((row["prompt_tokens"] for row in reversed(rows) if "prompt_tokens" in row), [])
    counts = Counter(n // WIDTH * WIDTH for n in lengths)
    bars = [(f"{low}+", float(counts[low])) for low in sorted(counts)]
    panel = Panel(f"prompts by tokens, {WIDTH} a bar", "tokens", [Series("prompts", bars)], "bars")
    return [Plot("prompts", "Tokens of the prompts", [panel])], []


STUDY = Study.read(__file__, cells, derive, findings, more)
