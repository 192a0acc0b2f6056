"""The contract of every number format, in one body for all, including the format that docs/extend.md prints."""

from dataclasses import replace
from itertools import product

import fixtures_formats
import pytest
import torch
from fixtures_models import backends
from fixtures_ops import randn, threads
from hypothesis import given, settings, strategies as st

from sameseed import ops, registry, scheme
from sameseed.errors import ConfigError, ModelLoadError
from sameseed.models.inner import take_rows
from sameseed.ops import gated_rows, normed_rows, plain_rows
from sameseed.scheme import OUTLIER, QuantScheme

FORMATS = {n: scheme.get(n) for n in registry.names("formats")} | {"ternary": fixtures_formats.FORMAT}
NAMES = [n for n, f in FORMATS.items() if f.weights]
KV_NAMES = [n for n, f in FORMATS.items() if f.kv_dtype is not None]
PACKED_ROWS = ("int4", "int4_sparse")  # KV cache formats where a value's levels depend on the other values of its row
every_kv_format = pytest.mark.parametrize("name", KV_NAMES)
K = 256  # a multiple of any group size


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory):
    with fixtures_formats.installed(tmp_path_factory.mktemp("site")):
        yield


def variants(name):
    """A format as schemes may name it: plain, with its variants, with groups, with zero points."""
    options = FORMATS[name].options
    own = ["", *(f"-{v}" for v in sorted(options - scheme.OPTIONS))]
    groups = ["", "-g32", "-g64", "-g128"] if "group" in options else [""]
    zeros = ["", "-asym"] if "asymmetric" in options else [""]
    return [f"{name}{v}{g}{a}" for v in own for g in groups for a in zeros]


every_format = pytest.mark.parametrize("name", [v for n in NAMES for v in variants(n)])


class Variant:
    """The format of a scheme; `encode` uses the scheme's settings."""

    def __init__(self, name):
        self.scheme = QuantScheme.parse(name)
        self.format = scheme.get(self.scheme.weights)

    def __getattr__(self, name):
        return getattr(self.format, name)

    def encode(self, weight):
        return self.scheme.encode(weight)

    @property
    def loss(self):
        """Largest allowed root mean square error, relative to the weights, for codes of so few bits."""
        return max(0.2, 2.4 / 2**self.format.bits)

    def decode(self, q):
        return scheme.get(q.format).decode(q)  # a format with `-auto` may have chosen another one

    @property
    def rows_alone(self):
        return self.scheme.rows_together == 1


def same(a, b):
    return (
        (a.format, a.shape, a.parts.keys()) == (b.format, b.shape, b.parts.keys())
        and all(a.parts[p].dtype == b.parts[p].dtype for p in a.parts)
        and all(a.parts[p].equal(b.parts[p]) for p in a.parts)
    )


def staircase(decoded, x, slack):
    """Check values x [S] against their decoded values: each must have become the nearest one of all decoded values."""
    levels = decoded.unique()
    nearest = (x[:, None] - levels[None, :]).abs().amin(1)
    assert len(levels) > 2
    assert ((decoded - x).abs() <= nearest + slack).all()
    # The levels are so dense that the nearest one is at most half a step away.
    half_step = (levels[1:] - levels[:-1]).max().item() / 2
    inside = (x >= levels[0]) & (x <= levels[-1])
    assert ((decoded - x).abs()[inside] <= half_step + slack).all()


@every_format
def test_rows_taken_from_a_packed_weight_are_its_own(name):
    """As a draft with a reduced vocabulary takes rows of its LM head; bf16 where rows share scales."""
    fmt, backend = Variant(name), ops.resolve()
    q, rows = fmt.encode(randn(130, K)), torch.tensor([0, 3, 64, 127, 129])
    taken = take_rows(backend, backend.pack(q), rows)
    assert taken.shape == (len(rows), K)
    found = fmt.decode(backend.unpack(taken))
    error = 0.0 if taken.format == q.format else 2.0**-8
    torch.testing.assert_close(found.float(), fmt.decode(q)[rows].float(), rtol=error, atol=0.0)


@every_format
@pytest.mark.parametrize("size", [1e-3, 300.0])
def test_weights_are_rounded_to_nearest(name, size):
    """One number sweeps its range. The other numbers, and so the scales of most formats, stay the same."""
    fmt = Variant(name)
    weight = randn(1, K).clamp(-0.99, 0.99).repeat(1001, 1)
    weight[:, ::8], weight[:, 4::8] = 1.0, -1.0  # the largest of each group, for any group size
    sweep = torch.linspace(-1, 1, 1001)
    weight[:, 3] = sweep
    q = fmt.encode(weight * size)
    decoded = fmt.decode(q)
    if any(len(q.parts[p].float().unique(dim=0)) > 1 for p in q.parts.keys() & {"scales", "zeros"}):
        # The scale depends on the whole group: each value must be the nearest one that occurs in its group.
        nearest = (decoded[:, :32] - sweep[:, None] * size).abs().amin(1)
        assert ((decoded[:, 3] - sweep * size).abs() <= nearest + 1e-6 * size).all()
        return
    level = size / 119 if name.startswith("qoq") else 0.0  # rounded to int8 first, so the level may be off by one
    staircase(decoded[:, 3], sweep * size, 1.01 * level + 1e-6 * size)
    assert decoded[:, 5].unique().numel() == 1  # the sweep does not change the other values


@every_format
@pytest.mark.parametrize(
    ("shape", "dtype"), [((1, K), torch.float32), ((7, K), torch.bfloat16), ((33, 2 * K), torch.float16)], ids=str
)
def test_shape_and_bytes(shape, dtype, name):
    weight = randn(*shape).to(dtype)
    q = Variant(name).encode(weight)
    assert q.format == Variant(name).scheme.weights and q.shape == shape
    assert (q.activations, q.layout) == (None, "plain")
    assert q.nbytes <= weight.numel() * 4
    assert all(t.is_contiguous() for t in q.parts.values())
    assert Variant(name).decode(q).equal(Variant(name).decode(Variant(name).encode(weight.float())))


@every_format
@pytest.mark.parametrize("size", [1.0, 1e-38, 1e-40, 1e-44])
def test_zeros_stay_zeros_and_tiny_weights_tiny(name, size):
    """For subnormal numbers the scale may underflow, but the decoded value must not become large."""
    fmt = Variant(name)
    weight = randn(4, K) * size
    weight[1] = weight[2, : K // 2] = 0
    before = weight.clone()
    decoded = fmt.decode(fmt.encode(weight))
    assert weight.equal(before), "the input is left alone"
    assert decoded.isfinite().all() and (decoded.abs() <= 4 * weight.abs().max()).all()
    assert (decoded[1] == 0).all() and (decoded[2, : K // 2] == 0).all()


@every_format
@given(st.lists(st.integers(0, 19), max_size=30))
@settings(max_examples=20)
def test_rows_decode_alone(name, index):
    fmt = Variant(name)
    q = fmt.encode(randn(20, K))
    for dtype in (torch.int32, torch.int64):
        rows = torch.tensor(index, dtype=dtype)
        assert fmt.decode_rows(q, rows).equal(fmt.decode(q)[rows.long()])


@every_format
def test_rows_are_encoded_alone(name):
    """A row's codes and scales do not depend on other rows: stacking q, k and v changes no value."""
    fmt = Variant(name)
    parts = [randn(n, K, seed=n) * size for n, size in ((5, 1.0), (1, 100.0), (12, 0.01))]
    stacked = fmt.concat([fmt.encode(w) for w in parts])
    assert same(stacked, fmt.encode(torch.cat(parts))) or not fmt.rows_alone
    assert fmt.decode(stacked).equal(torch.cat([fmt.decode(fmt.encode(w)) for w in parts]))


@every_format
def test_checkpoint_and_back(name, tmp_path):
    fmt = Variant(name)
    q = fmt.encode(randn(24, K))
    fixtures_formats.write_weight(tmp_path, *fixtures_formats.as_stored(q, fmt.scheme.settled(fmt.decode(q))))
    read = fixtures_formats.read_weight(tmp_path, q.shape)
    assert fmt.decode(read).equal(fmt.decode(q)) and read.format == q.format
    assert same(read, q) or "dq" in name  # double-quantized scales of bitsandbytes are read as plain ones


WRITTEN = [
    "w4a16", "w4a16-channel", "w4a8-g32-asym", "w8a8", "w8a8-g64", "w8a16", "w8a16-g64", "fp8", "fp8-a8", "fp8-b128",
    "fp8-a8-b128", "mxfp4", "mxfp4-mse",
]  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("shape", [(256, 512), (200, 384)], ids=str)
def test_compressed_tensors_reads_what_we_write(name, shape):
    """The library with which vLLM reads checkpoints, where it is installed."""
    base = pytest.importorskip("compressed_tensors.compressors.base")  # takes seconds
    from compressed_tensors.quantization import QuantizationConfig

    q = QuantScheme.parse(name).encode(randn(*shape, seed=1))
    fmt = scheme.get(q.format)
    config = fmt.config(q)
    group = QuantizationConfig.model_validate(config).config_groups["group_0"]
    reader = base.BaseCompressor.get_value_from_registry(config["format"])
    tensors = {key.removeprefix("x."): value for key, value in fmt.checkpoint("x", q).items()}
    assert set(reader.compression_param_names(group)) == set(tensors)
    if q.format != "mxfp4":  # float32 scales: products in float32; mxfp4 is exact in bfloat16
        tensors["weight_scale"] = tensors["weight_scale"].float()
    assert reader.decompress(tensors, group)["weight"].float().equal(fmt.decode(q))


def damages(t):
    """The tensor with wrong sizes, dimensions and types."""
    flat = t.flatten()
    shapes = [flat, flat[:0], flat[:1], t[None], torch.cat([t, t]), t[..., :0], t.new_zeros(()), torch.cat([t, t], -1)]
    return [*shapes, t.double(), t.to(torch.int64), t.to(torch.bool)]


@every_format
def test_damaged_tensors_are_refused_or_read(name, tmp_path):
    """A damaged file raises ModelLoadError or gives a weight that can be decoded; nothing else may happen."""
    fmt = Variant(name)
    q = fmt.encode(randn(16, K))
    tensors, config = fixtures_formats.as_stored(q, fmt.scheme.settled(fmt.decode(q)))
    refused = 0
    for key, tensor in tensors.items():
        for damaged in [None, *damages(tensor)]:
            given = {k: damaged if k == key else t for k, t in tensors.items()}
            fixtures_formats.write_weight(tmp_path, {k: t for k, t in given.items() if t is not None}, config)
            try:
                read = fixtures_formats.read_weight(tmp_path, q.shape)
            except ModelLoadError as error:
                assert "tensor x" in str(error)
                refused += 1
                continue
            assert fmt.decode(read).shape == q.shape
    assert refused >= len(tensors)


@every_format
@pytest.mark.parametrize("width", [K, 24, 1])
def test_bits_per_weight(name, width):
    """The predicted size is the real size. Codes below 8 bits take a byte each until a backend packs them."""
    fmt = Variant(name)
    if fmt.scheme.group is not None and width % fmt.scheme.group:
        with pytest.raises(ConfigError, match="do not divide"):
            fmt.scheme.bits_per_weight(width)
        with pytest.raises(ConfigError, match="do not divide"):
            fmt.encode(randn(3, width))
        return
    weight = randn(3, width)
    q = fmt.encode(weight)
    if width == 24:  # no multiple of a group size: one scale per row
        assert q.group == 24 and (fmt.decode(q) - weight).norm() < fmt.loss * weight.norm()
    rest = (q.nbytes - q.parts["codes" if "codes" in q.parts else "weight"].nbytes) * 8 / (3 * width)
    once = sum(t.nbytes for t in q.parts.values() if len(t) != 3) * 8 / (3 * width)  # per matrix or 256 scales
    assert fmt.scheme.bits_per_weight(width) == pytest.approx(rest + fmt.bits, abs=once)


@every_format
def test_extremes_of_weights_stay_numbers(name):
    """Huge beside tiny values, the largest floats, zeros of either sign: results stay finite and near the range."""
    weight = torch.zeros(4, K)
    weight[0, ::2], weight[0, 1] = 1e-30, -1e30
    weight[1, 5] = 3e38
    weight[2, ::2] = -0.0
    weight[3] = torch.linspace(-1e-38, 1e-38, K)
    if name == "fp16":
        weight = weight.clamp(-6e4, 6e4)
    fmt = Variant(name)
    decoded = fmt.decode(fmt.encode(weight))
    assert decoded.isfinite().all()
    size, wanted = decoded.abs().amax(1), weight.abs().amax(1)
    if not fmt.rows_alone:  # shared scales round the small rows to zero
        size, wanted = size.amax(), wanted.amax()
    least = min(0.9, 1 - 2.0 ** (2 - fmt.bits))  # few bits: the largest code is far below the largest weight
    assert (size <= 1.07 * wanted).all() and (size >= least * wanted - 1e-37).all()


@every_format
def test_packed_weights_are_refused_not_misread(name):
    fmt = Variant(name)
    q = replace(fmt.encode(randn(4, K)), layout="other")
    for read in (fmt.decode, lambda w: fmt.decode_rows(w, torch.tensor([0])), lambda w: fmt.concat([w, w])):
        with pytest.raises(ValueError, match=r"ops.unpack"):
            read(q)


@every_format
@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("shape", [(33, K), (1, 2 * K), (70, 40)], ids=str)
def test_packing_and_back(name, backend, shape):
    fmt, chosen = Variant(name), ops.resolve(backend)
    if fmt.scheme.group is not None and shape[1] % fmt.scheme.group:
        pytest.skip("the group does not divide the rows")
    q = fmt.encode(randn(*shape))
    packed = chosen.pack(q)
    assert packed.shape == q.shape and packed.format == q.format
    back = chosen.unpack(packed)
    assert fmt.decode(back).equal(fmt.decode(q))
    assert same(back, q) or "dq" in name  # kernels use double-quantized scales as plain ones


INTEGERS = [
    "w8a8", "w8a8-g32", "w8a8n", "w8a8n-g32", "w4a8", "w4a8-g32", "w4a8-g64-asym", "w4a8-channel", "w4a8-channel-asym",
    "w8a8n-channel", "w4a8-qoq", "w4a8-qoq-mse-g32", "q6_k-a8", "q5_0-a8", "iq4_nl-a8", "ternary-a8", "ternary-a8-g32",
]  # fmt: skip
FLOATS = [
    "w8a16", "w4a16", "w4a16-g32-asym", "w4a16-channel", "nf4", "nf4-dq", "fp8", "fp8-b128", "fp8-auto", "qoq-g64",
    "mxfp4", "int8n", "ternary",
]  # fmt: skip
SCHEMES = [
    *INTEGERS, *FLOATS, "q2_k-a8", "q4_k-a8", "q5_k-a8", "q4_1-a8", "q5_1-a8", "fp8-a8", "fp8_e5m2-a8", "fp8-a8-b128",
    "bf16-a16", "w8a8-outliers",
]  # fmt: skip
INVARIANT = [b for b in backends() if ops.resolve(b).row_invariant]


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("backend", backends())
def test_products_of_integers_are_exact(name, backend):
    """Products are compared with integers: scales that are powers of two leave nothing to round."""
    q = QuantScheme.parse(name).encode(randn(9, K))
    q = replace(q, parts={**q.parts, "scales": torch.full_like(q.parts["scales"], 2.0**-7)})
    x = torch.randint(-127, 128, (5, K), generator=torch.Generator().manual_seed(3)).float()
    x.view(5, -1, q.group)[:, :, 0] = 127.0  # absmax 127, so the scale is 1 and the codes are x
    wanted = x.double() @ scheme.get(q.format).decode(q).double().T
    chosen = ops.resolve(backend)
    assert chosen.product(plain_rows(x), chosen.pack(q)).double().equal(wanted)


@pytest.mark.parametrize("name", ["fp8-a8", "fp8-a8-b128", "fp8_e5m2-a8"])
@pytest.mark.parametrize("backend", backends())
def test_products_of_fp8_rows_are_those_of_rounded_rows(name, backend):
    chosen = ops.resolve(backend)
    q = QuantScheme.parse(name).encode(randn(33, K))
    floats, rounding = chosen.pack(replace(q, activations=None)), chosen.pack(q)
    x = randn(5, K, seed=1)
    wanted = chosen.product(plain_rows(scheme.round_rows(x, q.group)), floats)
    assert chosen.product(plain_rows(x), rounding).equal(wanted)
    assert not chosen.product(plain_rows(x), floats).equal(wanted)


def planted():
    """Rows [6, K] within 6, except column 7 of three rows, which is a hundred times as large."""
    x = randn(6, K).clamp(-5, 5)
    x[:, 7] = 1.0
    x[::2, 7] *= 100.0
    return x


@pytest.mark.parametrize("backend", backends())
def test_an_outlier_costs_the_others_nothing(backend):
    chosen, weight, x = ops.resolve(backend), randn(40, K, seed=1), planted()
    wanted = x.double() @ weight.double().T

    def error(name):
        got = chosen.product(plain_rows(x), chosen.encode(weight, QuantScheme.parse(name)))
        return float((got - wanted)[::2].norm() / wanted[::2].norm())

    assert error("w8a8") > 0.03  # steps of 100 / 127 for numbers of size 1
    # What remains is the error of the weights and the other numbers, as in rows without an outlier.
    assert error("w8a8-outliers") < min(0.3 * error("w8a8"), 1.2 * error("w8a16"))


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("suffix", ["", "-g64"])
def test_rows_without_one_have_the_bits_of_w8a8(backend, suffix):
    """Also if other rows of the pass have outliers (law 1)."""
    chosen, weight, x = ops.resolve(backend), randn(33, K, seed=1), planted()
    bias, residual = randn(33, seed=2), randn(6, 33, seed=3)
    mixed, integers = (chosen.encode(weight, QuantScheme.parse(name + suffix)) for name in ("w8a8-outliers", "w8a8"))
    got = chosen.product(plain_rows(x), mixed, bias, residual)
    wanted = chosen.product(plain_rows(x), integers, bias, residual)
    same = (got.view(torch.int32) == wanted.view(torch.int32)).all(1)
    assert same.tolist() == [False, True] * 3


@pytest.mark.bits
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("backend", backends())
def test_rows_made_on_the_way_have_the_bits_of_separate_ops(name, backend):
    """Rows that a product norms or gates itself; some of their values are outliers."""
    chosen = ops.resolve(backend)
    w = chosen.pack(QuantScheme.parse(name).encode(randn(33, K)))
    x, norm, rows = randn(5, K, seed=1), 3 * randn(K, seed=2), torch.tensor([3, 0], dtype=torch.int32)
    normed = chosen.rms_norm(x[rows.long()], norm, 1e-5)
    assert chosen.product(normed_rows(x, norm, 1e-5, rows), w).equal(chosen.product(plain_rows(normed), w))
    gate_up = 3 * randn(5, 2 * K, seed=3)
    gated = chosen.silu_mul(gate_up)
    assert normed.abs().max() > OUTLIER < gated.abs().max()
    assert chosen.product(gated_rows(gate_up), w).equal(chosen.product(plain_rows(gated), w))


@pytest.mark.bits
@pytest.mark.parametrize(
    ("name", "width"), [*product(SCHEMES, [K]), *product(("fp32", "bf16", "fp16", "w8a8", "fp8"), (16, 80, 96, K))]
)
@pytest.mark.parametrize("backend", INVARIANT)
def test_rows_do_not_know_their_company(name, width, backend):
    """The basis of law 1: a row has the same bits alone, in any pass, among large, zero or broken rows, on threads."""
    chosen = ops.resolve(backend)
    w = chosen.pack(QuantScheme.parse(name).encode(randn(130, width, seed=1)))
    x, bias = randn(70, width), randn(130, seed=2)
    residual = randn(70, 130, seed=4)
    x[1] *= 1e6
    x[3] = 0
    x[5, 7] = torch.nan
    x[6] *= 1e-30
    whole = chosen.product(plain_rows(x), w, bias, residual)
    assert whole[5].isnan().any() and whole[[*range(5), *range(6, 70)]].isfinite().all()
    for count in (1, 2, 3, 5, 8, 16, 33):
        for start in (0, 4, 70 - count):
            part = slice(start, start + count)
            got = chosen.product(plain_rows(x[part].clone()), w, bias, residual[part].clone())
            assert got.view(torch.int32).equal(whole[part].contiguous().view(torch.int32))
    with threads(2):
        assert chosen.product(plain_rows(x), w, bias, residual).view(torch.int32).equal(whole.view(torch.int32))


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("backend", backends())
def test_the_embedding_ignores_activations(name, backend):
    q, chosen = QuantScheme.parse(name).encode(randn(40, K)), ops.resolve(backend)
    ids = torch.tensor([39, 0, 7, 39], dtype=torch.int32)
    for stored in (q, chosen.pack(q)):
        assert chosen.embedding(ids, stored).equal(scheme.get(q.format).decode(q)[ids.long()])


@pytest.mark.parametrize("name", [n for n in KV_NAMES if n not in PACKED_ROWS])
@pytest.mark.parametrize("size", [1.0, 1e-3, 300.0])
def test_cache_rows_are_rounded_to_nearest(name, size):
    fmt = scheme.get(name)
    x = randn(1, 1, 16).clamp(-0.99, 0.99).repeat(1001, 2, 1)
    x[..., 0], x[..., 8] = 1.0, -1.0
    sweep = torch.linspace(-1, 1, 1001)
    x[:, 0, 3] = sweep
    decoded = fmt.decode_kv(*fmt.encode_kv(x * size))
    staircase(decoded[:, 0, 3], sweep * size, 1e-6 * size)


@every_kv_format
@pytest.mark.parametrize("dim", [2, 8, 12, 64, 96, 128, 320])
def test_cache_rows_and_back(name, dim):
    """Any even head dimension. The error of a row, as a vector, is at most half a step per value."""
    fmt = scheme.get(name)
    x = randn(50, 3, dim) * torch.tensor([1e-3, 1.0, 300.0])[:, None]
    x[:, :, 0] *= 20  # an outlier channel
    codes, scales = fmt.encode_kv(x)
    assert codes.shape[:2] == x.shape[:2] and codes.dtype == fmt.kv_dtype and codes.is_contiguous()
    assert scales is None or (scales.shape == x.shape[:2] and scales.dtype == torch.float32)
    decoded = fmt.decode_kv(codes, scales)
    assert decoded.dtype == torch.float32 and decoded.shape == x.shape
    error, length = (decoded - x).norm(dim=-1), x.norm(dim=-1)
    relative = {"fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3}.get(name, 2.0**-8)  # half a step of the float format
    steps = torch.zeros(()) if scales is None or name.startswith("fp8") else scales
    assert (error <= dim**0.5 * steps / 2 + relative * length).all()
    if name not in PACKED_ROWS:  # in packed rows, a rotation or other outliers change the levels
        torch.testing.assert_close(fmt.decode_kv(*fmt.encode_kv(decoded)), decoded, rtol=1e-6, atol=1e-9)


@every_kv_format
def test_a_cache_row_knows_no_other(name):
    """Law 1 needs this: a row's codes must not depend on rejected draft tokens of the pass, or on other heads."""
    fmt = scheme.get(name)
    x = randn(9, 3, 20) * torch.tensor([1e-4, 1.0, 1e3])[None, :, None] * torch.linspace(0.1, 50, 9)[:, None, None]
    codes, scales = fmt.encode_kv(x)
    for t in range(9):
        alone, alone_scales = fmt.encode_kv(x[t : t + 1])
        assert alone[0].equal(codes[t])
        assert (alone_scales is None) == (scales is None)
        assert scales is None or alone_scales is None or alone_scales[0].equal(scales[t])
    for h in range(3):
        alone, alone_scales = fmt.encode_kv(x[:, h : h + 1])
        assert alone[:, 0].equal(codes[:, h])
        assert scales is None or alone_scales is None or alone_scales[:, 0].equal(scales[:, h])


@every_kv_format
def test_cache_rows_that_are_no_numbers_stay_so(name):
    """NaN and infinity must show in their own row, and in no other row."""
    fmt = scheme.get(name)
    x = randn(4, 2, 16)
    x[1, 0, 3], x[2, 1, 0] = torch.nan, torch.inf
    decoded = fmt.decode_kv(*fmt.encode_kv(x))
    assert not decoded[1, 0].isfinite().all() and not decoded[2, 1].isfinite().all()
    for row in ((0, 0), (0, 1), (1, 1), (2, 0), (3, 0), (3, 1)):
        assert decoded[row].isfinite().all()


@every_kv_format
@pytest.mark.parametrize("size", [0.0, 1e-45, 2.0**-101, 1e-38])
def test_cache_rows_of_almost_nothing(name, size):
    fmt = scheme.get(name)
    decoded = fmt.decode_kv(*fmt.encode_kv(size * randn(3, 2, 8)))
    assert (decoded.abs() <= 8 * size).all()
    assert fmt.decode_kv(*fmt.encode_kv(torch.zeros(0, 2, 8))).shape == (0, 2, 8)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_serves_weights_or_the_cache_and_says_which(name):
    fmt = scheme.get(name)
    assert fmt.weights or fmt.kv_dtype is not None
    if fmt.kv_dtype is None:
        for use in (lambda: scheme.kv_format(name), lambda: fmt.encode_kv(randn(1, 1, 8))):
            with pytest.raises(ConfigError, match="use e"):
                use()
    if not fmt.weights:
        args = scheme.QuantArgs()
        for use in (lambda: QuantScheme(name), lambda: QuantScheme.parse(name), lambda: fmt.encode(randn(1, K), args)):
            with pytest.raises(ConfigError, match="KV cache only"):
                use()
