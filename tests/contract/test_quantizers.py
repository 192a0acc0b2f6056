"""The contract of every quantizer, in one body for all methods and formats: new files of either are tested at once."""

import pytest
import torch
from fixtures_formats import as_stored, read_weight, write_weight
from fixtures_models import VARIANTS, all_logits, prompt
from fixtures_ops import randn
from fixtures_quantize import SMALL, correlated, logits_of, source_of, stats_of, tokens, walk_of

from sameseed import ops, registry, scheme as formats
from sameseed.models.config import ARCHITECTURES
from sameseed.models.llama import Llama
from sameseed.models.weights import read_weights
from sameseed.quantize import decoded, parse_method
from sameseed.quantize._grid import CodeGrid, unit
from sameseed.scheme import DENSE, QuantScheme

pytestmark = pytest.mark.bits

METHODS = registry.names("quantize")
K = 256


def weight_schemes():
    """Every format that stores weights in codes, with the groups and zero points that it supports."""
    found = []
    for name in registry.names("formats"):
        fmt = formats.get(name)
        if not fmt.weights or name in DENSE.values():
            continue
        found.append(name)
        found += [f"{name}-{v}" for v in sorted(fmt.options - formats.OPTIONS)]
        found += [f"{name}-g32"] if "group" in fmt.options else []
        found += [f"{name}-g64-asym"] if "asymmetric" in fmt.options else []
    return found


LLAMAS = [n for n, v in VARIANTS.items() if ARCHITECTURES[v.raw["architectures"][0]] == "llama.Llama"]
every_method = pytest.mark.parametrize("method", METHODS)
every_scheme = pytest.mark.parametrize("scheme", weight_schemes())


def quantized(method, scheme, weight, stats, **options):
    chosen = QuantScheme.parse(scheme).settled(weight)
    q = parse_method(method, options).quantize(weight, chosen, stats)
    assert (q.format, q.shape, q.layout) == (chosen.weights, tuple(weight.shape), "plain")
    like = chosen.encode(weight)
    assert {n: (t.shape, t.dtype) for n, t in q.parts.items()} == {
        n: (t.shape, t.dtype) for n, t in like.parts.items()
    }, "the layout is the format's own"
    return decoded(q)


@every_scheme
@every_method
def test_the_output_error_is_no_worse_than_rounding(method, scheme):
    weight, stats = randn(32, K), stats_of(correlated(600, K))
    plain = stats.error(weight, decoded(QuantScheme.parse(scheme).encode(weight)))
    found = stats.error(weight, quantized(method, scheme, weight, stats))
    assert found.isfinite().all()
    assert found.sum() <= plain.sum() * (1 + 1e-6)
    if method == "gptq":
        assert (found <= plain * (1 + 1e-5) + 1e-9).all() or "b128" in scheme, "row by row"
        assert found.sum() < 0.8 * plain.sum(), "correlated inputs leave room"


@pytest.mark.parametrize(
    ("scheme", "width"), [*((s, K) for s in weight_schemes()), ("fp8_e4m3-b128", 192), ("fp8_e5m2-b128", 192)]
)
@every_method
def test_what_is_chosen_can_be_saved_and_read(method, scheme, width, tmp_path):
    """192: groups end inside the blocks of -b128."""
    weight, stats = randn(160, width), stats_of(correlated(400, width))
    if scheme.endswith("b128"):
        weight[:, :64] *= 2  # the first group of each block holds its largest value
    chosen = QuantScheme.parse(scheme).settled(weight)
    q = parse_method(method, {}).quantize(weight, chosen, stats)
    write_weight(tmp_path, *as_stored(q, chosen))
    read = read_weight(tmp_path, q.shape)
    assert read.shape == q.shape
    assert torch.allclose(decoded(read), decoded(q), rtol=1e-2)  # scales may be stored in 16 bits


@every_scheme
def test_every_code_is_among_the_values_of_its_grid(scheme):
    weight = randn(8, K)
    q = QuantScheme.parse(scheme).encode(weight)
    grid = CodeGrid(q)
    values = decoded(q).view(8, -1, unit(q))
    for g in range(values.shape[1]):
        for column in values[:, g].T:
            codes, found = grid.nearest(column, g)
            assert found.equal(column)
    assert codes.dtype == q.parts["codes"].dtype


def test_a_rotation_follows_its_seed():
    first, second = (parse_method("rotate", seed=s).embedding(randn(2, 64)) for s in (1, 2))
    assert not torch.allclose(first, second)


@pytest.mark.parametrize("name", LLAMAS)
def test_the_calibration_forward_is_the_engine_s(name):
    config, source = source_of(name)
    reference = ops.resolve("reference")
    model = Llama(config, read_weights(config, source, QuantScheme.parse("fp32"), reference), reference)
    ids = torch.tensor([prompt(VARIANTS[name].length)])
    walk = walk_of(config, source, "rtn", "fp32", ids)
    found = logits_of(walk, source, ids, [walk.prepared(i) for i in range(config.num_layers)])
    assert torch.allclose(found[0], all_logits(model, ids[0].tolist()), atol=1e-4, rtol=1e-4)


REWRITTEN = [*METHODS, "rotate+awq", "rotate+smooth", "smooth+awq"]
STORED = [*((m, torch.float32) for m in REWRITTEN), *((m, torch.bfloat16) for m in ("awq", "smooth", "smooth+awq"))]


@pytest.mark.parametrize(("method", "dtype"), STORED, ids=str)
@pytest.mark.parametrize("name", LLAMAS)
def test_a_rewritten_layer_computes_the_same(name, method, dtype):
    config, source = source_of(name)
    source.tensors = {n: t.to(dtype) for n, t in source.tensors.items()}
    ids = tokens(config, rows=3, length=24)
    plain = walk_of(config, source, "rtn", "w4a16", ids)
    expected = logits_of(plain, source, ids, [plain.prepared(i) for i in range(config.num_layers)])
    walk = walk_of(config, source, method, "w4a16", ids)
    blocks = []
    for i in range(config.num_layers):
        blocks.append(walk.prepared(i))
        walk.skip(blocks[-1])
    before = [plain.prepared(b.index).linears for b in blocks]
    changed = any(not b.linears[n].weight.equal(old[n].weight) for b, old in zip(blocks, before) for n in old)
    assert changed == any(part in method for part in ("awq", "smooth", "rotate"))
    found = logits_of(walk, source, ids, blocks)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("method", ["awq", "smooth"])
def test_weights_that_stay_bf16_are_not_rounded_anew(method):
    config, source = source_of(**SMALL)
    source.tensors = {n: t.bfloat16() for n, t in source.tensors.items()}
    kept = ["self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj"]
    scheme = ",".join(["w4a16-g32", *(f"*.{n}=bf16" for n in kept)])
    walk, plain = (walk_of(config, source, m, scheme, tokens(config)) for m in (method, "rtn"))
    block, before = walk.prepared(0), plain.prepared(0)
    for name in kept:
        weight = block.linears[name].weight
        assert weight.bfloat16().float().equal(weight), name
    assert not block.linears[kept[0]].weight.equal(before.linears[kept[0]].weight), "it is scaled all the same"
