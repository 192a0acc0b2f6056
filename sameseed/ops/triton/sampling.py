"""Choices on the GPU: `spec/sampling.py`'s, from rows of logits that never leave the device.

The noise is the same: SplitMix64 at (key, token), whose integers are exact, then two logarithms in float64. So the
choice is the same too, but where two candidates tie to the last bits of an exponential or a logarithm. A row's
parameters arrive as tensors, so that nothing waits for the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sameseed.batch import Draws
from sameseed.ops.triton.draws import maxima, noisy, nucleus
from sameseed.ops.triton.guard import Launch, guarded

CHUNK = 1024  # logits of one program
AMONG = 8  # candidates that the likeliest's share is of: spec.choices.SHARE_AMONG
FAILED = -1  # spec.sampling.FAILED
_NONE = 2**31 - 1


def _top_k(logits: Tensor, top: Tensor, draws: Draws) -> Tensor:
    """Floors raised to the k-th largest scaled logit, where a row asks for one; ties at it stay."""
    if not draws.most:
        return draws.floors
    index, most = draws.cut[0], min(draws.most, logits.shape[1])  # a k beyond all tokens rules none out
    largest = torch.topk(logits[index], most, dim=1).values  # scaling keeps the order
    k = draws.cut[1].clamp(max=most - 1)[:, None]
    kth = (largest.gather(1, k)[:, 0].double() - top[index]) / draws.divisors[index]
    return draws.floors.index_copy(0, index, torch.maximum(draws.floors[index], kth))


def _top_p(logits: Tensor, top: Tensor, floors: Tensor, draws: Draws) -> Tensor | None:
    """uint8 [R, V]: tokens of each row's nucleus, equals at its border by their numbers; None where no row asks."""
    if not draws.shares:
        return None
    kept = torch.ones(logits.shape, dtype=torch.uint8, device=logits.device)
    for r, p in draws.shares:  # one at a time: float64 of a whole vocabulary, sorted, times the rows would be too much
        kept[r].zero_()
        scaled = (logits[r].double() - top[r]) / draws.divisors[r]
        weights = torch.where(scaled >= floors[r], scaled.exp(), 0.0)
        falling, order = torch.sort(weights, descending=True, stable=True)
        target = weights.sum() * p
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


def launches(logits: Tensor, draws: Draws, token_ids: Tensor | None = None) -> tuple[list[Launch], Tensor, Tensor]:
    """The launches behind a choice without top-k and top-p, and the scores and tokens [R, chunks] that they write."""
    num_rows, vocab = logits.shape
    chunks = -(-vocab // CHUNK)
    top = logits.new_empty(num_rows, chunks, dtype=torch.float64)
    scores, tokens = torch.empty_like(top), torch.empty_like(top, dtype=torch.int32)
    grid = (num_rows, chunks)
    shared = {"logits_ptr": logits, "vocab": vocab, "num_chunks": chunks}
    first = Launch(maxima, grid, {**shared, "out_ptr": top}, {"BLOCK": CHUNK}, warps=4)
    best = top[:, 0].contiguous()
    return [first, _noisy(logits, best, draws, draws.floors, None, scores, tokens, token_ids)], scores, tokens


def _noisy(
    logits: Tensor,
    top: Tensor,
    draws: Draws,
    floors: Tensor,
    kept: Tensor | None,
    scores: Tensor,
    tokens: Tensor,
    token_ids: Tensor | None,
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
        "ids_ptr": tokens if token_ids is None else token_ids,
        "score_ptr": scores,
        "token_ptr": tokens,
        "vocab": vocab,
        "num_chunks": scores.shape[1],
    }
    constants = {"KEPT": kept is not None, "IDS": token_ids is not None, "BLOCK": CHUNK}
    return Launch(noisy, (num_rows, scores.shape[1]), arguments, constants, warps=4)


def choose(logits: Tensor, draws: Draws, token_ids: Tensor | None = None) -> Tensor | None:
    """The token of each row of logits float32 [R, V], as spec.sampling.numpy_choice draws it: int32 [R].

    Where `draws.sure`, int32 [2, R]: below the tokens the bits of float32 numbers, how sure they are. FAILED where a
    row's largest logit is no finite number. `token_ids` int64 [V], ascending: the tokens that the columns stand for.
    Nothing is copied to the host. None where the kernels do not compile.
    """
    return guarded("choose", lambda: _chosen(logits.contiguous(), draws, token_ids), lambda: None)


def _chosen(logits: Tensor, draws: Draws, token_ids: Tensor | None) -> Tensor:
    (first, _), scores, tokens = launches(logits, draws, token_ids)
    first.run()
    top = first.arguments["out_ptr"].amax(1)  # NaN if any is
    finite = top.isfinite()
    safe = torch.where(finite, top, 0.0)
    floors = _top_k(logits, safe, draws)
    kept = _top_p(logits, safe, floors, draws)
    _noisy(logits, safe, draws, floors, kept, scores, tokens, token_ids).run()
    best = scores.amax(1, keepdim=True)
    chosen = torch.where(scores == best, tokens, _NONE).amin(1)
    chosen = torch.where(finite, chosen, FAILED)
    if not draws.sure:
        return chosen
    # How sure the choices are, as the bits of float32 [R]: it decides lengths only, so about will do. Greedy, the
    # token's probability; sampled, its part of the exponentials of the largest scores, one of each chunk.
    likely = torch.exp(safe - torch.logsumexp(logits, 1))
    largest = torch.topk(scores, min(AMONG, scores.shape[1]), dim=1).values
    shares = 1.0 / torch.exp(largest - largest[:, :1]).sum(1)
    return torch.stack([chosen, torch.where(draws.greedy != 0, likely, shares).float().view(torch.int32)])
