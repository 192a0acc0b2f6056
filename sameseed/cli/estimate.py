"""`sameseed estimate`: memory and speed of a model, plain and with drafts, before its weights are downloaded."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence as Seq
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from sameseed import hub, ops
from sameseed.cli.console import show_table
from sameseed.cli.flags import EstimateArgs
from sameseed.cli.options import Parsed, draft_choice, numbers
from sameseed.config import SpecConfig, draft_text
from sameseed.devices import cpu_name, native_threads
from sameseed.errors import ConfigError
from sameseed.measure.costs import Profile
from sameseed.measure.limits import Limits, measure_limits
from sameseed.measure.profile_report import threads_text
from sameseed.measure.shapes import get_shape
from sameseed.models.config import EMBEDDED
from sameseed.plan.estimate import Estimate, Question, estimate, given_limits, read_bytes
from sameseed.plan.paper import find
from sameseed.report import table as layout
from sameseed.tuned import TunedFigure


def run(parsed: Parsed[EstimateArgs]) -> int:
    """Compute, print."""
    args = parsed.args
    if (args.model is None) == (args.shape is None):
        raise ConfigError("give either a model or a shape by name, e.g. --shape llama-3.2-1b")
    found, source = _estimates(args)
    if args.json:
        print(json.dumps({"machine": source, "estimates": [asdict(e) for e in found]}))
        return 0
    console = Console(highlight=False)
    console.print(f"{args.model or args.shape} on {source}", markup=False, soft_wrap=True)
    show_table(_memory(found))
    show_table(_speeds(found))
    console.print("\n".join(_remarks(found)), markup=False, soft_wrap=True)
    return 0


def _estimates(args: EstimateArgs) -> tuple[list[Estimate], str]:
    if args.shape is not None:
        get_shape(args.shape, "MODEL")
    names = ("kv_format", "draft_format", "acceptance", "context", "prompt_tokens")
    asked = Question(
        args.model or (args.shape or "").lower(),
        args.format,
        drafts=tuple(_auto(args) if text == "auto" else text for text in args.draft),
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
    return estimate(asked, costs), f"{cpu}, {threads_text(costs.threads)}, as profiled {costs.date[:10]}"


def _auto(args: EstimateArgs) -> str:
    """The draft that --draft auto takes; weights that are not here are not fetched to look into them."""
    model = args.model or ""
    here = model if model in ("", *EMBEDDED, *hub.PACKAGED) else str(find(model))
    return draft_text(draft_choice("auto", here) or SpecConfig(), models=True)


def _limits(args: EstimateArgs) -> tuple[Limits, str]:
    """The machine's limits, as given, or measured here in about a second; and the machine in words."""
    threads = args.threads or native_threads()
    limits, name = given_limits(args.machine_read, args.machine_ops, threads), "a machine"
    if limits is None:
        ops.set_num_threads(threads)
        limits, name = measure_limits(threads), f"{cpu_name()}, {threads_text(threads)}"
    reads = f"{limits.read / 1e9:.1f} GB/s, {limits.peak('int8') / 1e12:.2f} int8 and "
    busy = os.getloadavg()[0] > threads and limits.source != "given"
    note = " (other work runs here now: a quiet machine does more)" if busy else ""
    return limits, f"{name}: {reads}{limits.peak('fp32') / 1e12:.2f} float32 tera-operations/s{note}"


def _memory(found: Seq[Estimate]) -> Table:
    gib, first = 2**30, found[0].memory
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
        for draft, rows in e.num_speculative_tokens_per_batch_size.items():
            lengths = ", ".join(f"from {first}: {k or 'off'}" for first, _, k in rows)
            yield f"{e.format}, {draft}: best length by texts at once: {lengths}"
    for draft, source in found[0].acceptance.items():
        yield f"acceptance of {draft}: {source}"
    if found[0].experts:
        yield f"distinct experts: {found[0].experts}"
