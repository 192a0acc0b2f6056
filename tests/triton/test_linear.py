"""Products, norms and gates of the GPU kernels: values, bits, and how products are cut into programs."""

import math
from dataclasses import replace

import pytest
import torch
from fixtures_ops import randn

from sameseed import ops, scheme
from sameseed.models.config import RopeConfig
from sameseed.models.layers import rope_table
from sameseed.ops import gated_rows, normed_rows, plain_rows, reference, triton as gpu
from sameseed.ops.triton import dispatch as host, guard, packing, tiling as cuts
from sameseed.scheme import QuantScheme

# Law 4 in numbers: the largest difference from the reference over the sum of |x w|. Rows as float16 times a power of
# two keep 11 bits, and bfloat16 keeps 8; other rows enter the product as in the reference.
ROUNDING = {"half": 2.0**-11, "bf16": 2.0**-8, "single": 0.0, "int8": 0.0, "fp8": 0.0}
SUMS = 2e-6  # error of float32 sums in another order, relative to the size of the summed values

FORMATS = [
    "bf16", "fp16", "fp32", "w8a16", "w8a8", "w8a8-g64", "w4a16", "w4a16-g32-asym", "w4a8", "w4a8-g32", "w4a8-asym",
    "fp8", "fp8-b128", "fp8-a8", "fp8_e5m2", "fp8_e5m2-a8", "qoq", "w4a8-qoq", "nf4", "mxfp4", "int8n-g64", "w8a8n-g32",
]  # fmt: skip
every_format = pytest.mark.parametrize("name", FORMATS)
FEW = ["bf16", "w4a16-g32-asym", "w4a8-g32", "fp8-a8"]
DEVICE = "cpu" if guard.interpreted() else "cuda"
backend = ops.resolve("triton", DEVICE)
pytestmark = pytest.mark.usefixtures("small_programs")


def packed(name, O, K):  # noqa: E741
    plain = QuantScheme.parse(name).encode(randn(O, K, seed=1))
    w = backend.pack(plain)
    assert gpu.serves(w) and (w.layout == packing.LAYOUT or w.format in packing.DENSE)
    return plain, w


def fits(name, K):
    """Whether the format's groups divide rows of K values."""
    group = {"g64": 64, "g32": 32, "b128": 32}.get(name.split("-")[1] if "-" in name else "", 1)
    return K % group == 0


def as_entered(x, w):
    """Rows as they enter the product (after rounding), in float64."""
    form = host.form_for(w)
    if form == "half":
        power = torch.exp2(torch.floor(torch.log2(x.abs().amax(-1, keepdim=True))))
        return (x / power).half().double() * power
    if form == "int8":
        codes, scales = scheme.quantize_rows(x, w.group)
        return (codes.double().view(x.shape[0], -1, w.group) * scales.double()[..., None]).flatten(1)
    if form == "fp8":
        return scheme.round_rows(x, w.group).double()
    return x.bfloat16().double() if form == "bf16" else x.double()


def size(x, w):
    return x.abs().double() @ scheme.get(w.format).decode(w).abs().double().T


@every_format
@pytest.mark.parametrize(("T", "O", "K"), [(5, 70, 256), (1, 3, 40), (33, 20, 96)])
def test_values(T, O, K, name):  # noqa: E741
    if not fits(name, K) or (T == 33 and name not in FEW):
        return
    plain, w = packed(name, O, K)
    x, bias, residual = randn(T, K), randn(O, seed=2), randn(T, O, seed=3)
    got = backend.product(plain_rows(x), w, bias, residual)
    decoded = scheme.get(plain.format).decode(plain).double()
    wanted = as_entered(x, plain) @ decoded.T + bias + residual
    assert got.dtype == torch.float32 and got.shape == (T, O)
    assert (got - wanted).abs().max() <= SUMS * 3 * math.sqrt(K) * max(1.0, decoded.abs().max().item())
    bound = (ROUNDING[host.form_for(w)] + SUMS) * (size(x, plain) + 4)
    assert ((got - reference.product(plain_rows(x), plain, bias, residual)).abs() <= bound).all()


@pytest.mark.parametrize("name", ["w8a8", "w4a8", "fp8", "w4a16"])
def test_rows_of_any_size(name):
    """Large and tiny rows, zeros, and rows with NaN or infinity, which must not affect other rows."""
    plain, w = packed(name, 5, 256)
    x = randn(8, 256)
    x[1] *= 1e30
    x[2] *= 1e-30
    x[3] = 0.0
    x[4, 7], x[5, 9] = math.nan, math.inf
    x[6] *= 1e-41
    got, wanted = backend.product(plain_rows(x), w), reference.product(plain_rows(x), plain)
    assert not got[4:6].isfinite().any() and not wanted[4:6].isfinite().any()
    for t in (0, 1, 2, 3, 7):
        torch.testing.assert_close(got[t], wanted[t], rtol=2e-3, atol=2e-2 * float(x[t].abs().max()))
    assert (got[6].abs() <= 1e-38).all() and (got[3] == 0).all()


@pytest.mark.parametrize("name", ["nf4", "mxfp4"])
def test_every_code_of_four_bit_floats(name):
    """Products with one-hot rows return each code's value: exact for mxfp4, 22 bits for nf4."""
    fmt = scheme.get(name)
    plain = fmt.stored(torch.arange(128, dtype=torch.uint8).remainder(16)[None], torch.ones(1, 128 // fmt.groups[0]))
    ones = torch.arange(16) * 7  # one column of each code
    got = gpu.product(plain_rows(torch.eye(128)[ones]), gpu.pack(plain)).T
    torch.testing.assert_close(got, fmt.decode(plain)[:, ones], rtol=2.0**-22 if name == "nf4" else 0.0, atol=2.0**-25)


def test_every_code_of_eight_bit_floats():
    """Products with one-hot rows return each code's exact value, including NaN and subnormals."""
    for name in ("fp8_e4m3", "fp8_e5m2"):
        codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
        plain = scheme.get(name).stored(codes, torch.ones(8, 1))
        finite = codes.view(scheme.get(name).dtype).float().isfinite()
        alone = replace(plain, parts={**plain.parts, "codes": torch.where(finite, codes, 0)})
        x = torch.eye(32)
        assert gpu.product(plain_rows(x), gpu.pack(alone)).T.equal(scheme.get(name).decode(alone))
        spoiled = gpu.product(plain_rows(torch.ones(1, 32)), gpu.pack(plain))[0]
        assert spoiled.isfinite().equal(finite.all(1))


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_rows_are_quantized_as_the_formats_say(form):
    x = randn(6, 256)
    x[1], x[2], x[3] = 0.0, x[2] * 2.0**-103, x[3] * 1e35  # row 2 is below 2^-100
    x[4, 3], x[5, 200] = math.nan, math.inf
    x[0, :128] = torch.arange(128) - 63.5  # rounding ties
    for group in (64, 256):
        launch, ready = host.preparation(plain_rows(x), form, group)
        launch.run()
        if form == "int8":
            codes, scales = scheme.quantize_rows(x, group)
            assert ready.values.equal(codes)
            torch.testing.assert_close(ready.scales, scales, rtol=0, atol=0, equal_nan=True)
        else:
            values = (ready.values.float().view(6, -1, group) * ready.scales[..., None]).flatten(1)
            torch.testing.assert_close(values, scheme.round_rows(x, group), rtol=0, atol=0, equal_nan=True)


def test_halves_of_the_largest_and_the_smallest_rows():
    """The power of two of a row never overflows or underflows float32."""
    x = torch.tensor([[3.4e38, -1.7e38, 1.0], [2.0**-126, 2.0**-100, -(2.0**-99)], [0.0, -0.0, 0.0]])
    launch, ready = host.preparation(plain_rows(x), "half", 3)
    launch.run()
    assert ready.values.isfinite().all() and (ready.values.abs() < 4).all()
    back = ready.values.double() * ready.scales.double()[:, None]
    assert ((back - x.double()).abs() <= 2.0**-11 * x.abs().double().amax(-1, keepdim=True)).all()


def test_small_ops():
    x, weight = randn(5, 96), randn(96, seed=1)
    exact = x.double()
    normed = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(backend.rms_norm(x, weight, 1e-5).double(), normed, rtol=1e-6, atol=1e-6)
    gate, up = (6 * x).double().chunk(2, -1)
    wanted = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(backend.silu_mul(6 * x).double(), wanted, rtol=2e-6, atol=2e-6)
    wanted = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(backend.gelu_mul(6 * x).double(), wanted, rtol=2e-6, atol=3e-6)
    wide, table = randn(7, 5, 20), rope_table(RopeConfig(), 20, 50)
    positions = torch.tensor([0, 3, 49, 1, 1, 30, 8], dtype=torch.int32)
    for q in (wide, wide[:, 1:4]):
        torch.testing.assert_close(
            backend.rope(q, positions, table), reference.rope(q, positions, table), rtol=1e-6, atol=1e-6
        )


@every_format
def test_rows_do_not_know_their_company(name):
    _, w = packed(name, 33, 64)
    x, bias = randn(40 if name in FEW else 20, 64), randn(33, seed=2)
    whole = backend.product(plain_rows(x), w, bias)
    for start, count in ((39, 1), (2, 17)) if name in FEW else ((19, 1),):
        assert backend.product(plain_rows(x[start : start + count].clone()), w, bias).equal(
            whole[start : start + count]
        ), count


def test_a_row_keeps_its_bits_as_others_join_it():
    """Row counts on both sides of every tile border; `test_the_cut_...` shows that other counts run the same code."""
    _, w = packed("w4a16-g32", 8, 64)
    x = randn(64, 64)
    whole = backend.product(plain_rows(x), w)
    for count in (1, 15, 16, 17, 32, 33, 63):
        assert backend.product(plain_rows(x[:count].clone()), w).equal(whole[:count]), count
    lies = torch.cat([torch.zeros(1), x.flatten()])[1:].view(64, 64)
    assert lies.data_ptr() % 16 and backend.product(plain_rows(lies), w).equal(whole)  # at any address


@pytest.fixture
def short_parts(monkeypatch):
    """Cut short sums into two shares, too."""
    monkeypatch.setattr(cuts, "SHORTEST", 1)
    monkeypatch.setattr(cuts, "SPLITS", (2,))
    cuts.cut.cache_clear()


@pytest.mark.parametrize("name", ["w4a16-g32", "w8a8-g64"])
def test_split_sums_keep_the_law(name, short_parts, monkeypatch):
    plain, w = packed(name, 20, 256)
    assert cuts.tiling(w).split == 2
    x, bias, residual = randn(65, 256), randn(20, seed=2), randn(65, 20, seed=3)
    whole = backend.product(plain_rows(x), w, bias, residual)
    assert backend.product(plain_rows(x[17:18].clone()), w, bias, residual[17:18]).equal(whole[17:18])
    wanted = as_entered(x, plain) @ scheme.get(plain.format).decode(plain).double().T + bias + residual
    assert (whole - wanted).abs().max() <= SUMS * 3 * math.sqrt(256) * 4
    monkeypatch.setattr(host, "ROWS_AT_ONCE", 64)  # a pass with many rows is computed in slices
    assert backend.product(plain_rows(x), w, bias, residual).equal(whole)


@pytest.mark.parametrize("K", [64, 1024])  # more values than threads of a program: the order of the mean's sum matters
@pytest.mark.parametrize("name", FEW)
def test_fused_forms_have_the_bits_of_their_parts(name, K):
    _, w = packed(name, 20, K)
    x, norm, bias = randn(5, K), randn(K, seed=4), randn(20, seed=5)
    assert gpu.product(normed_rows(x, norm, 1e-5), w, bias).equal(
        gpu.product(plain_rows(gpu.rms_norm(x, norm, 1e-5)), w, bias)
    )
    index = torch.tensor([4, 3, 3], dtype=torch.int32)
    assert gpu.product(normed_rows(x, norm, 1e-5, index), w).equal(
        gpu.product(normed_rows(x, norm, 1e-5), w)[index.long()]
    )
    gate_up, residual = randn(5, 2 * K, seed=6), randn(5, 20, seed=7)
    assert gpu.product(gated_rows(gate_up), w, bias, residual).equal(
        gpu.product(plain_rows(gpu.silu_mul(gate_up)), w, bias, residual)
    )
    alone, added = gpu.product(gated_rows(gate_up), w), gpu.product(gated_rows(gate_up), w, residual=residual)
    assert added.equal(residual + alone)


@every_format
def test_the_cut_depends_on_the_weight_alone_as_it_is(name):
    """With the number of rows, only the number of programs, their tiles, their warps and their start time change."""
    _, w = packed(name, 100, 4096)
    seen = set()
    for count in (*range(1, 65), 100, 500):
        _, ready = host.preparation(plain_rows(torch.empty(count, 4096)), host.form_for(w), w.group)
        launches = host.multiplication(ready, w, None, None, torch.empty(count, 100))
        cut = []
        for launch in launches:
            fixed = {k: v for k, v in launch.constants.items() if k not in ("TILES", "EARLY")}
            sizes = {k: v for k, v in launch.arguments.items() if isinstance(v, int) and k != "num_rows"}
            cut.append((str(fixed), str(sizes), launch.grid[1:]))
            assert "num_rows" in launch.free  # the compiler must not specialize on 1 or multiples of 16
        seen.add(tuple(cut))
        tiles = launches[0].constants["TILES"]
        assert tiles == (1 if count <= 16 else 2 if count <= 32 else 4) and launches[0].grid[0] * tiles * 16 >= count
    assert len(seen) == 1


@every_format
@pytest.mark.parametrize(("O", "K"), [(70, 384), (33, 96), (1, 40)])
def test_packed_weights_unpack_to_themselves(O, K, name):  # noqa: E741
    if not fits(name, K):
        return
    plain, w = packed(name, O, K)
    again = backend.unpack(w)
    assert again.layout == "plain" and again.group == plain.group == w.group
    for part, tensor in plain.parts.items():
        assert again.parts[part].equal(tensor.reshape(again.parts[part].shape)), part
    ids = torch.tensor([O - 1, 0, O // 2], dtype=torch.int32)
    assert backend.embedding(ids, w).equal(reference.embedding(ids, plain))
    assert backend.pack(w) is w


def test_what_has_no_kernel_is_left_to_the_reference():
    plain = QuantScheme.parse("w8a16").encode(randn(4, 48, seed=1))
    zeros = replace(plain, parts={**plain.parts, "zeros": torch.ones(4, 1, dtype=torch.int8)})
    assert backend.pack(zeros) is zeros and not gpu.serves(zeros)
    lowered = scheme.get("int8n").lower(QuantScheme.parse("int8n").encode(randn(4, 64, seed=1)))
    assert lowered is not None and backend.pack(lowered) is lowered
    x = randn(3, 64)
    assert backend.product(plain_rows(x), lowered).equal(reference.product(plain_rows(x), lowered))


@pytest.mark.parametrize("packed_first", [True, False])
def test_the_upper_halves_of_a_weight_are_read_alone(packed_first):
    """self_quant drafts with one of the two planes, in the same memory."""
    fmt, plain = scheme.get("int8n"), QuantScheme.parse("w8a8n").encode(randn(20, 256, seed=1))
    whole = gpu.pack(plain)
    view = fmt.lower(whole) if packed_first else gpu.pack(fmt.lower(plain))
    assert gpu.serves(view) and set(view.parts) == {"high", "scales"} and view.shape == plain.shape
    if packed_first:
        assert view.parts["high"].data_ptr() == whole.parts["high"].data_ptr()
    x, exact = randn(5, 256), fmt.decode(fmt.lower(plain))
    assert fmt.decode(gpu.unpack(view)).equal(exact)
    wanted = as_entered(x, plain) @ exact.double().T
    assert (gpu.product(plain_rows(x), view) - wanted).abs().max() <= SUMS * 3 * 16 * exact.abs().max()
    assert gpu.product(plain_rows(x[1:2].clone()), view).equal(gpu.product(plain_rows(x), view)[1:2])


def test_rows_that_do_not_fit_are_refused():
    _, w = packed("w4a16", 4, 64)
    with pytest.raises(ValueError, match="do not fit a weight"):
        gpu.product(plain_rows(randn(2, 65)), w)
    with pytest.raises(ValueError, match="to be float32"):
        gpu.product(plain_rows(randn(2, 64).half()), w)
    with pytest.raises(ValueError, match="do not fit a weight"):
        gpu.pack(replace(gpu.unpack(w), shape=(5, 64)))
    assert gpu.product(plain_rows(randn(0, 64)), w).shape == (0, 4)
