"""Static check of the GPU kernels' machine code against budgets. It needs no GPU, and measures nothing.

    .venv/bin/python benchmarks/gpu_static.py [--capabilities 80,89,90,100] [--formats w4a16,fp8]

Each kernel of an 8B model is compiled for a chip, and its machine code is read: registers, spills, shared memory, the
number of instructions in the inner loop, and the instruction that multiplies.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch

from sameseed.ops import Then, gated_rows, normed_rows, plain_rows, triton as backend
from sameseed.ops.triton import dispatch, prepared, tiling, wide
from sameseed.ops.triton.guard import Launch
from sameseed.scheme import QuantScheme, QuantTensor

FORMATS = "bf16,w8a16,w8a8,fp8,fp8-a8,w4a16,w4a16-g32-asym,w4a8,w8a8n,nf4,mxfp4"
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}  # of an 8B Llama
LM_HEAD, LAYERS = (128256, 4096), 32
SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}  # most bytes of shared memory per program
SPILLS = {"w4a8, 64 rows": 64, "w4a8, 512 rows": 64, "mxfp4, 64 rows": 64}  # allowed spills in bytes; others: 0
INNER = re.compile(r"(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]*")


@dataclass(frozen=True)
class Code:
    """Facts of a kernel's machine code: registers, bytes spilled and shared, instructions of a warp's inner loop.

    `step` is 0 for a kernel without an inner loop.
    """

    registers: int
    spills: int
    shared: int
    step: int
    tensor: str  # PTX names of the tensor instructions that multiply, or ""

    def faults(self, name: str, warps: int, capability: int) -> list[str]:
        """The budgets that the kernel exceeds, in words."""
        found = []
        if self.spills > SPILLS.get(name, 0):
            found.append(f"{self.spills} bytes spilled")
        if self.registers * 32 * warps > 1 << 16:
            found.append(f"{self.registers} registers of {warps} warps")
        if self.shared > SHARED[capability]:
            found.append(f"{self.shared} bytes of shared memory")
        return found


def weight(name: str, outputs: int, depth: int) -> QuantTensor:
    """A packed weight of that size on the meta device (without data). `outputs` must be a multiple of 32."""
    small = backend.pack(QuantScheme.parse(name).encode(torch.ones(32, depth, dtype=torch.bfloat16)))
    parts = {
        part: torch.empty(t.shape[0] * outputs // 32, *t.shape[1:], dtype=t.dtype, device="meta")
        for part, t in small.parts.items()
    }
    return replace(small, shape=(outputs, depth), parts=parts)


def product(w: QuantTensor, num_rows: int, capability: int) -> list[Launch]:
    """The launches of the product of `num_rows` rows with `w`, on meta tensors."""
    outputs, depth = w.shape
    form, x = prepared.form_for(w), torch.empty(num_rows, depth, device="meta")
    ready = prepared.preparation(plain_rows(x), form, w.group)[1]
    way = wide.way(tiling.tiling(w), form, w.group != depth, num_rows, divmod(capability, 10))
    return dispatch.multiplication(ready, w, None, None, torch.empty(num_rows, outputs, device="meta"), way)


def launches(formats: list[str], capability: int) -> Iterator[tuple[str, Launch]]:
    """All kernels to check, by name: products of 1, 32, 64 and 512 rows, and preparation of rows."""
    for name in formats:
        for rows, what in (
            (1, "gate_up"),
            (32, "gate_up"),
            (64, "gate_up"),
            (512, "down"),
        ):  # down's sums are split over programs
            yield f"{name}, {rows} rows", product(weight(name, *SHAPES[what]), rows, capability)[0]
    w = weight("w4a16", *SHAPES["o"])
    combine = product(w, 1, capability)[1]
    yield "combine", combine
    x, norm = torch.empty(3, 4096, device="meta"), torch.empty(4096, device="meta")
    joined = dispatch.joined(combine, Then(norm, 1e-5, w), x[:1])
    assert joined is not None
    yield "combine, norm to half", joined[0]
    for form, group in (("half", 4096), ("bf16", 4096), ("int8", 128), ("fp8", 128)):
        yield f"norm to {form}", prepared.preparation(normed_rows(x, norm, 1e-5), form, group)[0]
        for width in (14336, 28672):
            gated = gated_rows(torch.empty(3, 2 * width, device="meta"))
            yield f"silu of {width} to {form}", prepared.preparation(gated, form, width if group > 128 else group)[0]


def _tool(name: str, *arguments: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def _inner_loop(sass: str) -> list[str]:
    """The instructions of the shortest loop that multiplies; empty if there is none."""
    listed = re.finditer(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(.+?)\s*;", sass)
    code = [(int(m[1], 16), m[2]) for m in listed]
    found = []
    for at, text in code:
        target = re.match(r"BRA\S* (?:.*\s)?`?\(?(0x[0-9a-f]+)", text)
        if target and int(target[1], 16) < at:
            body = [t for a, t in code if int(target[1], 16) <= a <= at]
            found += [body] if any("MMA" in t or t.startswith("FFMA") for t in body) else []
    return min(found, key=len, default=[])


def examine(launch: Launch, capability: int) -> Code:
    """Compile a launch for a chip and read its machine code."""
    compiled = launch.compile(capability)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = {name: int(n) for name, n in re.findall(r"(\w+):(\d+)", _tool("cuobjdump", "-res-usage", file.name))}
        loop = _inner_loop(_tool("cuobjdump", "-sass", file.name))
    tensor = Counter(INNER.findall(compiled.asm["ptx"]))
    return Code(usage["REG"], usage["STACK"], compiled.metadata.shared, len(loop), " ".join(sorted(tensor)))


def check(formats: list[str], capability: int, only: str = "") -> list[str]:
    """Print the facts of each kernel whose name matches the regex `only`; returns all exceeded budgets."""
    bad = []
    for name, launch in launches(formats, capability):
        if not re.search(only, name):
            continue
        code = examine(launch, capability)
        faults = code.faults(name, launch.warps, capability)
        bad += [f"{name}, {capability / 10}: {fault}" for fault in faults]
        said = (
            f"{code.registers:3} registers, {code.spills:3} B spilled, {code.shared:6} B shared, {launch.warps:2} warps"
        )
        said += f", {code.step:3} a step {code.tensor}{' <- ' if faults else ''}"
        print(f"{capability / 10:4} {name:24} {said}", flush=True)
    return bad


def main() -> None:
    """Check all kernels; exit with an error if a budget is exceeded."""
    parser = argparse.ArgumentParser(description="Machine code of the GPU's kernels; nothing is measured.")
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--capabilities", default="80,89,90,100")
    args = parser.parse_args()
    print(f"Triton {version('triton')}: from listings and by formula, not measurements")
    bad = [fault for c in args.capabilities.split(",") for fault in check(args.formats.split(","), int(c))]
    sys.exit("\n".join(["beyond their budgets:", *bad]) if bad else 0)


if __name__ == "__main__":
    main()
