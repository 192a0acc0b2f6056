"""Rows made ready for a product on the GPU: their forms, and the launches that make them (rows.prepare)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from sameseed.ops._rows import RowSource
from sameseed.ops.triton import rows as row_kernels
from sameseed.ops.triton.guard import Launch, interpreted
from sameseed.scheme import QuantTensor

MOST_AT_ONCE, CHUNK = 16384, 8192  # columns of a gated row that registers hold; of each part of a wider one
A_WARP = 256  # columns of a row that a warp holds
EARLY = True  # programmatic dependent launch (9.0 and newer) ...
EARLY_ROWS = 16  # ... of passes of so many rows: larger ones were slower with it on an H200
_FORMS = {  # of prepared rows: how they are stored
    "single": torch.float32,
    "bf16": torch.bfloat16,
    "half": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float16,  # holds every value of e4m3
}


@dataclass(frozen=True)
class Ready:
    """Rows for a product: values [T, K], and scales [T, K / G], [T] or none."""

    form: str
    values: Tensor
    scales: Tensor | None


@dataclass(frozen=True)
class Made:
    """What was made of a product's result at once: rows normed by `norm`, for weights of this form and group."""

    norm: Tensor
    eps: float
    group: int
    ready: Ready

    def serves(self, rows: RowSource, form: str, group: int) -> bool:
        same = rows.norm is self.norm and rows.eps == self.eps and rows.row_ids is None
        return same and (form, group) == (self.ready.form, self.group)


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """A GPU's compute capability; the interpreter's is 9.0."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


@cache
def converts_fp8(device: torch.device) -> bool:
    """Whether the GPU makes float16 of 8-bit floats by an instruction (8.9 and newer); otherwise several do."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def begins_early(num_rows: int, device: torch.device) -> bool:
    """Whether kernels of a pass of so many rows begin while those before them end. No bits depend on it."""
    return EARLY and num_rows <= EARLY_ROWS and not interpreted() and capability(device) >= (9, 0)


def form_for(w: QuantTensor) -> str:
    """The form of rows that multiply `w`."""
    return w.activations or {"fp32": "single", "bf16": "bf16"}.get(w.format, "half")


# What forms of rows round away: half a step of float16 under a power of two, of bfloat16.
_LOST = {"half": 2.0**-11, "bf16": 2.0**-8}


def product_rounding(w: QuantTensor) -> float:
    """What rows lose before they meet `w`, over the sum of |x w|: see `Ops.rounding`."""
    return _LOST.get(form_for(w), 0.0)


def aligned(x: Tensor) -> Tensor:
    """`x` contiguous and at an address that is a multiple of 16: a kernel's loads, and sums, do not vary with it."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def unwritten(x: Tensor, num_rows: int, width: int, form: str, group: int) -> Ready:
    """Room for so many rows beside x."""
    scales = None
    if form == "half":
        scales = x.new_empty(num_rows)
    elif form in ("int8", "fp8"):
        scales = x.new_empty(num_rows, width // group)
    return Ready(form, torch.empty(num_rows, width, dtype=_FORMS[form], device=x.device), scales)


def preparation(rows: RowSource, form: str, group: int) -> tuple[Launch, Ready]:
    """Rows [T, C] ("silu": [T, 2 C]) in a form: the launch, and where it writes."""
    x, source, norm, eps, index = rows
    width = x.shape[1] // 2 if source == "silu" else x.shape[1]
    num_rows = x.shape[0] if index is None else index.shape[0]
    block = max(16, 1 << (width - 1).bit_length())
    groups, ready = width // group, unwritten(x, num_rows, width, form, group)
    arguments = {
        "x_ptr": x,
        "index_ptr": index,
        "norm_ptr": norm,
        "out_ptr": ready.values,
        "scale_ptr": ready.scales,
        "width": width,
        "eps": float(eps),
        "num_groups": groups,
    }
    constants = {
        "SOURCE": source,
        "FORM": form,
        "GATHER": index is not None,
        "GROUP": block if groups == 1 else group,
        "BLOCK": block,
        "EARLY": begins_early(num_rows, x.device),
        "CHUNK": min(block, CHUNK) if source == "silu" and block > MOST_AT_ONCE else block,
    }
    warps = min(16, max(1, block // A_WARP))
    launch = Launch(row_kernels.prepare, (num_rows,), arguments, constants, warps)
    return launch, ready
