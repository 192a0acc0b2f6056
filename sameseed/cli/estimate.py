"""`sameseed estimate`: memory and speed of a model, plain and with drafts, before its weights are downloaded."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, UseAppendAction, arg

from sameseed.cli.options import option, parse
from sameseed.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from sameseed.measure.limits import Limits
    from sameseed.plan.estimate import Estimate
    from sameseed.tuned import TunedFigure

Many = Annotated[tuple[str, ...], UseAppendAction, arg(metavar="TEXT", help_behavior_hint="(repeatable)")]


@dataclass(frozen=True)
class EstimateArgs:
    """Estimate memory, speed and the gain from drafts, within seconds, from config.json alone: nothing is downloaded.

    Every figure has an 80 % interval and a grade: paper (bytes and operations over the machine's limits) or profiled
    (--cost). Unless --acceptance gives them, acceptance rates are assumed: 0.5 to 0.8 per token
    that a model drafts, 0.1 to 0.6 per token that is found in the text.
    """

    model: Annotated[str | None, Positional, option("MODEL")] = None  # a folder, a GGUF file or a hub id
    shape: Annotated[str | None, option("NAME")] = None  # or a known shape, see `sameseed profile --list`
    draft: Many = ()  # as generate's --draft; a shape's name stands for a model
    format: Many = ()  # number format of the weights; unset: the checkpoint's, w8a8 and w4a8
    kv_format: str = "auto"  # number format of the KV cache; auto follows the weights
    draft_format: str = "auto"  # number format of the draft's weights
    acceptance: Many = ()  # acceptance rate of a draft token, 0.7 or 0.6,0.8, or a JSON file of rates by position
    cost: Annotated[Path | None, option("FILE")] = None  # costs of `sameseed profile --json`, of any machine
    machine_read: Annotated[float | None, option("GB/S")] = None  # memory bandwidth of another machine
    machine_ops: Annotated[float | None, option("TOPS")] = None  # its speed, in 1e12 operations per second
    memory: Annotated[str | None, option("SIZE")] = None  # of the machine, e.g. 24GB; unset: what is free here
    context: Annotated[int | None, option("N")] = None  # tokens of a text; unset: 1024
    prompt_tokens: Annotated[int | None, option("N")] = None  # for the time to first token; unset: 512, or the context
    batch: str = "1,8"  # sequences at once, comma-separated
    threads: Annotated[int | None, option("N")] = None  # CPU threads; unset: as many as the backend finds useful
    json: Annotated[bool, option()] = False  # one JSON object instead of tables


def run(argv: Seq[str], prog: str) -> int:
    """Parse, compute, print."""
    args = parse(EstimateArgs, argv, prog).args
    if (args.model is None) == (args.shape is None):
        raise ConfigError("give either a model or a shape by name, e.g. --shape llama-3.2-1b")
    found, source = _estimates(args)
    if args.json:
        print(json.dumps({"machine": source, "estimates": [e.as_dict() for e in found]}))
        return 0
    from rich.console import Console

    from sameseed.cli.console import show_table

    console = Console(highlight=False)
    console.print(f"{args.model or args.shape} on {source}", markup=False, soft_wrap=True)
    show_table(_memory(found))
    show_table(_speeds(found))
    for line in _remarks(found):
        console.print(line, markup=False, soft_wrap=True)
    return 0


def _estimates(args: EstimateArgs) -> tuple[list[Estimate], str]:
    """The estimates, and the machine in words. Raises ConfigError for flags that contradict each other."""
    from sameseed.cli.profile import numbers
    from sameseed.measure.costs import Profile
    from sameseed.measure.shapes import get_shape
    from sameseed.plan.estimate import Question, estimate, read_bytes

    if args.shape is not None:
        get_shape(args.shape, "MODEL")
    names = ("kv_format", "draft_format", "acceptance", "context", "prompt_tokens")
    asked = Question(
        args.model or (args.shape or "").lower(),
        args.format,
        drafts=args.draft,
        batches=numbers("batch", args.batch),
        available=None if args.memory is None else read_bytes(args.memory),
        **{name: getattr(args, name) for name in names},
    )
    if args.cost is None:
        limits, source = _limits(args)
        return estimate(asked, limits), source
    if args.machine_read is not None or args.machine_ops is not None:
        raise ConfigError("--cost says what the machine can do: leave out --machine-read and --machine-ops")
    costs = Profile.read(args.cost)
    cpu = costs.machine.get("cpu", "?")
    return estimate(asked, costs), f"{cpu}, {_threads(costs.threads)}, as profiled {costs.date[:10]}"


def _threads(number: int) -> str:
    return f"{number} thread{'s' * (number != 1)}"


def _limits(args: EstimateArgs) -> tuple[Limits, str]:
    """The machine's limits, as given, or measured here in about a second; and the machine in words."""
    from sameseed import ops
    from sameseed.devices import cpu_name, native_threads
    from sameseed.measure.limits import measure_limits
    from sameseed.plan.estimate import given_limits

    threads = args.threads or native_threads()
    if threads < 1:
        raise ConfigError(f"--threads must be at least 1, got {threads}")
    limits, name = given_limits(args.machine_read, args.machine_ops, threads), "a machine"
    if limits is None:
        ops.set_num_threads(threads)
        limits, name = measure_limits(threads), f"{cpu_name()}, {_threads(threads)}"
    reads = f"{limits.read / 1e9:.1f} GB/s, {limits.peak('int8') / 1e12:.2f} int8 and "
    busy = os.getloadavg()[0] > threads and limits.source != "given"
    note = " (other work runs here now: a quiet machine does more)" if busy else ""
    return limits, f"{name}: {reads}{limits.fp32 / 1e12:.2f} float32 tera-operations/s{note}"


def _memory(found: Seq[Estimate]) -> Table:
    from sameseed.report import table as layout

    gib = 2**30
    first = found[0].memory
    heads = ["format", "KV", "target", "draft", "cache a 1000 tokens", "at start", "cache full"]
    heads += [*(f"longest text at batch {b}" for b in first.max_context), f"most texts of {found[0].context}"]
    table = layout.table(f"memory in GiB (paper), of {first.available / gib:.1f} there", heads)
    for e in found:
        m = e.memory
        sizes = (m.weights / gib, m.draft_weights / gib, 1000 * m.cache_per_token / gib, m.start / gib)
        peak = f"{m.peak.value / gib:.2f} ({m.peak.low / gib:.2f} to {m.peak.high / gib:.2f})"
        longest = [str(n) if n else "none" for n in m.max_context.values()]
        table.add_row(e.format, e.kv_format, *(f"{s:.2f}" for s in sizes), peak, *longest, str(m.max_batch))
    return table


def _speeds(found: Seq[Estimate]) -> Table:
    from sameseed.report import table as layout

    grades = {s.speedup.grade for e in found for s in e.speeds}
    grade = f" ({grades.pop()})" if len(grades) == 1 else ""
    title = f"speed{grade} after {found[0].context} tokens, with 80 % intervals; all texts of a batch together"
    heads = ("format", "draft", "batch", "k", "tokens/s", "times plain", "tokens a round", "draft share")
    table = layout.table(title, [*heads, *(() if grade else ("grade",))])
    for e in found:
        for s in e.speeds:
            its = () if grade else (s.speedup.grade,)
            tokens_per_s = _figure(s.tokens_per_s, 0 if s.tokens_per_s.value >= 100 else 1)
            if s.draft == "none":
                table.add_row(e.format, "none", str(s.batch), "", tokens_per_s, "", "", "", *its)
                continue
            k = f"{s.num_draft_tokens}{'' if s.pays else ': does not pay'}"
            figures = tokens_per_s, _figure(s.speedup, 2), _figure(s.tokens_per_round, 2), f"{s.draft_share:.0%}"
            table.add_row(e.format, s.draft, str(s.batch), k, *figures, *its)
    return table


def _figure(f: TunedFigure, digits: int) -> str:
    return f"{f.value:.{digits}f} ({f.low:.{digits}f} to {f.high:.{digits}f})"


def _remarks(found: Seq[Estimate]) -> Iterator[str]:
    for e in found:
        if e.loss:
            yield f"{e.format}: {e.loss}; `sameseed eval --compare MODEL MODEL@{e.format}` measures it"
        if e.memory.max_batch < e.speeds[-1].batch:
            yield f"{e.format}: at most {e.memory.max_batch} texts of {e.context} tokens fit; more at once is theory"
        figure = _figure(e.ttft_s, 2)
        yield f"{e.format}: first token of a prompt of {e.prompt_tokens} after {figure} s ({e.ttft_s.grade})"
        for draft, rows in e.by_batch.items():
            lengths = ", ".join(f"from {first}: {k or 'off'}" for first, _, k in rows)
            yield f"{e.format}, {draft}: best length by texts at once: {lengths}"
    for draft, source in found[0].acceptance.items():
        yield f"acceptance of {draft}: {source}"
