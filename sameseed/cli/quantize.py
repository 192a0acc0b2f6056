"""`sameseed quantize`: a model's weights in fewer bits, chosen by a method, as a checkpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence as Seq
from dataclasses import fields
from pathlib import Path

from sameseed.cli.console import progress, show_table, stdout_console
from sameseed.cli.flags import QuantizeArgs
from sameseed.cli.options import Parsed, unread
from sameseed.config import parse_options
from sameseed.errors import ConfigError
from sameseed.measure.quality.show import Variant
from sameseed.models.loader import resolve_model
from sameseed.quantize import _run as quantizing
from sameseed.quantize._head import turn_head
from sameseed.quantize._run import QuantizePlan, QuantizeResult
from sameseed.quantize._walk import ModuleError
from sameseed.report import table as layout


def run(parsed: Parsed[QuantizeArgs]) -> int:
    """Check, quantize, write, show the errors."""
    args = parsed.args
    if args.out is None:
        raise ConfigError("-o is missing; e.g. sameseed quantize embedded --scheme w4a16 -o runs/w4a16")
    if args.head_for is not None:
        return _turn_head(args, args.head_for, args.out)
    unread(args, ("original",), "it is the first target of a head, for --head-for")
    if args.budget is None:
        unread(args, ("candidates",), "only --budget chooses from them; --scheme says what is stored")
    given = {f.name: getattr(args, f.name) for f in fields(QuantizePlan)}
    given["candidates"] = tuple(c.strip() for c in args.candidates.split(",") if c.strip())
    plan = QuantizePlan(**{**given, "options": parse_options(args.options)})
    result = quantized(plan, quiet=args.json)
    if args.json:
        print(json.dumps({"folder": str(result.folder), **result.quantization}))
    else:
        _show(result, args.model)
    return 0


def _turn_head(args: QuantizeArgs, target: Path, out: Path) -> int:
    others = {f.name for f in fields(args)} - {"model", "out", "head_for", "original", "overwrite", "json"}
    unread(args, others, "--head-for turns a head and no more (--draft-format stores it in few bits)")
    original = None if args.original is None else resolve_model(args.original)
    folder = turn_head(resolve_model(args.model), target, out, original, args.overwrite)
    print(json.dumps({"folder": str(folder)}) if args.json else f"{folder}: a head for {target}")
    return 0


def quantized(plan: QuantizePlan, quiet: bool = False) -> QuantizeResult:
    """Run a plan with a progress bar; an interruption prints how to resume."""
    with progress(f"{plan.method} {plan.scheme}", quiet) as (update, say):

        def report(stage: str, done: int, total: int, errors: Seq[ModuleError]) -> None:
            worst = max(errors, key=lambda e: e.relative, default=None)
            note = "" if worst is None else f"error {worst.relative:.2%} at most, in {worst.module}"
            update(description=stage, completed=done, total=total, note=note)
            if errors and not quiet:
                parts = [f"{e.module.rsplit('.', 1)[-1].removesuffix('_proj')} {e.relative:.2%}" for e in errors]
                say(f"layer {done}/{total}: output error {', '.join(parts)}", style="dim", highlight=False)

        try:
            return quantizing.quantize(plan, report)
        except KeyboardInterrupt:
            print("stopped; the same command with --resume goes on from the last finished layer", file=sys.stderr)
            raise


def _show(result: QuantizeResult, model: str) -> None:
    found, console = result.quantization, stdout_console()
    if found["sensitivity"]:
        heads = ("part", "scheme", "bits", "loss if it alone is stored so (nats/token)")
        table = layout.table("what got which bits", heads, left=(0, 1))
        stored = {m["module"]: m["scheme"] for m in found["modules"]}
        for s in found["sensitivity"]:
            if stored.get(s["modules"][0]) == s["scheme"]:
                table.add_row(s["unit"], s["scheme"], f"{s['bits']:.2f}", f"{s['loss']:.2e}")
        show_table(table)
        console.print(f"predicted loss: {found['predicted_loss']:.3e} nats a token")
    now, was = (f"{Variant(str(m)).disk_bytes() / 1e6:,.1f}" for m in (result.folder, model))
    console.print(f"{result.folder}: {found['bits_per_weight']:.3f} bits a quantized weight; {now} MB, {was} before")
    for advice in found["recommendation"]:
        console.print(f"consider more bits for {', '.join(advice['modules'])}: {advice['reason']}")
