"""Speculation and FP8 in a server by lengths of prompt and answer and by clients, and draft lengths of rounds.

After an article of Novita AI (2024): vLLM with dynamic draft lengths on an H20, and FP8 with an FP8 cache on a 4090.
"""

from __future__ import annotations

from sameseed.report.plot import Panel, Series
from sameseed_lab.studies._bench import BenchCell, SpecSetting, bench_rows
from sameseed_lab.studies._load import LoadCell, load_rows
from sameseed_lab.studies._setup import StudySetup
from sameseed_lab.studies._study import Cell, Plot, Records, Row, Study, Table, matching, only

LENGTHS = ("1000-100", "500-50", "200-20")  # a tenth of the published lengths
CLIENTS = (1, 2, 4, 8)
BOUND = 2.0  # seconds to the first token
FORMATS = (("bf16", "auto"), ("fp8", "auto"), ("fp8", "fp8_e4m3"))
TIMELINES, STEPS = ("threshold 0.2", "disco", "goodput"), 12  # length policies and rounds of the timeline


def cells(setup: StudySetup) -> list[Cell]:
    """Cells of lengths x formats x clients, and one cell of rounds with each length policy at batch size 1."""
    alone = setup.size == "true"  # several servers of that size do not fit
    together: list[tuple[tuple[str, str], ...]] = [(form,) for form in FORMATS] if alone else [FORMATS]
    made: list[Cell] = []
    for lengths in LENGTHS:
        for formats in together:
            form, kv = formats[0]
            name = f"{lengths} {form}{' kv fp8' if kv != 'auto' else ''}" if alone else lengths
            made.append(LoadCell(name, "1b", CLIENTS, formats, None, lengths, BOUND))
    ways = [SpecSetting("{1b}", (8,), "bf16", t, (), f"threshold {t:g}") for t in (0.2, 0.5, 0.8)]
    ways += [SpecSetting("{1b}", (8,), "bf16", None, (), policy, policy) for policy in ("disco", "goodput")]
    return [*made, BenchCell("rounds", "bf16", tuple(ways))]


def derive(records: Records) -> list[Row]:
    """Rows; `gain`: over the record without speculation that is otherwise the same, `low`: over the one in bf16."""
    load = load_rows([r for r in records if r["cell"] != "rounds"])
    for row in load:
        same = {"lengths": row["lengths"], "concurrency": row["concurrency"], "on": False}
        its, low = only(load, **same, form=row["form"]), only(load, **same, form="bf16")
        row["gain"] = row["tokens_per_s"] / its["tokens_per_s"] if its and row["on"] else None
        row["low"] = row["tokens_per_s"] / low["tokens_per_s"] if low else None
        row["low_off"] = None if row["on"] else row["low"]
        row["low_off_each"] = [speed / low["tokens_per_s"] for speed in row["tokens_per_s_each"]] if low else []
        row["first_on"] = row["first_p90"] if row["on"] else None
        pairs = zip(row["tokens_per_s_each"], its["tokens_per_s_each"], strict=False) if its and row["on"] else ()
        row["gain_each"], row["first_on_each"] = [mine / off for mine, off in pairs], row["first_p90_each"]
    return load + bench_rows([r for r in records if r["cell"] == "rounds"])


def findings(rows: list[Row]) -> list[str]:
    """The least and the most gain of speculation, the best setting within the bound, and rounds by policy."""
    gains, said = [r for r in rows if r.get("gain")], list[str]()
    if gains:
        least, most = (f(gains, key=lambda r: float(r["gain"])) for f in (min, max))
        said.append(
            f"Speculation (goodput): from {least['gain']:.2f} times the tokens/s ({_where(least)}) to "
            f"{most['gain']:.2f} times ({_where(most)}). Published: 1.4 times in all."
        )
    kept = [r for r in rows if r.get("low") and r["first_p90"] is not None and r["first_p90"] < BOUND * 1e3]
    if kept:
        best = max(kept, key=lambda r: float(r["low"]))
        said.append(
            f"The most over plain bf16 with nine of ten first tokens in {BOUND:g} s: {best['low']:.2f} times, "
            f"{_where(best)}, speculation {best['speculation']}."
        )
    for row in rows:
        if row.get("way") in ("disco", "goodput"):
            said.append(f"{row['way']} drafted {row['mean_drafted']:.1f} tokens a round in the mean, ")
            said[-1] += f"{row['speedup']:.2f} times plain."
    return said


def _where(row: Row) -> str:
    return f"{row['form']}, {row['lengths']} tokens, {row['concurrency']} at once"


def more(rows: list[Row]) -> tuple[list[Plot], list[Table]]:
    """Draft lengths of rounds as shares, and the time split of the first rounds on one scale."""
    rounds = matching(rows, {"cell": "rounds", "drafted": True})
    lengths = []
    for row in rounds:
        total = max(1, sum(row["draft_lengths"]))
        lengths.append(Series(row["way"], [(n, v / total) for n, v in enumerate(row["draft_lengths"])]))
    drafts = Panel("share of rounds by tokens drafted", "draft tokens", lengths, "bars")
    steps = {row["way"]: row["first_steps"][1 : STEPS + 1] for row in rounds if row["way"] in TIMELINES}
    parts = ("draft", "target", "verify", "schedule")
    top = 1.05e3 * max((sum(step[part] for part in parts) for its in steps.values() for step in its), default=0.0)
    panels = []
    for way, its in steps.items():  # without the first step, which is the prefill
        split = [Series(part, [(n, 1e3 * step[part]) for n, step in enumerate(its, 2)]) for part in parts]
        panels.append(Panel(f"ms of each round, {way}", "round", split, "bars", stacked=True, top=top))
    return [Plot("drafts", "What rounds draft", [drafts]), Plot("rounds", "Where the time of rounds goes", panels)], []


STUDY = Study(__file__, cells, derive, findings, more)
