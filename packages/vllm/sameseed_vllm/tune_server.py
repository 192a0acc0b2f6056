"""`sameseed tune --engine vllm --url U`: measures a running vLLM by batch size, and finds the length that pays.

vLLM drafts for all requests alike, so one run sees one length (or one table of lengths). The file of costs keeps what
earlier runs saw: restart vLLM with another length, or without a draft, and run again. A round pays where its tokens
exceed the ratio of its time to that of plain decoding (Leviathan et al., 2023, section 3).
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Callable, Sequence as Seq
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sameseed.cli.bench_serve import read_key
from sameseed.cli.console import show_table, stages, stdout_console
from sameseed.cli.options import numbers
from sameseed.cost.curve import ENGINE_SCHEMA, Curve, read_table
from sameseed.cost.round import PAYS
from sameseed.errors import ConfigError
from sameseed.fields import parse
from sameseed.measure.load.wire import Endpoint, base_url, exchange, introduce, open_client
from sameseed.measure.prompt_sets import Prompt
from sameseed.measure.workload import DEFAULT_PROMPTS, read_prompts
from sameseed.plan.doctor import flags_of
from sameseed.plan.metrics import Counted, fetch, watch
from sameseed.plan.pricing import rounds_of
from sameseed.plan.profile_file import write
from sameseed.report import record
from sameseed.report.table import table
from sameseed.request import SamplingParams
from sameseed.store import replacing
from sameseed.tuned import AcceptRates, Chosen, Scope, Tuned, TunedMachine, TunedModel

if TYPE_CHECKING:
    from sameseed.cli.flags import TuneArgs

ENOUGH = 20  # rounds of single sequences below which a batch size says nothing
FULL = 0.5  # least mean share of the asked sequences that run at once: requests have pauses between them
SETTLE = 0.5  # seconds before the first look, until all prompts are prefilled
TIMEOUT = 600.0  # seconds for one answer


@dataclass(frozen=True)
class ServerTuneRequest:
    """What to measure of the server at `url`. `seconds`: for all batch sizes together, plus a few for each."""

    url: str
    draft: str
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    batches: tuple[int, ...]
    seconds: float
    key: str | None = None


@dataclass(frozen=True)
class Look:
    """Rounds at a batch size: draft tokens, milliseconds, and `survival`, the share of rounds with each place right."""

    batch: int
    k: int
    round_ms: float
    survival: tuple[float, ...] = ()
    num_rounds: int = 0


@dataclass(frozen=True)
class EnginePass:
    """Milliseconds of one pass over `rows` rows in all, of `batch` sequences."""

    batch: int
    rows: int
    ms: float


@dataclass(frozen=True)
class EngineCosts:
    """Rounds of a vLLM: a JSON file with these fields and `"schema": "sameseed.engine-costs/1"`.

    `draft` names the draft whose time `passes` include; `survival`: the share of `rounds` rounds in which each place of
    that draft was right.
    """

    engine: str
    passes: tuple[EnginePass, ...]
    machine: str = ""
    draft: str = ""
    survival: tuple[float, ...] = ()
    rounds: int = 0

    def __post_init__(self) -> None:
        rows = all(1 <= p.batch <= p.rows for p in self.passes)
        if not self.passes or not rows or not all(0 < p.ms < math.inf for p in self.passes):
            raise ConfigError("costs of an engine: passes with batch >= 1, rows >= batch and ms > 0, one at least")

    @property
    def batches(self) -> tuple[int, ...]:
        """Numbers of sequences that were measured, in ascending order."""
        return tuple(sorted({p.batch for p in self.passes}))

    def seconds(self, batch: int, k: int) -> float:
        """Seconds of a round of `batch` sequences, one of `batches`, with `k` draft tokens each: linear in rows."""
        return Curve(sorted((p.rows, p.ms / 1e3) for p in self.passes if p.batch == batch)).at(batch * (1 + k))


@dataclass(frozen=True)
class LengthRow:
    """Tokens, milliseconds and speed-up of a length's rounds at a batch size. `measured`: was it run, or computed?"""

    batch: int
    k: int
    tokens: float
    round_ms: float
    speedup: float
    measured: bool


def look_of(counted: Counted, batch: int) -> Look:
    """A look at what vLLM counted under `batch` sequences. Raises ConfigError where that says nothing of its rounds."""
    if counted.engine != "vllm":
        raise ConfigError(f"these are the metrics of {counted.engine}; tune --engine vllm wants a vLLM's address")
    if (ran := counted.running or 0.0) < FULL * batch:
        raise ConfigError(f"only {ran:.1f} of {batch} ran at once: lower --batch, or raise vLLM's --max-num-seqs")
    if not counted.gaps or not counted.gap_seconds or counted.gaps < ENOUGH:
        raise ConfigError(f"{counted.gaps or 0:g} rounds at batch {batch} are too few: give more --seconds")
    found = Look(batch, 0, 1e3 * counted.gap_seconds / counted.gaps, num_rounds=round(counted.gaps))
    rounds = rounds_of(counted)
    if rounds is None:
        return found
    return replace(found, k=round(rounds.k), survival=tuple(rounds.drafted * s for s in rounds.survival))


async def measure(asked: ServerTuneRequest, tell: Callable[[str, int, int], None]) -> list[Look]:
    """Send load at each batch size, and read the counters meanwhile. Raises ConfigError that says what to do."""
    server = Endpoint("server", base_url(asked.url))
    found = []
    async with open_client(asked.key, max(asked.batches), TIMEOUT) as client:
        server = replace(server, model=str((await introduce(client, server)).get("id", "")))
        for i, batch in enumerate(asked.batches):
            tell(f"{batch} at once", i, len(asked.batches))
            found.append(look_of(await _loaded(client, server, asked, batch), batch))
    return found


async def _loaded(client: Any, server: Endpoint, asked: ServerTuneRequest, batch: int) -> Counted:
    """Counters over a time in which `batch` requests are always running."""
    params = asked.params
    fields = {"max_tokens": params.max_tokens, "temperature": params.temperature, "stream": True}
    stopped = threading.Event()  # at the end, and on an error, stops the watch and the load at once

    async def always(number: int) -> None:
        while not stopped.is_set():  # a cancellation may be lost: before Python 3.12, `wait_for` drops one at its end
            prompt = asked.prompts[number % len(asked.prompts)]
            made = await exchange(
                client, server, {"model": server.model, "prompt": prompt.said, **fields}, TIMEOUT, max_retries=3
            )
            if made.error is not None:
                raise ConfigError(f"{server.url} failed on a request ({made.error}): {made.detail}; see its log")
            number += batch

    def counted() -> Counted:
        seconds = asked.seconds / len(asked.batches)
        return watch(lambda: fetch(server.url, key=asked.key), seconds, server.url, stopped.wait)

    tasks = [asyncio.create_task(always(i)) for i in range(batch)]
    try:
        await asyncio.sleep(SETTLE)
        watching = asyncio.create_task(asyncio.to_thread(counted))
        done, _ = await asyncio.wait({watching, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {watching}:
            task.result()
        return await watching
    finally:
        stopped.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def added(before: EngineCosts | None, looks: Seq[Look], draft: str) -> EngineCosts:
    """Earlier costs with these looks, the new ones instead of equal ones. Raises ConfigError for another draft."""
    known = {} if before is None else {(p.batch, p.rows): p for p in before.passes}
    known |= {(x.batch, rows): EnginePass(x.batch, rows, x.round_ms) for x in looks for rows in [x.batch * (1 + x.k)]}
    drafted = [x for x in looks if x.k]
    if before is not None and before.draft and drafted and before.draft != draft:
        raise ConfigError(f"the costs were measured with --drafts {before.draft!r}: give another --cost file")
    passes = tuple(known[at] for at in sorted(known))
    old = EngineCosts("vllm", passes) if before is None else replace(before, passes=passes)
    if not drafted or (most := max(x.k for x in drafted)) < len(old.survival):
        return old
    longest = [x for x in drafted if x.k == most]
    rounds = sum(x.num_rounds for x in longest)
    survival = tuple(sum(x.survival[i] * x.num_rounds for x in longest) / rounds for i in range(most))
    return replace(old, draft=draft, survival=survival, rounds=rounds)


def rows_of(costs: EngineCosts) -> list[LengthRow]:
    """Rows for every length up to the longest that was run, at each batch size that ran with a draft and without."""
    made = []
    for batch in costs.batches:
        ran = {p.rows // batch - 1 for p in costs.passes if p.batch == batch}
        if 0 not in ran or len(ran) < 2:
            continue
        for k in range(min(max(ran), len(costs.survival)) + 1):
            tokens, seconds = 1.0 + sum(costs.survival[:k]), costs.seconds(batch, k)
            speedup = tokens * costs.seconds(batch, 0) / seconds
            made.append(LengthRow(batch, k, tokens, 1e3 * seconds, speedup, k in ran))
    return made


def best_of(rows: Seq[LengthRow]) -> dict[int, LengthRow]:
    """The row of each batch size with the highest speed-up; plain decoding where none is worth it."""
    found = {}
    for batch in sorted({r.batch for r in rows}):
        own = [r for r in rows if r.batch == batch]
        best = max(own, key=lambda r: (r.speedup, -r.k))
        found[batch] = best if best.speedup >= PAYS else own[0]
    return found


def next_run(costs: EngineCosts) -> str | None:
    """How vLLM must be restarted before lengths can be compared; None where it need not be."""
    widths = [{p.rows // b - 1 for p in costs.passes if p.batch == b} for b in costs.batches]
    if not any(0 in ran for ran in widths):
        return "without a draft (leave --speculative-config out)"
    if not any(ran - {0} for ran in widths):
        return f"with a draft ({flags_of('vllm', '{length}', best=4)[0]})"
    if not any(0 in ran and len(ran) > 1 for ran in widths):
        return "at the same --batch, with a draft and without"
    unseen = sorted({r.k for r in best_of(rows_of(costs)).values() if not r.measured})
    return f"with {flags_of('vllm', '{length}', best=unseen[-1])[0]} (computed so far, not run)" if unseen else None


def as_tuned(asked: ServerTuneRequest, model: str, costs: EngineCosts) -> Tuned:
    """The profile that `export vllm` reads, with lengths by batch size. Raises ConfigError if none is known."""
    best = best_of(rows_of(costs))
    if not best:
        raise ConfigError(f"no length can be compared yet: restart vLLM {next_run(costs)} and run this again")
    chosen_ks = [(1 if i == 0 else batch, row.k) for i, (batch, row) in enumerate(best.items())]
    chosen_ks = [row for i, row in enumerate(chosen_ks) if i == 0 or row[1] != chosen_ks[i - 1][1]]
    most, survival = max(k for _, k in chosen_ks), costs.survival
    pairs = zip(survival, (1.0, *survival), strict=False)
    chosen = Chosen(draft="none", max_num_seqs=max(best))
    if most:
        chosen = Chosen(draft=costs.draft, num_draft_tokens=most, max_num_seqs=max(best), by_batch=tuple(chosen_ks))
    return Tuned(
        machine=TunedMachine(costs.machine or "that of a vLLM", 1),
        model=TunedModel(model),
        chosen=chosen,
        scope=Scope(num_prompts=len(asked.prompts), temperature=(asked.params.temperature,), batch=tuple(best)),
        acceptance=AcceptRates(
            tuple(s / b if b else 0.0 for s, b in pairs), survival, 1.0 + sum(survival), costs.rounds
        ),
        date=record.now(),
        commit=record.commit(),
    )


def read_costs(path: Path) -> EngineCosts:
    """The costs that `write_costs` wrote. Raises ConfigError."""
    data = read_table(path)
    if data.get("schema") != ENGINE_SCHEMA:
        raise ConfigError(
            f"{path} has schema {data.get('schema')!r}, not {ENGINE_SCHEMA!r}; name another file with --cost"
        )
    costs = parse(EngineCosts, {k: v for k, v in data.items() if k != "schema"}, str(path))
    if costs.engine != "vllm":
        raise ConfigError(f"{path} holds the costs of {costs.engine}, not of vllm: name another file with --cost")
    return costs


def write_costs(costs: EngineCosts, path: Path) -> None:
    """Write the file that the next run reads. Raises ConfigError."""
    try:
        with replacing(path) as file:
            file.write((json.dumps({"schema": ENGINE_SCHEMA, **asdict(costs)}, indent=1) + "\n").encode())
    except OSError as error:
        raise ConfigError(f"cannot write costs to {path} ({error.strerror}); choose another --cost") from None


def tune(args: TuneArgs) -> int:
    """Measure, add to the costs in `args.cost`, and, once lengths can be compared, write the profile to `args.out`."""
    asked = _request(args)
    before = read_costs(args.cost) if args.cost.exists() else None
    with stages(f"tuning {asked.url}", args.json) as tell:
        looks = asyncio.run(measure(asked, tell))
    costs = added(before, looks, asked.draft)
    write_costs(costs, args.cost)
    rows, todo = rows_of(costs), next_run(costs)
    if rows:
        write(as_tuned(asked, args.model, costs), args.out)
    if args.json:
        said = {"looks": [asdict(x) for x in looks], "rows": [asdict(r) for r in rows], "restart": todo}
        print(json.dumps(said))
    else:
        _show(looks, rows, todo, args.out)
    return 0


def _request(args: TuneArgs) -> ServerTuneRequest:
    if args.url is None:
        raise ConfigError("--engine vllm measures a vLLM that runs: give its address with --url")
    if len(args.drafts) != 1:
        raise ConfigError("--engine vllm: name the one draft that it runs with, or would, with --drafts")
    if not args.seconds > 0:
        raise ConfigError(f"--seconds must be above 0, got {args.seconds:g}")
    return ServerTuneRequest(
        args.url,
        args.drafts[0],
        tuple(read_prompts(args.prompts or DEFAULT_PROMPTS, args.num_prompts)),
        SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed),
        numbers("batch", args.batch),
        args.seconds,
        read_key(args.api_key_file),
    )


def _show(looks: Seq[Look], rows: list[LengthRow], todo: str | None, out: Path) -> None:
    """Show what was measured, which length pays, and what to run next."""
    console = stdout_console()
    for x in looks:
        what = f"{x.k} draft tokens, {1 + sum(x.survival):.2f} tokens a round" if x.k else "no draft"
        console.print(f"{x.batch} at once: {what}, {x.round_ms:.2f} ms a round ({x.num_rounds} rounds)", markup=False)
    if rows:
        best, shown = best_of(rows), []
        for r in rows:
            said = [word for word, holds in (("best", best[r.batch] == r), ("computed", not r.measured)) if holds]
            figures = (f"{r.tokens:.2f}", f"{r.round_ms:.2f}", f"{r.speedup:.2f}")
            shown.append((str(r.batch), str(r.k or "off"), *figures, " ".join(said)))
        heads = ("at once", "draft tokens", "tokens a round", "ms a round", "times plain decoding", "")
        show_table(table("", heads, shown, left=(5,)))
        console.print(f"written: {out}; its command: sameseed export vllm {out}", markup=False)
    if todo:
        console.print(f"vLLM has one length at a time: restart it {todo}, and run this again", markup=False)
