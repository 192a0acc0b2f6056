"""Rows prepared for a product on the GPU: their forms, and the launches that prepare them (rows.prepare)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from sameseed.ops._rows import RowSource
from sameseed.ops.triton import rows as row_kernels
from sameseed.ops.triton.guard import Launch, interpreted
from sameseed.scheme import QuantTensor

MOST_AT_ONCE, CHUNK = 16384, 8192  # most columns of a gated row that fit in registers; columns per chunk of wider rows
A_WARP = 256  # columns of a row per warp
EARLY = True  # use programmatic dependent launch (compute capability 9.0 and newer) ...
EARLY_ROWS = 16  # ... for passes of up to this many rows; larger passes were slower with it on an H200
_FORMS = {  # types of prepared rows, by form
    "single": torch.float32,
    "bf16": torch.bfloat16,
    "half": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float16,  # holds every value of e4m3
}


@dataclass(frozen=True)
class Ready:
    """Prepared rows: values [T, K], and scales [T, K / G] or [T], or None."""

    form: str
    values: Tensor
    scales: Tensor | None


@dataclass(frozen=True)
class Made:
    """Rows prepared together with a product's result: normed by `norm`, for weights that need this form and group."""

    norm: Tensor
    eps: float
    group: int
    ready: Ready

    def serves(self, rows: RowSource, form: str, group: int) -> bool:
        same = rows.norm is self.norm and rows.eps == self.eps and rows.row_ids is None
        return same and (form, group) == (self.ready.form, self.group)


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU; 9.0 for the interpreter."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def converts_fp8(device: torch.device) -> bool:
    """Whether the GPU converts 8-bit floats to float16 in one instruction (compute capability 8.9 and newer)."""
    return device.type == "cuda" and capability(device) >= (8, 9)


def begins_early(num_rows: int, device: torch.device) -> bool:
    """Whether kernels of a pass of `num_rows` rows use programmatic dependent launch. No bits depend on it."""
    return EARLY and num_rows <= EARLY_ROWS and not interpreted() and capability(device) >= (9, 0)


def form_for(w: QuantTensor) -> str:
    """The form of rows for products with `w`."""
    return w.activations or {"fp32": "single", "bf16": "bf16"}.get(w.format, "half")


# Relative rounding error of forms of rows: half a step of float16 (with a power-of-two scale), or of bfloat16.
_LOST = {"half": 2.0**-11, "bf16": 2.0**-8}


def product_rounding(w: QuantTensor) -> float:
    """Error from rounding rows for a product with `w`, relative to the sum of |x w|; see `Ops.rounding`."""
    return _LOST.get(form_for(w), 0.0)


def aligned(x: Tensor) -> Tensor:
    """`x` contiguous at an address that is a multiple of 16, so that kernels' loads and sums are always the same."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def preparation(rows: RowSource, form: str, group: int) -> tuple[Launch, Ready]:
    """The launch that prepares rows [T, C] (gated: [T, 2 C]) in a form, and its output."""
    (x, source, norm, eps, index), width = rows, rows.width
    num_rows = x.shape[0] if index is None else index.shape[0]
    block = max(16, 1 << (width - 1).bit_length())
    groups, scales = width // group, None
    if form == "half":
        scales = x.new_empty(num_rows)
    elif form in ("int8", "fp8"):
        scales = x.new_empty(num_rows, groups)
    ready = Ready(form, torch.empty(num_rows, width, dtype=_FORMS[form], device=x.device), scales)
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
        "CHUNK": min(block, CHUNK) if source in ("silu", "gelu") and block > MOST_AT_ONCE else block,
    }
    warps = min(16, max(1, block // A_WARP))
    launch = Launch(row_kernels.prepare, (num_rows,), arguments, constants, warps)
    return launch, ready
