"""What the formats with codes and scales share: groups along K, rows, and compressed-tensors' configuration.

Parts: "codes" [O, K], "scales" [O, K / G], and where there are zero points "zeros" [O, K / G].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sameseed.errors import ConfigError
from sameseed.scheme import SMALLEST, Format, QuantArgs, QuantTensor, own_args, plain


def grouped(x: Tensor, group: int | None) -> Tensor:
    """x [O, K] as float32 [O, K / G, G]. Raises ConfigError if the group does not divide K."""
    width = x.shape[1]
    if group is not None and (group < 1 or width % group):
        raise ConfigError(f"groups of {group} do not divide rows of {width} values; choose one that does, or none")
    return x.float().view(x.shape[0], -1, group or width)


def bf16_scales(size: Tensor, steps: float) -> Tensor:
    """Scales bfloat16 of groups: size / steps; 0 below 2^-100, NaN where the size is no number."""
    scales = torch.where(size >= SMALLEST, size / steps, 0.0)
    return torch.where(size.isfinite(), scales, torch.nan).to(torch.bfloat16)


def divided(x: Tensor, scales: Tensor) -> Tensor:
    """x [O, K / G, G] over scales [O, K / G], fresh memory; 0 where the scale is 0 or NaN."""
    steps = torch.where(scales > 0, scales.float(), torch.inf)  # x / inf = 0
    out = x / steps[..., None]
    return out.masked_fill_(scales.isnan()[..., None], 0.0) if scales.isnan().any() else out


PACKED = (1, 2, 4)  # bits of codes, uint8, that checkpoints pack
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Coded(Format):
    """A format for weights; `values` is what its codes mean. Subclasses that serve the cache define more."""

    def bits_per_weight(self, width: int, args: QuantArgs) -> float:
        """Codes, scales (bfloat16 where the format knows groups) and bytes of zero points."""
        scale = 16 if args.group or self.groups else 32
        return self.bits + (scale + (0 if args.symmetric else 8)) / (args.group or width)

    def encode(self, weight: Tensor, args: QuantArgs | None = None) -> QuantTensor:
        """Store weight [O, K], rounded to nearest. Raises ConfigError if the group does not divide K."""
        return self._encode(weight, own_args(self.groups, weight.shape[1]) if args is None else args)

    def _encode(self, weight: Tensor, args: QuantArgs) -> QuantTensor:
        raise NotImplementedError

    def values(self, codes: Tensor, zeros: Tensor | None) -> Tensor:
        """Codes [O, K / G, G] as float32 before scaling; zeros [O, K / G, 1]."""
        raise NotImplementedError

    def decode(self, q: QuantTensor) -> Tensor:
        """The stored values, float32 [O, K]: each one product of float32."""
        codes, scales, zeros = (plain(q).parts.get(p) for p in ("codes", "scales", "zeros"))
        assert codes is not None and scales is not None
        codes = codes.view(*scales.shape, q.group)
        return (self.values(codes, None if zeros is None else zeros[..., None]) * scales.float()[..., None]).flatten(1)

    def stored(self, codes: Tensor, scales: Tensor, zeros: Tensor | None = None) -> QuantTensor:
        """A weight of codes [O, K] (or in groups), scales [O, K / G] and zero points."""
        codes = codes.flatten(1).contiguous()
        parts = {"codes": codes, "scales": scales.contiguous()} | ({} if zeros is None else {"zeros": zeros})
        return QuantTensor(self.name, (codes.shape[0], codes.shape[1]), parts)

    def checkpoint(self, name: str, q: QuantTensor) -> dict[str, Tensor]:
        """A layout of ours: codes of less than a byte are packed, scales and zero points are as they are."""
        parts = plain(q).parts
        codes = parts["codes"]
        tensors = {
            f"{name}.weight_packed": packed_bytes(codes, self.bits) if self.bits in PACKED else codes,
            f"{name}.weight_scale": parts["scales"],
            f"{name}.weight_shape": torch.tensor(q.shape, dtype=torch.int64),
        }
        return tensors | ({f"{name}.weight_zero_point": parts["zeros"]} if "zeros" in parts else {})

    def from_checkpoint(self, name: str, tensors: Mapping[str, Tensor]) -> QuantTensor:
        """Raises ConfigError where the tensors do not fit each other."""
        height, width = shape_part(name, tensors)
        bits = self.bits if self.bits in PACKED else 8
        types = (torch.uint8,) if bits < 8 else (torch.uint8, torch.int8)
        codes = fitting(name, "weight_packed", tensors, types, height, -(-width * bits // 8))
        scales, zeros = scales_part(name, tensors, height, width), None
        if f"{name}.weight_zero_point" in tensors:
            zeros = fitting(name, "weight_zero_point", tensors, (torch.uint8,), *scales.shape)
        return self.stored(codes if bits == 8 else unpacked_bytes(codes, bits)[:, :width], scales, zeros)

    def config(self, q: QuantTensor) -> dict[str, object]:
        """Marked as ours: no other engine reads it."""
        return compressed_tensors(self.name, q, self.bits, "int", "sameseed")


def part(name: str, kind: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """Tensor `kind` of layer `name`. Raises ConfigError if the checkpoint has none."""
    found = tensors.get(f"{name}.{kind}")
    if found is None:
        raise ConfigError(f"the checkpoint has no tensor {name}.{kind}; it is stored otherwise than its format says")
    return found


def shape_part(name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """O and K of layer `name`, from its weight_shape. Raises ConfigError unless these are two sizes."""
    found = part(name, "weight_shape", tensors)
    if found.numel() != 2 or found.dtype.is_floating_point or (found < 1).any():
        raise ConfigError(f"tensor {name}.weight_shape holds {found.flatten()[:4].tolist()}, no height and width")
    height, width = (int(n) for n in found.flatten())
    return height, width


def fitting(
    name: str, kind: str, tensors: Mapping[str, Tensor], dtypes: tuple[torch.dtype, ...], *shape: int
) -> Tensor:
    """Tensor `kind` of layer `name`, of these types and this shape (-1: any size but 0).

    Raises ConfigError otherwise: what a file says of itself may be false.
    """
    found = part(name, kind, tensors)
    as_wanted = found.dim() == len(shape) and all(n in (-1, m) for n, m in zip(shape, found.shape, strict=True))
    if not as_wanted or found.dtype not in dtypes or 0 in found.shape:
        wanted = (
            f"{[n if n >= 0 else '...' for n in shape]} in {' or '.join(str(d).removeprefix('torch.') for d in dtypes)}"
        )
        raise ConfigError(
            f"tensor {name}.{kind} is {list(found.shape)} in {str(found.dtype).removeprefix('torch.')}, not {wanted}; "
            "the file is damaged, or of another layout"
        )
    return found


def scales_part(name: str, tensors: Mapping[str, Tensor], height: int, width: int) -> Tensor:
    """weight_scale [O, K / G] of layer `name`; [O] counts as [O, 1]. Raises ConfigError where it does not fit."""
    found = part(name, "weight_scale", tensors)
    scales = found[:, None] if found.dim() == 1 else found
    scales = fitting(name, "weight_scale", {f"{name}.weight_scale": scales}, FLOATS, height, -1)
    if width % scales.shape[1]:
        raise ConfigError(
            f"tensor {name}.weight_scale has {scales.shape[1]} groups, which do not divide {width} columns"
        )
    return scales


def packed_bytes(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [O, K] of 1, 2 or 4 bits as bytes uint8 [O, ceil(K * bits / 8)], the first in the lowest bits."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % (8 // bits)))
    places = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    packed: Tensor = (padded.view(len(codes), -1, 8 // bits) << places).sum(-1, dtype=torch.uint8)
    return packed


def unpacked_bytes(packed: Tensor, bits: int) -> Tensor:
    """The inverse: codes uint8 [O, 8 / bits * W] of bytes [O, W]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & (1 << bits) - 1).flatten(1)


def compressed_tensors(
    layout: str, q: QuantTensor, bits: int, kind: str, method: str = "compressed-tensors", **more: object
) -> dict[str, object]:
    """`quantization_config` of a compressed-tensors checkpoint (0.20) whose linear layers are stored like `q`.

    `more`: further keys for the weights, e.g. a strategy other than by channel or group. `method` "sameseed": a layout
    that only we read.
    """
    channel = q.group == q.shape[1]
    weights: dict[str, object] = {
        "num_bits": bits,
        "type": kind,
        "symmetric": "zeros" not in q.parts,
        "strategy": "channel" if channel else "group",
        "dynamic": False,
    }
    if not channel:
        weights["group_size"] = q.group
    weights |= more
    inputs: dict[str, object] = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
    inputs["type"] = "float" if q.activations == "fp8" else "int"
    if weights["strategy"] == "block":
        weights.pop("group_size", None)
        inputs |= {"strategy": "group", "group_size": 128}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None if q.activations is None else inputs,
        "output_activations": None,
        "format": layout,
    }
    return {
        "quant_method": method,
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
    }
