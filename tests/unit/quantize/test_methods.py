"""Quantizers: GPTQ is the paper's, outliers are rotated or scaled away, and bits go where they count."""

import itertools
import math
import random
from dataclasses import asdict
from functools import cache

import pytest
import torch
from fixtures_ops import randn
from fixtures_quantize import correlated, source_of, stats_of, tokens, walk_of

from sameseed.errors import ConfigError
from sameseed.quantize import decoded, parse_method
from sameseed.quantize._budget import STEPS, Sensitivity, assign, recommend
from sameseed.quantize._decoder import GATE, INPUT_NORM, POST_NORM, STAGES, K as K_PROJ, Q, read_block
from sameseed.quantize._grid import CodeGrid, clip
from sameseed.scheme import QuantScheme

pytestmark = pytest.mark.bits

K = 128


def gptq(weight, scheme, stats, **options):
    return decoded(parse_method("gptq", options).quantize(weight, QuantScheme.parse(scheme), stats))


def textbook(weight, hessian, grid, group, damping):
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
def test_it_is_the_paper_s_method(scheme):
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
def test_blocks_do_not_matter(scheme):
    weight, stats = randn(16, K, seed=1), stats_of(correlated(500, K))
    whole = gptq(weight, scheme, stats, block=K)
    for block in (16, 48, 100):  # groups end inside blocks, and blocks end inside groups
        found = gptq(weight, scheme, stats, block=block)
        assert (found == whole).float().mean() > 0.97  # sums in another order
        assert stats.error(weight, found).sum() == pytest.approx(float(stats.error(weight, whole).sum()), rel=0.05)


def test_act_order_helps_where_few_channels_are_large():
    x = correlated(800, K)
    x[:, -8:] *= 20  # in plain order, no column after these can make up for their errors
    weight, stats = randn(32, K, seed=2), stats_of(x)
    plain, ordered = (gptq(weight, "w4a16-g32", stats, act_order=a) for a in (False, True))
    assert stats.error(weight, ordered).sum() < 0.9 * stats.error(weight, plain).sum()


def test_clipping_lessens_the_error_of_a_lone_outlier():
    weight, stats = randn(16, K, seed=3), stats_of(randn(500, K))
    weight[:, 5] = 9.0
    stats.hessian[5] = stats.hessian[:, 5] = 0.0  # this input is always zero
    encode = QuantScheme.parse("w4a16-g32").encode
    plain, cut = encode(weight), encode(clip(weight, encode, stats.hessian))
    assert stats.error(weight, decoded(cut)).sum() < 0.8 * stats.error(weight, decoded(plain)).sum()


def test_inputs_that_never_vary_are_survived():
    x = torch.zeros(40, K)
    x[:, :3] = 1.0  # rank one, most channels dead
    for inputs in (x, torch.zeros(40, K)):
        assert gptq(randn(8, K), "w4a16-g32", stats_of(inputs)).isfinite().all()


def test_a_format_without_codes_of_its_own_is_refused():
    with pytest.raises(ConfigError, match="cannot be rounded column by column"):
        CodeGrid(QuantScheme.parse("bf16").encode(randn(4, 32)))
    assert gptq(randn(4, 32), "bf16", stats_of(randn(9, 32))).shape == (4, 32), "a dense weight is as it is"


WIDTH, PLANTED = 128, 17
SETTINGS = {"hidden_size": WIDTH, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 8}


def planted(compensated):
    """A layer whose norms enlarge one channel; compensated: the weights that read it are smaller by the same factor."""
    config, source = source_of("llama2", **SETTINGS, num_key_value_heads=8)
    for norm, stage in ((INPUT_NORM, "qkv"), (POST_NORM, "gate_up")):
        source.tensors[f"model.layers.0.{norm}.weight"][PLANTED] *= 100
        if compensated:
            for name in STAGES[stage]:
                source.tensors[f"model.layers.0.{name}.weight"][:, PLANTED] /= 100
    return config, source


@cache
def output_error(method, scheme, compensated):
    """The relative error of the outputs of q, k and gate, from the layer's own inputs."""
    config, source = planted(compensated)
    ids = tokens(config, rows=8, length=32)
    walk, plain = walk_of(config, source, method, scheme, ids), walk_of(config, source, "rtn", "fp32", ids)
    assert walk.hidden is not None and plain.hidden is not None
    original = read_block(config, source, 0)
    entering = walk.hidden.clone()
    block, _ = walk.layer(0)
    lost = whole = 0.0
    # v and up are left out: methods may rotate or scale their outputs, which o and down undo.
    for stage, names in (("qkv", (Q, K_PROJ)), ("gate_up", (GATE,))):
        x, y = walk.decoder.inputs(block, stage, entering), plain.decoder.inputs(original, stage, plain.hidden)
        for name in names:
            expected = original.linears[name](y)
            lost += float((block.linears[name](x) - expected).square().sum())
            whole += float(expected.square().sum())
    return (lost / whole) ** 0.5


# method, scheme, whether the weights compensate the outlier, factor by which the error is below rounding's.
FACTORS = [
    ("smooth", "w8a8", True, 12.0), ("rotate", "w8a8", True, 12.0), ("awq", "w8a8", True, 12.0),
    ("smooth+gptq", "w8a8", True, 12.0), ("rotate+gptq", "w8a8", True, 12.0), ("gptq", "w4a16", False, 2.5),
    ("awq", "w4a16", False, 1.8), ("rotate", "w4a16", False, 1.8), ("awq+gptq", "w4a16", False, 2.0),
    ("rotate", "w4a8-qoq", True, 1.6), ("rotate+gptq", "w4a8-qoq", True, 2.0),
]  # fmt: skip


@pytest.mark.parametrize(("method", "scheme", "compensated", "factor"), FACTORS)
def test_an_outlier_method_beats_rounding(method, scheme, compensated, factor):
    plain, found = output_error("rtn", scheme, compensated), output_error(method, scheme, compensated)
    assert found * factor < plain, f"{method} {found:.4f}, rtn {plain:.4f}: {plain / found:.2f} times"


CANDIDATES = [("w4a16-g128", 4.125), ("w4a16-g32", 4.5), ("w8a16", 8.1), ("bf16", 16.0)]


def units(seed, count=5):
    rng = random.Random(seed)
    found = []
    for u in range(count):
        size, hurt = rng.choice([100, 300, 1000]), rng.random()
        for scheme, bits in CANDIDATES:
            loss = 0.0 if scheme == "bf16" else hurt * 4 ** -(bits - 4) * rng.uniform(0.7, 1.3)
            found.append(Sensitivity(f"unit{u}", (f"unit{u}.a", f"unit{u}.b"), scheme, bits, size, loss))
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("budget", [4.125, 4.4, 5.0, 7.5, 16.0])
def test_the_choice_is_the_best_of_all(seed, budget):
    rows = units(seed)
    found = assign(rows, budget)
    assert found.bits <= budget * (1 + 1e-9)
    choices = [[r for r in rows if r.unit == f"unit{u}"] for u in range(5)]
    weights = sum(c[0].num_weights for c in choices)
    feasible = [
        sum(r.loss for r in pick)
        for pick in itertools.product(*choices)
        # The knapsack rounds each cost up, by less than a step of the bits that it can spend.
        if sum(r.bits * r.num_weights for r in pick) <= (budget - (budget - 4.125) * 5 / STEPS) * weights
    ]
    assert found.predicted_loss <= min(feasible, default=math.inf) + 1e-12
    assert found.predicted_loss == pytest.approx(sum(r.loss for r in found.chosen.values()))
    assert {glob: str(s) for glob, s in found.rules} == {m: r.scheme for r in found.chosen.values() for m in r.modules}


def test_advice():
    rows = units(1)
    worst = Sensitivity("bad", ("bad.q",), "w4a16-g128", 4.125, 10, 50.0)
    modules = [{"module": "bad.q", "scheme": "w4a16-g128", "relative": 0.1, "num_weights": 10}]
    modules += [{"module": r.modules[0], "scheme": r.scheme} for r in rows if r.scheme == "w4a16-g128"]
    advice = recommend({"sensitivity": [asdict(r) for r in (*rows, worst)], "modules": modules})
    assert advice[0].modules == ("bad.q",) and "of the loss in" in advice[0].reason


def test_advice_by_errors_names_what_stands_out():
    modules = [{"module": f"m{i}", "scheme": "w4a16", "relative": 0.1, "num_weights": 100} for i in range(9)]
    modules.append({"module": "bad", "scheme": "w4a16", "relative": 0.4, "num_weights": 100})
    (advice,) = recommend({"modules": modules, "sensitivity": None})
    assert advice.modules == ("bad",) and advice.of_weights == pytest.approx(0.1)
    assert recommend({"modules": modules[:-1], "sensitivity": None}) == []
