"""Devices: unknown names, GPUs that do not exist, and code that ignores where its tensors are."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from fixtures_device import Elsewhere, counted_waits, pretended_device
from fixtures_ops import randn
from lawkit import load_pair, make_engine, random_prompts, run, texts

from sameseed import SamplingParams, devices, ops
from sameseed.config import CacheConfig, EngineConfig
from sameseed.engine import build
from sameseed.engine.memory import Demand, plan_blocks
from sameseed.errors import ConfigError
from sameseed.kvcache.cache import KVCache
from sameseed.models.eagle_loader import load_head, with_vocabulary
from sameseed.models.inner import with_tokens
from sameseed.models.loader import load_model
from sameseed.ops import plain_rows
from sameseed.scheme import QuantScheme


@pytest.fixture
def one_gpu(monkeypatch):
    """PyTorch reports one GPU."""
    for name, answer in {
        "is_available": True,
        "device_count": 1,
        "get_device_capability": (9, 0),
        "get_device_name": "a GPU",
        "mem_get_info": (3 << 30, 8 << 30),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    ops.resolve.cache_clear()
    yield
    ops.resolve.cache_clear()


@pytest.mark.parametrize("name", ["gpu", "", "cuda:x", "cpu:0", "cpu:1", "meta", "cuda:-2"])
def test_names_that_are_no_device(name):
    with pytest.raises(ConfigError, match="use cpu, cuda, or cuda:N"):
        ops.resolve("auto", name)


def test_without_a_driver(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match=r"nvidia-smi.*--device cpu"):
        devices.check("cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(ConfigError, match="unset it"):
        devices.check("cuda")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=r"CUDA build.*--device cpu"):
        devices.check("cuda:0")


def test_a_gpu_that_is_not_here(one_gpu):
    devices.check("cuda")
    devices.check("cuda:0")
    with pytest.raises(ConfigError, match=r"cuda:0 \(a GPU\)"):
        devices.check("cuda:1")


def test_backends_say_where_they_compute(one_gpu, monkeypatch):
    with pytest.raises(ConfigError, match=r"leave out --backend"):
        ops.resolve("cpu", "cuda")
    assert ops.resolve("reference", "cuda").name == "reference"
    triton = pytest.importorskip("sameseed.ops.triton")
    monkeypatch.setattr(triton, "unavailable", lambda device="": None)
    ops.resolve.cache_clear()
    assert ops.resolve("auto", "cuda:0").name == "triton"
    with pytest.raises(ConfigError, match="but on cuda"):
        ops.resolve("triton", "cpu")
    monkeypatch.setattr(triton, "unavailable", lambda device="": "it is too old")
    ops.resolve.cache_clear()
    assert ops.resolve("auto", "cuda").name == "reference"  # slow, but available


def test_the_gpu_that_is_asked_for_counts(one_gpu, monkeypatch):
    """One of two GPUs is too old: `cuda:1` is not judged by `cuda:0`."""
    triton = pytest.importorskip("sameseed.ops.triton")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d=None: (7, 5) if (d.index or 0) == 0 else (8, 0))
    triton.unavailable.cache_clear()
    try:
        assert ops.resolve("auto", "cuda:0").name == "reference" and ops.resolve("auto", "cuda:1").name == "triton"
        with pytest.raises(ConfigError, match=r"7\.5.* 8\.0"):
            ops.resolve("triton", "cuda:0")
    finally:
        triton.unavailable.cache_clear()


def test_the_share_of_a_gpu_that_may_be_taken(one_gpu, monkeypatch):
    """7 of 8 GiB are free: a share of 0.5 is 4 GiB, which includes what this process already holds."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (7 << 30, 8 << 30))
    need = [Demand(QuantScheme.parse("w4a16"), 2 << 30, 1 << 20, 180 << 20, 32 << 20)]

    def blocks(share, **more):
        return plan_blocks(EngineConfig(device="cuda:0", gpu_memory_utilization=share, **more), 16_000, need)

    assert blocks(0.5) == 1024  # 4 GiB less 2 for weights and 1 for passes, graphs and their logits
    assert blocks(1.0) == 4096  # free memory is the limit, not all memory
    assert blocks(0.5, cache=CacheConfig(num_blocks=1000)) == 1000
    with pytest.raises(ConfigError, match="3264"):
        blocks(0.4)  # 3.2 GiB: 204 blocks of 16 tokens, six for each of 32 requests
    with pytest.raises(ConfigError, match="num_blocks"):
        blocks(0.5, cache=CacheConfig(num_blocks=2000))


def test_what_does_not_fit_a_gpu_is_refused_before_it_is_loaded(one_gpu, pair_folders, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 30, 8 << 30))
    monkeypatch.setattr(build, "load_model", lambda *_: pytest.fail("it was loaded"))
    config = EngineConfig(device="cuda", backend="reference", gpu_memory_utilization=0.05)
    with pytest.raises(ConfigError, match=r"--gpu-memory-utilization"):
        build.load_parts(str(pair_folders[0]), config)


@pytest.fixture(scope="module")
def plain_texts(pair_folders):
    pair = load_pair(*pair_folders, backend="reference", weights="w8a16")
    return {seed: texts(run(make_engine(pair), *asked(seed))) for seed in (0, 1)}


def asked(seed):
    """Prompts and parameters: greedy for seed 0, else sampled with several features that read the logits."""
    more = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "logprobs": 2} if seed else {"temperature": 0}
    return random_prompts(2, longest=12), SamplingParams(max_tokens=6, seed=seed, **more)


# How often functions above the ops make the host wait for a device in a round with k = 4, at most. The reference does
# not choose tokens, so the host reads logits: once of the target, and once of a draft model for each of its tokens.
ONCE, PER_TOKEN = {"spec.verify.on_host": 1}, {"spec.verify.on_host": 5}
MOST = {"none": ONCE, "ngram": ONCE, "suffix": ONCE}
MOST |= {"draft_model": PER_TOKEN, "cascade": PER_TOKEN, "self_quant": PER_TOKEN}
# A head has a pass for accepted tokens and one per level but the last; the kept rows of the target's pass are a copy.
MOST["eagle"] = {**ONCE, "drafters._choices.rows": 4, "devices.put": 5}


@pytest.mark.parametrize("method", MOST)
def test_the_engine_runs_whole_on_another_device(method, pair_folders, plain_texts):
    """The reference backend on another device: the same text, and no tensor on the CPU that should not be there."""
    with pretended_device() as name:
        reference = ops.resolve("reference")
        scheme = QuantScheme.parse("w8a16")
        pair = load_pair(*pair_folders, backend="reference", weights="w8a16")
        target = load_model(pair_folders[0], reference, scheme, device=name)
        pair = replace(
            pair,
            target=target,
            draft=load_model(pair_folders[1], reference, scheme, device=name),
            low=load_model(pair_folders[0], reference, QuantScheme.parse("int8"), device=name),
            head=load_head(pair_folders[0].parent / "head", target, reference, device=name),
        )
        engine = make_engine(pair, method)
        assert isinstance(engine.runner.cache.layers[0].k, Elsewhere) and isinstance(target.rope, Elsewhere)
        for seed, wanted in plain_texts.items():
            engine = make_engine(pair, method)
            engine.step = bounded(engine.step, Counter(MOST[method]))
            assert texts(run(engine, *asked(seed))) == wanted


def bounded(step, most):
    """`step`, which may wait for the device at most so often, without the reference's own waits."""

    def watched():
        with counted_waits() as found:
            done = step()
        ours = Counter(place for _, place in found.elements() if not place.startswith(("ops.", "formats.")))
        assert ours <= most, ours - most
        return done

    return watched


def test_stored_weights_and_small_vocabularies_move_too(pair_folders):
    ids = torch.arange(0, 60, 2)
    with pretended_device() as name:
        reference = ops.resolve("reference")
        target = load_model(pair_folders[0], reference, None, device=name)
        assert isinstance(with_tokens(target, ids).weights.lm_head.parts["weight"], Elsewhere)
        for scheme in (None, QuantScheme.parse("int8"), QuantScheme.parse("fp8-b128")):
            head = load_head(pair_folders[0].parent / "head", target, reference, scheme, device=name)
            small = with_vocabulary(head, ids)
            assert all(isinstance(part, Elsewhere) for part in small.weights.lm_head.parts.values())


@pytest.mark.parametrize(
    ("name", "kv"),
    [("w4a16-g32-asym", "int8"), ("fp8", "fp8_e4m3"), ("nf4-dq", "int4"), ("mxfp4", "int4_sparse"), ("qoq", "int8")],
)
def test_formats_compute_elsewhere(name, kv):
    reference, plain = ops.resolve("reference"), QuantScheme.parse(name).encode(randn(8, 64, seed=1))
    x = randn(3, 64)
    cache = [KVCache([(2, 16)], 2, 4, kv) for _ in range(2)]
    slots, rows = torch.tensor([5, 0, 3], dtype=torch.int32), randn(3, 2, 16, seed=2)
    reference.store_kv(rows, rows, cache[0].layers[0], slots)
    with pretended_device() as there:
        moved = replace(plain, parts={k: t.to(there) for k, t in plain.parts.items()})
        assert reference.product(plain_rows(x.to(there)), moved).cpu().equal(reference.product(plain_rows(x), plain))
        away = KVCache([(2, 16)], 2, 4, kv, there)
        reference.store_kv(rows.to(there), rows.to(there), away.layers[0], slots.to(there))
        assert away.layers[0].k.cpu().view(torch.uint8).equal(cache[0].layers[0].k.view(torch.uint8))
