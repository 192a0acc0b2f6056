"""Rows of the KV cache in 4 bits: bytes by hand, the rotation, outliers, NaN rows, odd dimensions."""

import math

import pytest
import torch
from fixtures_ops import randn

from sameseed import scheme
from sameseed.errors import ConfigError
from sameseed.formats import _kv4
from sameseed.formats._hadamard import hadamard
from sameseed.formats.int4_sparse import num_outliers
from sameseed.kvcache.cache import KVCache

INT4, SPARSE = scheme.get("int4"), scheme.get("int4_sparse")


@pytest.mark.parametrize("dim", [1, 2, 6, 10, 32, 64, 80, 96, 128])
def test_the_rotation_is_the_hadamard_matrix_by_blocks(dim):
    block = dim & -dim
    small = torch.ones(1, 1, dtype=torch.float64)
    while small.shape[0] < block:  # Sylvester's construction
        small = torch.cat([torch.cat([small, small], 1), torch.cat([small, -small], 1)])
    matrix = torch.block_diag(*[small] * (dim // block)) / math.sqrt(block)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim, dtype=torch.float64))
    x = randn(5, 3, dim)
    before = x.clone()
    torch.testing.assert_close(hadamard(x).double(), x.double() @ matrix.T, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hadamard(hadamard(x)), x, rtol=1e-5, atol=1e-6)
    assert x.equal(before)


def test_bytes_of_a_row():
    """Low nibbles hold the first half of a row, high nibbles the second half; the lowest value follows."""
    x = torch.tensor([[-1.0, 0.0, 14.0, 3.0, 2.0, 1.0]])
    data, scales = _kv4.encode_rows(x)
    assert scales.tolist() == [1.0]
    assert data.tolist() == [[0 | 4 << 4, 1 | 3 << 4, 15 | 2 << 4, 0x80, 0xBF]]  # bfloat16 of -1 is 0xBF80
    assert _kv4.decode_rows(data, scales, 6).equal(x)


@pytest.mark.parametrize(("value", "lowest"), [(0.1, 0.0996), (-0.1, -0.1001), (3.0, 3.0), (-3.0, -3.0)])
def test_the_lowest_value_is_rounded_down(value, lowest):
    data, scales = _kv4.encode_rows(torch.full((1, 4), value))
    stored = _kv4.as_bf16(data[:, 2:4]).float().item()
    assert stored <= value and stored == pytest.approx(lowest, abs=1e-4)
    assert (_kv4.decode_rows(data, scales, 4) - value).abs().max() <= scales.item() / 2 + 1e-7


@pytest.mark.parametrize(("dim", "width"), [(2, 6), (64, 40), (128, 78), (256, 154), (320, 202), (512, 322)])
def test_outliers_lie_behind_the_nibbles(dim, width):
    x = randn(4, 2, dim).clamp(-3, 3)
    count = num_outliers(dim)
    index = torch.arange(count) * (dim // count) + 1
    x[:, :, index] = 100.0 + torch.arange(count)
    codes, scales = SPARSE.encode_kv(x)
    assert codes.shape == (4, 2, width) and scales is not None
    start = dim // 2 + 2
    assert _kv4.as_bf16(codes[..., start : start + 2 * count]).float().equal(x[..., index].to(torch.bfloat16).float())
    places = codes[..., start + 2 * count :].long()
    places = places if dim <= 256 else places[..., ::2] + 256 * places[..., 1::2]
    assert (places == index).all()
    assert (scales <= 6.1 / 15).all()  # without the outliers the range is smaller
    decoded = SPARSE.decode_kv(codes, scales)
    assert decoded[..., index].equal(x[..., index].to(torch.bfloat16).float())


def test_of_two_as_large_the_first_is_kept():
    codes, _ = SPARSE.encode_kv(torch.tensor([[[1.0, -5.0, 5.0, 5.0]]]))
    assert codes[0, 0, -1] == 1


@pytest.mark.parametrize("name", ["int4", "int4_sparse"])
def test_odd_dimensions_are_refused(name):
    with pytest.raises(ConfigError, match="even head dimension"):
        scheme.get(name).encode_kv(randn(1, 1, 33))
    with pytest.raises(ConfigError, match="even head dimension"):
        KVCache([(1, 33)], 2, 4, name)
