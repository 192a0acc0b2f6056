"""Pictures made from the measured records, for the markers `picture:NAME`: SVG files in docs/pictures."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence as Seq
from dataclasses import dataclass, replace

from recorded import ROOT, Record, last_of_each, lines, loss_records, named, origins, policy_cells, real_records, short
from studied import measured, ours

from sameseed.report.plot import Panel, Series, draw
from sameseed_lab.studies import _runner

FOLDER = ROOT / "docs" / "pictures"
SHAPES = {"1b": "1B shape", "8b": "8B shape"}


@dataclass(frozen=True)
class Picture:
    """Panels, their title, and what a reader must know below them. `words`: the text for who cannot see it."""

    title: str
    panels: Seq[Panel]
    about: str
    words: str
    columns: int = 2


def chosen(temperature: float) -> str:
    """How the tokens of a record were chosen."""
    return f"temperature {temperature:g}" if temperature else "greedy"


def between(values: Iterable[float]) -> tuple[float, float]:
    """The least and the largest value."""
    known = list(values)
    return min(known), max(known)


def speedups(title: str, found: Seq[Record], runs: Callable[[Record], Seq[float]]) -> Panel:
    """Bars of the speed over plain decoding by drafter, one series a temperature, from the least to the largest run."""
    series = []
    for temperature in sorted({r["config"]["temperature"] for r in found}):
        mine = [r for r in found if r["config"]["temperature"] == temperature and r["config"]["draft"] != "none"]
        points = [("plain", 1.0), *((short(r["config"]["label"]), r["speedup"]) for r in mine)]
        series.append(Series(chosen(temperature), points, spread=[(1.0, 1.0), *(between(runs(r)) for r in mine)]))
    return Panel(title, "speed over plain decoding", series, "across", form=".2f")


def own_runs(record: Record) -> list[float]:
    """The speed-up of each run of a record."""
    return [run["speedup"] for run in record["repetitions"]]


def speed() -> Picture:
    """README's picture: what each drafter brings on real models."""
    found, panels = real_records(), []
    for name in dict.fromkeys(map(named, found)):
        mine = [r for r in found if named(r) == name]
        c = mine[0]["config"]
        panels.append(speedups(f"{name}, {c['num_parameters'] / 1e6:.0f} M, {c['format']}", mine, own_runs))
    top = 1.2 * max(y for panel in panels for s in panel.series for _, y in s.points)  # room for the figures
    panels = [replace(panel, top=top) for panel in panels]
    sizes = {f"{r['config']['num_prompts']} prompts x {r['config']['max_tokens']} tokens" for r in found}
    runs = sorted({len(r["repetitions"]) for r in found})
    spread = "lines: the least and the largest run" if runs[-1] > 1 else "one run, so no spread is shown"
    about = f"Default policy, batch 1, prompts included; at most {', '.join(sorted(sizes))}; {spread}. {origins(found)}"
    best: dict[str, Record] = {}
    for r in sorted(found, key=lambda r: r["speedup"]):
        best[named(r)] = r
    words = "; ".join(f"{name}: at best {short(r['config']['label'])}, {r['speedup']:.2f}x" for name, r in best.items())
    return Picture("Speed over plain decoding, same output", panels, about, f"Speed over plain decoding. {words}")


def losses() -> Picture:
    """What number formats cost on models of others."""
    found, panels = loss_records(), []
    for title, records in found.items():
        own = sorted(records, key=lambda r: float(r["comparison"]["perplexity_ratio"]["value"]))
        ratios = [r["comparison"]["perplexity_ratio"] for r in own]
        names = [f"{variant(r)} ({r['comparison']['weight_bytes'] / 1e6:.0f} MB)" for r in own]
        points, spread = [(n, r["value"]) for n, r in zip(names, ratios)], [tuple(r["interval"]) for r in ratios]
        series = [Series("perplexity ratio", points, spread=spread)]
        panel = Panel(title, "perplexity over the file's own", series, "across")
        panels.append(replace(panel, level=1, form=".3f"))
    about = 'Bars end at the value, lines at its 95 % interval. "From 16 bits": made from the weights in 16 bits, not '
    about += f"from the file's codes. {origins([r for own in found.values() for r in own])}"
    return Picture("What fewer bits cost", panels, about, "Perplexity of each variant over the file's own", 1)


def variant(record: Record) -> str:
    """The short name of a compared variant: its format, or how `sameseed quantize` made it."""
    name = str(record["config"]["label"])
    if " " in name:  # a format named while loading
        model, format_name = name.split(" ", 1)
        return f"{format_name}, rounded" + ("" if model.endswith(".gguf") else " from 16 bits")
    return re.sub(r"^SmolLM2(-135M-Instruct)?-", "", name) + (" from 16 bits" if "Instruct" in name else "")


def drafters() -> Picture:
    """All drafters on twins."""
    panels, found = [], []
    for name, title in (("drafters_1b", "shape of Llama-3.2-1B"), ("drafters_8b", "shape of Llama-3.1-8B")):
        mine = last_of_each(lines(name), setting)
        runs = {key: [r["speedup"] for r in lines(name) if setting(r) == key] for key in map(setting, mine)}
        panels.append(speedups(title, mine, lambda r, runs=runs: runs[setting(r)]))
        found += mine
    c = found[0]["config"]
    about = f"Weights w4a8, drafts of 4, batch 1, {c['num_prompts']} GSM8K questions (in the embedded pair's training "
    about += f"data) x at most {c['max_tokens']} tokens; bars: the newest run; lines: all, some older. {origins(found)}"
    return Picture("All drafters, made-up weights", panels, about, "Speed-up of each drafter at the 1B and 8B shapes")


def setting(record: Record) -> tuple[float, str]:
    """What distinguishes the records of one target: temperature and decoding."""
    return record["config"]["temperature"], record["config"]["label"]


def never_slower() -> Picture:
    """Goodput over plain decoding in every cell, from the worst to the best."""
    found, panels = policy_cells(lines("policies")), []
    for name in dict.fromkeys(r["model"] for r in found):
        mine = sorted((r for r in found if r["model"] == name), key=lambda r: float(r["goodput"][0]))
        points = [(i, r["goodput"][0]) for i, r in enumerate(mine, 1)]
        spread = [(r["goodput"][1], r["goodput"][2]) for r in mine]
        series = Series("a cell: draft, temperature, batch, texts", points, spread=spread)
        said, y = SHAPES.get(name, name), "speed over plain decoding"
        panels.append(Panel(said, "cells, from the worst", [series], "points", y=y, level=1))
    about = f"Default policy; lines: 95 % intervals over pairs of batches. {origins(found)}"
    return Picture("Never slower?", panels, about, "Goodput over plain decoding, cell by cell", 3)


def load() -> Picture:
    """Speculation on over off through the server, by clients."""
    found = load_cells()
    panels = []
    for name in sorted({r["config"]["model"] for r in found}):
        series = []
        for temperature in sorted({r["config"]["sampling"]["temperature"] for r in found}):
            mine = [r for r in found if r["config"]["model"] == name]
            mine = [r for r in mine if r["config"]["sampling"]["temperature"] == temperature]
            series.append(Series(chosen(temperature), [(r["config"]["concurrency"], r["speedup"]) for r in mine]))
        panels.append(Panel(name, "clients", series, y="tokens/s, on over off", level=1))
    about = "Questions of GSM8K (in the embedded pair's training data), medians of 3 to 5 runs. Runs of the embedded "
    about += f"pair last seconds: single ones are 0.76 to 1.26 times plain decoding. {origins(found)}"
    return Picture("Speculation through the server", panels, about, "Throughput with speculation over without")


def load_cells() -> list[Record]:
    """The newest record of each cell of `bench serve --compare-speculation`, since the present policies."""
    found = [r for r in lines("load") if r["config"]["label"] == "on" and r["config"].get("served")]
    found = [r for r in found if r["time"] > "2026-11-27"]  # older records have other policies
    found = last_of_each(
        found, lambda r: (r["config"]["model"], r["config"]["sampling"]["temperature"], r["config"]["concurrency"])
    )
    return sorted(found, key=lambda r: r["config"]["concurrency"])


def quantizers() -> Picture:
    """Held-out perplexity of the embedded target by format and method."""
    found = last_of_each(lines("quantize"), lambda r: (r["config"]["scheme"], r["config"]["method"]))
    found.sort(key=lambda r: (r["bits_per_weight"], r["relative"]["ratio"]))
    points = [
        (f"{r['config']['scheme']} {r['config']['method']} ({r['bits_per_weight']:.2f} bits)", r["relative"]["ratio"])
        for r in found
    ]
    spread = [(r["relative"]["low"], r["relative"]["high"]) for r in found]
    panel = Panel(
        "embedded target", "perplexity over bf16's", [Series("perplexity ratio", points, spread=spread)], "across"
    )
    about = f"{found[-1]['config']['held_out_tokens']:,} held-out tokens, 95 % intervals. {origins(found)}"
    return Picture("Quantizers", [replace(panel, level=1, form=".4f")], about, "Perplexity by format and method", 1)


STUDIES = {  # by study: the plot that stands for it, and its panels
    "assisted": ("lengths", slice(0, 2)),
    "concurrency": ("clients", slice(0, 2)),
    "formats": ("formats", slice(0, 3)),
    "serving": ("load", slice(0, 3)),
    "rivals": ("texts", slice(0, 3)),
}


def study(name: str) -> Picture:
    """The plot that stands for a study, of its first target; another plot, where that was not drawn."""
    found = measured(name)[0]
    plot_name, part = STUDIES[name]
    plots = _runner.load(name).report(found).plots
    plot = next((p for p in plots if p.name == plot_name), plots[0])
    timed = [r for r in found if "repetitions" in r] or found
    spread = "Lines: the least and the most of the texts." if name == "rivals" else _runner.SPREAD
    about = f"{ours(timed[-1])} {spread} {origins(timed)}"
    return Picture(plot.title, plot.panels[part], about, f"{name}: {plot.title}", 3)


MAKERS: dict[str, Callable[[], Picture]] = {
    "speed": speed,
    "losses": losses,
    "drafters": drafters,
    "never_slower": never_slower,
    "load": load,
    "quantizers": quantizers,
}


def picture(name: str, write: bool) -> str:
    """The Markdown of one picture, with its path below docs/pictures; `write`: the SVG is drawn anew."""
    made = MAKERS[name]() if name in MAKERS else study(name)
    if write:
        FOLDER.mkdir(exist_ok=True)
        png, _ = draw(made.panels, FOLDER / f"{name}.svg", made.title, made.about, made.columns)
        png.unlink()
    return f"![{made.words}]({FOLDER / f'{name}.svg'})\n"
