"""The price of exactness: acceptance of coupled sampling against that of min(1, p/q) on the same positions.

The usual rule accepts a token drawn from q with probability sum(min(p, q)) (Leviathan et al., 2023, theorem 3.5), but
its text depends on the drafter. With coupled sampling the text does not (docs/concepts.md); it accepts somewhat less.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sameseed.measure.quality.likelihood import forced
from sameseed.models.runner import ModelRunner
from sameseed.request import SamplingParams, Sequence
from sameseed.spec.sampling import choose, survivors


@dataclass(frozen=True)
class Price:
    """Acceptance over `positions` token positions.

    `coupled`: how often both models choose the same token with the same noise. `min_pq`: mean of sum(min(p, q)).
    """

    positions: int
    coupled: float
    min_pq: float


def price(
    target: ModelRunner, draft: ModelRunner, texts: Seq[tuple[Seq[int], Seq[int], SamplingParams]]
) -> Price | None:
    """Compare target and draft at every position of `texts`: (prompt, the target's text, sampling parameters) each.

    Both runners must be idle; their cache blocks are free again afterwards. None if there are no positions.
    """
    alike, overlap = list[bool](), list[float]()
    for prompt, text, params in (job for job in texts if job[1]):
        whole = (*prompt, *text)
        its, mine = (
            torch.cat([logits.cpu() for *_, logits in forced(runner, [(whole, len(prompt))], len(whole), len(whole))])
            for runner in (target, draft)
        )
        seq = Sequence(-1, list(prompt), params, params.seed or 0)
        for place, (p, q) in enumerate(zip(its.numpy(), mine.numpy(), strict=True)):
            path = text[:place]
            alike.append(choose(p, seq, path, ()) == choose(q, seq, path, ()))
            overlap.append(_shared(p, q, params))
    return Price(len(alike), float(np.mean(alike)), float(np.mean(overlap))) if alike else None


def _shared(its: NDArray[np.float32], mine: NDArray[np.float32], params: SamplingParams) -> float:
    """sum(min(p, q)) of the two distributions after sampling settings were applied; 0 or 1 for greedy sampling."""
    if params.greedy:
        return float(its.argmax() == mine.argmax())
    p, q = np.zeros(len(its)), np.zeros(max(len(its), len(mine)))
    for into, row in ((p, its), (q, mine)):
        ids, kept = survivors(row.astype(np.float64), params)
        weights = np.exp(kept - kept.max())
        into[ids] = weights / weights.sum()
    return float(np.minimum(p, q[: len(p)]).sum())
