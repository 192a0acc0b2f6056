"""Decoders: they turn a tile of packed words into tiles of numbers for tensor cores, one tile for each code of a word.

Scales are applied later. Each decoder has two forms: PTX for a GPU (`MACHINE`), and Triton operations for the
interpreter, which cannot run PTX.
"""

# Kernels are written in Triton's language, so they have no type annotations.
from __future__ import annotations

import triton
import triton.language as tl

from sameseed.formats.nf4 import TABLE
from sameseed.ops.triton import ptx

INT4 = tl.constexpr(ptx.INT4)
INT8 = tl.constexpr(ptx.INT8)
E4M3 = tl.constexpr(ptx.E4M3)
E4M3_BY_BITS = tl.constexpr(ptx.E4M3_BY_BITS)
E5M2 = tl.constexpr(ptx.E5M2)
E2M1 = tl.constexpr(ptx.E2M1)
NF4 = tl.constexpr(ptx.NF4)
INT4_BYTES = tl.constexpr(ptx.INT4_BYTES)
UPPER = tl.constexpr(ptx.UPPER)
BOTH = tl.constexpr(ptx.BOTH)
NF4_FIRST, NF4_SECOND = (tl.constexpr(tuple(term)) for term in ptx.terms(TABLE.tolist()))


@triton.jit
def nibble(words, part: tl.constexpr):
    """The 4-bit code of a part."""
    return (words >> (4 * part)) & 15


@triton.jit
def int4(words, zeros, MACHINE: tl.constexpr):
    """Decode words of 16 bits: four codes each, minus 8 or minus the zero point.

    zeros: for each part 1024 + zero point, float16 [O]; or None.
    """
    out = ()
    if MACHINE:
        offsets = ()
        for part in tl.static_range(4):
            if zeros is None:  # constants or loads only: other values keep words out of the layout that products need
                offset = tl.full(words.shape, 1032.0 if part % 2 == 0 else -72.0, tl.float16)
            else:
                offset = zeros[part] if part % 2 == 0 else 960.0 - zeros[part]
                offset = tl.broadcast_to(offset[None, :], words.shape)
            offsets = offsets + (offset,)
        out = tl.inline_asm_elementwise(
            INT4,
            "=r,=r,=r,=r,r,r,r,r,r",
            [words, offsets[0], offsets[1], offsets[2], offsets[3]],
            (tl.float16, tl.float16, tl.float16, tl.float16),
            True,
            2,
        )
    else:
        for part in tl.static_range(4):
            zero = 8.0 if zeros is None else zeros[part][None, :] - 1024.0
            out = out + ((nibble(words, part).to(tl.float16) - zero).to(tl.float16),)
    return out


@triton.jit
def int8(words, MACHINE: tl.constexpr):
    """Decode words of 16 bits: two codes, stored + 128, each."""
    if MACHINE:
        out = tl.inline_asm_elementwise(INT8, "=r,=r,r", [words], (tl.float16, tl.float16), True, 2)
    else:
        first, second = (words & 255).to(tl.float16) - 128.0, (words >> 8).to(tl.float16) - 128.0
        out = (first.to(tl.float16), second.to(tl.float16))
    return out


@triton.jit
def e4m3_by_bits(codes):
    """Move bits s eeee mmm to their places in float16, times 2^(15 - 7). Exact, subnormals too. 0x7F is NaN."""
    value = (((codes & 0x80) << 8) | ((codes & 0x7F) << 7)).to(tl.float16, bitcast=True)
    value = (value.to(tl.float32) * 256.0).to(tl.float16)
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)


@triton.jit
def e4m3(words, MACHINE: tl.constexpr, FLOAT8: tl.constexpr):
    """Decode words of 16 bits: two e4m3 floats each. FLOAT8: the GPU has an instruction for this."""
    if not MACHINE:
        out = (e4m3_by_bits(words & 255), e4m3_by_bits(words >> 8))
    elif FLOAT8:
        out = tl.inline_asm_elementwise(E4M3, "=r,=r,r", [words], (tl.float16, tl.float16), True, 2)
    else:
        out = tl.inline_asm_elementwise(E4M3_BY_BITS, "=r,=r,r", [words], (tl.float16, tl.float16), True, 2)
    return out


@triton.jit
def e5m2(words, MACHINE: tl.constexpr):
    """Decode words of 16 bits: two e5m2 floats each, which are the upper bytes of float16."""
    if MACHINE:
        out = tl.inline_asm_elementwise(E5M2, "=r,=r,r", [words], (tl.float16, tl.float16), True, 2)
    else:
        out = ((words << 8).to(tl.float16, bitcast=True), (words & 0xFF00).to(tl.float16, bitcast=True))
    return out


@triton.jit
def e2m1_by_bits(codes):
    """Move bits s ee m to their places in float16, times 2^(15 - 1)."""
    value = (((codes & 8) << 12) | ((codes & 7) << 9)).to(tl.float16, bitcast=True)
    return (value.to(tl.float32) * 16384.0).to(tl.float16)


@triton.jit
def e2m1(words, MACHINE: tl.constexpr):
    """Decode words of 16 bits: four e2m1 floats each."""
    out = ()
    if MACHINE:
        out = tl.inline_asm_elementwise(
            E2M1, "=r,=r,=r,=r,r", [words], (tl.float16, tl.float16, tl.float16, tl.float16), True, 2
        )
    else:
        for part in tl.static_range(4):
            out = out + (e2m1_by_bits(nibble(words, part)),)
    return out


@triton.jit
def from_table(codes, TABLE: tl.constexpr):
    """Look up one of 16 constants for each code."""
    value = tl.zeros(codes.shape, tl.float16)
    for i in tl.static_range(16):
        value = tl.where(codes == i, TABLE[i], value).to(tl.float16)
    return value


@triton.jit
def nf4(words, MACHINE: tl.constexpr):
    """Decode words of 16 bits: four codes each. Returns the first float16 terms of the four values, then the second."""
    out = ()
    if MACHINE:
        out = tl.inline_asm_elementwise(
            NF4,
            "=r,=r,=r,=r,=r,=r,=r,=r,r",
            [words],
            (tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            True,
            2,
        )
    else:
        for part in tl.static_range(4):
            out = out + (from_table(nibble(words, part), NF4_FIRST),)
        for part in tl.static_range(4):
            out = out + (from_table(nibble(words, part), NF4_SECOND),)
    return out


@triton.jit
def int4_bytes(words, zeros, MACHINE: tl.constexpr):
    """Decode bytes of two codes to int8: code minus 8, or minus the zero point of each part (uint8 [O])."""
    out = ()
    if MACHINE:
        offsets = ()
        for part in tl.static_range(2):
            if zeros is None:
                offset = tl.full(words.shape, 8, tl.uint8)
            else:
                offset = tl.broadcast_to(zeros[part][None, :], words.shape)
            offsets = offsets + (offset,)
        out = tl.inline_asm_elementwise(
            INT4_BYTES, "=r,=r,r,r,r", [words, offsets[0], offsets[1]], (tl.int8, tl.int8), True, 4
        )
    else:
        for part in tl.static_range(2):
            zero = 8 if zeros is None else zeros[part].to(tl.int8)[None, :]
            out = out + ((nibble(words, part).to(tl.int8) - zero).to(tl.int8),)
    return out


@triton.jit
def upper(words, MACHINE: tl.constexpr):
    """Decode bytes of two upper halves of int8n, stored + 8, to int8: 16 times each half."""
    if MACHINE:
        out = tl.inline_asm_elementwise(UPPER, "=r,=r,r", [words], (tl.int8, tl.int8), True, 4)
    else:
        out = (((words << 4) ^ 0x80).to(tl.int8, bitcast=True), ((words & 0xF0) ^ 0x80).to(tl.int8, bitcast=True))
    return out


@triton.jit
def both(words, low, MACHINE: tl.constexpr):
    """Decode bytes of two upper halves and bytes of two lower halves of int8n, all stored + 8, to int8."""
    if MACHINE:
        out = tl.inline_asm_elementwise(BOTH, "=r,=r,r,r", [words, low], (tl.int8, tl.int8), True, 4)
    else:
        first = ((words & 15) << 4) | (low & 15)
        second = (words & 0xF0) | (low >> 4)
        out = ((first - 136).to(tl.int8, bitcast=True), (second - 136).to(tl.int8, bitcast=True))
    return out
