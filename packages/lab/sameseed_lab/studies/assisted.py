"""Assisted generation with a smaller model: lengths x confidence x sampling, and all mixes of 8 and 4 bits.

After the HPML study of Columbia University (2025): Llama-3.1-8B with Llama-3.2-1B and 3B, bitsandbytes, one L4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sameseed_lab.studies import _quality
from sameseed_lab.studies._bench import BenchCell, SpecSetting
from sameseed_lab.studies._setup import role_name
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
    prompt_panel,
)

KS, THRESHOLDS, SAMPLED = (3, 5, 7), (1e-4, 0.2), 0.7
BITS = {"bf16": "bf16", "w8a8": "8 bit", "nf4": "4 bit (nf4)", "w4a8": "4 bit (w4a8)"}
# Published: (draft, threshold, sampling) -> k -> tokens/s, ms per token, rollbacks, acceptance, speed-up, GPU %
LENGTHS: Mapping[tuple[str, float, str], Mapping[int, tuple[float, ...]]] = {
    ("1b", 1e-4, "greedy"): {
        3: (19.995, 50.013, 2502, 0.547, 1.301, 89.08),
        5: (18.653, 53.611, 2700, 0.440, 1.214, 86.79),
        7: (16.696, 59.896, 2796, 0.363, 1.086, 72.30),
    },
    ("1b", 1e-4, "sampled"): {
        3: (19.833, 50.420, 2491, 0.549, 1.290, 89.88),
        5: (18.226, 54.866, 2785, 0.431, 1.186, 76.08),
        7: (16.510, 60.570, 2863, 0.361, 1.074, 73.84),
    },
    ("1b", 0.2, "greedy"): {
        3: (20.769, 48.150, 2428, 0.609, 1.351, 81.27),
        5: (20.535, 48.697, 2606, 0.544, 1.336, 76.91),
        7: (20.334, 49.178, 2653, 0.500, 1.323, 77.06),
    },
    ("1b", 0.2, "sampled"): {
        3: (20.425, 48.960, 2353, 0.605, 1.329, 79.97),
        5: (19.385, 51.585, 2550, 0.490, 1.261, 76.61),
        7: (19.152, 52.215, 2657, 0.480, 1.246, 75.21),
    },
    ("3b", 0.2, "greedy"): {
        3: (17.099, 58.481, 1967, 0.673, 1.112, 88.14),
        5: (16.580, 60.313, 2116, 0.610, 1.079, 92.56),
        7: (15.928, 62.782, 2194, 0.559, 1.036, 92.61),
    },
    ("3b", 0.2, "sampled"): {
        3: (16.794, 59.546, 1985, 0.660, 1.093, 90.80),
        5: (16.324, 61.261, 2055, 0.605, 1.062, 91.41),
        7: (15.475, 64.621, 2170, 0.556, 1.010, 90.45),
    },
}
# Published: (draft, target's format, draft's format) -> the same values, at k = 3, threshold 0.2, greedy
MIXES: Mapping[tuple[str, str, str], tuple[float, ...]] = {
    ("1b", "bf16", "bf16"): LENGTHS["1b", 0.2, "greedy"][3],
    ("1b", "bf16", "w8a8"): (12.818, 78.018, 2491, 0.602, 0.834, 50.26),
    ("1b", "bf16", "nf4"): (14.423, 69.335, 2883, 0.539, 0.938, 67.08),
    ("1b", "w8a8", "bf16"): (14.661, 68.207, 2491, 0.601, 0.954, 46.25),
    ("1b", "w8a8", "nf4"): (11.025, 90.702, 2900, 0.537, 0.717, 41.54),
    ("3b", "bf16", "bf16"): LENGTHS["3b", 0.2, "greedy"][3],
    ("3b", "bf16", "w8a8"): (9.358, 106.863, 2047, 0.663, 0.609, 42.91),
    ("3b", "bf16", "nf4"): (10.627, 94.103, 2264, 0.637, 0.691, 74.52),
    ("3b", "w8a8", "bf16"): (12.804, 78.101, 2006, 0.661, 0.833, 60.49),
    ("3b", "w8a8", "nf4"): (8.607, 116.188, 2250, 0.634, 0.560, 55.15),
}
PLAIN = {"bf16": 15.499, "w8a8": 9.028, "nf4": 21.036}  # published tokens/s of plain decoding, by format


# Published: format -> perplexity of WikiText-2, HumanEval pass@1 greedy and sampled
QUALITY = {"bf16": (5.563, 0.336, 0.329), "w8a8": (5.640, 0.323, 0.329), "nf4": (6.242, 0.292, 0.317)}


def cells(size: str) -> list[Cell]:
    """Cells of draft lengths in bf16, greedy and sampled; of all format mixes at k = 3; of each format's quality."""
    made: list[Cell] = []
    for role in ("1b",) if size == "small" else ("1b", "3b"):
        draft = f"{{{role}}}"
        ways = tuple(SpecSetting(draft, KS, "bf16", threshold) for threshold in THRESHOLDS)
        for how, temperature in (("greedy", 0.0), ("sampled", SAMPLED)):
            made.append(BenchCell(f"{role_name(role, size)} lengths {how}", "bf16", ways, temperature))
        mixed = tuple(SpecSetting(draft, (3,), form, 0.2) for form in BITS)
        made += [BenchCell(f"{role_name(role, size)} mixes of {form}", form, mixed) for form in BITS]
    return [*made, *_quality.cells(BITS)]


def report(records: Records) -> Report:
    """All plots and tables of the study, with our figures beside the published ones."""
    quality, records = [r for r in records if "perplexity" in r], [r for r in records if "perplexity" not in r]
    made = Report([], [], [], [])
    if records:
        base = only(records, draft="none", format="bf16", temperature=0.0)
        base = base if base is None else {**base, "tokens_per_s": _plain(records, "bf16")}
        made = Report(
            _findings(records, base), _published(records, base), _plots(records, base), _tables(records, base)
        )
    return _quality.extended(made, quality, BITS, QUALITY)


def _plain(records: Records, form: str) -> float | None:
    """Plain greedy tokens/s in a format, from the cell of the format's mixes if measured; None without records."""
    found = pick(records, draft="none", format=form, temperature=0.0)
    mixes = [r for r in found if "mixes" in r["cell"]] or found
    return float(mixes[0]["tokens_per_s"]) if mixes else None


def _over(record: Mapping[str, Any], base: Mapping[str, Any] | None) -> float | None:
    """Speed-up over plain decoding in bf16, the study's only baseline."""
    return None if base is None else float(record["tokens_per_s"] / base["tokens_per_s"])


def _draft(role: str, records: Records) -> str:
    """The name of a draft in plots."""
    name = role_name(role, records[-1]["size"])
    return name.upper() if name == role else name


def _findings(records: Records, base: Mapping[str, Any] | None) -> list[str]:
    drafted = [r for r in records if r["way"]]
    best = max(drafted, key=lambda r: float(r["tokens_per_s"]))
    c, total = best["config"], _over(best, base)
    how = "sampled" if c["temperature"] else "greedy"
    said = [
        f"The fastest: target in {c['format']}, draft in {c['draft_format']}, k = {c['num_draft_tokens']}, {how}"
        f": {best['tokens_per_s']:.0f} tokens/s"
        + f". That is {best['speedup']:.2f} times plain decoding in its own format"
        + ("." if total is None else f", and {total:.2f} times one plain bf16 baseline (published best: 1.35 times).")
    ]
    gains = {f: max((r["speedup"] for r in drafted if r["config"]["format"] == f), default=None) for f in BITS}
    known = ", ".join(f"{g:.2f} in {f}" for f, g in gains.items() if g is not None)
    said.append(f"What speculation gains over its own format, at best: {known}.")
    priced = [r["price"] for r in drafted if r.get("price") and r["config"]["temperature"]]
    if priced:
        p = priced[0]
        said.append(
            f"The price of exactness: sampled, coupled sampling accepts {p['coupled']:.1%} of {p['positions']} tokens; "
            f"min(1, p/q), which does not keep the text, would accept {p['min_pq']:.1%} on the same positions."
        )
    return said


def _published(records: Records, base: Mapping[str, Any] | None) -> list[Published]:
    made = []
    for (role, threshold, how), ks in LENGTHS.items():
        temperature = 0.0 if how == "greedy" else SAMPLED
        for k, row in ks.items():
            asked: dict[str, Any] = {"num_draft_tokens": k, "confidence": threshold, "temperature": temperature}
            ours = only([r for r in records if "lengths" in r["cell"]], way=f"{{{role}}}", **asked)
            what = f"8B / {role.upper()}, threshold {threshold:g}, {how}, k = {k}"
            made.append(Published(f"{what}: speed-up", row[4], None if ours is None else ours["speedup"]))
            made.append(Published(f"{what}: acceptance", row[3], None if ours is None else ours["acceptance_rate"]))
    for (role, target, draft), row in MIXES.items():
        ours = _mix(records, role, target, draft)
        what = f"8B / {role.upper()}, target {BITS[target]}, draft {BITS[draft]}"
        total = None if ours is None else _over(ours, base)
        made.append(Published(f"{what}: speed-up over bf16", row[4], total))
        own = row[0] / PLAIN[target]
        note = "theirs derived: its tokens/s over the format's own"
        made.append(Published(f"{what}: over its own format", own, None if ours is None else ours["speedup"], note))
    for form, speed in PLAIN.items():
        mine, whole = _plain(records, form), _plain(records, "bf16")
        ratio = mine / whole if mine and whole else None
        made.append(Published(f"plain decoding in {BITS[form]} over bf16", speed / PLAIN["bf16"], ratio))
    return made


def _mix(records: Records, role: str, target: str, draft: str) -> Mapping[str, Any] | None:
    mixes = [r for r in records if "mixes" in r["cell"]]
    return only(mixes, way=f"{{{role}}}", format=target, draft_format=draft)


def _plots(records: Records, base: Mapping[str, Any] | None) -> list[Plot]:
    return [
        Plot("lengths", "By draft length", _length_panels(records)),
        Plot("mixes", "By formats of target and draft", _mix_panels(records, base)),
        Plot("prompts", "Tokens of the prompts", [prompt_panel(records)]),
    ]


def _length_panels(records: Records) -> list[Panel]:
    measures = (
        ("speed-up over plain bf16", lambda r: r["speedup"], 4, 1.0),
        ("share of drafted tokens accepted", lambda r: r["acceptance_rate"], 3, None),
        ("tokens/s", lambda r: r["tokens_per_s"], None, None),
        ("ms a token", lambda r: 1e3 / r["tokens_per_s"], None, None),
        ("rollbacks a 100 tokens", lambda r: 100 * r["rollbacks"] / r["repetitions"][0]["num_tokens"], None, None),
        ("CPU: share of all cores", lambda r: r["usage"]["cpu_share"], None, None),
    )
    panels = []
    for title, of, column, level in measures:
        series = []
        for (role, threshold, how), ks in LENGTHS.items():
            asked: dict[str, Any] = {"confidence": threshold, "temperature": 0.0 if how == "greedy" else SAMPLED}
            found = pick([r for r in records if "lengths" in r["cell"]], way=f"{{{role}}}", **asked)
            if found:
                label = f"{_draft(role, found)}, p >= {threshold:g}, {how}"
                series.append(Series(label, points(found, "num_draft_tokens", of)))
                if column is not None:
                    series.append(Series(label, [(k, row[column]) for k, row in ks.items()], True))
        panels.append(Panel(title, "draft tokens", series, level=level))
    return panels


def _mix_panels(records: Records, base: Mapping[str, Any] | None) -> list[Panel]:
    measures = (
        ("speed-up over one plain bf16 baseline", lambda r: _over(r, base), 4, 1.0),
        ("speed-up over its own format", lambda r: r["speedup"], None, 1.0),
        ("share of drafted tokens accepted", lambda r: r["acceptance_rate"], 3, None),
        ("tokens/s", lambda r: r["tokens_per_s"], None, None),
        ("ms a token", lambda r: 1e3 / r["tokens_per_s"], None, None),
        ("CPU: share of all cores", lambda r: r["usage"]["cpu_share"], None, None),
    )
    panels = []
    for title, of, column, level in measures:
        series = []
        for role in ("1b", "3b"):
            for target in BITS:
                found = [(d, v) for d in BITS if (r := _mix(records, role, target, d)) and (v := of(r)) is not None]
                label = f"{_draft(role, records)}, target {target}"
                if found:
                    series.append(Series(label, found))
                theirs = [(d, MIXES[role, target, d][column]) for d in BITS if column and (role, target, d) in MIXES]
                if found and theirs:
                    series.append(Series(label, theirs, True))
        panels.append(Panel(title, "format of the draft", series, "bars", level=level))
    return panels


HEADS = ("cell", "threshold", "target", "draft", "k", "tokens/s", "ms a token", "own format", "bf16", "accepted")
MORE = ("a draft", "rollbacks", "CPU", "J a token", "coupled", "min(p, q)", "same text")


def _tables(records: Records, base: Mapping[str, Any] | None) -> list[Table]:
    rows = []
    for r in records:
        c, u, p = r["config"], r["usage"], r.get("price") or {}
        drafted = bool(r["way"])
        cost = u["gpu_j_per_token"] if u["gpu_j_per_token"] is not None else u["cpu_j_per_token"]
        rows.append(
            [
                r["cell"] if drafted else f"{r['cell']}: plain",
                figure(c["confidence"], "g"),
                c["format"],
                c["draft_format"] if drafted else "",
                str(c["num_draft_tokens"]) if drafted else "",
                figure(r["tokens_per_s"], ".1f"),
                figure(1e3 / r["tokens_per_s"]),
                figure(r["speedup"] if drafted else None),
                figure(_over(r, base)),
                figure(r["acceptance_rate"], ".0%"),
                figure(r["mean_acceptance_length"]),
                str(r["rollbacks"]) if drafted else "",
                figure(u["cpu_share"], ".0%"),
                figure(cost, ".3g"),
                figure(p.get("coupled"), ".1%"),
                figure(p.get("min_pq"), ".1%"),
                ("yes" if r["equals_plain"] else "NO") if drafted else "",
            ]
        )
    return [Table("All measurements", (*HEADS, *MORE), rows)]


STUDY = Study(
    title="Assisted generation: draft lengths, confidence, and 8 and 4 bits in every mix",
    source="HPML study, Columbia University 2025: Llama-3.1-8B with 1B and 3B drafts, transformers, one L4",
    differs=(
        "Theirs are trained models of 8, 1 and 3 billion weights on a GPU. Ours at --size small is the embedded pair "
        "(8.6 and 1.6 million), at --size true its twins in these shapes: true cost, the small pair's acceptance.",
        "Their 20 new tokens a prompt include the prefill, and every speed-up is over one bf16 baseline. Both kinds "
        "stand here: over bf16, and over plain decoding in the target's own format, which took turns.",
        "Their 8 bits are LLM.int8 (row int8 with outlier columns), ours w8a8 (int8 products). nf4 has no fast kernel "
        "on a CPU; w4a8 has. Their utilisation is the GPU's, ours the share of all cores.",
        "Sampled is temperature 0.7 and top-p 0.95 here; theirs is not said for these runs.",
        "Speed-ups over bf16 are across cells that did not take turns.",
        "Their perplexity is WikiText-2's, ours that of the prompts' texts: compare what formats add to it. Of "
        "HumanEval ours are --num-prompts problems; a model as small as the embedded one solves none.",
    ),
    data="Their prompts are WikiText-2 test rows of at least 128 tokens, clipped to 128. --prompts wikitext fetches "
    "the set from the hub, --prompts wikitext:DIR reads DIR/wiki.test.raw; without, the packaged prompts are taken.",
    cells=cells,
    report=report,
)
