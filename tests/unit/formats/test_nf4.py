"""nf4: the nearest of sixteen values, in bitsandbytes' layout."""

from __future__ import annotations

import json

import torch
from hypothesis import given, strategies as st

from sameseed import scheme
from sameseed.formats.nf4 import BORDERS, TABLE, nearest

NF4 = scheme.get("nf4")


def test_the_table_is_that_of_normal_quantiles():
    """Means of neighbouring quantiles of each half, scaled to 1 (appendix E of Dettmers et al., 2023); 0 is exact."""
    normal = torch.distributions.Normal(0.0, 1.0)
    offset = 0.9677083
    upper = normal.icdf(torch.linspace(offset, 0.5, 9))[:-1]
    lower = -normal.icdf(torch.linspace(offset, 0.5, 8))[:-1]
    wanted = torch.cat([lower, torch.zeros(1), upper]).sort().values
    torch.testing.assert_close(TABLE, wanted / wanted.max(), rtol=1e-5, atol=1e-6)


@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=50))
def test_nearest_of_the_table(values):
    x = torch.tensor(values)
    distance = (x[:, None].double() - TABLE[None].double()).abs()
    chosen = distance[torch.arange(len(x)), nearest(x).long()]
    assert (chosen <= distance.min(1).values + 1e-7).all()  # borders between values are rounded to float32


def test_nearest_at_the_borders():
    inf = torch.tensor(torch.inf)
    x = torch.cat([torch.linspace(-1.01, 1.01, 100_001), BORDERS, BORDERS.nextafter(inf), BORDERS.nextafter(-inf)])
    assert nearest(x).equal(torch.bucketize(x, BORDERS).to(torch.uint8))


def test_absmax_scales_of_64():
    weight = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    q = NF4.encode(weight)
    assert q.group == 64 and q.parts["scales"].dtype == torch.bfloat16
    assert q.parts["scales"].equal(weight.view(3, 2, 64).abs().amax(-1).to(torch.bfloat16))


def test_checkpoint_layout_is_that_of_bitsandbytes():
    q = NF4.encode(torch.randn(2, 64, generator=torch.Generator().manual_seed(0)))
    tensors = NF4.checkpoint("x", q)
    codes = q.parts["codes"].flatten().tolist()
    assert tensors["x.weight"].shape == (64, 1)
    assert tensors["x.weight"].flatten().tolist() == [a * 16 + b for a, b in zip(codes[::2], codes[1::2], strict=True)]
    assert tensors["x.weight.absmax"].dtype == torch.float32 and tensors["x.weight.absmax"].shape == (2,)
    state = json.loads(bytes(tensors["x.weight.quant_state.bitsandbytes__nf4"].tolist()))
    assert (state["quant_type"], state["blocksize"], state["shape"]) == ("nf4", 64, [2, 64])
