"""Token choice on the CPU by the specification, in place of a GPU's kernels (`Ops.choose`)."""

from unittest.mock import patch

import numpy as np
import torch

from sameseed.request import SamplingParams
from sameseed.spec import sampling
from sameseed.spec.sampling import FAILED, survivors


def choose(logits, draws, token_ids=None):
    """Choose tokens int32 [R], or [2, R] with confidences, from logits float32 [R, V]."""
    ids = np.arange(logits.shape[1]) if token_ids is None else token_ids.numpy()
    cut, shares = dict(zip(*draws.cut.tolist())), dict(draws.shares)
    found = []
    for r, row in enumerate(logits.double().numpy()):
        if not np.isfinite(row.max()):
            found.append((FAILED, float("nan")))
            continue
        weights = np.exp(row - row.max())
        if draws.greedy[r]:
            found.append((int(ids[row.argmax()]), float(1.0 / weights.sum())))
            continue
        params = SamplingParams(
            temperature=float(draws.divisors[r]), top_k=cut.get(r, -1) + 1, top_p=shares.get(r, 1.0)
        )
        places, scores = survivors(row, params)
        with patch.object(sampling, "noise_key", lambda key, _: key):  # draws.keys already holds noise keys
            key = int(draws.keys[r]) % 2**64
            scores = scores + sampling.gumbel_noise(key, 0, ids[places].astype(np.int64))
        likeliest = np.sort(np.exp(scores - scores.max()))[-8:]
        found.append((int(ids[places[scores.argmax()]]), float(1.0 / likeliest.sum())))
    tokens = torch.tensor([token for token, _ in found], dtype=torch.int32)
    sure = torch.tensor([share for _, share in found], dtype=torch.float32)
    return torch.stack([tokens, sure.view(torch.int32)]) if draws.sure else tokens


def let_choose(monkeypatch, ops):
    """Let these ops choose tokens with `choose`."""
    monkeypatch.setattr(ops, "_choose", choose)
