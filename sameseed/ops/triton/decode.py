"""A tile of words as tiles of numbers that tensor cores take, one for each code of a word; scales come later.

Each kind has two forms: PTX for a GPU (`MACHINE`), and plain steps for the interpreter, which knows no PTX.
"""

# Kernels are Triton's language, not Python's: types and docstrings stay outside.
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
    """The 4 bits of a part."""
    return (words >> (4 * part)) & 15


@triton.jit
def int4(words, zeros, MACHINE: tl.constexpr):
    """Words of 16 bits, four codes each, less 8, or less the zero point of each part: float16 [O], 1024 + zero."""
    out = ()
    if MACHINE:
        offsets = ()
        for part in tl.static_range(4):
            if zeros is None:  # constants: what is no load, and no constant, keeps words from lying as products want
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
    """Words of 16 bits, two codes + 128 each."""
    if MACHINE:
        out = tl.inline_asm_elementwise(INT8, "=r,=r,r", [words], (tl.float16, tl.float16), True, 2)
    else:
        first, second = (words & 255).to(tl.float16) - 128.0, (words >> 8).to(tl.float16) - 128.0
        out = (first.to(tl.float16), second.to(tl.float16))
    return out


@triton.jit
def e4m3_by_bits(codes):
    """Bits s eeee mmm moved under float16's exponent, times 2^(15 - 7); exact, subnormals too. 0x7F is NaN."""
    value = (((codes & 0x80) << 8) | ((codes & 0x7F) << 7)).to(tl.float16, bitcast=True)
    value = (value.to(tl.float32) * 256.0).to(tl.float16)
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)


@triton.jit
def e4m3(words, MACHINE: tl.constexpr, FLOAT8: tl.constexpr):
    """Words of 16 bits, two floats each. FLOAT8: the GPU converts them."""
    if not MACHINE:
        out = (e4m3_by_bits(words & 255), e4m3_by_bits(words >> 8))
    elif FLOAT8:
        out = tl.inline_asm_elementwise(E4M3, "=r,=r,r", [words], (tl.float16, tl.float16), True, 2)
    else:
        out = tl.inline_asm_elementwise(E4M3_BY_BITS, "=r,=r,r", [words], (tl.float16, tl.float16), True, 2)
    return out


@triton.jit
def e5m2(words, MACHINE: tl.constexpr):
    """Words of 16 bits, two floats each: float16 without its lower byte."""
    if MACHINE:
        out = tl.inline_asm_elementwise(E5M2, "=r,=r,r", [words], (tl.float16, tl.float16), True, 2)
    else:
        out = ((words << 8).to(tl.float16, bitcast=True), (words & 0xFF00).to(tl.float16, bitcast=True))
    return out


@triton.jit
def e2m1_by_bits(codes):
    """Bits s ee m under float16's exponent, times 2^(15 - 1)."""
    value = (((codes & 8) << 12) | ((codes & 7) << 9)).to(tl.float16, bitcast=True)
    return (value.to(tl.float32) * 16384.0).to(tl.float16)


@triton.jit
def e2m1(words, MACHINE: tl.constexpr):
    """Words of 16 bits, four floats each."""
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
    """One of 16 constants for each code."""
    value = tl.zeros(codes.shape, tl.float16)
    for i in tl.static_range(16):
        value = tl.where(codes == i, TABLE[i], value).to(tl.float16)
    return value


@triton.jit
def nf4(words, MACHINE: tl.constexpr):
    """Words of 16 bits, four codes each: the first terms of the four, then the second ones."""
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
    """Bytes of two codes, less 8, or less the zero point uint8 [O] of each part: int8."""
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
    """Bytes of two upper halves + 8 of int8n: int8, 16 times the halves."""
    if MACHINE:
        out = tl.inline_asm_elementwise(UPPER, "=r,=r,r", [words], (tl.int8, tl.int8), True, 4)
    else:
        out = (((words << 4) ^ 0x80).to(tl.int8, bitcast=True), ((words & 0xF0) ^ 0x80).to(tl.int8, bitcast=True))
    return out


@triton.jit
def both(words, low, MACHINE: tl.constexpr):
    """Bytes of two upper halves + 8 and of two lower ones + 8, of int8n: int8."""
    if MACHINE:
        out = tl.inline_asm_elementwise(BOTH, "=r,=r,r,r", [words, low], (tl.int8, tl.int8), True, 4)
    else:
        first = ((words & 15) << 4) | (low & 15)
        second = (words & 0xF0) | (low >> 4)
        out = ((first - 136).to(tl.int8, bitcast=True), (second - 136).to(tl.int8, bitcast=True))
    return out
