"""The HTML page of a run of `make bench-gpu`: aims, results and plots in one file, made only from the records.

python benchmarks/gpu_page.py RECORDS.jsonl [PAGE.html]      # makes the page of the last run in the file
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from html import escape
from pathlib import Path

import gpu_summary
from gpu_summary import Lines, chosen

Points = Mapping[str, Seq[tuple[float, float]]]  # by name of a line: its (x, y) points
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 300, 56, 120, 12, 36
COLOURS = ("#3b6fd4", "#c4572e", "#2f8f5b", "#8a4fbf", "#b08a00", "#5b6472")
STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 4rem; font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; } figure { margin: 0 0 1rem; }
svg { width: 100%; max-width: 44rem; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: currentColor; }
table { border-collapse: collapse; width: 100%; font-size: .93rem; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #8886; vertical-align: top; }
.met { color: #2f8f5b; } .MISSED { color: #c4572e; font-weight: 600; } .note { border-left: .4rem solid #c4572e;
padding: .2rem .8rem; }
"""


def line_chart(lines: Points, x_name: str, y_name: str) -> str:
    """A line chart as SVG: x on a log2 axis, y from 0. Raises ValueError if there are no points."""
    every = [p for points in lines.values() for p in points if p[0] > 0 and math.isfinite(p[1])]
    if not every:
        raise ValueError("nothing was measured")
    low, high = math.log2(min(x for x, _ in every)), math.log2(max(x for x, _ in every))
    most = max(y for _, y in every) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log2(x) - low) / (high - low or 1.0)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y / most * (HEIGHT - TOP - BOTTOM)

    parts = [_grid(most, y_name, x_name)]
    for x in sorted({x for x, _ in every}):
        parts.append(f'<text x="{at(x, 0)[0]:.0f}" y="{HEIGHT - 20}" text-anchor="middle">{x:g}</text>')
    for (name, points), colour in zip(lines.items(), COLOURS * len(lines), strict=False):
        places = [at(x, y) for x, y in sorted(points) if x > 0 and math.isfinite(y)]
        if not places:
            continue
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        x, y = places[-1]
        parts.append(f'<text x="{x + 7:.0f}" y="{y + 4:.0f}" style="fill: {colour}">{escape(name)}</text>')
    return _svg(parts, HEIGHT)


def bar_chart(bars: Mapping[str, float], unit: str, aims: Mapping[str, float]) -> str:
    """A bar chart as SVG, with a mark at each bar's aim. Raises ValueError if there are no bars."""
    if not bars:
        raise ValueError("nothing was measured")
    most, height, begin = max([*bars.values(), *aims.values()]) or 1.0, 22 * len(bars) + 12, 250
    form: Callable[[float], str] = (lambda v: f"{v:.1%}") if unit == "%" else (lambda v: f"{v:.3g} {unit}")
    parts = []
    for i, (name, value) in enumerate(bars.items()):
        y, width = 6 + 22 * i, value / most * (WIDTH - begin - 90)
        parts.append(f'<text x="{begin - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect x="{begin}" y="{y + 2}" width="{width:.1f}" height="15" fill="{COLOURS[0]}"/>')
        end = begin + width + 6
        if name in aims:
            at = begin + aims[name] / most * (WIDTH - begin - 90)
            parts.append(f'<path d="M{at:.1f} {y} v19" stroke="{COLOURS[1]}" stroke-width="2"/>')
            end = max(end, at + 6)
        parts.append(f'<text x="{end:.0f}" y="{y + 13}">{form(value)}</text>')
    return _svg(parts, height)


def _svg(parts: Iterable[str], height: int) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'


def _grid(most: float, y_name: str, x_name: str) -> str:
    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
        parts.append(f'<path d="M{LEFT} {y:.1f} H{WIDTH - RIGHT}" stroke="currentColor" stroke-opacity=".15"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{share * most:.3g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_name)}</text>')
    turn = f"translate(12 {HEIGHT / 2:.0f}) rotate(-90)"
    return "".join([*parts, f'<text transform="{turn}" text-anchor="middle">{escape(y_name)}</text>'])


def _costs(lines: Lines, value: str) -> str:
    """Line chart of chain passes at the shortest context, by format."""
    found = [x for x in chosen(lines, "costs", kind="chain") if x.get(value) is not None]
    least = min((x["context"] for x in found), default=0)
    by: dict[str, list[tuple[float, float]]] = {}
    for x in found:
        if x["context"] == least:
            by.setdefault(x["format"], []).append((x["rows"], x[value]))
    return line_chart(by, f"rows of a pass ({least} cached tokens)", {"c": "times one row"}.get(value, "ms"))


def _bandwidth(lines: Lines) -> str:
    aims, bars = dict(gpu_summary.SHARES), {}
    for part, note in (("costs", ""), ("device", ", as a graph")):
        bars |= {f"{x['format']}{note}": x["read_share"] for x in chosen(lines, part, kind="batch", rows=1)}
    known = {name: share for name, share in bars.items() if share is not None}
    of = {name: aims.get(name.split(",")[0].split("-")[0], aims.get(name.split(",")[0])) for name in known}
    return bar_chart(known, "%", {name: aim for name, aim in of.items() if aim is not None})


def _speculation(lines: Lines) -> str:
    best: dict[str, float] = {}
    for x in chosen(lines, "speculation"):
        name = f"{x['shape']} {x['format']} {x['arm']}, batch {x['batch']}"
        if not x.get("failed"):
            best[name] = max(best.get(name, 0.0), x["tokens_per_s"])
    return bar_chart(best, "tokens/s", {})


def _host(lines: Lines) -> str:
    found = [x for x in chosen(lines, "host", kind="chain") if x.get("host_share") is not None]
    return bar_chart({f"{x['format']}, {x['rows']} rows": x["host_share"] for x in found}, "%", {})


def _peers(lines: Lines) -> str:
    bars = {
        f"{x['engine']} {x['mode']}, batch {x['batch']}": x["median_ms"] for x in chosen(lines, "peers", kind="decode")
    }
    for x in chosen(lines, "costs", kind="batch") if bars else ():
        bars[f"sameseed {x['format']}, batch {x['rows']}"] = x["median_ms"]
    return bar_chart(bars, "ms", {})


PLOTS: tuple[tuple[str, Callable[[Lines], str]], ...] = (
    ("A pass by its rows, milliseconds", lambda lines: _costs(lines, "median_ms")),
    ("A pass by its rows, over one row: c(M)", lambda lines: _costs(lines, "c")),
    ("Decoding at batch 1: share of the copy bandwidth, and the aim", _bandwidth),
    ("Speculation: tokens a second, the best setting of each", _speculation),
    ("Share of a pass in which the device waits for the host", _host),
    ("Plain decoding: milliseconds a step", _peers),
)


def page(lines: Lines) -> str:
    """The HTML page of a run's records. A plot whose records are missing or of another form is replaced by a note."""
    head = lines[0] if lines else {}
    machine = head.get("machine", {})
    where = machine.get("gpu") if head.get("device") != "cpu" else machine.get("cpu")
    title = f"sameseed on {where}, {head.get('run')}, commit {head.get('commit')}"
    parts = [f"<h1>{escape(title)}</h1>"]
    if head.get("dry_run", True):
        parts.append('<p class="note">DRY RUN: toy sizes on the CPU. These numbers mean nothing.</p>')
    parts.append("<h2>Aims</h2><table><tr><th>what<th>aim<th>got<th></tr>")
    for r in gpu_summary.rows(lines):
        verdict = "" if head.get("dry_run", True) else r.verdict
        cells = "".join(f"<td>{escape(x)}" for x in (r.what, r.aim, r.got))
        parts.append(f'<tr>{cells}<td class="{verdict}">{verdict}</tr>')
    parts.append("</table>")
    for name, plot in PLOTS:
        try:
            made = plot(lines)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            made = f"<p>Not measured ({escape(type(error).__name__)}: {escape(str(error))}).</p>"
        parts.append(f"<h2>{escape(name)}</h2><figure>{made}</figure>")
    left = [x for end in chosen(lines, "end") for x in end["left_out"]]
    parts += ["<h2>Left out</h2>", "<ul>" if left else "<p>Nothing.</p>"]
    parts += [f"<li>{escape(x['what'])}: {escape(x['why'])}" for x in left] + (["</ul>"] if left else [])
    start = f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
    return f"{start}<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</html>\n"


def main() -> int:
    """Write the page of the last run in a record file."""
    source = Path(sys.argv[1])
    every = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else source.with_suffix(".html")
    out.write_text(page([x for x in every if x["run"] == every[-1]["run"]]), encoding="utf-8")
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
