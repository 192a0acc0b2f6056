"""verify: follow the target's own choices through each draft. The acceptance rule, the same for chains and trees."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sameseed.errors import RequestError, reason
from sameseed.request import Sequence, TokenLogprob
from sameseed.spec.draft import Draft
from sameseed.spec.sampling import FAILED, choose, drawable, plain_greedy, token_logprob

log = logging.getLogger("sameseed")
NO_TOKEN = (
    "no token was left to choose: the request's allowed or banned tokens, biases and grammar rule out all of them; "
    "loosen them"
)
NO_NUMBERS = "the model's logits are no finite numbers; check its weights, or try another format or backend"


@dataclass(frozen=True)
class Verified:
    """Ragged over sequences: the tokens decided in this round, and the draft nodes accepted for them (one fewer).

    A sequence without logits (its pending tokens were not all in the pass) has neither. `failed[b]`: no token could be
    chosen after the accepted ones, which stay valid, and the sequence must end with an error.
    """

    tokens: list[list[int]]
    nodes: list[list[int]]
    logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    failed: list[bool] = field(default_factory=list)


def verify(
    draft: Draft,
    logits: Tensor,
    seqs: Seq[Sequence],
    wants_logits: Seq[bool],
    eos_token_ids: Seq[int] = (),
    choices: Seq[int] | None = None,
) -> Verified:
    """Accept a path of each draft, and add one token: the walk goes on while a child holds the target's own choice.

    logits float32 [R, V] holds, for each sequence with `wants_logits`, the row after its last known token and one row
    after each of its nodes. `choices` [R]: the backend's choices, if it made any. They are used for sequences that are
    `drawable`, whose logits are then not read.
    """
    paths: list[_Path] = []
    drawn = [choices is not None and drawable(seq) for seq in seqs]
    table = on_host(logits, draft, wants_logits, drawn)
    best, finite = _argmax(table) if any(plain_greedy(s) and not d for s, d in zip(seqs, drawn)) else ([], [])
    row = 0
    for b, seq in enumerate(seqs):
        path = _Path()
        if wants_logits[b]:
            draft_tokens, parents = draft.nodes(b)
            end = row + 1 + len(draft_tokens)
            try:
                made: tuple[Seq[int], Seq[bool]] | None = None
                if choices is not None and drawn[b]:
                    made = choices[row:end], [True] * (end - row)
                elif plain_greedy(seq):
                    made = best[row:end], finite[row:end]
                _walk(path, table[row:end], seq, draft_tokens, parents, made, eos_token_ids)
            except RequestError as error:  # a grammar that took too much time
                path.failed = seq.ruled_out = True
                seq.error = str(error)
            except Exception as error:  # mostly its own parameters: only this sequence ends
                log.exception("choosing a token of sequence %d failed", seq.seq_id)
                path.failed, seq.error = True, f"choosing a token failed: {reason(error)}"
            row = end
        paths.append(path)
    return Verified(
        [p.tokens for p in paths], [p.nodes for p in paths], [p.logprobs for p in paths], [p.failed for p in paths]
    )


@dataclass
class _Path:
    """What was decided for one sequence in this round."""

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
    made: tuple[Seq[int], Seq[bool]] | None,
    eos_token_ids: Seq[int],
) -> None:
    """Follow the choices for one sequence into `path`; table: logits [1 + nodes, V].

    `made`: the choice for each row and whether the row has one, if they are known. A token of `seq.script` is taken
    whatever the logits say.
    """
    children = {(p, t): i for i, (p, t) in reversed(list(enumerate(zip(parents, draft_tokens, strict=True))))}
    node = -1
    while True:
        at, position = 1 + node, len(seq) + len(path.tokens)
        if position < len(seq.script):
            token = seq.script[position]
        elif made is not None:
            token = made[0][at] if made[1][at] else FAILED
        else:
            token = choose(table[at], seq, path.tokens, eos_token_ids)
        if token == FAILED:
            path.failed = True
            seq.ruled_out = bool(np.isfinite(table[at].max(initial=-np.inf)))  # False: the model is at fault
            seq.error = NO_TOKEN if seq.ruled_out else NO_NUMBERS
            return
        if seq.params.logprobs is not None:
            path.logprobs.append(token_logprob(table[at], seq, path.tokens, token, eos_token_ids))
        path.tokens.append(token)
        child = children.get((node, token))
        if child is None:
            return
        path.nodes.append(child)
        node = child


def on_host(logits: Tensor, draft: Draft, wants_logits: Seq[bool], drawn: Seq[bool]) -> NDArray[np.float32]:
    """Logits [R, V] on the host. Rows of sequences that are `drawn` are not copied, and hold arbitrary values."""
    if logits.device.type == "cpu":
        return logits.numpy()
    wanted = [w and not d for w, d in zip(wants_logits, drawn, strict=True)]
    if not any(drawn):
        return logits.cpu().numpy()
    table: NDArray[np.float32] = np.empty(logits.shape if any(wanted) else (len(logits), 0), np.float32)
    spans: list[slice] = []
    row = 0
    for b, (wants, one) in enumerate(zip(wants_logits, wanted, strict=True)):
        end = row + (1 + draft.count(b) if wants else 0)
        spans += [slice(row, end)] if one else []
        row = end
    if spans:
        found, at = torch.cat([logits[s] for s in spans]).cpu().numpy(), 0
        for s in spans:
            table[s] = found[at : at + s.stop - s.start]
            at += s.stop - s.start
    return table


def _argmax(table: NDArray[np.float32]) -> tuple[list[int], list[bool]]:
    """Index of each row's first maximum, and whether the maximum is a finite number (NaN is the maximum of its row).

    In NumPy, because PyTorch would wake its thread pool for these few rows, which costs more than the search.
    """
    index = table.argmax(axis=-1)
    values = table[np.arange(len(table)), index]
    return index.tolist(), np.isfinite(values).tolist()
