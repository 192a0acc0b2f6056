"""Shared code of the formats with codes and scales: groups along K, rows, and the compressed-tensors configuration.

Parts of a stored weight: "codes" [O, K], "scales" [O, K / G] and, if it has zero points, "zeros" [O, K / G].
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
    """Scales of groups, size / steps, as bfloat16; 0 where size < 2^-100, NaN where size is NaN or infinite."""
    scales = torch.where(size >= SMALLEST, over(size, steps), 0.0)
    return torch.where(size.isfinite(), scales, torch.nan).to(torch.bfloat16)


def divided(x: Tensor, scales: Tensor) -> Tensor:
    """x [O, K / G, G] divided by scales [O, K / G], in new memory; 0 where the scale is 0 or NaN."""
    steps = torch.where(scales > 0, scales.float(), torch.inf)  # x / inf = 0
    out = x / steps[..., None]
    return out.masked_fill_(scales.isnan()[..., None], 0.0) if scales.isnan().any() else out


PACKED = (1, 2, 4)  # widths in bits of the uint8 codes that checkpoints pack several to a byte


class Coded(Format):
    """A weight format with codes and scales; `values` decodes codes. Subclasses that serve the KV cache define more."""

    def bits_per_weight(self, width: int, args: QuantArgs) -> float:
        """Bits of a code plus its share of the scale and of the zero point (one byte).

        A scale is bfloat16 if the format or `args` has groups, else float32.
        """
        scale = 16 if args.group or self.groups else 32
        return self.bits + (scale + (0 if args.symmetric else 8)) / (args.group or width)

    def encode(self, weight: Tensor, args: QuantArgs | None = None) -> QuantTensor:
        return self._encode(weight, own_args(self.groups, weight.shape[1]) if args is None else args)

    def _encode(self, weight: Tensor, args: QuantArgs) -> QuantTensor:
        raise NotImplementedError

    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes of x [..., K] and a float32 scale for each row [..., 1], of a format that serves the cache."""
        raise self._no_cache()

    def encode_kv(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        codes, scales = self.rows(x)  # one scale per row: rejected draft tokens must not affect other rows
        return codes, scales.squeeze(-1)

    def decode_kv(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        assert scales is not None
        return self.values(codes.contiguous(), None) * scales[..., None]

    def values(self, codes: Tensor, zeros: Tensor | None) -> Tensor:
        """Values of codes [O, K / G, G] before scaling, float32; zeros [O, K / G, 1]."""
        raise NotImplementedError

    def decode(self, q: QuantTensor) -> Tensor:
        codes, scales, zeros = (plain(q).parts.get(p) for p in ("codes", "scales", "zeros"))
        assert codes is not None and scales is not None
        codes = codes.view(*scales.shape, q.group)
        found = self.values(codes, None if zeros is None else zeros[..., None]) * scales.float()[..., None]
        return found.flatten(1) if q.order is None else found.flatten(1).index_select(1, q.order.argsort())

    def stored(self, codes: Tensor, scales: Tensor, zeros: Tensor | None = None) -> QuantTensor:
        """Build a stored weight from codes [O, K] or [O, K / G, G], scales and zero points [O, K / G]."""
        codes = codes.flatten(1).contiguous()
        parts = {"codes": codes, "scales": scales.contiguous()} | ({} if zeros is None else {"zeros": zeros})
        return QuantTensor(self.name, (codes.shape[0], codes.shape[1]), parts)


def packed_bytes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes uint8 [O, K] of 1, 2 or 4 bits into uint8 [O, ceil(K * bits / 8)], the first in the lowest bits."""
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
