"""Mixtures of experts on every backend: values of a float64 formula, rows that do not depend on others, ties."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from fixtures_models import backends
from fixtures_ops import Part, exact_attention, make_pass, randn, threads
from torch.nn.functional import gelu, silu

from sameseed import ops, scheme
from sameseed.ops import ExpertWeights, normed_rows, parted, plain_rows
from sameseed.scheme import QuantScheme

pytestmark = pytest.mark.bits

E, K, C, F = 8, 3, 256, 256  # K-quants have blocks of 256
FORMATS = ["fp32", "bf16", "w4a8-g32", "w8a8", "q4_k-a8", "q6_k-a8", "q5_0-a8", "mxfp4", "mxfp4-a8", "nf4", "fp8-a8"]
GATES = {"silu": silu, "gelu": partial(gelu, approximate="tanh")}
every_backend = pytest.mark.parametrize("backend", backends())


def mixture(backend, name, limit=None, biased=False, seed=0):
    quant, table = QuantScheme.parse(name), ops.resolve(backend)

    def stack(rows, columns, at):
        return parted(table.encode(randn(E * rows, columns, seed=at) / columns**0.5, quant), E)

    biases = [randn(E, n, seed=seed + n + 1) if biased else None for n in (1, 2 * F, C)]
    router = table.encode(randn(E, C, seed=seed) / C**0.5, QuantScheme.parse("fp32"))
    bias = None if biases[0] is None else biases[0].flatten()
    return ExpertWeights(
        router, bias, stack(2 * F, C, seed + 1), biases[1], stack(C, F, seed + 2), biases[2], K, not biased, limit
    )


def formula(w, x, table):
    """A row at a time in float64, of decoded weights."""

    def dense(m):
        plain = table.unpack(m)
        return scheme.get(plain.format).decode(plain).double()

    none = [None] * E
    logits = x.double() @ dense(w.router).T + (0 if w.router_bias is None else w.router_bias)
    out = torch.zeros_like(x, dtype=torch.float64)
    for t, row in enumerate(x.double()):
        scores = logits[t].softmax(0) if w.chosen_by is None else w.factor * logits[t].sigmoid()
        keys = logits[t] if w.chosen_by is None else logits[t].sigmoid() + w.chosen_by
        chosen = keys.argsort(descending=True, stable=True)[:K]
        weights = scores[chosen]
        for e, weight in zip(chosen.tolist(), weights / (weights.sum() / w.factor if w.normalize else 1), strict=True):
            first, second = ((none if b is None else b)[e] for b in (w.gate_up_bias, w.down_bias))
            gate, up = (dense(w.gate_up[e]) @ row + (0 if first is None else first)).split(F)
            if w.limit is None:
                inner = GATES[w.act](gate) * up
            else:
                gate = gate.clamp(max=w.limit)
                inner = gate * torch.sigmoid(1.702 * gate) * (up.clamp(-w.limit, w.limit) + 1)
            factor = 1 if w.factors is None else w.factors[e]
            out[t] += factor * weight * (dense(w.down[e]) @ inner + (0 if second is None else second))
    return out


@every_backend
@pytest.mark.parametrize("name", FORMATS)
def test_values_and_bits_of_rows(backend, name):
    table, biased = ops.resolve(backend), name.startswith(("mxfp4", "bf16"))
    w = mixture(backend, name, 0.5 if biased else None, biased)
    x, residual = randn(23, C, seed=9), randn(23, C, seed=8)
    norm = 1 + randn(C, seed=7) / 8
    rows = normed_rows(x, norm, 1e-6)
    got = table.experts(rows, w, residual)
    wanted = residual.double() + formula(w, rows.prepared(table.rms_norm, table.silu_mul, table.gelu_mul), table)
    loose = "a8" in name
    assert (got - wanted).abs().max() <= (0.05 if loose else 2e-5) * wanted.abs().max()
    for part in ([4], [0, 22], [7, 3, 3, 11, 5], list(range(22, -1, -1))):
        some = table.experts(normed_rows(x[part], norm, 1e-6), w, residual[part])
        assert some.equal(got[part])
    with threads(2):
        assert table.experts(rows, w, residual).equal(got)


@every_backend
@pytest.mark.parametrize(
    "change",
    [
        {"act": "gelu"},
        {"factors": 1 + torch.arange(E) / E},
        {"chosen_by": torch.arange(E) / E, "factor": 1.5},
        {"chosen_by": torch.arange(E) / E, "factor": 1.5, "normalize": False},
    ],
)
def test_other_gates_and_weights(backend, change):
    table, x, w = ops.resolve(backend), randn(5, C, seed=3), replace(mixture(backend, "fp32"), **change)
    wanted = formula(w, x, table)
    assert (table.experts(plain_rows(x), w) - wanted).abs().max() <= 2e-5 * wanted.abs().max()


@every_backend
def test_columns_may_have_an_order(backend):
    """As GPTQ stores them (`desc_act`)."""
    table, w, x, logits = ops.resolve(backend), mixture(backend, "fp32"), randn(4, C, seed=1), randn(4, E, seed=2)
    order = torch.randperm(C, generator=torch.Generator().manual_seed(0))
    ordered = replace(w, gate_up=tuple(replace(m, order=order) for m in w.gate_up))
    wanted = table.experts(plain_rows(x[:, order]), w, logits=logits)
    assert (table.experts(plain_rows(x), ordered, logits=logits) - wanted).abs().max() <= 2e-5 * wanted.abs().max()


@every_backend
def test_ties_go_to_the_lower_expert(backend):
    w, x = mixture(backend, "fp32"), randn(4, C, seed=1)
    flat = replace(w, router=ops.resolve(backend).encode(torch.zeros(E, C), QuantScheme.parse("fp32")))
    first = replace(flat, router_bias=torch.tensor([0.0] * K + [-1e9] * (E - K)))
    table = ops.resolve(backend)
    assert table.experts(plain_rows(x), flat).equal(table.experts(plain_rows(x), first))


@every_backend
def test_weights_of_experts_that_no_row_chose_are_not_read(backend):
    w, x = mixture(backend, "fp32"), randn(4, C, seed=1)
    w = replace(w, router_bias=torch.tensor([0.0] * K + [-1e9] * (E - K)))
    nan = tuple(replace(m, parts={n: torch.full_like(p, torch.nan) for n, p in m.parts.items()}) for m in w.down[K:])
    table = ops.resolve(backend)
    spoiled = replace(w, down=(*w.down[:K], *nan))
    assert table.experts(plain_rows(x), spoiled).equal(table.experts(plain_rows(x), w))


@every_backend
@pytest.mark.parametrize(("kv_format", "window"), [("fp32", None), ("fp32", 100), ("bf16_a16", None), ("int8_a8", 9)])
def test_sinks_join_the_softmax(backend, kv_format, window):
    """A sink is one more key that has a value of zeros; long rows are computed in parts."""
    p = make_pass([Part(2, 1), Part(700, 1, [-1, 0, 0]), Part(0, 20)], kv_format, heads=4, dim=32, block_size=16)
    sinks, table = randn(4, seed=5) * 3, ops.resolve(backend)
    got = table.attention(p.q, p.layer, p.batch, 0.2, window, sinks)
    plain = exact_attention(p, 0.2, window)
    # with the logsumexp s of the keys, a sink z scales a head's output by 1 / (1 + exp(z - s))
    sure = table.attention(p.q, p.layer, p.batch, 0.2, window, torch.full((4,), -1e9))
    tolerance = {"fp32": 2e-5}.get(kv_format, 0.02) * plain.abs().max()
    assert (sure - plain).abs().max() <= tolerance
    weight = got.double() / sure  # the same for all dimensions of a head
    middle = weight.median(-1, keepdim=True).values
    assert middle.min() < 0.9 and middle.max() < 1.001 and (got - middle * sure).abs().max() <= tolerance
    with threads(4):
        assert table.attention(p.q, p.layer, p.batch, 0.2, window, sinks).equal(got)
