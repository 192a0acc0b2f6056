"""Kernels of sampling: Gumbel noise from SplitMix64 (Steele, Lea and Flood, 2014), and the best token with it."""

# Kernels are written in Triton's language: they have no type annotations, and comments instead of docstrings.
from __future__ import annotations

import triton
import triton.language as tl

STEP: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
FACTOR_1: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
FACTOR_2: tl.constexpr = tl.constexpr(0x94D049BB133111EB)
UNIT: tl.constexpr = tl.constexpr(2.0**-53)
BELOW_ONE: tl.constexpr = tl.constexpr(1.0 - 2.0**-53)
NONE: tl.constexpr = tl.constexpr(2**31 - 1)  # no token


@triton.jit
def hashed(key, token):
    # Output number token + 1 of the generator with this key: uint64.
    z = (token.to(tl.int64) + 1).to(tl.uint64, bitcast=True) * STEP + key.to(tl.uint64, bitcast=True)
    z = (z ^ (z >> 30)) * FACTOR_1
    z = (z ^ (z >> 27)) * FACTOR_2
    return z ^ (z >> 31)


@triton.jit
def _gumbel(key, token):
    # Standard Gumbel noise float64 of these tokens.
    share = ((hashed(key, token) >> 11).to(tl.int64, bitcast=True).to(tl.float64) + 0.5) * UNIT
    return -tl.log(-tl.log(tl.minimum(share, BELOW_ONE)))


@triton.jit
def maxima(logits_ptr, out_ptr, vocab, num_chunks, BLOCK: tl.constexpr):
    # The largest logit of each chunk of each row as float64; NaN if the chunk has a NaN.
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * vocab + token, mask=token < vocab, other=float("-inf")).to(tl.float64)
    broken = tl.max((x != x).to(tl.int32), axis=0) == 1
    largest = tl.max(tl.where(x != x, float("-inf"), x), axis=0)
    tl.store(out_ptr + row * num_chunks + chunk, tl.where(broken, float("nan"), largest))


@triton.jit
def noisy(
    logits_ptr, top_ptr, divisor_ptr, floor_ptr, key_ptr, greedy_ptr, kept_ptr, ids_ptr, score_ptr, token_ptr,
    vocab, num_chunks, KEPT: tl.constexpr, IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # The best allowed token of each chunk of each row, and its score: the scaled logit plus noise.
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    x = tl.load(logits_ptr + row * vocab + token, mask=inside, other=float("-inf")).to(tl.float64)
    value = (x - tl.load(top_ptr + row)) / tl.load(divisor_ptr + row)
    allowed = inside & (value > float("-inf")) & (value >= tl.load(floor_ptr + row))
    if KEPT:
        allowed = allowed & (tl.load(kept_ptr + row * vocab + token, mask=inside, other=0) != 0)
    if IDS:  # ids ascend, so among equal scores the first column has the lowest id
        token = tl.load(ids_ptr + token, mask=inside, other=0).to(tl.int32)
    score = value + tl.where(tl.load(greedy_ptr + row) != 0, 0.0, _gumbel(tl.load(key_ptr + row), token))
    score = tl.where(allowed, score, float("-inf"))
    best = tl.max(score, axis=0)
    first = tl.min(tl.where(allowed & (score == best), token, NONE), axis=0)
    tl.store(score_ptr + row * num_chunks + chunk, best)
    tl.store(token_ptr + row * num_chunks + chunk, first)


@triton.jit
def nucleus(falling_ptr, order_ptr, target_ptr, kept_ptr, vocab, BLOCK: tl.constexpr):
    # Marks the smallest number of descending weights [V] whose sum reaches the target. One program adds in one order,
    # because PyTorch's cumulative sums on a GPU differ from run to run.
    target = tl.load(target_ptr)
    reached, start = tl.zeros((), tl.float64), 0
    while start < vocab:
        place = start + tl.arange(0, BLOCK)
        weight = tl.load(falling_ptr + place, mask=place < vocab, other=0.0)
        before = reached + (tl.cumsum(weight, axis=0) - weight)
        inside = (place < vocab) & ((before < target) | (place == 0))
        tl.store(kept_ptr + tl.load(order_ptr + place, mask=inside, other=0), 1, mask=inside)
        reached += tl.sum(weight, axis=0)
        start = tl.where(reached < target, start + BLOCK, vocab)
