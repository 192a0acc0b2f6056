"""Choices on the GPU: `spec/sampling.py`'s, from rows of logits that never leave the device.

The noise is the same: SplitMix64 at (key, token), whose integers are exact, then two logarithms in float64. So the
choice is the same too, but where two candidates tie to the last bits of an exponential or a logarithm. A row's
parameters arrive as tensors, so that nothing waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from sameseed.ops.triton.draws import maxima, noisy, nucleus
from sameseed.ops.triton.guard import Launch

CHUNK = 1024  # logits of one program
FAILED = -1  # spec.sampling.FAILED
_NONE = 2**31 - 1


@dataclass(frozen=True)
class Draws:
    """How each of R rows draws: `keys` int64 [R] are noise keys, `divisors` and `floors` float64 [R] temperatures and
    least scaled logits, `greedy` int32 [R]; `top_k` and `top_p` of each row stay on the host (0 and 1: none)."""

    keys: Tensor
    divisors: Tensor
    floors: Tensor
    greedy: Tensor
    top_k: Seq[int]
    top_p: Seq[float]

    @classmethod
    def of(cls, rows: Seq[tuple[int, float, float, bool, int, float]], device: torch.device | str) -> Draws:
        """From a tuple each: noise key (uint64), temperature, floor, greedy, top-k, top-p; one copy to the device.

        For a greedy row the rest does not count.
        """
        keys = [key - (1 << 64) if key >> 63 else key for key, *_ in rows]
        numbers = torch.tensor(
            [[1.0 if g else t, -torch.inf if g else f] for _, t, f, g, *_ in rows], dtype=torch.float64
        )
        integers = torch.tensor([[key, int(row[3])] for key, row in zip(keys, rows)], dtype=torch.int64)
        numbers, integers = numbers.view(-1, 2).to(device), integers.view(-1, 2).to(device)
        return cls(
            integers[:, 0].contiguous(),
            numbers[:, 0].contiguous(),
            numbers[:, 1].contiguous(),
            integers[:, 1].to(torch.int32),
            [0 if g else k for *_, g, k, _ in rows],
            [1.0 if g else p for *_, g, _, p in rows],
        )


def _top_k(logits: Tensor, top: Tensor, draws: Draws) -> Tensor:
    """Floors raised to the k-th largest scaled logit, where a row asks for one; ties at it stay."""
    vocab = logits.shape[1]
    wanted = [r for r, k in enumerate(draws.top_k) if 0 < k < vocab]
    if not wanted:
        return draws.floors
    index = torch.tensor(wanted, device=logits.device)
    k = torch.tensor([[draws.top_k[r] - 1] for r in wanted], device=logits.device)
    largest = torch.topk(logits[index], max(draws.top_k[r] for r in wanted), dim=1).values  # scaling keeps the order
    kth = (largest.gather(1, k)[:, 0].double() - top[index]) / draws.divisors[index]
    return draws.floors.index_copy(0, index, torch.maximum(draws.floors[index], kth))


def _top_p(logits: Tensor, top: Tensor, floors: Tensor, draws: Draws) -> Tensor | None:
    """uint8 [R, V]: tokens of each row's nucleus, equals at its border by their numbers; None where no row asks."""
    wanted = [r for r, p in enumerate(draws.top_p) if p < 1.0]
    if not wanted:
        return None
    kept = torch.ones(logits.shape, dtype=torch.uint8, device=logits.device)
    kept[torch.tensor(wanted, device=logits.device)] = 0
    for r in wanted:  # one at a time: float64 of a whole vocabulary, sorted, times the rows would fill the memory
        scaled = (logits[r].double() - top[r]) / draws.divisors[r]
        weights = torch.where(scaled >= floors[r], scaled.exp(), 0.0)
        falling, order = torch.sort(weights, descending=True, stable=True)
        target = weights.sum() * draws.top_p[r]
        marking(falling, order, target, kept[r]).run()
    return kept


def marking(falling: Tensor, order: Tensor, target: Tensor, kept: Tensor) -> Launch:
    """The launch that sets kept uint8 [V] for the nucleus of falling weights [V]; target float64 []."""
    arguments = {
        "falling_ptr": falling,
        "order_ptr": order,
        "target_ptr": target,
        "kept_ptr": kept,
        "vocab": falling.shape[0],
    }
    return Launch(nucleus, (1,), arguments, {"BLOCK": CHUNK}, warps=4)


def launches(logits: Tensor, draws: Draws) -> tuple[list[Launch], Tensor, Tensor]:
    """The launches behind a choice without top-k and top-p, and the scores and tokens [R, chunks] that they write."""
    num_rows, vocab = logits.shape
    chunks = -(-vocab // CHUNK)
    top = logits.new_empty(num_rows, chunks, dtype=torch.float64)
    scores, tokens = torch.empty_like(top), torch.empty_like(top, dtype=torch.int32)
    grid = (num_rows, chunks)
    shared = {"logits_ptr": logits, "vocab": vocab, "num_chunks": chunks}
    first = Launch(maxima, grid, {**shared, "out_ptr": top}, {"BLOCK": CHUNK}, warps=4)
    return [first, _noisy(logits, top[:, 0].contiguous(), draws, draws.floors, None, scores, tokens)], scores, tokens


def _noisy(
    logits: Tensor, top: Tensor, draws: Draws, floors: Tensor, kept: Tensor | None, scores: Tensor, tokens: Tensor
) -> Launch:
    num_rows, vocab = logits.shape
    arguments = {
        "logits_ptr": logits,
        "top_ptr": top,
        "divisor_ptr": draws.divisors,
        "floor_ptr": floors,
        "key_ptr": draws.keys,
        "greedy_ptr": draws.greedy,
        "kept_ptr": tokens if kept is None else kept,  # not read without
        "score_ptr": scores,
        "token_ptr": tokens,
        "vocab": vocab,
        "num_chunks": scores.shape[1],
    }
    return Launch(noisy, (num_rows, scores.shape[1]), arguments, {"KEPT": kept is not None, "BLOCK": CHUNK}, warps=4)


def choose(logits: Tensor, draws: Draws) -> Tensor:
    """The token of each row of adjusted logits float32 [R, V], as spec.sampling.numpy_choice draws it: int32 [R].

    FAILED where a row's largest logit is no finite number. Nothing is copied to the host.
    """
    logits = logits.contiguous()
    (first, _), scores, tokens = launches(logits, draws)
    first.run()
    top = first.arguments["out_ptr"].amax(1)  # NaN if any is
    finite = top.isfinite()
    safe = torch.where(finite, top, 0.0)
    floors = _top_k(logits, safe, draws)
    kept = _top_p(logits, safe, floors, draws)
    _noisy(logits, safe, draws, floors, kept, scores, tokens).run()
    best = scores.amax(1, keepdim=True)
    chosen = torch.where(scores == best, tokens, _NONE).amin(1)
    return torch.where(finite, chosen, FAILED)
