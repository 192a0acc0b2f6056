"""A cell with clients and local servers, speculation off and on interleaved, as in `sameseed bench serve`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, ClassVar

from sameseed.engine.build import check_parts
from sameseed.engine.settings import make_config
from sameseed.errors import ConfigError
from sameseed.measure.load import wire
from sameseed.measure.load.bench import LoadBench, LoadLevel, LoadSettings
from sameseed.measure.load.prompts import Shape, parse_shape
from sameseed.measure.load.show import make_records
from sameseed.measure.load.wire import Endpoint
from sameseed.measure.workload import DEFAULT_PROMPTS
from sameseed.models.loader import resolve_model
from sameseed.report import record
from sameseed_lab.studies._setup import StudySetup
from sameseed_lab.studies._study import Records, Row, Tell, machine_use, rows_of

PER_CLIENT = 4  # each client sends num_prompts / PER_CLIENT requests, at least one


@dataclass(frozen=True)
class LoadCell:
    """Servers with these formats, all with one draft, under each number of clients."""

    name: str
    draft: str
    clients: tuple[int, ...]
    formats: tuple[tuple[str, str], ...] = (("auto", "auto"),)  # of weights and KV cache
    k: int | None = None  # draft tokens of every round; None: the policy goodput decides
    lengths: str | None = None  # IN-OUT tokens; None: those of the prompts
    ttft: float | None = None  # bound of the time to first token, in seconds
    needs: ClassVar = ("server,study", "httpx", "fastapi", "uvicorn", "msgspec")  # extras, and their modules

    @property
    def weight(self) -> float:
        return 2.0 * len(self.formats) * len(self.clients)

    def check(self, setup: StudySetup) -> None:
        """Raise SameseedError if a format or a draft does not fit, or memory is short."""
        for form, kv in self.formats:
            spec = make_config(setup.source(self.draft)).spec
            config = make_config(spec, format=form, kv_format=kv)
            check_parts(resolve_model(setup.source("target")), config)
        if setup.size == "true" and len(self.formats) > 1:
            raise ConfigError("servers of several formats at once are for --size small and real")
        setup.check_memory([(role, self.formats[0][0]) for role in ("target", self.draft)])  # the draft's is the same

    def measure(self, setup: StudySetup, tell: Tell) -> list[dict[str, Any]]:
        """One record per arm and number of clients; speculation off comes first."""
        target, draft = setup.model("target"), setup.model(self.draft)
        policy = ["--policy", "fixed", "--k", str(self.k)] if self.k else ["--policy", "goodput"]
        flags = ["--model", target, "--draft", draft, "--max-num-seqs", str(max(self.clients)), *policy]
        flags += ["--threads", str(setup.threads)] if setup.threads else []
        with ExitStack() as stack:
            arms, pids = list[Endpoint](), dict[str, int]()
            for form, kv in self.formats:
                url, pid = stack.enter_context(serving([*flags, "--format", form, "--kv-format", kv]))
                name = self.name_of(form, kv)
                asked: Mapping[str, Any] = {"speculation": "off"}
                both = [Endpoint(f"{name}off", url, chat=self.lengths is None, fields=asked)]
                both.append(replace(both[0], label=f"{name}on", fields={}))
                arms, pids = arms + both, pids | {arm.label: pid for arm in both}
            return asyncio.run(self._measure(setup, arms, pids))

    def name_of(self, form: str, kv: str) -> str:
        """Prefix of an arm's label before "off" or "on": its formats, if the cell has several."""
        return f"{form}{'' if kv == 'auto' else ' kv ' + kv} " if len(self.formats) > 1 else ""

    async def _measure(self, setup: StudySetup, arms: list[Endpoint], pids: Mapping[str, int]) -> list[dict[str, Any]]:
        shape = Shape(None, setup.max_tokens) if self.lengths is None else parse_shape(self.lengths, 1.0)
        prompts = str(setup.prompts or DEFAULT_PROMPTS) if self.lengths is None else "text"
        sampling = {"temperature": 0.0} | ({"ignore_eos": True} if self.lengths else {})
        levels = tuple(LoadLevel(concurrency=c) for c in self.clients)
        settings = LoadSettings((shape,), levels, prompts, sampling, repeat=setup.repeat, ttft_slo=self.ttft)
        made, run_id, done = list[dict[str, Any]](), record.now(), 0
        async with wire.open_client(None, max(self.clients), settings.timeout) as client:
            bench = LoadBench(client, arms, settings)
            bench.pids = pids
            await bench.prepare()
            for level in levels:
                count = max(1, setup.num_prompts // PER_CLIENT) * (level.concurrency or 1)
                bench.settings = replace(settings, num_requests=max(count, min(8, setup.num_prompts)))

                def tick(note: str) -> None:
                    nonlocal done
                    whole = len(levels) * setup.repeat * len(arms)
                    setup.progress(f"{self.name}: {note} clients", done := done + 1, whole)

                runs = await bench.measure(shape, level, tick)
                made += [self._more(r) for r in make_records(bench, shape, level, runs, run_id)]
        return made

    def _more(self, made: dict[str, Any]) -> dict[str, Any]:
        """The record with the server's settings and its median machine usage added."""
        label = made["config"]["label"]
        form, kv = next((f, v) for f, v in self.formats if label.removeprefix(self.name_of(f, v)) in ("on", "off"))
        made["config"] |= {"format": form, "kv_format": kv, "draft": self.draft, "k": self.k}
        taken = [r["usage"] for r in made["repetitions"]]
        each = {name: [u[name] for u in taken] for name in taken[0]}
        made["usage"] = {name: None if None in values else median(values) for name, values in each.items()}
        if (form, kv) != self.formats[0]:
            made["same_texts"] = None  # texts differ between formats
        return made


@contextmanager
def serving(flags: list[str]) -> Iterator[tuple[str, int]]:
    """A sameseed server on a free port: its URL and process id. Raises ConfigError with its last log lines."""
    command = [sys.executable, "-m", "sameseed", "serve", "--port", "0", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    last, url = deque[str](maxlen=5), ""
    try:
        for line in process.stderr:
            last.append(line.strip())
            with contextlib.suppress(ValueError, AttributeError):
                said = json.loads(line)
                url = said.get("url", url)
                if said.get("message") == "ready":
                    break
        else:
            raise ConfigError(f"the server ended: {' '.join(last)}")
        threading.Thread(target=deque, args=(process.stderr, 0), daemon=True).start()  # drain: a full pipe would block
        yield url, process.pid
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def load_rows(records: Records) -> list[Row]:
    """Rows of LoadCells. `form`: the formats' name; `on_off`: tokens/s over those with speculation off."""
    rows = rows_of(records)
    for row in rows:
        same, told, label, runs = row["same_texts"], row["acceptance"] or {}, str(row["label"]), row["repetitions"]
        ends = [run["e2e_ms"]["p50"] for run in runs]
        row |= {
            **machine_use(row),
            "on": label.endswith("on"),
            "speculation": "on" if label.endswith("on") else "off",
            "form": row["format"] + ("" if row["kv_format"] == "auto" else f", cache {row['kv_format']}"),
            "tokens_per_s": row["output_tokens_per_s"],
            "tokens_per_s_each": [run["output_tokens_per_s"] for run in runs],
            "on_off": row["speedup"],
            "on_off_each": row.get("speedups"),
            "seconds": row["e2e_ms"]["p50"] and row["e2e_ms"]["p50"] / 1e3,
            "seconds_each": [end / 1e3 for end in ends if end is not None],
            "ms": row["tpot_ms"]["p50"],
            "accepted": told.get("acceptance_rate"),
            "same": "" if same is None else f"{same[0]} of {same[1]}",
        }
        for p in ("p50", "p90"):
            firsts = [run["ttft_ms"][p] for run in runs]
            row |= {f"first_{p}": row["ttft_ms"][p], f"first_{p}_each": [v for v in firsts if v is not None]}
    return rows
