"""The interpreter that the other cases run in, which is sped up, computes what Triton's own computes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="of the interpreter")


@triton.jit
def _shifted(x, by: tl.constexpr):
    return (x + by) * 3 - x // 2


@triton.jit
def everything(x_ptr, n_ptr, out_ptr, whole_ptr, size, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Values of several types and shapes, which the interpreter converts and makes equally large."""
    row, col = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    at = row[:, None] * COLS + col[None, :]
    inside = (row < size)[:, None] & (col >= 0)
    x = tl.load(x_ptr + at, mask=inside, other=-1.0)
    n = tl.load(n_ptr + at, mask=inside, other=7)
    half, wide = x.to(tl.float16), n.to(tl.int64)
    y = (half / (half + 2)).to(tl.float32) + half * 0.1 + x * (n % 7)  # halves are divided as float32
    y += tl.sum(x, axis=1)[:, None] - tl.max(x, axis=0)
    y = tl.where((n % 3 == 0) | (x > y), y, _shifted(n, 5))
    few = (n % 4).to(tl.float16)  # their sums are exact in any order
    y += tl.sum(tl.dot(few, tl.trans(few)), axis=1)[:, None] / 3
    n = n * 0x01000193 ^ (n >> 3)  # overflows
    wide = wide * 0x100000001B3 + n.to(tl.uint32) + size
    tl.store(out_ptr + at, y, mask=inside)
    tl.store(whole_ptr + at, wide + (n.to(tl.int8) & 15) + (x > 0), mask=inside)


def values() -> list[list[float]]:
    torch.set_default_device("cpu")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 16, generator=generator)
    n = torch.randint(-(2**31), 2**31 - 1, (40, 16), generator=generator, dtype=torch.int64).to(torch.int32)
    out, whole = torch.zeros(40, 16), torch.zeros(40, 16, dtype=torch.int64)
    everything[(3,)](x, n, out, whole, 37, 16, 16)
    return [out.view(torch.int32).flatten().tolist(), whole.flatten().tolist()]


def test_values_are_those_of_triton_s_own_interpreter():
    import sameseed.ops.triton  # noqa: F401  speeds it up

    found = values()
    assert len(set(found[0])) > 500 and len(set(found[1])) > 500 and not any(found[0][37 * 16 :])
    # numpy warns of overflows
    made = subprocess.run([sys.executable, "-W", "ignore", __file__], capture_output=True, text=True, check=True)
    assert made.stdout == f"{found}\n"


if __name__ == "__main__":
    print(values())
