"""Time all tilings of an 8B model's matrix products on a GPU, as data for `tiling.py`. Writes one record per tiling.

    python3 benchmarks/gpu_sweep.py [--formats w4a16,bf16] [--rows 1] [--out RECORDS.jsonl]

Each product runs as a CUDA graph over more weights than the caches hold. With a split, the time includes the launch
that adds the partial sums. Needs only a GPU and the checkout.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import gpu_checkout  # noqa: F401  # finds the package
import torch
from gpu_clock import graphed
from gpu_models import copied
from gpu_static import LM_HEAD, SHAPES, weight

from sameseed.ops import plain_rows
from sameseed.ops.triton import dispatch, prepared, tiling
from sameseed.ops.triton.guard import Launch
from sameseed.scheme import QuantTensor
from sameseed.study import record

SCHEMA = "sameseed.gpu_sweep/1"
PROGRAMS = ((32, 4), (64, 4), (64, 8), (128, 4), (128, 8), (256, 8))  # outputs and warps of one program
SHARES, STAGES = (1, 2, 4, 8, 16), (3, 4, 6)
BYTES = 256 << 20  # of weights that one graph reads: more than any level-2 cache holds


def cuts(w: QuantTensor) -> Iterator[tuple[tiling.Tiling, int]]:
    """All tilings worth timing, with pipeline stages.

    Left out: tilings with fewer than 60 programs, and splits with more than 12 programs per multiprocessor or fewer
    than two steps per share.
    """
    chosen = tiling.tiling(w)
    for (outputs, warps), split, stages in product(PROGRAMS, SHARES, STAGES):
        programs = -(-w.shape[0] // outputs) * split
        many = split > 1 and (chosen.steps < 2 * split or programs > 12 * tiling.MULTIPROCESSORS)
        if programs >= 60 and not many:
            yield replace(chosen, split=split, outputs=outputs, warps=warps), stages


def launches(w: QuantTensor, how: tiling.Tiling, stages: int, num_rows: int) -> list[Launch]:
    """The launches of a product with `num_rows` rows in tiling `how`."""
    w.__dict__["_tiling"] = how
    x, out = torch.randn(num_rows, w.shape[1], device="cuda"), torch.empty(num_rows, w.shape[0], device="cuda")
    first, ready = prepared.preparation(plain_rows(x), prepared.form_for(w), w.group)
    first.run()
    made = dispatch.multiplication(ready, w, None, None, out)
    return [replace(made[0], stages=stages), *made[1:]]


def filled(w: QuantTensor) -> QuantTensor:
    """The same weight with random values, on the GPU."""

    def numbers(t: torch.Tensor) -> torch.Tensor:
        if t.is_floating_point():
            return torch.rand(t.shape, device="cuda").to(t.dtype)
        return torch.randint(0, 100, t.shape, dtype=t.dtype, device="cuda")

    return replace(w, parts={name: numbers(t) for name, t in w.parts.items()})


def run_all(jobs: list[Launch]) -> None:
    """Run the launches one after the other."""
    for job in jobs:
        job.run()


def sweep(format: str, what: str, num_rows: int) -> Iterator[dict[str, Any]]:
    """One record per tiling of one product: microseconds, or the error if the tiling does not run."""
    w = filled(weight(format, *{**SHAPES, "lm_head": LM_HEAD}[what]))
    weights = [w, *(copied(w) for _ in range(min(15, max(1, BYTES // w.nbytes))))]
    for how, stages in cuts(w):
        found = {"format": format, "what": what, "rows": num_rows, "bytes": w.nbytes, "stages": stages}
        found |= {"outputs": how.outputs, "warps": how.warps, "split": how.split}
        try:
            jobs = [job for each in weights for job in launches(each, how, stages, num_rows)]
            seconds = statistics.median(graphed(partial(run_all, jobs), "cuda"))
            yield {**found, "us": 1e6 * seconds / len(weights)}
        except Exception as error:  # e.g. the kernel does not compile
            yield {**found, "error": str(error)[:200]}


def main() -> None:
    """Time all products, append the records, and print the fastest tiling of each product."""
    parser = argparse.ArgumentParser(description="Times of every cut of an 8B model's products on a GPU.")
    parser.add_argument("--formats", default="w4a16,bf16,fp8-a8,w4a8,w8a8")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu_sweep.jsonl")
    args = parser.parse_args()
    shared = {"schema": SCHEMA, "run": record.now(), "commit": record.commit(), "machine": record.machine()}
    for format, what in product(args.formats.split(","), (*SHAPES, "lm_head")):
        lines = list(sweep(format, what, args.rows))
        with args.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({**shared, **line}) + "\n" for line in lines)
        best = min((x for x in lines if "us" in x), key=lambda x: x["us"])
        print(f"{format} {what}: {best['us']:.1f} us, {best['outputs']} outputs, {best['warps']} warps, "
              f"{best['split']} shares, {best['stages']} stages; {len(lines)} cuts", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
