"""Other engines against ours on the same checkpoints, interleaved: passes, prefill, batches, and texts.

For texts, each engine uses its own speculation. The runner in benchmarks/peers measures; its README.md describes the
measurements and each engine's settings.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter, truediv
from pathlib import Path
from statistics import median
from typing import Any

import sameseed
from sameseed.errors import ConfigError
from sameseed.report.schemas import PEER_SCHEMA
from sameseed_lab.studies._setup import StudySetup
from sameseed_lab.studies._study import Panel, Plot, Records, Report, Series, Study, Table, Tell, figure

PEERS = Path(sameseed.__file__).resolve().parent.parent / "benchmarks" / "peers"
ENGINES = {
    "llama_cpp": "llama.cpp*",
    "openvino": "OpenVINO*",
    "vllm": "vLLM*",
    "transformers": "transformers*",
    "amd_pace": "AMD PACE*",
}
SHAPES = {
    "passes": {"small": "tiny", "true": "llama-3.2-1b"},  # random weights
    "texts": {"small": "embedded", "true": "twin-1b"},
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
    def home(self) -> Path:
        """Folder of the engines' virtual environments: $PEERS_HOME, or the default of `make peers`."""
        return Path(os.environ.get("PEERS_HOME", PEERS / ".venvs"))

    @property
    def work(self) -> Path:
        """Folder of the checkpoints: $PEERS_WORK, or the default of `make peers`."""
        return Path(os.environ.get("PEERS_WORK", Path.home() / ".cache" / "sameseed-peers"))

    def check(self, setup: StudySetup) -> None:
        """Raise ConfigError if the engine or its checkpoints are missing."""
        if not PEERS.is_dir():
            raise ConfigError(
                "other engines are measured by benchmarks/peers; run this in a checkout of the repository"
            )
        if not (self.home / self.engine / ".installed").exists():
            raise ConfigError(f"{self.engine} is not installed in PEERS_HOME ({self.home}); `make peers` installs it")
        shape = SHAPES[self.what][setup.size]
        if not (self.work / shape).is_dir():
            raise ConfigError(
                f"no checkpoints in PEERS_WORK ({self.work}); `make peers PEERS_SHAPE={shape}` makes them"
            )

    def measure(self, setup: StudySetup, tell: Tell) -> list[dict[str, Any]]:
        """One record per arm. Raises ConfigError with the runner's error output."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "peers.jsonl"
            shape = SHAPES[self.what][setup.size]
            command = [sys.executable, str(PEERS / "run.py"), "--shape", shape, "--out", str(out)]
            command += ["--home", str(self.home), "--work", str(self.work), "--arms", ENGINES[self.engine]]
            command += ["--rounds", str(ROUNDS * setup.repeat), "--slow-rounds", str(setup.repeat)]
            command += ["--threads", str(min(2, setup.cores))]
            command += ["--num-prompts", str(setup.num_prompts), "--max-tokens", str(setup.max_tokens)]
            command += ["--prompts", str(setup.prompts)] if setup.prompts else []
            tell(" ".join(command))
            errors = Path(folder) / "errors"
            with errors.open("w") as file, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file) as running:
                for line in running.stdout or ():
                    if line.startswith(b"  "):  # forward progress lines only, not the runner's tables
                        tell(line.decode(errors="replace").strip())
            if running.returncode:
                raise ConfigError(f"{self.name}: {errors.read_text(errors='replace').strip()[-500:]}")
            return split(json.loads(out.read_text()))


def cells(size: str) -> list[PeerCell]:
    """Two cells per engine: passes and texts."""
    return [PeerCell(engine, what) for what in SHAPES for engine in ENGINES]


def split(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Split a record of benchmarks/peers into one record per arm."""
    plan = line["plan"]
    said = f"{line['shape']}, context {plan['context']}, {plan['rounds']} rounds in turns, medians"
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


def report(records: Records) -> Report:
    """Times by rows, prefill, batches and texts. Ratios are taken within each round or text."""
    texts = [r for r in records if r.get("texts")]
    records = [r for r in records if r["config"]["shape"] not in SHAPES["texts"].values()]
    panels = []
    for place in dict.fromkeys(map(_place, records)):
        here = [r for r in records if _place(r) == place]
        title = f"beside {_peer(place, here)}, {place[1]}: ms of a pass"
        panels.append(Panel(title, "rows", [Series(_name(r), _rows(r)) for r in here]))
    panels += [_bars("prompt of 512: tokens/s", records, "prefill"), _bars("16 sequences: tokens/s", records, "batch")]
    pairs = [(m, p) for m in records for p in records if _ours(m) and not _ours(p) and _place(m) == _place(p)]
    plots = [Plot("passes", "Passes, prompts, batches", panels)] if records else []
    if texts:
        plots.append(Plot("texts", "Texts, each engine with its own speculation", _text_panels(texts)))
    tables = [*(_tables(records, pairs) if records else []), *([text_table(texts)] if texts else [])]
    return Report([*_findings(pairs), *_text_findings(texts)], [], plots, tables)


def _name(record: Mapping[str, Any]) -> str:
    return str(record["config"]["label"])


def _peer(place: tuple[object, ...], records: Records) -> str:
    """The engine that ours ran beside at this place."""
    engines = [str(r["engine"]) for r in records if _place(r) == place and not _ours(r)]
    return ENGINES.get(engines[0], engines[0]).rstrip("*") if engines else str(place[1])


def _named(record: Mapping[str, Any], records: Records) -> str:
    """The name of an arm; for one of ours in several places also beside which engine it ran."""
    if not _ours(record) or len(set(map(_place, records))) == 1:
        return _name(record)
    return f"{_name(record)} (beside {_peer(_place(record), records)})"


def _ours(record: Mapping[str, Any]) -> bool:
    return bool(record["engine"] == "sameseed")


def _place(record: Mapping[str, Any]) -> tuple[object, ...]:
    """Key of interleaved arms: only arms with the same key can be compared."""
    return record["run"], record["config"]["group"], record.get("cell")


def _rows(record: Mapping[str, Any]) -> list[tuple[int, float]]:
    return [(x["rows"], x["median"]) for x in record["rows"]]


def _curve(record: Mapping[str, Any]) -> list[tuple[int, float]]:
    found = dict(_rows(record))
    return [(m, ms / found[1]) for m, ms in found.items()] if 1 in found else []


def _bars(title: str, records: Records, what: str) -> Panel:
    """A bar per arm: the median of its places."""
    found: dict[tuple[bool, str], list[float]] = {}
    for r in records:
        if r[what]:
            found.setdefault((_ours(r), _name(r)), []).append(r[what]["median"])
    bars = [
        Series(who, [(name, median(figures)) for (mine, name), figures in found.items() if mine is ours])
        for who, ours in (("ours", True), ("theirs", False))
    ]
    return Panel(title, "", bars, "bars", stacked=True)


def _times(record: Mapping[str, Any], rows: int) -> list[float]:
    return next((list(x["ms"]) for x in record["rows"] if x["rows"] == rows), [])


def _faster(mine: Mapping[str, Any], peer: Mapping[str, Any], rows: int) -> float | None:
    """The peer's time over ours for a pass over `rows` rows: median over rounds, None without measurements."""
    ratios = [theirs / own for own, theirs in zip(_times(mine, rows), _times(peer, rows))]
    return median(ratios) if ratios else None


def _findings(pairs: list[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[str]:
    """For one row and eight: the engine that comes nearest to our fastest format."""
    said = []
    for rows, what in ((1, "One row"), (8, "Eight rows")):
        best: dict[str, tuple[float, str]] = {}  # by arm of another engine: how much faster is which of ours
        for mine, peer in pairs:
            faster = _faster(mine, peer, rows)
            if faster is not None:
                best[_name(peer)] = max((faster, _name(mine)), best.get(_name(peer), (0.0, "")))
        if best:
            theirs, (times, ours) = min(best.items(), key=itemgetter(1))
            said.append(f"{what}: the nearest is {theirs}; {ours} is {times:.2f} times as fast.")
    return said


def _over(mine: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    return float(median(map(truediv, mine["texts"]["tokens_per_s"], other["texts"]["tokens_per_s"])))


def _best(texts: Records, ours: bool) -> dict[tuple[object, ...], Mapping[str, Any]]:
    """The fastest of our arms (or of the other engines' arms) at each place."""
    found: dict[tuple[object, ...], Mapping[str, Any]] = {}
    for record in texts:
        if _ours(record) is ours:
            found[_place(record)] = max(
                record, found.get(_place(record), record), key=lambda r: float(r["texts"]["median"])
            )
    return found


def _text_panels(texts: Records) -> list[Panel]:
    """One panel per engine with ours: tokens per second of each way to decode."""
    panels = []
    for place in dict.fromkeys(map(_place, texts)):
        here = [r for r in texts if _place(r) == place]
        ours, others = [r for r in here if _ours(r)], [r for r in here if not _ours(r)]
        bars = [
            Series(who, [(_name(r), r["texts"]["median"]) for r in of])
            for who, of in (("ours", ours), ("theirs", others))
        ]
        panels.append(Panel(f"{place[1]}: tokens/s", "", bars, "bars", stacked=True))
    return panels


def text_table(texts: Records) -> Table:
    """Table of each arm: tokens per second, speed-up over its engine's plain decoding, equal texts, our lead.

    `texts`: records from `split`, of arms that generated texts.
    """
    ours, rows = _best(texts, True), []
    several = len(set(map(_place, texts))) > 1
    for record in texts:
        said, plain, best = record["texts"], record["texts"]["plain"], ours.get(_place(record))
        same = f"{plain['same']} of {plain['texts']}" if plain else ""
        gain = figure(plain["faster"]["median"] if plain else None)
        faster = figure(_over(best, record) if best else None)
        rows.append([_named(record, texts), figure(said["median"], ".1f"), gain, same, faster])
    best_name = "our best" if several or not ours else _name(*ours.values())
    heads = ("engine", "tokens/s", "over its plain", "texts as its plain", f"{best_name}: times faster")
    return Table("Texts", heads, rows)


def _text_findings(texts: Records) -> list[str]:
    ours = _best(texts, True)
    said = []
    for place, theirs in _best(texts, False).items():
        if place in ours:
            faster = f"{_over(ours[place], theirs):.2f} times as fast as {_name(theirs)}"
            said.append(f"Texts: {_name(ours[place])} is {faster}, the fastest of {place[1]}.")
    return said


def _tables(records: Records, pairs: list[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[Table]:
    sizes = sorted({m for r in records for m, _ in _rows(r)})
    of: Callable[[Mapping[str, Any], str], object] = lambda r, what: r[what]["median"] if r[what] else None  # noqa: E731
    times = [
        [_named(r, records), *(figure(dict(_rows(r)).get(m), ".1f") for m in sizes), figure(dict(_curve(r)).get(8))]
        + [figure(of(r, what), ".0f") for what in ("prefill", "batch")]
        for r in records
    ]
    faster = [[f"{_name(m)} / {_name(p)}", *(figure(_faster(m, p, n)) for n in sizes)] for m, p in pairs]
    heads = [f"M={m}" for m in sizes]
    return [
        Table("Milliseconds of a pass", ("engine", *heads, "c(8)", "prompt tokens/s", "batch tokens/s"), times),
        Table("Times faster", ("ours beside theirs: times faster", *heads), faster),
    ]


STUDY = Study(
    title="Other engines beside ours: what checking a draft costs in each",
    source="no publication; llama.cpp, OpenVINO, vLLM and transformers run here, each at its best settings",
    differs=(
        "Passes over M rows are what verification costs; they run on random weights of the shape.",
        "Texts come from the embedded models or their twins, which all engines load. Formats differ, so texts do.",
        "Each engine speculates as it can: with the draft model and n-grams, ours and vLLM also with the EAGLE head.",
    ),
    data="`make peers` installs the engines, each in an environment of its own, and makes the checkpoints.",
    cells=cells,
    report=report,
)
