"""Products on the GPU: kernels prepare rows (rows.prepare), multiply (multiply.product) and add shares (combine)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sameseed.errors import say_once
from sameseed.ops import reference
from sameseed.ops._rows import RowSource, Then, gated_rows, normed_rows, plain_rows
from sameseed.ops.triton import multiply, packing
from sameseed.ops.triton.guard import Launch, guarded, interpreted
from sameseed.ops.triton.prepared import (
    MOST_AT_ONCE,
    Made,
    Ready,
    aligned,
    begins_early,
    capability,
    converts_fp8,
    form_for,
    preparation,
)
from sameseed.ops.triton.tiling import FEW, TILE, Way, same_bits, spread, stages, tiles, tiling, warps, way_for
from sameseed.scheme import QuantTensor

ROWS_AT_ONCE = 256  # rows per launch of a split product, to bound the memory of its shares
SUMMED = 1024  # outputs per program of `combine`


def multiplication(
    ready: Ready, w: QuantTensor, bias: Tensor | None, residual: Tensor | None, out: Tensor, way: Way | None = None
) -> list[Launch]:
    """The launches that write rows [T, K] times w [O, K] transposed, plus bias [O], plus residual, to out [T, O].

    way: larger tiles with the same bits, or None.
    """
    how, (outputs, depth), num_rows = tiling(w), w.shape, ready.values.shape[0]
    count = tiles(num_rows)
    tile = Way(TILE, how.outputs, warps(how, count), stages(how.kind, count), False, False)
    if way is not None:
        tile, count = way, 1
    parts = 1 if tile.whole else how.split
    extras = {"bias_ptr": bias, "residual_ptr": residual}
    flags = {"BIAS": bias is not None, "RESIDUAL": residual is not None, "SPLIT": how.split}
    flags["EARLY"] = begins_early(num_rows, out.device)
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
    constants, free = {**_cut(ready, w, out.device, tile), **flags, "TILES": count}, frozenset({"num_rows"})
    first = Launch(multiply.product, grid, arguments, constants, tile.warps, tile.stages, free)
    if parts == 1:
        return [first]
    arguments = {"parts_ptr": target, **extras, "out_ptr": out, "num_rows": num_rows, "outputs": outputs}
    grid, constants = (num_rows, -(-outputs // SUMMED), 1), {**flags, "BLOCK": SUMMED}
    return [first, Launch(multiply.combine, grid, arguments, constants, free=free)]


def joined(combine: Launch, then: Then, out: Tensor) -> tuple[Launch, Made] | None:
    """One launch of `combine` plus the preparation of rows [T, C] for the next product; None if rows are too wide."""
    form, group, width = form_for(then.w), then.w.group, out.shape[1]
    block = max(16, 1 << (width - 1).bit_length())
    if block > MOST_AT_ONCE:
        return None
    norm = aligned(then.norm)
    apart, ready = preparation(normed_rows(out, norm, then.eps), form, group)
    new = {"norm_ptr": norm, "values_ptr": ready.values, "scale_ptr": ready.scales}
    arguments = {**combine.arguments, **new, "eps": float(then.eps), "num_groups": apart.arguments["num_groups"]}
    constants = {**combine.constants, **{name: apart.constants[name] for name in ("FORM", "GROUP", "BLOCK")}}
    launch = Launch(multiply.combine_norm, apart.grid, arguments, constants, apart.warps, free=combine.free)
    return launch, Made(then.norm, then.eps, group, ready)


def _cut(ready: Ready, w: QuantTensor, device: torch.device, tile: Way) -> dict[str, Any]:
    """The kernel constants that depend on the weight, the form of the rows, their tiles and the device."""
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
    """The larger tiles for `num_rows` rows, if they were tested to have the bits of tiles of 16 rows on this device."""
    how = tiling(w)
    found = way_for(how, form, w.group != w.shape[1], num_rows, capability(device))
    if found is None:
        return None
    known: dict[Any, Way | None] = w.__dict__.setdefault("_shown", {})  # cached, because every launch needs it
    if (found, device) in known:
        return known[found, device]

    def compute(way: Way | None) -> Tensor:
        launch, ready = preparation(plain_rows(spread(found.tile, w.shape[1], device)), form, w.group)
        out = torch.empty(found.tile, w.shape[0], device=device)
        for each in (launch, *multiplication(ready, w, None, None, out, way)):
            each.run()
        return out

    key = (found, how, form, w.format, w.activations, w.group, w.shape, *sorted(w.parts))
    same = same_bits(key, device, lambda: compute(None), lambda: compute(found))
    if same is not None:
        known[found, device] = found if same else None
    return found if same else None


def _entered(rows: RowSource, w: QuantTensor) -> Ready:
    """The rows in the form that products with `w` need. Raises ValueError if they do not fit."""
    x, form = rows.x, form_for(w)
    if rows.width != w.shape[1] or x.dtype != torch.float32:
        raise ValueError(f"rows {tuple(x.shape)} in {x.dtype} do not fit a weight {w.shape}; they are to be float32")
    made: Made | None = getattr(x, "made", None)
    if made is not None and made.serves(rows, form, w.group):
        return made.ready
    x = aligned(x)
    if rows.kind == "plain" and form == "single" and rows.row_ids is None:
        return Ready(form, x, None)
    norm = None if rows.norm is None else aligned(rows.norm)
    launch, ready = preparation(rows._replace(x=x, norm=norm), form, w.group)
    launch.run()
    return ready


def _run(rows: RowSource, w: QuantTensor, bias: Tensor | None, residual: Tensor | None, then: Then | None) -> Tensor:
    ready = _entered(rows, w)
    out = rows.x.new_empty(ready.values.shape[0], w.shape[0])
    bias = None if bias is None else aligned(bias)
    residual = None if residual is None else aligned(residual)
    num_rows = max(1, out.shape[0])
    way = larger(ready.form, w, num_rows, out.device)
    # One launch takes all rows, or fewer rows if shares are stored in memory, to bound that memory.
    split = tiling(w).split > 1 and not (way is not None and way.whole)
    step = max(ROWS_AT_ONCE, FEW) if split else num_rows
    for start in range(0, out.shape[0], step):
        part = slice(start, start + step)
        scales = None if ready.scales is None else ready.scales[part]
        piece = Ready(ready.form, ready.values[part], scales)
        launches = multiplication(piece, w, bias, None if residual is None else residual[part], out[part], way)
        if then is not None and split and num_rows <= step and (both := joined(launches[1], then, out)) is not None:
            launches[1], out.made = both  # type: ignore[attr-defined]  # until the next product asks for it
        for launch in launches:
            launch.run()
    return out


def product(
    rows: RowSource,
    w: QuantTensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    then: Then | None = None,
) -> Tensor:
    """Rows [T, K] times w [O, K] transposed, plus bias [O], plus residual [T, O]; returns [T, O].

    then: what the result is used for next. The kernel that adds shares may prepare the rows for it at once.

    Raises ValueError if rows and weight do not fit.
    """
    return guarded(
        f"product ({w.format}{'' if w.activations is None else f', {w.activations} rows'})",
        lambda: _run(rows, w, bias, residual, then),
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


def silu_mul(gate_up: Tensor, limit: float | None = None) -> Tensor:
    """silu of the first half of gate_up [T, 2I] times the second; returns [T, I] (SwiGLU; `limit`: gpt-oss's)."""
    if limit is not None:
        say_once("no 'triton' kernel for silu_mul with a limit; using the reference (slow)")
        return reference.silu_mul(gate_up, limit)
    return guarded("silu_mul", lambda: _made(gated_rows(aligned(gate_up))), lambda: reference.silu_mul(gate_up))


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu (its tanh form) of the first half of gate_up [T, 2I] times the second; returns [T, I]."""
    return guarded("gelu_mul", lambda: _made(gated_rows(aligned(gate_up), "gelu")), lambda: reference.gelu_mul(gate_up))
