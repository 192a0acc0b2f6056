"""Products on the GPU: rows are made ready (rows.prepare), multiplied (multiply.product), parts added (combine)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sameseed.ops import reference
from sameseed.ops._rows import RowSource, gated_rows, normed_rows, plain_rows
from sameseed.ops.triton import multiply, packing, rows as row_kernels, wide
from sameseed.ops.triton.guard import Launch, guarded, interpreted
from sameseed.ops.triton.tiling import MAX_TILES, TILE, stages, tiles, tiling
from sameseed.ops.triton.wide import Way
from sameseed.scheme import QuantTensor

ROWS_AT_ONCE = 256  # of a split product: bounds the memory of its parts
MOST_AT_ONCE, CHUNK = 16384, 8192  # columns of a gated row that registers hold; of each part of a wider one
EARLY = False  # programmatic dependent launch (9.0 and newer): off until a GPU has shown its laws and its times
SUMMED = 1024  # outputs whose shares one program adds
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


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """A GPU's compute capability; the interpreter's is 9.0."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


@cache
def converts_fp8(device: torch.device) -> bool:
    """Whether the GPU makes float16 of 8-bit floats by an instruction (8.9 and newer); otherwise several do."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def begins_early(device: torch.device) -> bool:
    """Whether kernels begin while those before them end."""
    return EARLY and not interpreted() and capability(device) >= (9, 0)


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


def preparation(rows: RowSource, form: str, group: int) -> tuple[Launch, Ready]:
    """Rows [T, C] ("silu": [T, 2 C]) in a form: the launch, and where it writes."""
    x, source, norm, eps, index = rows
    width = x.shape[1] // 2 if source == "silu" else x.shape[1]
    num_rows = x.shape[0] if index is None else index.shape[0]
    block = max(16, 1 << (width - 1).bit_length())
    groups, scales = width // group, None
    if form == "half":
        scales = x.new_empty(num_rows)
    elif form in ("int8", "fp8"):
        scales = x.new_empty(num_rows, groups)
    values = torch.empty(num_rows, width, dtype=_FORMS[form], device=x.device)
    arguments = {
        "x_ptr": x,
        "index_ptr": index,
        "norm_ptr": norm,
        "out_ptr": values,
        "scale_ptr": scales,
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
        "EARLY": begins_early(x.device),
        "CHUNK": min(block, CHUNK) if source == "silu" and block > MOST_AT_ONCE else block,
    }
    warps = min(16, max(1, block // 512))
    launch = Launch(row_kernels.prepare, (num_rows,), arguments, constants, warps)
    return launch, Ready(form, values, scales)


def multiplication(
    ready: Ready, w: QuantTensor, bias: Tensor | None, residual: Tensor | None, out: Tensor, way: Way | None = None
) -> list[Launch]:
    """The launches that write rows [T, K] times w [O, K] transposed, plus bias [O], plus residual, to out [T, O].

    way: larger tiles, which keep the bits.
    """
    how, (outputs, depth), num_rows = tiling(w), w.shape, ready.values.shape[0]
    count = tiles(num_rows)
    tile = Way(TILE, how.outputs, how.warps, stages(count), False, False)
    if way is not None:
        tile, count = way, 1
    parts = 1 if tile.whole else how.split
    extras = {"bias_ptr": bias, "residual_ptr": residual}
    flags = {"BIAS": bias is not None, "RESIDUAL": residual is not None, "SPLIT": how.split}
    target = out if parts == 1 else out.new_empty(parts, num_rows, outputs)
    grid = (-(-num_rows // (count * tile.tile)), -(-outputs // tile.outputs), parts)
    arguments = {
        "x_ptr": ready.values,
        "row_scale_ptr": ready.scales,
        "w_ptr": next(w.parts[name] for name in packing.PLANES if name in w.parts),
        "low_ptr": w.parts.get("low"),
        "scale_ptr": w.parts.get("scales"),
        "zero_ptr": w.parts.get("zeros"),
        **extras,
        "out_ptr": target,
        "num_rows": num_rows,
        "depth": depth,
        "outputs": outputs,
        "num_groups": depth // w.group,
        "num_steps": how.steps,
    }
    constants = {**_cut(ready, w, out.device, tile), **flags, "TILES": count, "EARLY": begins_early(out.device)}
    free = frozenset({"num_rows"})
    first = Launch(multiply.product, grid, arguments, constants, tile.warps, tile.stages, free)
    if parts == 1:
        return [first]
    arguments = {"parts_ptr": target, **extras, "out_ptr": out, "num_rows": num_rows, "outputs": outputs}
    grid, constants = (num_rows, -(-outputs // SUMMED), 1), {**flags, "BLOCK": SUMMED, "EARLY": constants["EARLY"]}
    return [first, Launch(multiply.combine, grid, arguments, constants, free=free)]


def _cut(ready: Ready, w: QuantTensor, device: torch.device, tile: Way) -> dict[str, Any]:
    """What a weight, the form of rows, their tiles and the device decide of a product's kernel."""
    how, depth = tiling(w), w.shape[1]
    return {
        "WEIGHT": how.kind,
        "ROWS": ready.form,
        "GROUPED": w.group != depth,
        "WIDTH": how.width,
        "PARTS": how.parts,
        "SPAN": min(how.parts, w.group // how.width),
        "EVEN_K": depth == how.steps * how.parts * how.width,
        "EVEN_O": w.shape[0] % tile.outputs == 0,
        "BLOCK_O": tile.outputs,
        "TILE": tile.tile,
        "WHOLE": tile.whole,
        "LEFT": tile.left,
        "MACHINE": not interpreted(),
        "FLOAT8": converts_fp8(device),
        "WIDEN": interpreted() and ready.form == "bf16",
    }


def larger(form: str, w: QuantTensor, num_rows: int, device: torch.device) -> Way | None:
    """The larger tiles of so many rows, where the device has shown that they keep the bits of tiles of 16."""
    how = tiling(w)
    found = wide.way(how, form, w.group != w.shape[1], num_rows, capability(device))
    if found is None:
        return None

    def compute(way: Way | None) -> Tensor:
        launch, ready = preparation(plain_rows(wide.spread(found.tile, w.shape[1], device)), form, w.group)
        out = torch.empty(found.tile, w.shape[0], device=device)
        for each in (launch, *multiplication(ready, w, None, None, out, way)):
            each.run()
        return out

    key = (found, how, form, w.format, w.activations, w.group, w.shape, *sorted(w.parts))
    return found if wide.same_bits(key, device, lambda: compute(None), lambda: compute(found)) else None


def _run(rows: RowSource, w: QuantTensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    x = rows.x
    width = x.shape[1] // 2 if rows.kind == "silu" else x.shape[1]
    if width != w.shape[1] or x.dtype != torch.float32:
        raise ValueError(f"rows {tuple(x.shape)} in {x.dtype} do not fit a weight {w.shape}; they are to be float32")
    x, form = aligned(x), form_for(w)
    if rows.kind == "plain" and form == "single" and rows.row_ids is None:
        ready = Ready(form, x, None)
    else:
        norm = None if rows.norm is None else aligned(rows.norm)
        launch, ready = preparation(rows._replace(x=x, norm=norm), form, w.group)
        launch.run()
    out = x.new_empty(ready.values.shape[0], w.shape[0])
    bias = None if bias is None else aligned(bias)
    residual = None if residual is None else aligned(residual)
    num_rows = max(1, out.shape[0])
    way = larger(form, w, num_rows, x.device)
    # Of each launch: all rows; where shares lie in memory some, to bound it.
    split = tiling(w).split > 1 and not (way is not None and way.whole)
    step = max(ROWS_AT_ONCE, MAX_TILES * TILE) if split else num_rows
    for start in range(0, out.shape[0], step):
        part = slice(start, start + step)
        scales = None if ready.scales is None else ready.scales[part]
        piece = Ready(form, ready.values[part], scales)
        for launch in multiplication(piece, w, bias, None if residual is None else residual[part], out[part], way):
            launch.run()
    return out


def product(rows: RowSource, w: QuantTensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """Rows [T, K] times w [O, K] transposed, plus bias [O], plus residual [T, O]; returns [T, O].

    Raises ValueError where they do not fit.
    """
    return guarded(
        f"product ({w.format}{'' if w.activations is None else f', {w.activations} rows'})",
        lambda: _run(rows, w, bias, residual),
        lambda: reference.product(rows, packing.unpack(w), bias, residual),
    )


def _made(rows: RowSource) -> Tensor:
    launch, ready = preparation(rows, "single", 1)
    launch.run()
    return ready.values


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, C] divided by its root mean square over C, times weight [C] (Zhang and Sennrich, 2019)."""
    return guarded(
        "rms_norm",
        lambda: _made(normed_rows(aligned(x), aligned(weight), eps)),
        lambda: reference.rms_norm(x, weight, eps),
    )


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu of the first half of gate_up [T, 2I] times the second; returns [T, I] (SwiGLU: Shazeer, 2020)."""
    return guarded("silu_mul", lambda: _made(gated_rows(aligned(gate_up))), lambda: reference.silu_mul(gate_up))


def rotation(x: Tensor, positions: Tensor, table: Tensor) -> tuple[Launch, Tensor]:
    """The launch of rope, and where it writes."""
    num_rows, heads, dim = x.shape
    out = torch.empty(num_rows, heads, dim, dtype=torch.float32, device=x.device)
    arguments = {
        "x_ptr": x,
        "positions_ptr": positions,
        "table_ptr": table,
        "out_ptr": out,
        "row_stride": x.stride(0),
        "num_heads": heads,
    }
    half = dim // 2
    block = max(16, 1 << (half - 1).bit_length())
    return Launch(row_kernels.rotate, (num_rows, heads), arguments, {"HALF": half, "BLOCK": block}, 1), out


def rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Rotate x [T, H, D] by position (Su et al., 2021). table [P, D]: cosines, then sines.

    Positions beyond the table are not looked for here: a batch bounds them.
    """

    def kernel() -> Tensor:
        packed = x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
        launch, out = rotation(packed, positions, table.contiguous())
        launch.run()
        return out

    return guarded("rope", kernel, lambda: reference.rope(x, positions, table))
