"""The price of exactness: acceptance of coupled sampling against that of min(1, p/q) on the same positions.

The usual rule accepts a token drawn from q with probability sum(min(p, q)) (Leviathan et al., 2023, theorem 3.5), but
its text depends on the drafter. With coupled sampling the text does not (docs/concepts.md); it accepts somewhat less.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sameseed.batch import MAX_NODES
from sameseed.models.runner import ModelRunner
from sameseed.request import SamplingParams, Sequence
from sameseed.spec.draft import Draft
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
    target: ModelRunner, draft: ModelRunner, texts: Iterable[tuple[Seq[int], Seq[int], SamplingParams]]
) -> Price | None:
    """Compare target and draft at every position of `texts`: (prompt, the target's text, sampling parameters) each.

    Both runners must be idle; their cache blocks are free again afterwards. None if there are no positions.
    """
    alike, overlap = list[bool](), list[float]()
    for prompt, text, params in texts:
        rows = zip(_logits(target, prompt, text, params), _logits(draft, prompt, text, params), strict=True)
        seq = Sequence(-1, list(prompt), params, params.seed or 0)
        for place, (its, mine) in enumerate(rows):
            path = text[:place]
            alike.append(choose(its, seq, path, ()) == choose(mine, seq, path, ()))
            overlap.append(_shared(its, mine, params))
    return Price(len(alike), float(np.mean(alike)), float(np.mean(overlap))) if alike else None


def _logits(runner: ModelRunner, prompt: Seq[int], text: Seq[int], params: SamplingParams) -> list[NDArray[np.float32]]:
    """The logits before each token of the text."""
    seq, rows = Sequence(-1, list(prompt), params, 0), list[NDArray[np.float32]]()
    try:
        for start in range(0, len(text), MAX_NODES):
            nodes = list(text[start : start + MAX_NODES])
            pending = [seq.num_pending]
            if not runner.blocks.reserve(seq, len(seq) + len(nodes)):
                break
            out = runner.forward([seq], Draft.chains([nodes]), pending)
            rows += list(out.logits.cpu().numpy()[: len(nodes)])
            runner.commit([seq], pending, [range(len(nodes) - 1)], out)  # the last one stays pending
            seq.token_ids += nodes
    finally:
        runner.blocks.release(seq)
    return rows


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
