"""Choices in Triton equal those of spec/sampling.py: the noise bit for bit, and every token."""

import importlib

import numpy as np
import pytest
import torch
from fixtures_ops import randn

from sameseed.batch import Draws
from sameseed.ops.triton.guard import Launch
from sameseed.request import SamplingParams, Sequence
from sameseed.spec import sampling as spec

kernels = importlib.import_module("sameseed.ops.triton.sampling")
draws_module = importlib.import_module("sameseed.ops.triton.draws")
triton = pytest.importorskip("triton")
tl = triton.language

V = 2500  # three chunks, the last one not full


@triton.jit
def noise_of(key_ptr, out_ptr, hash_ptr, first, BLOCK: tl.constexpr):
    token = first + tl.arange(0, BLOCK)
    key = tl.load(key_ptr)
    tl.store(hash_ptr + tl.arange(0, BLOCK), draws_module.hashed(key, token).to(tl.int64, bitcast=True))
    tl.store(out_ptr + tl.arange(0, BLOCK), draws_module._gumbel(key, token))


@pytest.mark.parametrize(("seed", "position", "first"), [(0, 0, 0), (7, 131071, 151000), (2**63 - 1, 5, 128000)])
def test_the_noise_is_the_same(seed, position, first):
    out, hashes = torch.empty(256, dtype=torch.float64), torch.empty(256, dtype=torch.int64)
    key = spec.noise_key(seed, position)
    signed = torch.tensor([key - (1 << 64) if key >> 63 else key])
    arguments = {"key_ptr": signed, "out_ptr": out, "hash_ptr": hashes, "first": first}
    Launch(noise_of, (1,), arguments, {"BLOCK": 256}).run()
    wanted = [spec._mix((key + (first + t + 1) * spec._GOLDEN) & spec._MASK) for t in range(256)]
    assert [h % (1 << 64) for h in hashes.tolist()] == wanted
    tokens = np.arange(first, first + 256)
    wanted = spec.gumbel_noise(seed, position, tokens)
    if out.device.type == "cuda":  # a GPU's logarithms may differ in the last bits
        np.testing.assert_allclose(out.cpu().numpy(), wanted, rtol=1e-13, atol=1e-15)
    else:
        assert (out.cpu().numpy() == wanted).all()


def choices(logits, params, position, seeds, token_ids=None):
    draws = [spec.drawer(Sequence(0, [1] * position, p, s), 0) for p, s in zip(params, seeds)]
    return kernels.choose(logits, Draws.of(draws).on(logits.device), token_ids).tolist()


MANY = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
    for t, k, p, m in [
        (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.8, 50, 1.0, 0.0), (0.7, 0, 0.9, 0.0), (1.3, 40, 0.95, 0.01),
        (1e-300, 5, 0.5, 0.0), (2.0, 0, 0.3, 0.0), (1.0, 1, 1.0, 0.0), (0.6, V, 0.99, 0.05), (1.0, 3000, 1.0, 0.2),
    ]
]  # fmt: skip


def test_choices_are_the_same():
    logits = 3 * randn(len(MANY), V, seed=4)
    logits[3:] = logits[3:].mul(4).round() / 4  # ties, also at the borders of top-k and top-p
    logits[1, ::2] = -torch.inf
    found = set()
    for position in range(8):
        wanted = [spec.numpy_choice(x, p, 11 + i, position) for i, (x, p) in enumerate(zip(logits.cpu().numpy(), MANY))]
        got = choices(logits, MANY, position, range(11, 11 + len(MANY)))
        assert got == wanted
        found.add(tuple(got))
    assert len(found) > 1


def test_a_row_does_not_know_its_company():
    logits = 3 * randn(len(MANY), V, seed=5)
    together = choices(logits, MANY, 3, [9] * len(MANY))
    for i in (0, 2, 4):
        assert choices(logits[i : i + 1], MANY[i : i + 1], 3, [9]) == together[i : i + 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_choice_say_so(temperature):
    logits = randn(4, V)
    logits[0, 2000], logits[1], logits[2, 5] = torch.nan, -torch.inf, torch.inf
    params = [SamplingParams(temperature=temperature, top_p=p) for p in (1.0, 1.0, 0.9, 0.9)]
    got = choices(logits, params, 0, [1] * 4)
    assert got[:3] == [spec.FAILED] * 3
    assert got[3] == spec.numpy_choice(logits[3].cpu().numpy(), params[3], 1, 0)


def test_columns_may_stand_for_other_tokens():
    """The choices are those from the whole vocabulary with all other tokens ruled out."""
    logits, ids = 3 * randn(len(MANY), 300, seed=6), torch.arange(300) * 7 + 3
    whole = logits.new_full((len(MANY), V), -torch.inf)
    whole[:, ids] = logits
    assert choices(logits, MANY, 5, [4] * len(MANY), ids) == choices(whole, MANY, 5, [4] * len(MANY))
