"""Other engines beside ours, same checkpoints, in turns: passes over several rows, prompts, batches.

What is measured, and how each engine is set: benchmarks/peers/README.md, whose runner measures here too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import sameseed
from sameseed.errors import ConfigError
from sameseed.studies._setup import StudySetup
from sameseed.studies._study import Panel, Plot, Records, Report, Series, Study, Table, Tell, figure
from sameseed.study.schemas import PEER_SCHEMA

PEERS = Path(sameseed.__file__).resolve().parent.parent / "benchmarks" / "peers"
ENGINES = {"llama_cpp": "llama.cpp*", "openvino": "OpenVINO*", "vllm": "vLLM*", "transformers": "transformers*"}
SHAPES = {"small": "tiny", "true": "llama-3.2-1b"}
ROUNDS = 3  # for each of a study's repetitions: passes are short


@dataclass(frozen=True)
class PeerCell:
    """One engine and ours, in groups that fit the memory."""

    name: str

    @property
    def weight(self) -> float:
        return 3.0

    @property
    def home(self) -> Path:
        """Where the engines' environments are, as make has it."""
        return Path(os.environ.get("PEERS_HOME", PEERS / ".venvs"))

    @property
    def work(self) -> Path:
        """Where the checkpoints are."""
        return Path(os.environ.get("PEERS_WORK", Path.home() / ".cache" / "sameseed-peers"))

    def check(self, setup: StudySetup) -> None:
        """Raise ConfigError where the engine, or its checkpoints, are not here."""
        if not PEERS.is_dir():
            raise ConfigError(
                "other engines are measured by benchmarks/peers; run this in a checkout of the repository"
            )
        if not (self.home / self.name / ".installed").exists():
            raise ConfigError(f"{self.name} is not installed in PEERS_HOME ({self.home}); `make peers` installs it")
        if not (self.work / SHAPES[setup.size]).is_dir():
            shape = SHAPES[setup.size]
            raise ConfigError(
                f"no checkpoints in PEERS_WORK ({self.work}); `make peers PEERS_SHAPE={shape}` makes them"
            )

    def measure(self, setup: StudySetup, tell: Tell) -> list[dict[str, Any]]:
        """A record an arm. Raises ConfigError with the runner's words."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "peers.jsonl"
            command = [sys.executable, str(PEERS / "run.py"), "--shape", SHAPES[setup.size], "--out", str(out)]
            command += ["--home", str(self.home), "--work", str(self.work), "--arms", ENGINES[self.name]]
            command += ["--rounds", str(ROUNDS * setup.repeat), "--slow-rounds", str(setup.repeat)]
            command += ["--threads", str(min(2, setup.cores))]
            tell(" ".join(command))
            done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            if done.returncode:
                raise ConfigError(f"{self.name}: {done.stderr.strip()[-500:]}")
            return split(json.loads(out.read_text()))


def cells(size: str) -> list[PeerCell]:
    """A cell an engine."""
    return [PeerCell(engine) for engine in ENGINES]


def split(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The arms of a record of benchmarks/peers, each as a record of its own."""
    plan = line["plan"]
    said = f"{line['shape']}, context {plan['context']}, {plan['rounds']} rounds in turns, medians"
    shared = {name: line[name] for name in ("run", "commit", "machine")} | {"time": line.get("time", line["run"])}
    return [
        {
            **shared,
            "schema": PEER_SCHEMA,
            "config": {"label": arm["name"], "group": group["name"], "shape": line["shape"], "workload": said},
            "repetitions": [],
            **{name: arm[name] for name in ("engine", "versions", "settings", "rows", "prefill", "batch", "missing")},
        }
        for group in line["groups"]
        for arm in group["arms"]
    ]


def report(records: Records) -> Report:
    """Time by rows, what more rows cost, prompts and batches; ratios within each round."""
    panels = [
        Panel("ms of a pass", "rows", [Series(_name(r), _rows(r)) for r in records]),
        Panel("over one row: c(M)", "rows", [Series(_name(r), _curve(r)) for r in records], level=1.0),
        _bars("prompt of 512: tokens/s", records, "prefill"),
        _bars("16 sequences: tokens/s", records, "batch"),
    ]
    pairs = [(m, p) for m in records for p in records if _ours(m) and not _ours(p) and _place(m) == _place(p)]
    return Report(_findings(pairs), [], [Plot("passes", "Passes, prompts, batches", panels)], _tables(records, pairs))


def _name(record: Mapping[str, Any]) -> str:
    return str(record["config"]["label"])


def _ours(record: Mapping[str, Any]) -> bool:
    return bool(record["engine"] == "sameseed")


def _place(record: Mapping[str, Any]) -> tuple[object, ...]:
    """Arms of one place took turns."""
    return record["run"], record["config"]["group"], record.get("cell")


def _rows(record: Mapping[str, Any]) -> list[tuple[int, float]]:
    return [(x["rows"], x["median"]) for x in record["rows"]]


def _curve(record: Mapping[str, Any]) -> list[tuple[int, float]]:
    found = dict(_rows(record))
    return [(m, ms / found[1]) for m, ms in found.items()] if 1 in found else []


def _bars(title: str, records: Records, what: str) -> Panel:
    return Panel(title, "", [Series(_name(r), [("", r[what]["median"])]) for r in records if r[what]], True)


def _times(record: Mapping[str, Any], rows: int) -> list[float]:
    return next((list(x["ms"]) for x in record["rows"] if x["rows"] == rows), [])


def _faster(mine: Mapping[str, Any], peer: Mapping[str, Any], rows: int) -> float | None:
    """How many times less ours takes, the median over rounds."""
    ratios = [theirs / own for own, theirs in zip(_times(mine, rows), _times(peer, rows))]
    return median(ratios) if ratios else None


def _findings(pairs: list[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[str]:
    said = []
    for rows in (1, 8):
        known = [(f, m, p) for m, p in pairs if (f := _faster(m, p, rows)) is not None]
        if known:
            f, m, p = min(known, key=lambda each: each[0])
            said.append(f"{rows} rows: the nearest is {_name(p)}; {_name(m)} takes {f:.2f} times less.")
    return said


def _tables(records: Records, pairs: list[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[Table]:
    sizes = sorted({m for r in records for m, _ in _rows(r)})
    of: Callable[[Mapping[str, Any], str], object] = lambda r, what: r[what]["median"] if r[what] else None  # noqa: E731
    times = [
        [_name(r), *(figure(dict(_rows(r)).get(m), ".1f") for m in sizes), figure(dict(_curve(r)).get(8))]
        + [figure(of(r, what), ".0f") for what in ("prefill", "batch")]
        for r in records
    ]
    faster = [[f"{_name(m)} / {_name(p)}", *(figure(_faster(m, p, n)) for n in sizes)] for m, p in pairs]
    heads = [f"M={m}" for m in sizes]
    return [
        Table("Milliseconds of a pass", ("engine", *heads, "c(8)", "prompt tokens/s", "batch tokens/s"), times),
        Table("Times faster", ("ours / theirs", *heads), faster),
    ]


STUDY = Study(
    title="Other engines beside ours: what checking a draft costs in each",
    source="no publication; llama.cpp, OpenVINO, vLLM and transformers run here, each at its best settings",
    differs=(
        "Passes over M rows are what verification costs; each engine's own speculation is not measured.",
        "Checkpoints have random weights of the shape: speed alone is compared, on the same numbers.",
    ),
    data="`make peers` installs the engines, each in an environment of its own, and makes the checkpoints.",
    cells=cells,
    report=report,
)
