"""Token sampling on the GPU as in `spec/sampling.py`, from rows of logits that stay on the device.

The noise is the same: exact integers of SplitMix64 at (key, token), then two logarithms in float64. So the chosen token
is the same, unless two candidates tie up to the last bits of an exponential or a logarithm. The sampling parameters of
rows are tensors, so nothing waits for the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sameseed.batch import Draws
from sameseed.ops.triton.draws import maxima, noisy, nucleus
from sameseed.ops.triton.guard import Launch, guarded

CHUNK = 1024  # logits per program
AMONG = 8  # number of candidates over which shares are computed: drafters/_choices.py
FAILED = -1  # spec.sampling.FAILED
_NONE = 2**31 - 1


def _top_k(logits: Tensor, top: Tensor, draws: Draws) -> Tensor:
    """Floors, raised to the k-th largest scaled logit for rows with top-k. Ties with it stay allowed."""
    if not draws.most:
        return draws.floors
    index, most = draws.cut[0], min(draws.most, logits.shape[1])  # a k beyond the vocabulary excludes nothing
    largest = torch.topk(logits[index], most, dim=1).values  # scaling keeps the order
    k = draws.cut[1].clamp(max=most - 1)[:, None]
    kth = (largest.gather(1, k)[:, 0].double() - top[index]) / draws.divisors[index]
    return draws.floors.index_copy(0, index, torch.maximum(draws.floors[index], kth))


def _top_p(logits: Tensor, top: Tensor, floors: Tensor, draws: Draws) -> Tensor | None:
    """uint8 [R, V] that marks each row's nucleus; ties at its border go to lower columns. None if no row has top-p."""
    if not draws.shares:
        return None
    kept = torch.ones(logits.shape, dtype=torch.uint8, device=logits.device)
    for r, p in draws.shares:  # one row at a time: sorting float64 [R, V] at once takes too much memory
        kept[r].zero_()
        scaled = (logits[r].double() - top[r]) / draws.divisors[r]
        weights = torch.where(scaled >= floors[r], scaled.exp(), 0.0)
        falling, order = torch.sort(weights, descending=True, stable=True)
        target = weights.sum() * p
        marking(falling, order, target, kept[r]).run()
    return kept


def marking(falling: Tensor, order: Tensor, target: Tensor, kept: Tensor) -> Launch:
    """The launch that marks the nucleus of descending weights [V] in kept uint8 [V]; target float64 []."""
    arguments = {
        "falling_ptr": falling,
        "order_ptr": order,
        "target_ptr": target,
        "kept_ptr": kept,
        "vocab": falling.shape[0],
    }
    return Launch(nucleus, (1,), arguments, {"BLOCK": CHUNK}, warps=4)


def launches(logits: Tensor, draws: Draws, token_ids: Tensor | None = None) -> tuple[list[Launch], Tensor, Tensor]:
    """The launches of a choice without top-k and top-p, and the scores and tokens [R, chunks] that they write."""
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
        "kept_ptr": tokens if kept is None else kept,  # not read if None
        "ids_ptr": tokens if token_ids is None else token_ids,
        "score_ptr": scores,
        "token_ptr": tokens,
        "vocab": vocab,
        "num_chunks": scores.shape[1],
    }
    constants = {"KEPT": kept is not None, "IDS": token_ids is not None, "BLOCK": CHUNK}
    return Launch(noisy, (num_rows, scores.shape[1]), arguments, constants, warps=4)


def choose(logits: Tensor, draws: Draws, token_ids: Tensor | None = None) -> Tensor | None:
    """The token chosen from each row of logits float32 [R, V], as `Ops.choose`; nothing is copied to the host.

    `token_ids` ascend. Returns None if the kernels do not compile.
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
    # The confidences of the choices, as bits of float32 [R]. They only decide draft lengths, so approximate values are
    # enough. Greedy: the token's probability. Sampled: its share of exp(score) among the largest scores of chunks.
    likely = torch.exp(safe - torch.logsumexp(logits, 1))
    largest = torch.topk(scores, min(AMONG, scores.shape[1]), dim=1).values
    shares = 1.0 / torch.exp(largest - largest[:, :1]).sum(1)
    return torch.stack([chosen, torch.where(draws.greedy != 0, likely, shares).float().view(torch.int32)])
