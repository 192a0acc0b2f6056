"""Format nf4: 16 quantiles of the normal distribution, scaled by the absmax of 64 weights (Dettmers et al., 2023)."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from foretoken.formats._coded import Coded, bf16_scales, divided, grouped, part, plain
from foretoken.formats.scheme import QuantArgs, QuantTensor

# Appendix E of the paper, as float32.
TABLE = torch.tensor(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]
)  # fmt: skip
BORDERS = (TABLE[1:] + TABLE[:-1]) / 2
STATE = "weight.quant_state.bitsandbytes__nf4"


class NF4(Coded):
    """Codes 0..15 into TABLE; value = TABLE[code] * scale, the scale bfloat16 in what `encode` stores."""

    name = "nf4"
    bits = 4
    groups = (64,)

    def _encode(self, weight: Tensor, args: QuantArgs) -> QuantTensor:
        x = grouped(weight, args.group)
        scales = bf16_scales(x.abs().amax(-1), 1.0)
        return self.stored(nearest(divided(x, scales)), scales)

    def values(self, codes: Tensor, zeros: Tensor | None) -> Tensor:
        return TABLE.to(codes.device)[codes.long()]

    def checkpoint(self, name: str, q: QuantTensor) -> dict[str, Tensor]:
        """Tensors as bitsandbytes stores them: two codes a byte, the first in the upper half."""
        codes = plain(q).parts["codes"].flatten()
        if codes.numel() % 2:
            codes = torch.nn.functional.pad(codes, (0, 1))
        state = {"quant_type": "nf4", "blocksize": q.group, "dtype": "bfloat16", "shape": list(q.shape)}
        return {
            f"{name}.weight": (codes[::2] << 4 | codes[1::2])[:, None],
            f"{name}.weight.absmax": q.parts["scales"].float().flatten(),
            f"{name}.weight.quant_map": TABLE.clone(),
            f"{name}.{STATE}": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        }

    def from_checkpoint(self, name: str, tensors: Mapping[str, Tensor]) -> QuantTensor:
        state = json.loads(bytes(part(name, STATE, tensors).tolist()))
        height, width = state["shape"]
        packed = part(name, "weight", tensors).flatten()
        codes = torch.stack([packed >> 4, packed & 15], dim=1).flatten()[: height * width]
        scales = part(name, "weight.absmax", tensors).view(height, -1)
        short = scales.to(torch.bfloat16)
        return self.stored(codes.view(height, width), short if short.float().equal(scales) else scales)

    def config(self, q: QuantTensor) -> dict[str, object]:
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_use_double_quant": False,
        }


def nearest(x: Tensor) -> Tensor:
    """Codes uint8 of the table's nearest value (of two as near, the lower).

    A bucket is far narrower than the gaps between borders: x can only lie on either side of the one nearest to its
    bucket, even where rounding put it into the next bucket.
    """
    bucket = (x + 1).mul_(_BUCKETS / 2).long().clamp_(0, _BUCKETS - 1)
    near = _NEAR_BORDER.to(x.device).take(bucket)
    return (x > BORDERS.to(x.device).take(near)).view(torch.uint8) + near.to(torch.uint8)


_BUCKETS = 1024  # of equal width, from -1 to 1
_CENTRES = (torch.arange(_BUCKETS) + 0.5) / (_BUCKETS / 2) - 1
_NEAR_BORDER = (_CENTRES[:, None] - BORDERS[None, :]).abs().argmin(1)


FORMAT = NF4()
