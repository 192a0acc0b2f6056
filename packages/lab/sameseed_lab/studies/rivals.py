"""Other engines against ours on the same checkpoints, interleaved, measured by benchmarks/peers (see its README)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import sameseed
from sameseed import registry
from sameseed.errors import ConfigError
from sameseed.models.loader import resolve_model
from sameseed.report.plot import Panel, Series, lines
from sameseed.report.schemas import PEER_SCHEMA
from sameseed_lab.studies._setup import StudySetup
from sameseed_lab.studies._study import Plot, Records, Row, Study, Table, Tell, figure, rows_of

PEERS = Path(sameseed.__file__).resolve().parent.parent / "benchmarks" / "peers"
ENGINES = {
    "llama_cpp": "llama.cpp*",
    "openvino": "OpenVINO*",
    "vllm": "vLLM*",
    "transformers": "transformers*",
    "amd_pace": "AMD PACE*",
}
READ = (("llama_cpp", ".gguf"), ("transformers", ".gguf"))  # of one's own: as stored, and in bf16
SHAPES = {
    "passes": {"small": "tiny", "true": "llama-3.2-1b"},  # random weights
    "texts": {"small": "embedded", "true": "twin-1b", "real": "own"},
}
KEPT = ("engine", "versions", "settings", "rows", "prefill", "batch", "texts", "missing")
ROUNDS = 3  # rounds per repetition of a study, since passes are short


@dataclass(frozen=True)
class PeerCell:
    """One other engine against ours, in groups of arms that fit in memory. `what`: "passes" or "texts"."""

    engine: str
    what: str

    @property
    def name(self) -> str:
        return f"{self.engine} {self.what}"

    @property
    def weight(self) -> float:
        return 3.0

    @property
    def folders(self) -> tuple[Path, Path]:
        """Of the engines' environments and of checkpoints: $PEERS_HOME and $PEERS_WORK, or those of `make peers`."""
        home, work = PEERS / ".venvs", Path.home() / ".cache" / "sameseed-peers"
        return Path(os.environ.get("PEERS_HOME", home)), Path(os.environ.get("PEERS_WORK", work))

    def check(self, setup: StudySetup) -> None:
        """Raise ConfigError if the engine or its checkpoints are missing."""
        if not PEERS.is_dir():
            raise ConfigError("benchmarks/peers measures other engines; run this in a checkout of the repository")
        home, work = self.folders
        if setup.size == "real" and (self.engine, resolve_model(setup.source("target")).suffix) not in READ:
            raise ConfigError("of other engines llama.cpp and transformers read a model of your own, a GGUF file")
        if not (home / self.engine / ".installed").exists():
            raise ConfigError(f"{self.engine} is not installed in PEERS_HOME ({home}); `make peers` installs it")
        shape = SHAPES[self.what][setup.size]
        if setup.size != "real" and not (work / shape).is_dir():
            raise ConfigError(f"no checkpoints in PEERS_WORK ({work}); `make peers PEERS_SHAPE={shape}` makes them")

    def measure(self, setup: StudySetup, tell: Tell) -> list[dict[str, Any]]:
        """One record per arm. Raises ConfigError with the runner's error output."""
        with tempfile.TemporaryDirectory() as folder:
            out, errors = Path(folder) / "peers.jsonl", Path(folder) / "errors"
            asked: dict[str, object] = {
                "shape": SHAPES[self.what][setup.size],
                "out": out,
                **dict(zip(("home", "work"), self.folders)),
                "arms": ENGINES[self.engine],
                "rounds": ROUNDS * setup.repeat,
                "slow-rounds": setup.repeat,
                "threads": min(2, setup.cores),
                "num-prompts": setup.num_prompts,
                "max-tokens": setup.max_tokens,
                **({"prompts": setup.prompts} if setup.prompts else {}),
            }
            if setup.size == "real":
                models = {"model": setup.models["target"], "draft": setup.models["1b"]}
                drafters = registry.names("drafters")
                asked |= {name: resolve_model(model) for name, model in models.items() if model not in drafters}
            flags = [word for name, value in asked.items() for word in (f"--{name}", str(value))]
            command = [sys.executable, str(PEERS / "run.py"), *flags]
            tell(" ".join(command))
            with errors.open("w") as file, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file) as running:
                for line in running.stdout or ():
                    if line.startswith(b"  "):  # forward progress lines only, not the runner's tables
                        tell(line.decode(errors="replace").strip())
            if running.returncode:
                raise ConfigError(f"{self.name}: {errors.read_text(errors='replace').strip()[-500:]}")
            return split(json.loads(out.read_text()))


def cells(setup: StudySetup) -> list[PeerCell]:
    """Two cells per engine: passes (not of a model of one's own) and texts."""
    return [PeerCell(engine, what) for what in SHAPES if setup.size in SHAPES[what] for engine in ENGINES]


def split(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Split a record of benchmarks/peers into one record per arm."""
    plan = line["plan"]
    said = f"{line['shape']}, context {plan['context']}, {plan['rounds']} rounds interleaved, medians"
    if prompts := line.get("prompts"):
        said = f"{line['shape']}, {prompts['count']} prompts of {prompts['from']}, {plan['text_tokens']} tokens at most"
    shared = {name: line[name] for name in ("run", "commit", "machine")} | {"time": line.get("time", line["run"])}
    return [
        {
            **shared,
            "schema": PEER_SCHEMA,
            "config": {"label": arm["name"], "group": group["name"], "shape": line["shape"], "workload": said},
            "repetitions": [],
            **{name: arm.get(name) for name in KEPT},
        }
        for group in line["groups"]
        for arm in group["arms"]
    ]


def derive(records: Records) -> list[Row]:
    """Rows; `place`: key of arms that were interleaved and can be compared; `peer`: the engine beside ours."""
    rows = rows_of(records)
    for row in rows:
        row |= {"ours": row["engine"] == "sameseed", "place": (row["run"], row["group"], row.get("cell"))}
        row["times"] = {} if row.get("texts") else {x["rows"]: list(x["ms"]) for x in row["rows"]}
        row["medians"] = {} if row.get("texts") else {x["rows"]: x["median"] for x in row["rows"]}
    peers = {r["place"]: ENGINES.get(r["engine"], str(r["engine"])).rstrip("*") for r in rows if not r["ours"]}
    several = len({row["place"] for row in rows}) > 1
    for row in rows:
        row["peer"] = peers.get(row["place"], row["group"])
        row["name"] = row["label"] + (f" (beside {row['peer']})" if row["ours"] and several else "")
    return rows


def _pairs(rows: list[Row]) -> list[tuple[Row, Row]]:
    """Each of our arms with each peer that it was interleaved with."""
    return [(m, p) for m in rows for p in rows if m["ours"] and not p["ours"] and m["place"] == p["place"]]


def _faster(mine: Row, peer: Row, rows: int) -> float | None:
    """The peer's time over ours for a pass over `rows` rows: median over rounds, None without measurements."""
    ratios = [theirs / own for own, theirs in zip(mine["times"].get(rows, ()), peer["times"].get(rows, ()))]
    return median(ratios) if ratios else None


def _over(mine: Row, other: Row) -> float:
    return float(median(map(truediv, mine["texts"]["tokens_per_s"], other["texts"]["tokens_per_s"])))


def _best(texts: list[Row], ours: bool) -> dict[tuple[object, ...], Row]:
    """The fastest of our arms (or of the other engines' arms) at each place."""
    slowest_first = sorted((r for r in texts if r["ours"] is ours), key=lambda r: float(r["texts"]["median"]))
    return {row["place"]: row for row in slowest_first}


def findings(rows: list[Row]) -> list[str]:
    """For one row and eight: the engine that comes nearest to our fastest format. For texts: our lead at each place."""
    said = []
    for count, what in ((1, "One row"), (8, "Eight rows")):
        best: dict[str, tuple[float, str]] = {}  # by arm of another engine: how much faster is which of ours
        for mine, peer in _pairs(rows):
            if (times := _faster(mine, peer, count)) is not None:
                best[peer["label"]] = max((times, mine["label"]), best.get(peer["label"], (0.0, "")))
        if best:
            nearest, (lead, ours) = min(best.items(), key=lambda item: item[1])
            said.append(f"{what}: the nearest is {nearest}; {ours} is {lead:.2f} times as fast.")
    texts = [row for row in rows if row.get("texts")]
    fastest = _best(texts, True)
    for place, peer in _best(texts, False).items():
        if place in fastest:
            faster = f"{_over(fastest[place], peer):.2f} times as fast as {peer['label']}"
            said.append(f"Texts: {fastest[place]['label']} is {faster}, the fastest of {peer['group']}.")
    return said


def more(rows: list[Row]) -> tuple[list[Plot], list[Table]]:
    """Times by rows, prefill, batches and texts. Ratios are taken within each round or text."""
    passes, texts = [r for r in rows if r["times"]], [r for r in rows if r.get("texts")]
    panels, text_panels = list[Panel](), list[Panel]()
    for place in dict.fromkeys(row["place"] for row in rows):
        here = [row for row in rows if row["place"] == place]
        points = [(r["label"], m, v, [*r["times"][m], v]) for r in here for m, v in r["medians"].items()]
        panels.append(Panel(f"beside {here[0]['peer']}, {place[1]}: ms of a pass", "rows", lines(points)))
        said = {row["label"]: (row["ours"], row["texts"]["tokens_per_s"]) for row in here if row.get("texts")}
        text_panels.append(_two(f"beside {place[1]}: tokens/s", said))
    for what, title in (("prefill", "prompt of 512: tokens/s"), ("batch", "16 sequences: tokens/s")):
        found: dict[str, tuple[bool, list[float]]] = {}
        for row in passes:
            if row[what]:
                found.setdefault(row["label"], (row["ours"], []))[1].append(row[what]["median"])
        panels.append(_two(title, found))
    plots = [Plot("passes", "Passes, prompts, batches", panels)]
    plots.append(Plot("texts", "Texts, each engine with its own speculation", text_panels))
    return plots, [*(_tables(passes) if passes else []), *([text_table(texts)] if texts else [])]


def _two(title: str, found: Mapping[str, tuple[bool, list[float]]]) -> Panel:
    """A bar for each arm, ours and theirs in two colours: the median, with the least and the most."""
    series = []
    for who, ours in (("ours", True), ("theirs", False)):
        bars = [(name, median(values), values) for name, (mine, values) in found.items() if mine is ours]
        spread = [(min(*values, middle), max(*values, middle)) for _, middle, values in bars]
        series.append(Series(who, [(name, middle) for name, middle, _ in bars], spread=spread))
    return Panel(title, "", series, "across", stacked=True, form=".0f")


def _tables(rows: list[Row]) -> list[Table]:
    sizes = sorted({m for row in rows for m in row["times"]})
    times, heads = [], [f"M={m}" for m in sizes]
    for row in rows:
        at, speeds = row["medians"], [row[what]["median"] if row[what] else None for what in ("prefill", "batch")]
        c8 = at[8] / at[1] if 1 in at and 8 in at else None
        cells = [figure(at.get(m), ".1f") for m in sizes]
        times.append([row["name"], *cells, figure(c8), *(figure(v, ".0f") for v in speeds)])
    faster = [[f"{m['label']} / {p['label']}", *(figure(_faster(m, p, n)) for n in sizes)] for m, p in _pairs(rows)]
    return [
        Table("Milliseconds of a pass", ("engine", *heads, "c(8)", "prompt tokens/s", "batch tokens/s"), times),
        Table("Times faster", ("ours beside theirs: times faster", *heads), faster),
    ]


def text_table(texts: list[Row]) -> Table:
    """Each arm: tokens per second, speed-up over its engine's plain decoding, texts equal to that, our lead."""
    ours, rows = _best(texts, True), []
    for row in texts:
        plain, best = row["texts"]["plain"], ours.get(row["place"])
        same = f"{plain['same']} of {plain['texts']}" if plain else ""
        gain = figure(plain["faster"]["median"] if plain else None)
        speed = figure(row["texts"]["median"], ".1f")
        rows.append([row["name"], speed, gain, same, figure(_over(best, row) if best else None)])
    name = next(iter(ours.values()))["label"] if len({r["place"] for r in texts}) == 1 and ours else "our best"
    heads = ("engine", "tokens/s", "over its plain", "texts as its plain", f"{name}: times faster")
    return Table("Texts (ratios: medians over texts)", heads, rows)


STUDY = Study(__file__, cells, derive, findings, more)
