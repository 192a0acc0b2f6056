"""gptq against the paper's plain formulas, its blocks and groups, and the search for clipping ranges."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fixtures_formats import as_stored, read_weight, write_weight
from fixtures_ops import randn
from fixtures_quantize import correlated, stats_of
from torch import Tensor

from sameseed.errors import ConfigError
from sameseed.quantize import Stats, decoded, parse_method
from sameseed.quantize._grid import CodeGrid, clip
from sameseed.scheme import QuantScheme

pytestmark = pytest.mark.bits

K = 128


def gptq(weight: Tensor, scheme: str, stats: Stats, **options: object) -> Tensor:
    return decoded(parse_method("gptq", options).quantize(weight, QuantScheme.parse(scheme), stats))


def textbook(weight: Tensor, hessian: Tensor, grid: CodeGrid, group: int, damping: float) -> Tensor:
    """Optimal brain quantization in a fixed order: each column inverts the remaining Hessian anew."""
    work, hessian = weight.double(), hessian.double()
    hessian = hessian + damping * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    out = torch.empty_like(work)
    for i in range(work.shape[1]):
        inverse = torch.linalg.inv(hessian[i:, i:])
        out[:, i] = grid.nearest(work[:, i].float(), i // group)[1].double()
        error = (work[:, i] - out[:, i]) / inverse[0, 0]
        work[:, i:] -= error[:, None] * inverse[0]
    return out.float()


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16-g32", "w4a8-qoq", "fp8", "w8a8n"])
def test_it_is_the_paper_s_method(scheme: str) -> None:
    weight, stats = randn(24, K), stats_of(correlated(500, K))
    q = QuantScheme.parse(scheme).encode(weight)
    expected = textbook(weight, stats.hessian, CodeGrid(q), q.group, 0.01)
    plain = decoded(q)
    kept = stats.error(weight, expected) <= stats.error(weight, plain)  # the other rows fall back to rounding
    found = gptq(weight, scheme, stats, clip=False, act_order=False)
    assert kept.sum() > 12
    assert (found[kept] == expected[kept]).float().mean() > 0.99
    assert found[~kept].equal(plain[~kept])


@pytest.mark.parametrize("scheme", ["w4a16-g32", "w4a16-g64-asym", "nf4", "w8a16"])
def test_blocks_do_not_matter(scheme: str) -> None:
    weight, stats = randn(16, K, seed=1), stats_of(correlated(500, K))
    whole = gptq(weight, scheme, stats, block=K)
    for block in (16, 48, 100):  # groups end inside blocks, and blocks end inside groups
        found = gptq(weight, scheme, stats, block=block)
        assert (found == whole).float().mean() > 0.97  # sums in another order
        assert stats.error(weight, found).sum() == pytest.approx(float(stats.error(weight, whole).sum()), rel=0.05)


@pytest.mark.parametrize("scheme", ["fp8-b128", "nf4-dq"])
def test_rows_that_share_something_are_kept_together(scheme: str, tmp_path: Path) -> None:
    # Inputs are nearly uncorrelated: about half the rows gain nothing.
    weight, stats = randn(256, 2 * K, seed=3), stats_of(randn(4000, 2 * K, seed=9))
    chosen = QuantScheme.parse(scheme)
    q, plain = parse_method("gptq", {}).quantize(weight, chosen, stats), chosen.encode(weight)
    write_weight(tmp_path, *as_stored(q, chosen))
    read = read_weight(tmp_path, q.shape)
    assert decoded(read).equal(decoded(q))
    found, rounded = (stats.error(weight, decoded(x)) for x in (q, plain))
    size = chosen.rows_together or len(weight)
    assert all(f.sum() <= r.sum() for f, r in zip(found.split(size), rounded.split(size), strict=True))


def test_act_order_helps_where_few_channels_are_large() -> None:
    x = correlated(800, K)
    x[:, -8:] *= 20  # in plain order, no column after these can make up for their errors
    weight, stats = randn(32, K, seed=2), stats_of(x)
    plain, ordered = (gptq(weight, "w4a16-g32", stats, act_order=a) for a in (False, True))
    assert stats.error(weight, ordered).sum() < 0.9 * stats.error(weight, plain).sum()


def test_clipping_lessens_the_error_of_a_lone_outlier() -> None:
    weight, stats = randn(16, K, seed=3), stats_of(randn(500, K))
    weight[:, 5] = 9.0
    stats.hessian[5] = stats.hessian[:, 5] = 0.0  # this input is always zero
    encode = QuantScheme.parse("w4a16-g32").encode
    plain, cut = encode(weight), encode(clip(weight, encode, stats.hessian))
    assert stats.error(weight, decoded(cut)).sum() < 0.8 * stats.error(weight, decoded(plain)).sum()


def test_inputs_that_never_vary_are_survived() -> None:
    x = torch.zeros(40, K)
    x[:, :3] = 1.0  # rank one, most channels dead
    for inputs in (x, torch.zeros(40, K)):
        assert gptq(randn(8, K), "w4a16-g32", stats_of(inputs)).isfinite().all()


def test_a_format_without_codes_of_its_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be rounded column by column"):
        CodeGrid(QuantScheme.parse("bf16").encode(randn(4, 32)))
    assert gptq(randn(4, 32), "bf16", stats_of(randn(9, 32))).shape == (4, 32), "a dense weight is as it is"
