"""Speculation and FP8 in a server by lengths of prompt and answer and by clients, and draft lengths of rounds.

After an article of Novita AI (2024): vLLM with dynamic draft lengths on an H20, and FP8 with an FP8 cache on a 4090.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sameseed_lab.studies._bench import BenchCell, SpecSetting
from sameseed_lab.studies._load import LoadCell
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
    points,
)

LENGTHS = ("1000-100", "500-50", "200-20")  # a tenth of the published lengths
CLIENTS = (1, 2, 4, 8)
BOUND = 2.0  # seconds to the first token
SPECULATION, FP8 = 1.4, 1.4  # published speed-ups: overall; and of FP8 at about 4 sequences within the bound
FORMATS = (("bf16", "auto"), ("fp8", "auto"), ("fp8", "fp8_e4m3"))
NAMES = {("bf16", "bf16"): "bf16", ("fp8", "bf16"): "fp8", ("fp8", "fp8_e4m3"): "fp8, cache fp8"}


def cells(size: str) -> list[Cell]:
    """Cells of lengths x formats x clients, and one cell of rounds with each length policy at batch size 1."""
    together: list[tuple[tuple[str, str], ...]] = [FORMATS] if size == "small" else [(form,) for form in FORMATS]
    made: list[Cell] = []
    for lengths in LENGTHS:
        for formats in together:
            alone = "" if len(formats) > 1 else f" {formats[0][0]}" + (" kv fp8" if formats[0][1] != "auto" else "")
            made.append(LoadCell(f"{lengths}{alone}", "1b", CLIENTS, formats, None, lengths, BOUND))
    ways = [
        SpecSetting("{1b}", (8,), "bf16", threshold, (), f"threshold {threshold:g}") for threshold in (0.2, 0.5, 0.8)
    ]
    ways += [SpecSetting("{1b}", (8,), "bf16", None, (), policy, policy) for policy in ("disco", "goodput")]
    return [*made, BenchCell("rounds", "bf16", tuple(ways))]


def report(records: Records) -> Report:
    """The study's plots: speed-up by lengths, FP8 over bf16, draft lengths, a timeline."""
    load = [r for r in records if r["cell"] != "rounds"]
    rounds = pick(records, cell="rounds")
    plots = ([_load_plot(load)] if load else []) + (_round_plots(rounds) if rounds else [])
    tables = ([_load_table(load)] if load else []) + ([_round_table(rounds)] if rounds else [])
    return Report(_findings(load, rounds), _published(load), plots, tables)


def _name(record: Mapping[str, Any]) -> str:
    c = record["config"]
    return NAMES[c["format"], "bf16" if c["kv_format"] == "auto" else c["kv_format"]]


def _is_on(record: Mapping[str, Any]) -> bool:
    return str(record["config"]["label"]).endswith("on")


def _find(records: Records, name: str, on: bool, **wanted: object) -> list[Mapping[str, Any]]:
    return [r for r in pick(records, **wanted) if _name(r) == name and _is_on(r) == on]


def _over(mine: Mapping[str, Any], its: Mapping[str, Any] | None) -> float | None:
    """Ratio of tokens/s of two records; None without a baseline."""
    whole = its["output_tokens_per_s"] if its else 0.0
    return float(mine["output_tokens_per_s"] / whole) if whole else None


def _gain(records: Records, record: Mapping[str, Any]) -> float | None:
    """Speed-up over the record without speculation that is otherwise the same."""
    c = record["config"]
    off = _find(records, _name(record), False, lengths=c["lengths"], concurrency=c["concurrency"])
    return _over(record, off[-1] if off else None)


def _low(records: Records, record: Mapping[str, Any]) -> float | None:
    """Speed-up over the record in bf16 without speculation that is otherwise the same."""
    c = record["config"]
    off = _find(records, "bf16", False, lengths=c["lengths"], concurrency=c["concurrency"])
    return _over(record, off[-1] if off else None)


def _findings(load: Records, rounds: Records) -> list[str]:
    gains = [(g, r) for r in load if _is_on(r) and (g := _gain(load, r)) is not None]
    said = []
    if gains:
        (least, low), (most, high) = (f(gains, key=lambda pair: pair[0]) for f in (min, max))
        said.append(
            f"Speculation (goodput): from {least:.2f} times the tokens/s ({_where(low)}) to {most:.2f} times "
            f"({_where(high)}). Published: 1.4 times in all."
        )
    kept = [r for r in load if r["ttft_ms"]["p90"] is not None and r["ttft_ms"]["p90"] < BOUND * 1e3]
    best = max(((v, r) for r in kept if (v := _low(load, r)) is not None), key=lambda pair: pair[0], default=None)
    if best:
        said.append(f"The most over plain bf16 with nine of ten first tokens in {BOUND:g} s: {best[0]:.2f} times, ")
        said[-1] += f"{_where(best[1])}, speculation {'on' if _is_on(best[1]) else 'off'}."
    for r in rounds:
        if r["way"] in ("disco", "goodput"):
            said.append(
                f"{r['way']} drafted {_mean(r):.1f} tokens a round in the mean, {r['speedup']:.2f} times plain."
            )
    return said


def _where(record: Mapping[str, Any]) -> str:
    c = record["config"]
    return f"{_name(record)}, {c['lengths']} tokens, {c['concurrency']} at once"


def _mean(record: Mapping[str, Any]) -> float:
    counts = record["draft_lengths"]
    return float(sum(n * count for n, count in enumerate(counts)) / max(1, sum(counts)))


def _published(load: Records) -> list[Published]:
    made = []
    for lengths in LENGTHS:
        for clients in CLIENTS:
            on = _find(load, "bf16", True, lengths=lengths, concurrency=clients)
            what = f"speculation on / off, {lengths} tokens, {clients} at once"
            made.append(Published(what, SPECULATION, _gain(load, on[-1]) if on else None, "theirs: in all, 70B on H20"))
        both = _find(load, "fp8, cache fp8", False, lengths=lengths, concurrency=4)
        what = f"FP8 with FP8 cache over bf16, {lengths} tokens, 4 at once"
        made.append(Published(what, FP8, _low(load, both[-1]) if both else None, "theirs: 8B on a 4090, TTFT < 2 s"))
    return made


def _load_plot(load: Records) -> Plot:
    panels = []
    for lengths in LENGTHS:
        gains = [
            Series(n, points(_find(load, n, True, lengths=lengths), "concurrency", lambda r: _gain(load, r)))
            for n in NAMES.values()
        ]
        panels.append(Panel(f"speculation on over off, {lengths} tokens", "clients at once", gains, level=1.0))
    for lengths in LENGTHS:
        low = [
            Series(n, points(_find(load, n, False, lengths=lengths), "concurrency", lambda r: _low(load, r)))
            for n in NAMES.values()
        ]
        theirs = Series(NAMES["fp8", "fp8_e4m3"], [(4, FP8)], True)
        panels.append(Panel(f"over bf16, both without, {lengths}", "clients at once", [*low, theirs], level=1.0))
    for lengths in LENGTHS:
        first = [
            Series(n, points(_find(load, n, True, lengths=lengths), "concurrency", lambda r: r["ttft_ms"]["p90"]))
            for n in NAMES.values()
        ]
        panels.append(Panel(f"first token, p90 ms, speculation on, {lengths}", "clients at once", first))
    return Plot("load", "By lengths, clients and formats", [p for p in panels if any(s.points for s in p.series)])


def _round_plots(rounds: Records) -> list[Plot]:
    """Plots of draft lengths, and of the time split of rounds; two plots, so that each has enough colours."""
    drafted = [r for r in rounds if r["way"]]
    lengths = [Series(r["way"], [(n, float(v)) for n, v in enumerate(r["draft_lengths"])]) for r in drafted]
    drafts = Plot("drafts", "What rounds draft", [Panel("rounds by tokens drafted", "draft tokens", lengths, "bars")])
    panels = []
    for name in ("threshold 0.2", "disco", "goodput"):
        if r := only(rounds, way=name):
            steps = r["first_steps"][1:13]  # without the first step, which is the prefill
            parts = [
                Series(part, [(n, 1e3 * step[part]) for n, step in enumerate(steps, 2)])
                for part in ("draft", "target", "verify", "schedule")
            ]
            panels.append(Panel(f"ms of each round, {name}", "round", parts, "bars", stacked=True))
    return [drafts, *([Plot("rounds", "Where the time of rounds goes", panels)] if panels else [])]


def _load_table(load: Records) -> Table:
    heads = ("lengths", "format", "speculation", "at once", "tokens/s", "on / off", "over bf16", "TTFT p50", "TTFT p90")
    rows = []
    for r in load:
        c, told, same = r["config"], r["acceptance"] or {}, r["same_texts"]
        rows.append(
            [
                c["lengths"],
                _name(r),
                "on" if _is_on(r) else "off",
                str(c["concurrency"]),
                figure(r["output_tokens_per_s"], ".1f"),
                figure(_gain(load, r) if _is_on(r) else None),
                figure(_low(load, r)),
                figure(r["ttft_ms"]["p50"], ".0f"),
                figure(r["ttft_ms"]["p90"], ".0f"),
                figure(told.get("acceptance_rate"), ".0%"),
                figure(r["usage"]["cpu_share"], ".0%"),
                "" if same is None else f"{same[0]} of {same[1]}",
            ]
        )
    return Table("Load", (*heads, "accepted", "CPU", "same texts"), rows)


def _round_table(rounds: Records) -> Table:
    heads = ("lengths by", "tokens/s", "over plain", "drafted a round", "accepted", "coupled", "min(p, q)", "same text")
    rows = []
    for r in rounds:
        p, drafted = r.get("price") or {}, bool(r["way"])
        rows.append(
            [
                r["way"] or "plain",
                figure(r["tokens_per_s"], ".1f"),
                figure(r["speedup"] if drafted else None),
                figure(_mean(r) if drafted else None, ".1f"),
                figure(r["acceptance_rate"], ".0%"),
                figure(p.get("coupled"), ".1%"),
                figure(p.get("min_pq"), ".1%"),
                ("yes" if r["equals_plain"] else "NO") if drafted else "",
            ]
        )
    return Table("Rounds, one text after the other", heads, rows)


STUDY = Study(
    title="Speculation and FP8 in a server: lengths, clients, draft lengths",
    source="Novita AI, 2024: Llama-3.1-70B with dynamic draft lengths on H20, Llama-3-8B in FP8 on a 4090, vLLM",
    differs=(
        "Their bars have no numbers: 1.4 times in all is what is said of both.",
        "Lengths here are a tenth of theirs (10000-1000, 5000-500, 2000-200). The bound of 2 s is the same.",
        "Ours at --size small is the embedded family, at --size true its twins at 8B and 1B. FP8 weights save reading "
        "where memory binds; the products are in bf16 on a CPU, so a long prompt gains nothing.",
        "Arms of all formats took turns at --size small; at --size true each format is a cell of its own.",
        "MMLU-Pro through the API is `sameseed eval --tasks mmlu_pro` and no part of this study.",
        "Coupled and min(p, q) are at temperature 0.7, on greedy texts; a server's records have none.",
    ),
    data="Their prompts are not published: prompts of the asked lengths are made of the packaged ones.",
    cells=cells,
    report=report,
)
