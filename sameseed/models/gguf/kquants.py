"""Convert K-quants of a GGUF file to our formats of the same names, with unchanged codes and scales.

Blocks of 256 values are laid out as in ggml (block_q2_K to block_q6_K in ggml-common.h). Q3_K, which is Q6_K with 3-bit
codes, is stored as q6_k here and uses its kernel. IQ4_XS uses the codes of IQ4_NL, with one scale per 32 of them (a
6-bit multiple of a larger scale); it is stored as iq4_nl.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sameseed.scheme import KQUANTS, QuantScheme

# Activation rows are rounded to int8 by super-block, as in llama.cpp (Q8_K).
TYPES = {name.upper(): QuantScheme(name, activations="int8") for name in KQUANTS}
TYPES["Q3_K"] = TYPES["Q6_K"]
TYPES["IQ4_XS"] = QuantScheme("iq4_nl", activations="int8")


def parts(kind: str, blocks: Tensor, height: int) -> dict[str, Tensor]:
    """The parts of a weight of `height` rows, read from its blocks uint8 [height * K / 256, bytes]."""
    read = {"Q2_K": _q2, "Q3_K": _q3, "Q4_K": _q45, "Q5_K": _q45, "Q6_K": _q6, "IQ4_XS": _iq4}[kind]
    found = read(blocks)
    return {name: t.reshape(height, -1) for name, t in found.items()}


def _half(blocks: Tensor, at: int) -> Tensor:
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _bits(packed: Tensor, count: int, step: int) -> Tensor:
    """Unpack uint8 [n, W] to [n, count, W]: `step` bits each, the lowest first."""
    if packed.shape[1] % 8:
        shifts = torch.arange(0, count * step, step, dtype=torch.uint8)[:, None]
        return (packed[:, None] >> shifts) & ((1 << step) - 1)
    words = packed.contiguous().view(torch.int64)  # eight bytes at a time: six times as fast
    mask = int.from_bytes(bytes([(1 << step) - 1] * 8), "little")
    found = words.new_empty(len(words), count, words.shape[1])
    for i in range(count):
        torch.bitwise_and(words >> i * step, mask, out=found[:, i])
    return found.view(torch.uint8)


def _q2(blocks: Tensor) -> dict[str, Tensor]:
    """Block: 16 bytes (low nibble: step, high: minimum); per half of 128, 4 x 32 2-bit codes; scale and least."""
    multiples = blocks[:, :16]
    return {
        "codes": _bits(blocks[:, 16:80].reshape(-1, 32), 4, 2).view(-1, 256),
        "steps": (multiples & 15).view(torch.int8),
        "minima": (multiples >> 4).view(torch.int8),
        "scales": _half(blocks, 80),
        "least": _half(blocks, 82),
    }


def _q3(blocks: Tensor) -> dict[str, Tensor]:
    """Block: 256 third bits (0: code minus 4); per half of 128, 4 x 32 low bit pairs; 16 6-bit steps; fp16 scale."""
    third = _bits(blocks[:, :32], 8, 1).view(-1, 256)
    low = _bits(blocks[:, 32:96].reshape(-1, 32), 4, 2).view(-1, 256)
    packed = blocks[:, 96:108].view(-1, 3, 4)
    fours = torch.cat([packed[:, :2] & 15, packed[:, :2] >> 4], dim=1)
    steps = (fours | _bits(packed[:, 2], 4, 2) << 4).flatten(1).view(torch.int8) - 32
    return {"codes": low + (third << 2) + (32 - 4), "steps": steps, "scales": _half(blocks, 108)}


def _q45(blocks: Tensor) -> dict[str, Tensor]:
    """Block: fp16 scale and least; 8 6-bit steps and minima in 12 bytes; in Q5_K fifth bits; 4 x 32 nibble pairs."""
    packed, count = blocks[:, 4:16], len(blocks)
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    steps = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=1)
    minima = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=1)
    codes = _bits(blocks[:, -128:].reshape(count * 4, 32), 2, 4).view(count, 8, 32)
    if blocks.shape[1] > 144:
        codes = codes | _bits(blocks[:, 16:48], 8, 1) << 4
    found = {"scales": _half(blocks, 0), "least": _half(blocks, 2)}
    return {"codes": codes, "steps": steps.view(torch.int8), "minima": minima.view(torch.int8), **found}


def _q6(blocks: Tensor) -> dict[str, Tensor]:
    """Block: per half of 128, 64 bytes of low 4 bits; then 32 bytes of high 2 bits each; 16 steps; fp16 scale."""
    low = _bits(blocks[:, :128].reshape(-1, 64), 2, 4).view(-1, 128)
    high = _bits(blocks[:, 128:192].reshape(-1, 32), 4, 2).view(-1, 128)
    steps = blocks[:, 192:208].contiguous().view(torch.int8)
    return {"codes": low | high << 4, "steps": steps, "scales": _half(blocks, 208)}


def _iq4(blocks: Tensor) -> dict[str, Tensor]:
    """Block: fp16 scale; eight 6-bit steps (high 2 bits in 2 bytes, low 4 bits in 4); eight times 16 bytes of codes."""
    high = _bits(blocks[:, 2:4], 4, 2).transpose(1, 2).flatten(1)
    low = _bits(blocks[:, 4:8], 2, 4).transpose(1, 2).flatten(1)
    steps = (low | high << 4).view(torch.int8) - 32
    codes = _bits(blocks[:, 8:].reshape(-1, 16), 2, 4).view(-1, 256)
    return {"codes": codes, "scales": _half(blocks, 0).float() * steps}
