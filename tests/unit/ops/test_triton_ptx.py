"""The PTX that decodes weights, executed for every word: the results equal the formats' own decoding."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from sameseed import scheme
from sameseed.formats import nf4
from sameseed.ops.triton import packing, ptx

HALF = np.uint32(0xFFFF)


def byte(value, place):
    return value >> np.uint32(8 * place) & np.uint32(255)


def permuted(a, b, selector):
    """prmt: each nibble of the selector names a byte of b:a; if its upper bit is set, that byte's sign eight times."""
    out = np.zeros_like(selector)
    for place in range(4):
        nibble = selector >> np.uint32(4 * place) & np.uint32(15)
        found = np.zeros_like(selector)
        for i in range(8):
            source = byte(a if i < 4 else b, i % 4) + np.zeros_like(selector)
            found = np.where((nibble & 7) == i, source, found)
        found = np.where(nibble & 8, np.where(found & 0x80, 255, 0), found).astype(np.uint32)
        out |= found << np.uint32(8 * place)
    return out


def chosen(a, b, c, table):
    """lop3: each bit is the table's entry 4 a + 2 b + c."""
    out = np.zeros_like(a | b | c)
    for entry in range(8):
        if table >> entry & 1:
            bits = [x if entry >> shift & 1 else ~x for x, shift in ((a, 2), (b, 1), (c, 0))]
            out |= bits[0] & bits[1] & bits[2]
    return out


def floats(x):
    """The two float16 numbers of each register, the lower one first."""
    return np.ascontiguousarray(x).view(np.float16).astype(np.float64).reshape(*x.shape, 2)


def register(x):
    with np.errstate(over="ignore"):
        return x.astype(np.float16).view(np.uint32)[..., 0]


def e4m3(x):
    codes = np.stack([x & 255, x >> np.uint32(8) & np.uint32(255)], -1).astype(np.uint8)
    return register(torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy())


OPERATIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "add.u32": lambda a, b: a + b,
    "sub.u32": lambda a, b: a - b,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "prmt.b32": permuted,
    "lop3.b32": lambda a, b, c, table: chosen(a, b, c, int(table.flat[0])),
    "sub.rn.f16x2": lambda a, b: register(floats(a) - floats(b)),
    "mul.rn.f16x2": lambda a, b: register(floats(a) * floats(b)),
    "fma.rn.f16x2": lambda a, b, c: register(floats(a) * floats(b) + floats(c)),  # exact in float64
    "cvt.rn.f16x2.e4m3x2": e4m3,
}


def run(text, inputs, outputs):
    """Executes lines of PTX. Raises KeyError for unknown instructions and for registers without a value."""
    held = {f"${outputs + i}": x for i, x in enumerate(inputs)}

    def value(name):
        return np.full_like(inputs[0], int(name, 0)) if name[0].isdigit() else held[name]

    for line in re.split(r";\s*", text.strip().removeprefix("{").removesuffix("}").strip()):
        if not line or line.startswith(".reg"):
            continue
        name, rest = line.split(maxsplit=1)
        pair = re.fullmatch(r"\{(\w+), (\w+)\}, (\w+)", rest)
        if pair:
            whole = value(pair[3])
            held[pair[1]], held[pair[2]] = whole & HALF, whole >> np.uint32(16)
            continue
        target, *sources = rest.split(", ")
        assert target not in (f"${outputs + i}" for i in range(len(inputs))), "an input is written"
        held[target] = OPERATIONS[name](*map(value, sources)).astype(np.uint32)
    return [held[f"${i}"] for i in range(outputs)]


def words16():
    """Registers of two 16-bit words: each word once in the lower place, and once in the upper, in some order."""
    every = np.arange(1 << 16, dtype=np.uint32)
    return every | (every * np.uint32(40503) & HALF) << np.uint32(16)


def words8():
    """Registers of four bytes, with each byte in each place."""
    every = np.arange(1 << 16, dtype=np.uint32)
    return every & HALF | (every * np.uint32(40503) + np.uint32(77) & HALF) << np.uint32(16)


def as_bytes(x):
    return np.stack([byte(x, i) for i in range(4)], -1).astype(np.uint8).view(np.int8).astype(np.int64)


def codes(words, part, bits):
    """The codes of one part, of both words."""
    each = np.stack([words & HALF, words >> np.uint32(16)], -1)
    return (each >> np.uint32(bits * part) & np.uint32((1 << bits) - 1)).astype(np.int64)


def twice(value):
    return np.full(1 << 16, register(np.array([value, value])), dtype=np.uint32)


@pytest.mark.parametrize("zeros", [(8, 8, 8, 8), (0, 3, 15, 9)])
def test_int4(zeros):
    words = words16()
    offsets = [twice(1024 + z if part % 2 == 0 else -64 - z) for part, z in enumerate(zeros)]
    for part, out in enumerate(run(ptx.INT4, [words, *offsets], 4)):
        assert (floats(out) == codes(words, part, 4) - zeros[part]).all()


def test_int8():
    words = words16()
    for part, out in enumerate(run(ptx.INT8, [words], 2)):
        assert (floats(out) == codes(words, part, 8) - 128).all()


@pytest.mark.parametrize(
    ("text", "kind"), [(ptx.E4M3, "float8_e4m3fn"), (ptx.E4M3_BY_BITS, "float8_e4m3fn"), (ptx.E5M2, "float8_e5m2")]
)
def test_eight_bit_floats(text, kind):
    """All codes, including NaN and infinities."""
    words = words16()
    for part, out in enumerate(run(text, [words], 2)):
        wanted = torch.from_numpy(codes(words, part, 8).astype(np.uint8)).view(getattr(torch, kind)).double().numpy()
        assert np.array_equal(floats(out), wanted, equal_nan=True)
        assert (np.signbit(floats(out)) == np.signbit(wanted))[~np.isnan(wanted)].all()


def test_e2m1():
    words = words16()
    table = scheme.get("mxfp4").values(torch.arange(16), None).double().numpy()
    for part, out in enumerate(run(ptx.E2M1, [words], 4)):
        wanted = table[codes(words, part, 4)]
        assert (floats(out) == wanted).all() and (np.signbit(floats(out)) == np.signbit(wanted)).all()


def test_nf4():
    """The sum of both terms equals the table's value to 22 bits."""
    words, table = words16(), nf4.TABLE.double().numpy()
    outs = run(ptx.NF4, [words], 8)
    for part in range(4):
        wanted = table[codes(words, part, 4)]
        assert (np.abs(floats(outs[part]) + floats(outs[4 + part]) - wanted) <= 2.0**-22 * np.abs(wanted)).all()
        assert (np.abs(floats(outs[part]) - wanted) <= 2.0**-11 * np.abs(wanted)).all()


@pytest.mark.parametrize("zeros", [(8, 8), (0, 15)])
def test_int4_bytes(zeros):
    words = words8()
    offsets = [np.full_like(words, 0x01010101 * z) for z in zeros]
    for part, out in enumerate(run(ptx.INT4_BYTES, [words, *offsets], 2)):
        assert (as_bytes(out) == (as_bytes(words) >> 4 * part & 15) - zeros[part]).all()


def test_planes_of_int8n():
    """Codes packed like weights, then decoded: whole codes from both planes, upper halves from one."""
    fmt = scheme.get("int8n")
    every = torch.arange(-128, 120, dtype=torch.int8).repeat(2)[:256].view(1, 256)
    plain = replace(fmt.stored(every, torch.ones(1, 1)), activations="int8")
    packed = packing.pack(plain)
    planes = [packed.parts[name][0, :, 0].contiguous().numpy().view(np.uint32) for name in ("high", "low")]
    whole = np.concatenate([as_bytes(out).flatten() for out in run(ptx.BOTH, planes, 2)])
    assert (whole == every[0].numpy()).all()
    upper = np.concatenate([as_bytes(out).flatten() for out in run(ptx.UPPER, planes[:1], 2)])
    assert (upper == fmt.decode(fmt.lower(plain))[0].numpy()).all()


def test_operations_that_are_not_known_are_not_guessed():
    with pytest.raises(KeyError):
        run("{\nvsub4.u32 $0, $1, $1;\n}", [words8()], 1)
