"""verify: walk each sequence's draft with the target's own choices. The one acceptance rule, chains and trees alike."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from foretoken.request import Sequence, TokenLogprob
from foretoken.spec.draft import Draft
from foretoken.spec.sampling import FAILED, choose, plain_greedy, token_logprob


@dataclass(frozen=True)
class Verified:
    """Ragged over sequences: the tokens decided this round, and the draft nodes accepted on the way (one less).

    A sequence without logits (its pending tokens were not all in the pass) has neither. `failed[b]` says that no token
    could be chosen: what was accepted before stands, then the sequence must end with an error.
    """

    tokens: list[list[int]]
    nodes: list[list[int]]
    logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    failed: list[bool] = field(default_factory=list)


def verify(
    draft: Draft, logits: Tensor, seqs: Seq[Sequence], wants_logits: Seq[bool], eos_token_ids: Seq[int] = ()
) -> Verified:
    """Accept a path of each draft and add one token.

    logits float32 [R, V] holds, for each sequence with `wants_logits`, the row after its last known token and one row
    after each of its nodes. At each node the target's own choice is computed; the child that carries it is followed;
    where none does, that choice is the last token of the round.
    """
    tokens: list[list[int]] = []
    nodes: list[list[int]] = []
    logprobs: list[list[TokenLogprob]] = []
    failed: list[bool] = []
    table = logits.numpy() if logits.device.type == "cpu" else logits.cpu().numpy()
    best, finite = _argmax(table) if any(plain_greedy(s) for s in seqs) else ([], [])
    row = 0
    for b, seq in enumerate(seqs):
        path_tokens: list[int] = []
        path_nodes: list[int] = []
        path_logprobs: list[TokenLogprob] = []
        ended = False
        if wants_logits[b]:
            draft_tokens, parents = draft.nodes(b)
            children = {(p, t): i for i, (p, t) in reversed(list(enumerate(zip(parents, draft_tokens, strict=True))))}
            greedy, node = plain_greedy(seq), -1
            while True:
                at = row + 1 + node
                if greedy:
                    token = best[at] if finite[at] else FAILED
                else:
                    token = choose(table[at], seq, path_tokens, eos_token_ids)
                if token == FAILED:
                    ended = True
                    break
                if seq.params.logprobs is not None:
                    path_logprobs.append(token_logprob(table[at], seq, path_tokens, token, eos_token_ids))
                path_tokens.append(token)
                child = children.get((node, token))
                if child is None:
                    break
                path_nodes.append(child)
                node = child
            row += 1 + len(draft_tokens)
        tokens.append(path_tokens)
        nodes.append(path_nodes)
        logprobs.append(path_logprobs)
        failed.append(ended)
    return Verified(tokens, nodes, logprobs, failed)


def _argmax(table: NDArray[np.float32]) -> tuple[list[int], list[bool]]:
    """Index of each row's first maximum, and whether the maximum is a finite number (NaN is the maximum of its row).

    In NumPy: PyTorch would wake its thread pool for these few rows, which costs more than the search.
    """
    index = table.argmax(axis=-1)
    values = table[np.arange(len(table)), index]
    return index.tolist(), np.isfinite(values).tolist()
