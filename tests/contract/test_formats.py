"""What every number format must keep, one body for all: a new file on the shelf is tested on the day it comes."""

from __future__ import annotations

import json

import pytest
import torch
from fixtures_models import backends
from hypothesis import given, settings, strategies as st
from safetensors.torch import load, save
from torch import Tensor

from foretoken import ops, registry
from foretoken.formats import scheme
from foretoken.formats.scheme import QuantScheme, QuantTensor

NAMES = registry.names("formats")
KV_NAMES = [n for n in NAMES if scheme.get(n).kv_dtype is not None]
every_format = pytest.mark.parametrize("name", NAMES)
every_kv_format = pytest.mark.parametrize("name", KV_NAMES)
K = 256  # a multiple of any group size


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same(a: QuantTensor, b: QuantTensor) -> bool:
    return (
        (a.format, a.shape, a.parts.keys()) == (b.format, b.shape, b.parts.keys())
        and all(a.parts[p].dtype == b.parts[p].dtype for p in a.parts)
        and all(a.parts[p].equal(b.parts[p]) for p in a.parts)
    )


def staircase(decoded: Tensor, x: Tensor, slack: float) -> None:
    """Values x [S] and what they became: each became the nearest of all values that any of them became."""
    levels = decoded.unique()
    nearest = (x[:, None] - levels[None, :]).abs().amin(1)
    assert len(levels) > 2
    assert ((decoded - x).abs() <= nearest + slack).all()
    # The levels lie so close that the nearest one is at most half a step away.
    half_step = (levels[1:] - levels[:-1]).max().item() / 2
    inside = (x >= levels[0]) & (x <= levels[-1])
    assert ((decoded - x).abs()[inside] <= half_step + slack).all()


# --- weights ---


@every_format
@pytest.mark.parametrize("size", [1.0, 1e-3, 300.0])
def test_weights_are_rounded_to_nearest(name, size):
    """One number sweeps its range while its neighbours, and so every scale, stay the same."""
    fmt = scheme.get(name)
    weight = randn(1, K).clamp(-0.99, 0.99).repeat(1001, 1)
    weight[:, ::8], weight[:, 4::8] = 1.0, -1.0  # the largest of each group, however groups lie
    sweep = torch.linspace(-1, 1, 1001)
    weight[:, 3] = sweep
    decoded = fmt.decode(fmt.encode(weight * size))
    staircase(decoded[:, 3], sweep * size, 1e-6 * size)
    assert decoded[:, 5].unique().numel() == 1  # the sweep left its neighbours alone


@every_format
def test_stored_values_stay_under_a_second_encoding(name):
    fmt = scheme.get(name)
    once = fmt.decode(fmt.encode(randn(16, K)))
    twice = fmt.decode(fmt.encode(once))
    torch.testing.assert_close(twice, once, rtol=1e-6, atol=1e-7)


@every_format
def test_the_values_resemble_the_weights(name):
    """Root mean square error below a fifth of the weights' own size, even at the lowest widths."""
    weight = randn(32, K)
    fmt = scheme.get(name)
    decoded = fmt.decode(fmt.encode(weight))
    assert decoded.shape == weight.shape and decoded.dtype == torch.float32
    assert (decoded - weight).square().mean().sqrt() < 0.2 * weight.square().mean().sqrt()


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, K), (7, K), (33, 2 * K)], ids=str)
def test_shape_and_bytes(shape, dtype, name):
    weight = randn(*shape).to(dtype)
    q = scheme.get(name).encode(weight)
    assert q.format == name and q.shape == shape
    assert q.nbytes == sum(len(bytes(t.view(torch.uint8).flatten().tolist())) for t in q.parts.values())
    assert q.nbytes <= weight.numel() * 4
    assert all(t.is_contiguous() for t in q.parts.values())
    assert scheme.get(name).decode(q).equal(scheme.get(name).decode(scheme.get(name).encode(weight.float())))


@every_format
def test_zeros_stay_zeros(name):
    fmt = scheme.get(name)
    weight = randn(4, K)
    weight[1] = 0
    weight[2, : K // 2] = 0
    decoded = fmt.decode(fmt.encode(weight))
    assert decoded.isfinite().all()
    assert (decoded[1] == 0).all() and (decoded[2, : K // 2] == 0).all()


@every_format
def test_tiny_weights_do_not_become_large(name):
    """Subnormal numbers: the scale may underflow, the value may not jump."""
    fmt = scheme.get(name)
    for size in (1e-38, 1e-40, 1e-44):
        weight = randn(3, K) * size
        decoded = fmt.decode(fmt.encode(weight))
        assert decoded.isfinite().all()
        assert (decoded.abs() <= 4 * weight.abs().max()).all()


@every_format
@given(st.lists(st.integers(0, 19), max_size=30))
@settings(max_examples=20)
def test_rows_decode_alone(name, index):
    fmt = scheme.get(name)
    q = fmt.encode(randn(20, K))
    for dtype in (torch.int32, torch.int64):
        rows = torch.tensor(index, dtype=dtype)
        assert fmt.decode_rows(q, rows).equal(fmt.decode(q)[rows.long()])


@every_format
def test_rows_are_encoded_alone(name):
    """A row's codes and scales do not depend on its neighbours: stacking q, k and v changes no value."""
    fmt = scheme.get(name)
    parts = [randn(n, K, seed=n) * size for n, size in ((5, 1.0), (1, 100.0), (12, 0.01))]
    stacked = fmt.concat([fmt.encode(w) for w in parts])
    assert same(stacked, fmt.encode(torch.cat(parts)))
    assert fmt.decode(stacked).equal(torch.cat([fmt.decode(fmt.encode(w)) for w in parts]))


@every_format
def test_checkpoint_and_back(name):
    fmt = scheme.get(name)
    q = fmt.encode(randn(24, K))
    tensors = fmt.checkpoint("model.layers.3.mlp.up_proj", q)
    assert all(key.startswith("model.layers.3.mlp.up_proj.") for key in tensors)
    stored = load(save({key: t.contiguous() for key, t in tensors.items()}))
    assert same(fmt.from_checkpoint("model.layers.3.mlp.up_proj", stored), q)


@every_format
def test_config_is_json(name):
    """What vLLM reads: none for dense formats, else a method by name."""
    fmt = scheme.get(name)
    config = fmt.config()
    assert json.loads(json.dumps(config)) == config
    dense = set(fmt.encode(randn(2, K)).parts) == {"weight"}
    assert dense == (config == {})
    assert dense or isinstance(config["quant_method"], str)


@every_format
@pytest.mark.parametrize("backend", backends())
def test_linear_and_embedding_work_on_every_backend(name, backend):
    """With a kernel or by falling through to x @ decode(w).T: the day a format's file exists, it runs everywhere."""
    chosen = ops.resolve(backend)
    fmt = scheme.get(name)
    q, x, bias = fmt.encode(randn(19, K)), randn(6, K, seed=1), randn(19, seed=2)
    weight = fmt.decode(q).double()
    wanted = x.double() @ weight.T
    for got, exact in ((chosen.linear(x, q), wanted), (chosen.linear(x, q, bias), wanted + bias)):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-4)
    ids = torch.tensor([3, 0, 18, 3], dtype=torch.int32)
    assert chosen.embedding(ids, q).equal(fmt.decode(q)[ids.long()])


@every_format
def test_a_scheme_encodes_in_its_format(name):
    weight = randn(4, K).to(torch.bfloat16)
    assert same(QuantScheme(name).encode(weight), scheme.get(name).encode(weight))


# --- the cache ---


@every_kv_format
@pytest.mark.parametrize("size", [1.0, 1e-3, 300.0])
def test_cache_rows_are_rounded_to_nearest(name, size):
    fmt = scheme.get(name)
    x = randn(1, 1, 16).clamp(-0.99, 0.99).repeat(1001, 2, 1)
    x[..., 0], x[..., 8] = 1.0, -1.0
    sweep = torch.linspace(-1, 1, 1001)
    x[:, 0, 3] = sweep
    codes, scales = fmt.encode_kv(x * size)
    assert codes.shape == x.shape and codes.dtype == fmt.kv_dtype
    assert scales is None or (scales.shape == x.shape[:2] and scales.dtype == torch.float32)
    decoded = fmt.decode_kv(codes, scales)
    assert decoded.dtype == torch.float32 and decoded.shape == x.shape
    staircase(decoded[:, 0, 3], sweep * size, 1e-6 * size)


@every_kv_format
def test_a_cache_row_knows_no_other(name):
    """Law 1 rests on it: a rejected draft in the same pass, or another head, must leave no trace in a row's codes."""
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
def test_cache_rows_may_be_slices_of_wider_ones(name):
    fmt = scheme.get(name)
    wide = randn(5, 6, 16)
    x = wide[:, 2:4]
    codes, scales = fmt.encode_kv(x)
    wanted, wanted_scales = fmt.encode_kv(x.contiguous())
    assert codes.equal(wanted)
    assert scales is None or wanted_scales is None or scales.equal(wanted_scales)


@every_kv_format
def test_zero_cache_rows(name):
    fmt = scheme.get(name)
    assert (fmt.decode_kv(*fmt.encode_kv(torch.zeros(3, 2, 8))) == 0).all()
    assert fmt.decode_kv(*fmt.encode_kv(torch.zeros(0, 2, 8))).shape == (0, 2, 8)
