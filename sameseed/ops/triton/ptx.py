"""PTX code that decodes codes to numbers. A 32-bit register holds two words of 16 bits, or four bytes.

The same code in Triton's language compiles to several times as many instructions, and it converts integers on a slow
unit. A product of one row with 4-bit weights would then be limited by decoding, not by memory. The tests execute this
PTX for every value of a word and compare the results with the formats.

A word holds one code of each of its parts, the first part in its lowest bits. $0, $1, ... are the decoded numbers of
the parts; the words follow, then the zero points.
"""

from __future__ import annotations

import struct

from sameseed.formats.nf4 import TABLE

# The float16 with bits 0x6400 | n is 1024 + n, for n below 1024. $5..$8 are 1024 + zero point, or -(64 + zero point)
# for codes that appear as 1024 + 16 n. Every step is exact.
INT4 = """{
.reg .b32 a, b, k;
mov.b32 k, 0x2c002c00;
lop3.b32 a, $4, 0x000f000f, 0x64006400, 0xea;
sub.rn.f16x2 $0, a, $5;
lop3.b32 a, $4, 0x00f000f0, 0x64006400, 0xea;
fma.rn.f16x2 $1, a, k, $6;
shr.u32 b, $4, 8;
lop3.b32 a, b, 0x000f000f, 0x64006400, 0xea;
sub.rn.f16x2 $2, a, $7;
lop3.b32 a, b, 0x00f000f0, 0x64006400, 0xea;
fma.rn.f16x2 $3, a, k, $8;
}"""

# Words hold codes + 128 (packing._stored): 1024 + code + 128, minus 1152.
INT8 = """{
.reg .b32 a, k;
mov.b32 k, 0x64806480;
lop3.b32 a, $2, 0x00ff00ff, 0x64006400, 0xea;
sub.rn.f16x2 $0, a, k;
prmt.b32 a, $2, 0x64646464, 0x4341;
sub.rn.f16x2 $1, a, k;
}"""

E4M3 = """{
.reg .b32 a;
.reg .b16 l, h;
prmt.b32 a, $2, 0, 0x3120;
mov.b32 {l, h}, a;
cvt.rn.f16x2.e4m3x2 $0, l;
cvt.rn.f16x2.e4m3x2 $1, h;
}"""


def _e4m3(out: str, word: str) -> str:
    """Decode the upper byte of each half-word: bits moved to float16, times 2^8. 0x7F becomes 0x7FFF, which is NaN."""
    return f"""and.b32 a, {word}, 0x7f007f00;
add.u32 b, a, 0x01000100;
and.b32 b, b, 0x80008000;
shr.u32 c, b, 15;
sub.u32 b, b, c;
shr.u32 a, a, 1;
lop3.b32 a, {word}, 0x80008000, a, 0xea;
mul.rn.f16x2 a, a, k;
or.b32 {out}, a, b;
"""


# For GPUs below compute capability 8.9, which have no instruction for this conversion.
E4M3_BY_BITS = f"""{{
.reg .b32 a, b, c, k, u;
mov.b32 k, 0x5c005c00;
shl.b32 u, $2, 8;
{_e4m3("$0", "u")}{_e4m3("$1", "$2")}}}"""

E5M2 = """{
prmt.b32 $0, $2, 0, 0x2404;
and.b32 $1, $2, 0xff00ff00;
}"""

# Codes, in the order t0k0 t1k0 t0k1 t1k1 t2k0 ... (t: part, k: word), select bytes in PRMT. Signs come from bit 3.
_ORDERED = """.reg .b32 r, s, t, g, h;
prmt.b32 r, $WORDS, 0, 0x3120;
and.b32 s, r, 0x77777777;
shl.b32 t, r, 4;
"""

# The upper bytes of float16 0, 0.5, 1, 1.5, 2, 3, 4 and 6; their lower bytes are 0.
E2M1 = (
    "{\n"
    + _ORDERED.replace("$WORDS", "$4")
    + """prmt.b32 h, 0x3e3c3800, 0x46444240, s;
prmt.b32 g, t, r, 0x5140;
lop3.b32 h, g, 0x80808080, h, 0xea;
prmt.b32 $0, h, 0, 0x2404;
prmt.b32 $1, h, 0, 0x3414;
shr.u32 s, s, 16;
prmt.b32 h, 0x3e3c3800, 0x46444240, s;
prmt.b32 g, t, r, 0x7362;
lop3.b32 h, g, 0x80808080, h, 0xea;
prmt.b32 $2, h, 0, 0x2404;
prmt.b32 $3, h, 0, 0x3414;
}"""
)


def terms(values: list[float]) -> tuple[list[float], list[float]]:
    """Float16 numbers a and b for each value, with a + b nearest to it (22 bits)."""
    first = [struct.unpack("<e", struct.pack("<e", value))[0] for value in values]
    rest = [struct.unpack("<e", struct.pack("<e", v - a))[0] for v, a in zip(values, first, strict=True)]
    return first, rest


def _looked_up(table: list[int], outs: tuple[str, str]) -> str:
    """Look up float16 `table`[16] for four codes `s`, one byte at a time. `g`: bit 3 of each code, as a whole byte."""
    text = ""
    for shift, to in ((0, "l"), (8, "h")):
        quads = [sum((table[4 * q + i] >> shift & 255) << 8 * i for i in range(4)) for q in range(4)]
        text += f"prmt.b32 a, {quads[0]:#x}, {quads[1]:#x}, s;\n"
        text += f"prmt.b32 b, {quads[2]:#x}, {quads[3]:#x}, s;\n"
        text += f"lop3.b32 {to}, a, b, g, 0xd8;\n"
    return text + f"prmt.b32 {outs[0]}, l, h, 0x6240;\nprmt.b32 {outs[1]}, l, h, 0x7351;\n"


def _nf4() -> str:
    """Decode each value to two float16 terms: $0..$3 are the first terms, $4..$7 the second."""
    first, second = ([struct.unpack("<H", struct.pack("<e", v))[0] for v in term] for term in terms(TABLE.tolist()))
    text = "{\n.reg .b32 a, b, l;\n" + _ORDERED.replace("$WORDS", "$8")
    for at, spread in ((0, "0xd9c8"), (2, "0xfbea")):
        text += f"prmt.b32 g, t, r, {spread};\n"
        for table, offset in ((first, 0), (second, 4)):
            text += _looked_up(table, (f"${at + offset}", f"${at + offset + 1}"))
        text += "shr.u32 s, s, 16;\n" if at == 0 else ""
    return text + "}"


NF4 = _nf4()

# For rows in int8. In bytes, 128 + code - zero point never borrows from the next byte. Subtracting 128 gives the
# number.
INT4_BYTES = """{
.reg .b32 a;
lop3.b32 a, $2, 0x0f0f0f0f, 0x80808080, 0xea;
sub.u32 a, a, $3;
xor.b32 $0, a, 0x80808080;
shr.u32 a, $2, 4;
lop3.b32 a, a, 0x0f0f0f0f, 0x80808080, 0xea;
sub.u32 a, a, $4;
xor.b32 $1, a, 0x80808080;
}"""

# Words hold upper halves of int8n + 8 = n; the result is 16 (n - 8) as a byte.
UPPER = """{
.reg .b32 a;
shl.b32 a, $2, 4;
lop3.b32 $0, a, 0xf0f0f0f0, 0x80808080, 0x6a;
lop3.b32 $1, $2, 0xf0f0f0f0, 0x80808080, 0x6a;
}"""

# Both halves of int8n, $2 the upper and $3 the lower. They form bytes code + 136; adding 120 modulo 256 subtracts 136.
BOTH = """{
.reg .b32 a, b;
shl.b32 a, $2, 4;
and.b32 a, a, 0xf0f0f0f0;
lop3.b32 a, $3, 0x0f0f0f0f, a, 0xea;
and.b32 b, a, 0x7f7f7f7f;
add.u32 b, b, 0x78787878;
lop3.b32 $0, a, 0x80808080, b, 0x6a;
and.b32 a, $2, 0xf0f0f0f0;
shr.u32 b, $3, 4;
lop3.b32 a, b, 0x0f0f0f0f, a, 0xea;
and.b32 b, a, 0x7f7f7f7f;
add.u32 b, b, 0x78787878;
lop3.b32 $1, a, 0x80808080, b, 0x6a;
}"""
