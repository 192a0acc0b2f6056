"""What the formats with codes and scales share: groups along K, rows, and compressed-tensors' configuration.

Parts: "codes" [O, K], "scales" [O, K / G], and where there are zero points "zeros" [O, K / G].
"""

from __future__ import annotations

import torch
from torch import Tensor

from sameseed.errors import ConfigError
from sameseed.scheme import SMALLEST, Format, QuantArgs, QuantTensor, over, own_args, plain


def grouped(x: Tensor, group: int | None) -> Tensor:
    """x [O, K] as float32 [O, K / G, G]. Raises ConfigError if the group does not divide K."""
    width = x.shape[1]
    if group is not None and (group < 1 or width % group):
        raise ConfigError(f"groups of {group} do not divide rows of {width} values; choose one that does, or none")
    return x.float().view(x.shape[0], -1, group or width)


def bf16_scales(size: Tensor, steps: float) -> Tensor:
    """Scales bfloat16 of groups: size / steps; 0 below 2^-100, NaN where the size is no number."""
    scales = torch.where(size >= SMALLEST, over(size, steps), 0.0)
    return torch.where(size.isfinite(), scales, torch.nan).to(torch.bfloat16)


def divided(x: Tensor, scales: Tensor) -> Tensor:
    """x [O, K / G, G] over scales [O, K / G], fresh memory; 0 where the scale is 0 or NaN."""
    steps = torch.where(scales > 0, scales.float(), torch.inf)  # x / inf = 0
    out = x / steps[..., None]
    return out.masked_fill_(scales.isnan()[..., None], 0.0) if scales.isnan().any() else out


PACKED = (1, 2, 4)  # bits of codes, uint8, that checkpoints pack


class Coded(Format):
    """A format for weights; `values` is what its codes mean. Subclasses that serve the cache define more."""

    def bits_per_weight(self, width: int, args: QuantArgs) -> float:
        """Codes, scales (bfloat16 where the format knows groups) and bytes of zero points."""
        scale = 16 if args.group or self.groups else 32
        return self.bits + (scale + (0 if args.symmetric else 8)) / (args.group or width)

    def encode(self, weight: Tensor, args: QuantArgs | None = None) -> QuantTensor:
        return self._encode(weight, own_args(self.groups, weight.shape[1]) if args is None else args)

    def _encode(self, weight: Tensor, args: QuantArgs) -> QuantTensor:
        raise NotImplementedError

    def values(self, codes: Tensor, zeros: Tensor | None) -> Tensor:
        """Codes [O, K / G, G] as float32 before scaling; zeros [O, K / G, 1]."""
        raise NotImplementedError

    def decode(self, q: QuantTensor) -> Tensor:
        codes, scales, zeros = (plain(q).parts.get(p) for p in ("codes", "scales", "zeros"))
        assert codes is not None and scales is not None
        codes = codes.view(*scales.shape, q.group)
        found = self.values(codes, None if zeros is None else zeros[..., None]) * scales.float()[..., None]
        return found.flatten(1) if q.order is None else found.flatten(1).index_select(1, q.order.argsort())

    def stored(self, codes: Tensor, scales: Tensor, zeros: Tensor | None = None) -> QuantTensor:
        """A weight of codes [O, K] (or in groups), scales [O, K / G] and zero points."""
        codes = codes.flatten(1).contiguous()
        parts = {"codes": codes, "scales": scales.contiguous()} | ({} if zeros is None else {"zeros": zeros})
        return QuantTensor(self.name, (codes.shape[0], codes.shape[1]), parts)


def packed_bytes(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [O, K] of 1, 2 or 4 bits as bytes uint8 [O, ceil(K * bits / 8)], the first in the lowest bits."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % (8 // bits)))
    places = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    packed: Tensor = (padded.view(len(codes), -1, 8 // bits) << places).sum(-1, dtype=torch.uint8)
    return packed


def unpacked_bytes(packed: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & (1 << bits) - 1).flatten(1)


def compressed_tensors(layout: str, q: QuantTensor, bits: int, kind: str, **more: object) -> dict[str, object]:
    """`quantization_config` of a compressed-tensors checkpoint (0.20) whose linear layers are stored like `q`.

    `more`: further keys for the weights, e.g. a strategy other than by channel or group.
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
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
    }
