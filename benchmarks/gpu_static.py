"""What compilers make of the GPU's products, where there is no GPU: static estimates, not measurements.

    .venv/bin/python benchmarks/gpu_static.py [--formats w4a16,fp8] [--products '8B down'] [--rows 1,64] [--out FILE]

Each kernel is compiled for a chip, and its machine code read: registers, spills, shared memory, the instructions of the
inner loop. With what the chip has that gives how many programs a multiprocessor holds, how many bytes are on their way
to it at one time (bandwidth times latency must be), and two bounds: the time to read the weight, and the time to issue
all instructions. A product is not faster than either; how much slower it is, only a clock can tell.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch

from sameseed.ops import plain_rows, triton as backend
from sameseed.ops.triton import dispatch
from sameseed.ops.triton.guard import Launch
from sameseed.scheme import QuantScheme, QuantTensor
from sameseed.study import record

SCHEMA = "sameseed.gpu_static/1"
FORMATS = "bf16,w8a16,w8a8,w8a8n,fp8,fp8-a8,w4a16,w4a16-asym,w4a16-g32,w4a8,w4a8-qoq,nf4,mxfp4"
SHAPES = {  # outputs and inputs of the products of a Llama
    "8B o": (4096, 4096),
    "8B qkv": (6144, 4096),
    "8B gate_up": (28672, 4096),
    "8B down": (4096, 14336),
    "8B lm_head": (128256, 4096),
    "1B qkv": (3072, 2048),
    "1B gate_up": (16384, 2048),
    "70B o": (8192, 8192),
    "70B gate_up": (57344, 8192),
    "70B down": (8192, 28672),
}
LATENCY = 0.8e-6  # seconds from memory, loaded
Pick = Callable[[list[tuple[int, str]]], list[str]]


@dataclass(frozen=True)
class Chip:
    """What one kind of GPU has: bytes a second of its memory, and of each multiprocessor shared memory and warps."""

    multiprocessors: int
    clock: float
    bandwidth: float
    shared: int
    warps: int = 64
    registers: int = 65536
    issues: int = 4  # a clock

    def resident(self, code: Code, warps: int) -> int:
        """Programs of so many warps that one multiprocessor holds."""
        by_registers = self.registers // (-(-code.registers // 8) * 8 * 32 * warps)
        return min(by_registers, self.shared // (code.shared + 1024), self.warps // warps)


CHIPS = {  # by compute capability: A100, L40 and H200
    80: Chip(108, 1.41e9, 1.9e12, 164 << 10),
    89: Chip(142, 2.49e9, 0.8e12, 100 << 10, warps=48),
    90: Chip(132, 1.755e9, 4.3e12, 228 << 10),
}


@dataclass(frozen=True)
class Code:
    """Machine code of a kernel: `loop` counts the instructions of one step by name, `rest` are all others."""

    registers: int
    spilled: int
    shared: int
    loop: Counter[str]
    rest: int

    @property
    def step(self) -> int:
        """Instructions of a warp in one step."""
        return sum(self.loop.values())


def weight(name: str, outputs: int, depth: int) -> QuantTensor:
    """A packed weight of that size without numbers. `outputs` is a multiple of 32."""
    small = backend.pack(QuantScheme.parse(name).encode(torch.ones(32, depth, dtype=torch.bfloat16)))
    parts = {
        part: torch.empty(t.shape[0] * outputs // 32, *t.shape[1:], dtype=t.dtype, device="meta")
        for part, t in small.parts.items()
    }
    return replace(small, shape=(outputs, depth), parts=parts)


def product(w: QuantTensor, num_rows: int) -> Launch:
    """The launch of the product of so many rows with `w`, on tensors without numbers."""
    outputs, depth = w.shape
    x = torch.empty(num_rows, depth, device="meta")
    ready = dispatch.preparation(plain_rows(x), dispatch.form_for(w), w.group)[1]
    return dispatch.multiplication(ready, w, None, None, torch.empty(num_rows, outputs, device="meta"))[0]


def _tool(name: str, *arguments: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def instructions(sass: str) -> list[tuple[int, str]]:
    """Address and text, without its predicate, of each instruction in a listing."""
    found = re.finditer(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(.+?)\s*;", sass)
    return [(int(m[1], 16), m[2]) for m in found]


def loops(code: list[tuple[int, str]]) -> Iterator[list[str]]:
    """The loops of a listing, in the order of their ends."""
    for at, text in code:
        target = re.match(r"BRA\S* (?:.*\s)?`?\(?(0x[0-9a-f]+)", text)
        if target and int(target[1], 16) < at:
            yield [t for a, t in code if int(target[1], 16) <= a <= at]


def inner_loop(code: list[tuple[int, str]]) -> list[str]:
    """The shortest loop that multiplies. Raises ValueError where none does: the kernel is not what was thought."""
    found = [body for body in loops(code) if any("MMA" in t or t.startswith("FFMA") for t in body)]
    if not found:
        raise ValueError("no loop of products was found in the machine code; read it by cuobjdump")
    return min(found, key=len)


def examine(launch: Launch, capability: int = 90, pick: Pick = inner_loop) -> Code:
    """Compile a launch for a chip and read its code. pick: the loop that counts."""
    compiled = launch.compile(capability)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        code = instructions(_tool("cuobjdump", "-sass", file.name))
        usage = {name: int(n) for name, n in re.findall(r"(\w+):(\d+)", _tool("cuobjdump", "-res-usage", file.name))}
    loop = pick(code)
    names = Counter(text.split()[0].split(".")[0] for text in loop)
    spilled = sum(text.startswith(("STL", "LDL")) for _, text in code)
    return Code(usage["REG"], spilled, compiled.metadata.shared, names, len(code) - len(loop))


@dataclass(frozen=True)
class Estimate:
    """Of one product on one chip; times in microseconds. `busy`: the share of multiprocessors' turns that are used."""

    programs: int
    resident: int
    busy: float
    in_flight: int
    needed: int
    read_us: float
    issue_us: float
    instructions_per_byte: float
    tensor_instruction: str


def estimate(launch: Launch, code: Code, chip: Chip, weight_bytes: int) -> Estimate:
    """What the chip's numbers make of a kernel's code."""
    arguments, constants, warps = launch.arguments, launch.constants, launch.warps
    programs = launch.grid[0] * launch.grid[1] * launch.grid[2]
    held = chip.resident(code, warps)
    turns = -(-programs // chip.multiprocessors)
    planes = 2 if arguments["low_ptr"] is not None else 1
    tile = constants["WIDTH"] * constants["BLOCK_O"] * arguments["w_ptr"].element_size() * planes
    steps = -(-arguments["num_steps"] // launch.grid[2])
    issued = programs * warps * (code.step * steps + code.rest)
    return Estimate(
        programs=programs,
        resident=held,
        busy=round(programs / (turns * chip.multiprocessors), 3),
        in_flight=min(held, turns) * min(launch.stages - 1, steps) * tile,
        needed=round(chip.bandwidth * LATENCY / chip.multiprocessors),
        read_us=round(1e6 * weight_bytes / chip.bandwidth, 3),
        issue_us=round(1e6 * issued / (chip.multiprocessors * chip.issues * chip.clock), 3),
        instructions_per_byte=round(code.step * warps / tile, 4),
        tensor_instruction=next((name for name in ("HGMMA", "HMMA", "IMMA", "QMMA") if code.loop[name]), "FFMA"),
    )


def main() -> None:
    """Print each estimate; append the records."""
    parser = argparse.ArgumentParser(description="Static estimates of the GPU's products; nothing is measured.")
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--products", default=",".join(SHAPES))
    parser.add_argument("--rows", default="1,32,64", help="numbers of rows: 1, 17 and 33 begin 1, 2 and 4 tiles")
    parser.add_argument("--capability", type=int, choices=CHIPS, default=90)
    parser.add_argument("--out", type=Path, help="append records to this file")
    args = parser.parse_args()
    chip = CHIPS[args.capability]
    shared = {"schema": SCHEMA, "kind": "static estimate, not a measurement", "time": record.now()}
    shared |= {"commit": record.commit(), "triton": version("triton"), "capability": args.capability}
    print("static estimates, not measurements")
    for name, what, rows in itertools.product(args.formats.split(","), args.products.split(","), args.rows.split(",")):
        w = weight(name, *SHAPES[what])
        launch = product(w, int(rows))
        code = examine(launch, args.capability)
        cut = {"outputs": launch.constants["BLOCK_O"], "split": launch.grid[2], "warps": launch.warps}
        cut |= {"stages": launch.stages, "tiles": launch.constants["TILES"]}
        line = {"format": name, "product": what, "shape": SHAPES[what], "rows": int(rows), "cut": cut}
        line |= {"code": vars(code), "estimate": asdict(estimate(launch, code, chip, w.nbytes))}
        said = {**cut, "registers": code.registers, "spills": code.spilled, **line["estimate"]}
        print(f"{name} {what}, {rows} rows: " + ", ".join(f"{key} {value}" for key, value in said.items()))
        if args.out is not None:
            with args.out.open("a") as file:
                file.write(json.dumps({**shared, "chip": asdict(chip), **line}) + "\n")


if __name__ == "__main__":
    main()
