"""`sameseed quantize`: a model's weights in fewer bits, chosen by a method, as a checkpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from sameseed.cli.options import option, parse
from sameseed.config import parse_options
from sameseed.errors import ConfigError

if TYPE_CHECKING:
    from sameseed.quantize._plan import QuantizePlan
    from sameseed.quantize._run import Progress, QuantizeResult

OUT_ALIAS = arg(metavar="DIR", aliases=["-o"], help_behavior_hint="")


@dataclass(frozen=True)
class QuantizeArgs:
    """Store the linear layers of a model in fewer bits and write a checkpoint. Embedding and head stay as they are
    unless a rule of the scheme names them (lm_head=w8a16). A run that was stopped goes on with --resume.
    """

    model: Annotated[str, Positional] = "embedded"  # a folder, a GGUF file, a hub id, smollm2 or embedded
    out: Annotated[Path | None, OUT_ALIAS] = None  # where the checkpoint goes (required)
    scheme: str = "w4a16"  # a format, then rules: w4a16-g128,lm_head=w8a16,model.layers.0.*=bf16
    method: str = "rtn"  # rtn, gptq, awq, smooth, rotate, or some joined with +, e.g. rotate+gptq
    options: Annotated[str, option("JSON")] = "{}"  # options of the methods, e.g. '{"act_order": true}'
    calibration: Annotated[Path | None, option("FILE")] = None  # .jsonl (text, prompt or messages) or .txt; rtn: none
    samples: int = 128  # rows of calibration text
    length: int = 512  # tokens of a row
    seed: int = 0  # of the rows' order and of rotations
    budget: Annotated[float | None, option("BITS")] = None  # average bits per weight, spent by measured sensitivity
    candidates: str = "w4a16,w4a16-g32,w8a16,bf16"  # the schemes that a budget chooses from
    device: str = "cpu"  # where it is computed: cpu, cuda, cuda:1, ...
    # the model is an EAGLE-3 head: adapt it to this checkpoint of method rotate
    head_for: Annotated[Path | None, option("DIR")] = None
    original: Annotated[str | None, option("MODEL")] = None  # --head-for: the original target, if its LM head is shared
    overwrite: Annotated[bool, option()] = False  # replace what is at the destination, once the new one is complete
    resume: Annotated[bool, option()] = False  # go on with an interrupted run
    json: Annotated[bool, option()] = False  # one JSON object with the errors instead of tables


def run(argv: Seq[str], prog: str) -> int:
    """Check, quantize, write, show the errors."""
    args = parse(QuantizeArgs, argv, prog).args
    if args.out is None:
        raise ConfigError("-o is missing; e.g. sameseed quantize embedded --scheme w4a16 -o runs/w4a16")
    if args.head_for is not None:
        return _turn_head(args, args.head_for, args.out)
    from sameseed.quantize._plan import QuantizePlan

    given = {f.name: getattr(args, f.name) for f in fields(QuantizePlan)}
    given["options"] = parse_options(args.options)
    given["candidates"] = tuple(c.strip() for c in args.candidates.split(",") if c.strip())
    plan = QuantizePlan(**given)
    result = quantized(plan, quiet=args.json)
    if args.json:
        print(json.dumps({"folder": str(result.folder), **result.quantization}))
    else:
        _show(result)
    return 0


def _turn_head(args: QuantizeArgs, target: Path, out: Path) -> int:
    from sameseed.models.loader import resolve_model
    from sameseed.quantize._head import turn_head

    own = {"model", "out", "head_for", "original", "overwrite", "json"}
    idle = next((f.name for f in fields(args) if f.name not in own and getattr(args, f.name) != f.default), None)
    if idle is not None:
        raise ConfigError(
            f"--head-for turns a head and no more; leave out --{idle} (--draft-format stores it in few bits)"
        )
    original = None if args.original is None else resolve_model(args.original)
    folder = turn_head(resolve_model(args.model), target, out, original, args.overwrite)
    print(json.dumps({"folder": str(folder)}) if args.json else f"{folder}: a head for {target}")
    return 0


def quantized(plan: QuantizePlan, quiet: bool = False) -> QuantizeResult:
    """Run a plan with a progress bar; an interruption prints how to resume."""
    from sameseed.cli.console import progress
    from sameseed.quantize import _run as quantizing

    with progress(f"{plan.method} {plan.scheme}", quiet) as bar:

        def report(p: Progress) -> None:
            worst = max(p.errors, key=lambda e: e.relative, default=None)
            note = "" if worst is None else f"error {worst.relative:.2%} at most, in {worst.module}"
            name = {"budget": "sensitivity of layers", "layers": "layers"}[p.stage]
            bar.update(bar.tasks[0].id, description=name, completed=p.done, total=p.total, note=note)
            if p.errors and not quiet:
                parts = [f"{e.module.rsplit('.', 1)[-1].removesuffix('_proj')} {e.relative:.2%}" for e in p.errors]
                line = f"layer {p.done}/{p.total}: output error {', '.join(parts)}"
                bar.console.print(line, style="dim", highlight=False)

        try:
            return quantizing.quantize(plan, report)
        except KeyboardInterrupt:
            print("stopped; the same command with --resume goes on from the last finished layer", file=sys.stderr)
            raise


def _show(result: QuantizeResult) -> None:
    from sameseed.cli.console import show_table, stdout_console
    from sameseed.report import table as layout

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
    how = f"{found['method']}, {found['scheme']}"
    console.print(f"{result.folder}: {found['bits_per_weight']:.3f} bits a weight ({how})")
    for advice in found["recommendation"]:
        console.print(f"consider more bits for {', '.join(advice['modules'])}: {advice['reason']}")
