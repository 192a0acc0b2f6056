"""What each method and format costs in held-out perplexity: a record line for each, and a table.

    .venv/bin/python benchmarks/quantize.py --data CORPUS [--model embedded] [--out RECORDS.jsonl]

CORPUS holds *.jsonl.gz with a `text` a line; valid.jsonl.gz is the held-out part, the others give calibration text.
Each checkpoint is written, read again, and run in float32 on its decoded values (activations rounded where the scheme
says so).
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from sameseed.errors import ConfigError
from sameseed.models.loader import resolve_model
from sameseed.quantize._calibrate import read_calibration
from sameseed.quantize._losses import token_losses
from sameseed.quantize._run import QuantizePlan, quantize
from sameseed.study import record
from sameseed.tokenizer import Tokenizer

OUT = Path(__file__).parent / "results" / "quantize.jsonl"
SCHEMA = "sameseed.quantize/1"
ROUNDED = "w8a8 w8a16 fp8 fp8-a8 fp8-b128 w4a16-g128 w4a16-g32 w4a8-g128 w4a8-qoq nf4 nf4-dq mxfp4"
LOW = "w4a16-g128 w4a8-g128 w4a8-qoq nf4 mxfp4"
GRID = {
    "rtn": ROUNDED,
    "gptq": f"w8a8 fp8 w4a16-g32 {LOW}",
    "awq": LOW,
    "smooth+gptq": "w8a8 w4a8-g128",
    "rotate": "w8a8 w4a16-g128 w4a8-qoq",
    "rotate+gptq": LOW,
    "awq+gptq": "w4a16-g128 w4a8-qoq",
}


def write_calibration(data: Path, path: Path, lines: int) -> None:
    """The first lines of every file but the held-out one."""
    with path.open("w", encoding="utf-8") as out:
        for file in sorted(data.glob("*.jsonl.gz")):
            if file.name != "valid.jsonl.gz":
                with gzip.open(file, "rt", encoding="utf-8") as rows:
                    out.writelines(
                        json.dumps({"text": json.loads(row)["text"]}) + "\n" for _, row in zip(range(lines), rows)
                    )


def ratio_of(found: Tensor, plain: Tensor) -> dict[str, float]:
    """Perplexity over the original's, with the 95 % interval of the paired differences (normal, by token)."""
    delta = found - plain
    mean, error = float(delta.mean()), float(delta.std() / len(delta) ** 0.5)
    return {"ratio": math.exp(mean), "low": math.exp(mean - 1.96 * error), "high": math.exp(mean + 1.96 * error)}


def main() -> None:
    """Measure the grid, print each line, append its record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--held-out", type=int, default=96, help="rows of held-out text")
    parser.add_argument("--only", nargs="*", help="METHOD@SCHEME, instead of the grid")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    grid = [c.split("@") for c in args.only] if args.only else [(m, s) for m, row in GRID.items() for s in row.split()]
    folder, run_id, here = resolve_model(args.model), record.now(), record.machine()
    with tempfile.TemporaryDirectory() as scratch:
        calibration, held_out = Path(scratch, "calibration.jsonl"), Path(scratch, "held_out.jsonl")
        write_calibration(args.data, calibration, 400)
        held_out.write_bytes(gzip.decompress((args.data / "valid.jsonl.gz").read_bytes()))
        ids = read_calibration(held_out, Tokenizer.from_folder(folder), args.held_out, args.length, seed=0).rows
        plain = token_losses(folder, ids)
        print(f"{'original':12} {'':12} perplexity {math.exp(plain.mean()):9.4f}", flush=True)
        for method, scheme in grid:
            text = None if method == "rtn" else calibration
            plan = QuantizePlan(
                args.model, Path(scratch, "out"), scheme, method, text, args.samples, args.length, overwrite=True
            )
            start = time.perf_counter()
            try:
                result = quantize(plan)
            except ConfigError as error:
                print(f"{method:12} {scheme:12} {error}", flush=True)
                continue
            seconds = time.perf_counter() - start
            found = token_losses(result.folder, ids)
            about = result.quantization
            line = {
                "schema": SCHEMA,
                "run": run_id,
                "time": record.now(),
                "commit": record.commit(),
                "machine": here,
                "config": {
                    "model": record.model_name(args.model),
                    "model_digest": record.weights_digest(args.model),
                    "method": method,
                    "scheme": scheme,
                    "calibration": about["calibration"] and f"{args.samples} rows of {args.length} tokens",
                    "seed": plan.seed,
                    "held_out_rows": len(ids),
                    "held_out_tokens": len(plain),
                },
                "bits_per_weight": about["bits_per_weight"],
                "perplexity": math.exp(found.mean()),
                "original_perplexity": math.exp(plain.mean()),
                "relative": ratio_of(found, plain),
                "worst_module": max(about["modules"], key=lambda m: m["relative"]),
                "seconds": seconds,
            }
            args.out.parent.mkdir(parents=True, exist_ok=True)
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            r = line["relative"]
            print(
                f"{method:12} {scheme:12} perplexity {line['perplexity']:9.4f}  relative {r['ratio']:.5f} "
                f"[{r['low']:.5f}, {r['high']:.5f}]  {about['bits_per_weight']:.3f} bits  {seconds:.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
