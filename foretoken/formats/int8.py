"""Format int8: symmetric 8-bit integers; weights with a scale per channel, KV rows with one per token and head."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from foretoken.formats.scheme import QuantTensor


class Int8:
    """Codes in -127..127, scale = absmax / 127 of the row: all scales are per row."""

    kv_dtype: torch.dtype | None = torch.int8

    def encode(self, weight: Tensor) -> QuantTensor:
        codes, scales = _codes(weight)  # [O, K], [O]
        return QuantTensor("int8", (weight.shape[0], weight.shape[1]), {"codes": codes, "scales": scales})

    def decode(self, q: QuantTensor) -> Tensor:
        return q.parts["codes"].float() * q.parts["scales"][:, None]

    def decode_rows(self, q: QuantTensor, index: Tensor) -> Tensor:
        codes, scales = (q.parts[p].index_select(0, index) for p in ("codes", "scales"))
        return codes.float() * scales[:, None]

    def concat(self, parts: list[QuantTensor]) -> QuantTensor:
        codes, scales = (torch.cat([q.parts[p] for q in parts]) for p in ("codes", "scales"))
        return QuantTensor("int8", (codes.shape[0], codes.shape[1]), {"codes": codes, "scales": scales})

    def encode_kv(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return _codes(x)  # the scale is per row: a rejected draft must leave no trace

    def decode_kv(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        assert scales is not None
        return codes.float() * scales[..., None]

    def checkpoint(self, name: str, q: QuantTensor) -> dict[str, Tensor]:
        """Tensors in compressed-tensors' int-quantized layout."""
        return {f"{name}.weight": q.parts["codes"], f"{name}.weight_scale": q.parts["scales"][:, None]}

    def from_checkpoint(self, name: str, tensors: Mapping[str, Tensor]) -> QuantTensor:
        codes, scales = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"].float().reshape(-1)
        return QuantTensor("int8", (codes.shape[0], codes.shape[1]), {"codes": codes, "scales": scales})

    def config(self) -> dict[str, object]:
        """`quantization_config` of a compressed-tensors checkpoint (weights only)."""
        weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": "int-quantized"}
        return {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        }


def _codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 and scales float32 (last dimension dropped) of x, rounded to nearest."""
    x = x.float()
    scales = x.abs().amax(-1) / 127.0
    safe = torch.where(scales > 0, scales, torch.ones_like(scales))  # an all-zero row has codes 0 under any scale
    return (x / safe[..., None]).round().clamp(-127, 127).to(torch.int8), safe


FORMAT = Int8()
