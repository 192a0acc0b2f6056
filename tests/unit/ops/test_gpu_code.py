"""The machine code of the GPU's products: the compiled kernels keep the properties that they were tuned for."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: nothing is compiled")
import triton

from sameseed.ops import plain_rows, triton as backend
from sameseed.ops.triton import dispatch, guard
from sameseed.scheme import QuantScheme

pytestmark = [pytest.mark.triton, pytest.mark.skipif(guard.interpreted(), reason="the interpreter compiles nothing")]


def product(name, outputs, depth, num_rows):
    """The launch of a product with a packed weight, on meta tensors. `outputs` is a multiple of 32."""
    small = backend.pack(QuantScheme.parse(name).encode(torch.ones(32, depth, dtype=torch.bfloat16)))
    parts = {
        part: torch.empty(t.shape[0] * outputs // 32, *t.shape[1:], dtype=t.dtype, device="meta")
        for part, t in small.parts.items()
    }
    w = replace(small, shape=(outputs, depth), parts=parts)
    x = torch.empty(num_rows, depth, device="meta")
    ready = dispatch.preparation(plain_rows(x), dispatch.form_for(w), w.group)[1]
    return dispatch.multiplication(ready, w, None, None, torch.empty(num_rows, outputs, device="meta"))[0]


def listing(cubin):
    """Address and text of each instruction, without its predicate."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    sass = subprocess.run([tool, "-sass", cubin], capture_output=True, text=True, check=True).stdout
    found = re.finditer(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(.+?)\s*;", sass)
    return [(int(m[1], 16), m[2]) for m in found]


def inner_loop(code):
    """The instructions of the shortest loop with a multiplication."""
    targets = ((at, re.match(r"BRA\S* (?:.*\s)?`?\(?(0x[0-9a-f]+)", text)) for at, text in code)
    back = [(int(target[1], 16), at) for at, target in targets if target and int(target[1], 16) < at]
    loops = ([t for a, t in code if first <= a <= last] for first, last in back)
    return min((body for body in loops if any("MMA" in t or t.startswith("FFMA") for t in body)), key=len)


@pytest.mark.parametrize(
    ("name", "num_rows", "tensor", "least"),
    [("w4a16", 1, "HMMA", 0.16), ("w4a16", 64, "HMMA", 0.3), ("w4a8", 1, "IMMA", 0.17), ("fp8", 32, "HMMA", 0.12)],
)
def test_products_spill_nothing_and_wait_for_no_conversion(name, num_rows, tensor, least, tmp_path, monkeypatch):
    """`least`: the most instructions per byte of weight; without inline PTX there were 0.35 to 0.6."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launch = product(name, 28672, 4096, num_rows)
    compiled = launch.compile(90)
    (tmp_path / "cubin").write_bytes(compiled.asm["cubin"])
    code = listing(tmp_path / "cubin")
    assert not any(text.startswith(("STL", "LDL")) for _, text in code)
    assert compiled.metadata.shared <= 99 << 10  # the shared memory of a program on an L40
    loop = Counter(text.split()[0].split(".")[0] for text in inner_loop(code))
    assert loop["LDGSTS"] and not loop["I2F"] and loop["STS"] <= 2  # copies run ahead; at most scales are shuffled
    assert loop[tensor]
    planes = 2 if launch.arguments["low_ptr"] is not None else 1
    step = launch.constants["WIDTH"] * launch.constants["BLOCK_O"] * launch.arguments["w_ptr"].element_size() * planes
    assert loop.total() * launch.warps / step <= least
