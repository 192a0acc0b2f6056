"""verify: walk each sequence's draft with the target's own choices. The one acceptance rule, chains and trees alike."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sameseed.errors import RequestError
from sameseed.request import Sequence, TokenLogprob
from sameseed.spec.draft import Draft
from sameseed.spec.sampling import FAILED, choose, plain_greedy, token_logprob

log = logging.getLogger("sameseed")


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
    paths: list[_Path] = []
    table = logits.numpy() if logits.device.type == "cpu" else logits.cpu().numpy()
    best, finite = _argmax(table) if any(plain_greedy(s) for s in seqs) else ([], [])
    row = 0
    for b, seq in enumerate(seqs):
        path = _Path()
        if wants_logits[b]:
            draft_tokens, parents = draft.nodes(b)
            end = row + 1 + len(draft_tokens)
            try:
                greedy = (best[row:end], finite[row:end]) if plain_greedy(seq) else None
                _walk(path, table[row:end], seq, draft_tokens, parents, greedy, eos_token_ids)
            except RequestError as error:  # a grammar that is given up
                log.warning("choosing a token of sequence %d failed: %s", seq.seq_id, error)
                path.failed = seq.ruled_out = True
            except Exception:  # its own parameters, mostly: it ends alone, and its neighbours never know
                log.exception("choosing a token of sequence %d failed", seq.seq_id)
                path.failed = True
            row = end
        paths.append(path)
    return Verified(
        [p.tokens for p in paths], [p.nodes for p in paths], [p.logprobs for p in paths], [p.failed for p in paths]
    )


@dataclass
class _Path:
    """What one sequence decided in this round."""

    tokens: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    failed: bool = False


def _walk(
    path: _Path,
    table: NDArray[np.float32],
    seq: Sequence,
    draft_tokens: Seq[int],
    parents: Seq[int],
    greedy: tuple[Seq[int], Seq[bool]] | None,
    eos_token_ids: Seq[int],
) -> None:
    """Follow one sequence's own choices; table [1 + nodes, V], `greedy`: the rows' maxima, where these are the choices.

    A token that is decided already (`seq.script`) is taken whatever the logits say.
    """
    children = {(p, t): i for i, (p, t) in reversed(list(enumerate(zip(parents, draft_tokens, strict=True))))}
    node = -1
    while True:
        at, position = 1 + node, len(seq) + len(path.tokens)
        if position < len(seq.script):
            token = seq.script[position]
        elif greedy is not None:
            token = greedy[0][at] if greedy[1][at] else FAILED
        else:
            token = choose(table[at], seq, path.tokens, eos_token_ids)
        if token == FAILED:
            path.failed = True
            seq.ruled_out = bool(np.isfinite(table[at].max()))  # else the model is at fault
            return
        if seq.params.logprobs is not None:
            path.logprobs.append(token_logprob(table[at], seq, path.tokens, token, eos_token_ids))
        path.tokens.append(token)
        child = children.get((node, token))
        if child is None:
            return
        path.nodes.append(child)
        node = child


def _argmax(table: NDArray[np.float32]) -> tuple[list[int], list[bool]]:
    """Index of each row's first maximum, and whether the maximum is a finite number (NaN is the maximum of its row).

    In NumPy: PyTorch would wake its thread pool for these few rows, which costs more than the search.
    """
    index = table.argmax(axis=-1)
    values = table[np.arange(len(table)), index]
    return index.tolist(), np.isfinite(values).tolist()
