"""What the machine code of attention says where there is no GPU: estimates, not measurements.

    .venv/bin/python benchmarks/gpu_static_attention.py [--shapes llama-3.1-8b] [--formats bf16,int8] [--out FILE.jsonl]

Kernels are compiled for true shapes by the assembler that Triton brings, and read by its disassembler: registers,
memory, and the instructions of the loop over blocks of keys. A case (rows, context, sequences) is then a number of
programs and of blocks, and two bounds: the cache's bytes at the bandwidth of an H200's copy, and the loop's
instructions at one a clock from each of a multiprocessor's four schedulers. Neither knows latency: the truth is above.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence as Seq
from pathlib import Path
from typing import Any

import torch
import triton
from gpu_static import CHIPS, SCHEMA, Chip, Code, examine, loops

from sameseed import scheme
from sameseed.batch import Batch
from sameseed.ops.triton.guard import Launch
from sameseed.scheme import KVLayer
from sameseed.study import record
from sameseed.study.shapes import get_shape

attention = importlib.import_module("sameseed.ops.triton.attention")  # it shares its name with the op
OUT = Path(__file__).parent / "results" / "gpu_static_attention.jsonl"
FORMATS = ("bf16", "fp16", "fp32", "int8", "fp8_e4m3")
TAKEN = ("span", "stretch", "all")
PAGE = 16
Case = tuple[int, int, int]  # rows of each sequence, context, sequences
CASES: list[Case] = [(1, context, 1) for context in (512, 2048, 8192, 32768)]
CASES += [(rows, 4096, 1) for rows in (4, 8, 16)] + [(1, 2048, count) for count in (4, 16, 64)] + [(2048, 2048, 1)]
KINDS = ("HMMA", "LDGSTS", "BAR", "LDL", "STL", "FFMA")  # instructions that a record counts


def shared_loop(code: list[tuple[int, str]]) -> list[str]:
    """The first loop that multiplies matrices: the one over blocks that rows of a tile share."""
    for body in loops(code):
        names = Counter(text.split()[0].split(".")[0] for text in body)
        if names["HMMA"] >= 16 or names["FFMA"] + names["FMUL"] >= 256:
            return body
    return []


def launches(shape: str, name: str, case: Case, taken: str | None = None) -> list[Launch]:
    """Attention's launches at a shape, cache format and case, on tensors without memory."""
    config, (rows, context, count) = get_shape(shape), case
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    fmt, pages = scheme.kv_format(name), -(-context // PAGE)

    def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    def ints(*sizes: int) -> torch.Tensor:
        return empty(*sizes, dtype=torch.int32)

    assert fmt.kv_dtype is not None
    codes = empty(count * pages, PAGE, kv_heads, dim, dtype=fmt.kv_dtype)
    scales = empty(count * pages, PAGE, kv_heads) if name in attention.LARGEST else None
    total = rows * count
    batch = Batch(
        *(ints(n) for n in (total, total, total, count + 1, count, count)), ints(count, pages), None, ints(total)
    )
    q = empty(total, heads, dim)
    layer = KVLayer(name, codes, codes, scales, scales)
    found: list[Launch] = attention.launches(q, layer, batch, dim**-0.5, None, torch.empty_like(q), taken)
    return found


def estimate(shape: str, name: str, case: Case, codes: dict[str, Code], chip: Chip) -> dict[str, object]:
    """A case's programs, and the two bounds of its time."""
    config, (rows, context, count) = get_shape(shape), case
    launch = launches(shape, name, case)[0]
    taken, heads = str(launch.constants["WALK"]), int(launch.constants["HEADS"])
    code, keys = codes[taken], int(launch.constants["KEYS"])
    tiles = count * -(-rows // (16 // heads)) * launch.grid[1]  # without the empty ones at ends of sequences
    blocks = -(-context // keys)
    if rows == context:
        blocks = -(-blocks // 2)  # a prompt: half of them on average
    width = scheme.kv_format(name).encode_kv(torch.zeros(1, 1, config.head_dim))
    row_bytes = 2 * sum(x.numel() * x.element_size() for x in width if x is not None)
    programs, block_bytes = tiles * launch.grid[2], keys * row_bytes
    held, units = chip.resident(code, launch.warps), chip.multiprocessors
    issued = tiles * blocks * code.step * launch.warps
    return {
        "rows": rows,
        "context": context,
        "sequences": count,
        "taken": taken,
        "programs": programs,
        "waves": round(programs / (units * held), 2),
        "in_flight_bytes": block_bytes * min(held, -(-programs // units)),
        "instructions_per_kv_byte": round(code.step * launch.warps / block_bytes, 4),
        "bandwidth_us": round(1e6 * count * context * config.num_kv_heads * row_bytes / chip.bandwidth, 2),
        "issue_us": round(1e6 * issued / (chip.issues * chip.clock * min(units, programs)), 2),
    }


def rows_of(shapes: Seq[str], formats: Seq[str], capability: int = 90) -> Iterator[dict[str, Any]]:
    """For each shape and format what its kernels are made of, and each case's estimate; seconds each."""
    for shape in shapes:
        for name in formats:
            made = {taken: launches(shape, name, (1, 4096, 1), taken)[0] for taken in TAKEN}
            codes = {taken: examine(launch, capability, shared_loop) for taken, launch in made.items()}
            told = {
                taken: {
                    "registers": code.registers,
                    "spills": code.spilled,
                    "shared_bytes": code.shared,
                    "warps": made[taken].warps,
                    "resident": CHIPS[capability].resident(code, made[taken].warps),
                    "loop_instructions": code.step,
                    **{kind.lower(): code.loop[kind] for kind in KINDS},
                }
                for taken, code in codes.items()
            }
            yield {
                "kernel": "attention",
                "shape": shape,
                "kv_format": name,
                "capability": capability,
                "code": told,
                "cases": [estimate(shape, name, case, codes, CHIPS[capability]) for case in CASES],
            }


def table(line: dict[str, Any]) -> Iterator[str]:
    """A record for people."""
    yield f"{line['shape']}, cache in {line['kv_format']}, compute capability {line['capability'] / 10}"
    for taken, code in line["code"].items():
        yield f"  {taken:8} " + ", ".join(f"{value} {name}" for name, value in code.items() if value)
    yield "  rows context seqs  taken    programs waves  in flight  KV at bandwidth  instructions"
    for case in line["cases"]:
        who = f"{case['rows']:4} {case['context']:7} {case['sequences']:4}  {case['taken']:8} {case['programs']:8}"
        flying = f"{case['waves']:5} {case['in_flight_bytes'] >> 10:7} KiB"
        yield f"  {who} {flying} {case['bandwidth_us']:13} us {case['issue_us']:10} us"


def main() -> None:
    """Compile, print, and append records."""
    parser = argparse.ArgumentParser(description="Static estimates of attention's kernels; nothing runs on a GPU.")
    parser.add_argument("--shapes", default="llama-3.1-8b,llama-3.2-1b,llama-3.1-70b")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    shared = {"schema": SCHEMA, "run": record.now(), "measured": False, "triton": triton.__version__}
    for line in rows_of(given.shapes.split(","), given.formats.split(","), given.capability):
        print("\n".join(table(line)), flush=True)
        with given.out.open("a") as file:
            file.write(json.dumps({**shared, "time": record.now(), "commit": record.commit(), **line}) + "\n")


if __name__ == "__main__":
    main()
