"""Format int4: 4-bit integers in groups of 32, 64 or 128 weights; for the cache, after a Hadamard rotation (QuaRot)."""

from __future__ import annotations

import torch
from torch import Tensor

from sameseed.formats import _kv4
from sameseed.formats._coded import Coded, bf16_scales, compressed_tensors, divided, grouped, packed_bytes
from sameseed.formats._hadamard import hadamard
from sameseed.scheme import QuantArgs, QuantTensor, plain

ZERO = 8  # the zero point of symmetric weights


class Int4(Coded):
    """Codes 0..15; value = (code - zero) * scale, the scale bfloat16.

    Symmetric: zero = 8 and scale = absmax / 7.5, so the largest value of either sign is off by half a step. With zero
    points: the group's range, extended to contain 0, is mapped to 0..15. The error is at most half a step (plus the
    rounding error of the bfloat16 scale).

    KV cache rows (even D), keys and values alike, are rotated by `hadamard`, which spreads outlier channels over the
    row (Ashkboos et al., 2024), and stored as `_kv4` describes; decoding rotates back. The error's Euclidean length is
    at most sqrt(D) / 2 steps.
    """

    name = "int4"
    bits = 4
    kv_dtype = torch.uint8
    options = frozenset({"group", "asymmetric", "activations"})
    groups = (128, 64, 32)

    def _encode(self, weight: Tensor, args: QuantArgs) -> QuantTensor:
        x = grouped(weight, args.group)
        low, high = x.aminmax(dim=-1)  # [O, K / G]
        if args.symmetric:
            scales = bf16_scales(torch.maximum(high, -low), 7.5)
            return self.stored(divided(x, scales).round_().clamp_(-8, 7).add_(ZERO).to(torch.uint8), scales)
        low, high = low.clamp(max=0.0), high.clamp(min=0.0)
        scales = bf16_scales(high / 15 - low / 15, 1.0)  # high - low might overflow
        zeros = divided(-low[..., None], scales).round_().clamp_(0, 15)
        codes = divided(x, scales).round_().add_(zeros).clamp_(0, 15).to(torch.uint8)
        return self.stored(codes, scales, zeros.squeeze(-1).to(torch.uint8))

    def values(self, codes: Tensor, zeros: Tensor | None) -> Tensor:
        return codes.float() - (float(ZERO) if zeros is None else zeros.float())

    def encode_kv(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Bytes uint8 [T, Hk, D / 2 + 2] and scales float32 [T, Hk]. Raises ConfigError for an odd D."""
        _kv4.even(self.name, x.shape[-1])
        return _kv4.encode_rows(hadamard(x))

    def decode_kv(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        assert scales is not None
        return hadamard(_kv4.decode_rows(codes, scales, 2 * (codes.shape[-1] - _kv4.LOWEST_BYTES)))

    def by_channel(self, rows: Tensor) -> Tensor:
        """Round without the rotation, which would widen a channel's range where its values are all far from 0."""
        return _kv4.decode_rows(*_kv4.encode_rows(rows), rows.shape[-1])

    def checkpoint(self, name: str, q: QuantTensor) -> dict[str, Tensor]:
        """Tensors in compressed-tensors' pack-quantized layout: eight codes per int32, the first in its lowest bits."""
        parts = plain(q).parts
        tensors = {
            f"{name}.weight_packed": pack_int32(parts["codes"]),
            f"{name}.weight_scale": parts["scales"],
            f"{name}.weight_shape": torch.tensor(q.shape, dtype=torch.int64),
        }
        if "zeros" in parts:  # packed along O
            tensors[f"{name}.weight_zero_point"] = pack_int32(parts["zeros"].T).T.contiguous()
        return tensors

    def config(self, q: QuantTensor) -> dict[str, object]:
        return compressed_tensors("pack-quantized", q, 4, "int")


def pack_int32(codes: Tensor, bits: int = 4) -> Tensor:
    """Codes uint8 [N, W] of 4 or 8 bits as int32 [N, ceil(W * bits / 32)], padded with zeros."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % (32 // bits)))
    return packed_bytes(padded, bits).view(torch.int32)


FORMAT = Int4()
