"""Format nf4: 16 quantiles of the normal distribution, scaled by the absmax of 64 weights (Dettmers et al., 2023)."""

from __future__ import annotations

import json
from dataclasses import replace

import torch
from torch import Tensor

from sameseed.formats import _dynamic8
from sameseed.formats._coded import Coded, bf16_scales, divided, grouped
from sameseed.scheme import SMALLEST, QuantArgs, QuantTensor, plain

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
    """Codes 0..15 index TABLE; value = TABLE[code] * scale. `encode` stores the scale as bfloat16.

    `-dq`: double quantization (QLoRA, section 3), in the layout of bitsandbytes. Then "scales" holds uint8 codes of
    absmax - offset, where "offset" [1] is the mean absmax. "sizes" [O K / G / 256] are the scales of these uint8 codes,
    in blocks of 256 that run across rows. Kernels and `concat` use float32 scales (`single`). Weight codes are the
    nearest ones for the stored scales (bitsandbytes: for the exact scales). The error is at most half the gap between
    two table values.
    """

    name = "nf4"
    bits = 4
    options = frozenset({"dq"})
    groups = (64,)

    def _encode(self, weight: Tensor, args: QuantArgs) -> QuantTensor:
        x = grouped(weight, args.group)
        a = x.abs().amax(-1)
        if args.variant != "dq":
            scales = bf16_scales(a, 1.0)
            return self.stored(nearest(divided(x, scales)), scales)
        a = torch.where(a < SMALLEST, 0.0, a)
        offset = a.flatten().mean().view(1)
        codes, sizes = _dynamic8.encode(a.flatten() - offset)
        q = self.stored(weight, codes.view(a.shape))
        q = replace(q, parts={**q.parts, "sizes": sizes, "offset": offset})
        return replace(q, parts={**q.parts, "codes": nearest(divided(x, single(q).parts["scales"])).flatten(1)})

    def rows_together(self, args: QuantArgs) -> int:
        return 0 if args.variant == "dq" else 1  # the offset is the mean of all scales

    def bits_per_weight(self, width: int, args: QuantArgs) -> float:
        """For -dq, the bits as stored, without the offset (32 bits per matrix); kernels use 4 + 32 / 64."""
        group = args.group or width
        return 4 + (8 + 32 / _dynamic8.BLOCK if args.variant == "dq" else 16) / group

    def values(self, codes: Tensor, zeros: Tensor | None) -> Tensor:
        return TABLE.to(codes.device)[codes.long()]

    def decode(self, q: QuantTensor) -> Tensor:
        return super().decode(single(q))

    def decode_rows(self, q: QuantTensor, index: Tensor) -> Tensor:
        return super().decode_rows(single(q), index)

    def concat(self, parts: list[QuantTensor]) -> QuantTensor:
        return super().concat([single(q) for q in parts])

    def checkpoint(self, name: str, q: QuantTensor) -> dict[str, Tensor]:
        """Tensors as bitsandbytes stores them: two codes per byte, the first in the upper half."""
        codes, scales = plain(q).parts["codes"].flatten(), q.parts["scales"].flatten()
        if codes.numel() % 2:
            codes = torch.nn.functional.pad(codes, (0, 1))
        state = {"quant_type": "nf4", "blocksize": q.group, "dtype": "bfloat16", "shape": list(q.shape)}
        tensors = {
            f"{name}.weight": (codes[::2] << 4 | codes[1::2])[:, None],
            f"{name}.weight.absmax": scales if "sizes" in q.parts else scales.float(),
            f"{name}.weight.quant_map": TABLE.clone(),
        }
        if "sizes" in q.parts:
            state |= {"nested_blocksize": _dynamic8.BLOCK, "nested_dtype": "float32"}
            state["nested_offset"] = q.parts["offset"].item()
            tensors[f"{name}.weight.nested_absmax"] = q.parts["sizes"]
            tensors[f"{name}.weight.nested_quant_map"] = _dynamic8.TABLE.clone()
        return tensors | {f"{name}.{STATE}": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)}

    def config(self, q: QuantTensor) -> dict[str, object]:
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_use_double_quant": "sizes" in q.parts,
        }


def single(q: QuantTensor) -> QuantTensor:
    """`q` with its double-quantized scales decoded to float32 [O, K / G]; `q` itself if its scales are plain."""
    if "sizes" not in q.parts:
        return q
    codes = plain(q).parts["scales"]
    scales = _dynamic8.decode(codes.flatten(), q.parts["sizes"]) + q.parts["offset"]
    return replace(q, parts={"codes": q.parts["codes"], "scales": scales.view(codes.shape)})


def nearest(x: Tensor) -> Tensor:
    """Codes uint8 of the nearest table value (the lower one on a tie)."""
    return torch.bucketize(x, BORDERS.to(x.device), out_int32=True).to(torch.uint8)


FORMAT = NF4()
