"""Wrong versions of the code, each with one flaw that someone could have written: what the checks must reject."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from sameseed.models.runner import ModelRunner, Output
from sameseed.request import FinishReason, SamplingParams, Sequence
from sameseed.spec import sampling
from sameseed.spec.draft import Draft
from sameseed.spec.verify import Verified

LIKELY = 0.25  # what acceptance by threshold takes for good enough

_noise_key, _gumbel = sampling.noise_key, sampling.gumbel_noise
_survivors, _penalize = sampling.survivors, sampling._penalize


def verify(flaw: str = "") -> Callable[..., Verified]:
    """`spec.verify.verify` with a flaw by name; without one it does the same."""

    def walk(
        draft: Draft, logits: Tensor, seqs: Seq[Sequence], wants_logits: Seq[bool], eos_token_ids: Seq[int] = ()
    ) -> Verified:
        table, row = logits.cpu().numpy(), 0
        out = Verified([], [], [], [])
        for b, seq in enumerate(seqs):
            path: list[int] = []
            nodes: list[int] = []
            logprobs = []
            if wants_logits[b]:
                seed, seq.seed = seq.seed, seq.seed + (b if flaw == "seed by place" else 0)
                tokens, parents = draft.nodes(b)
                node, spent = -1, False
                while True:
                    at = min(_row(flaw, row, node, len(nodes)), len(table) - 1)
                    children = [i for i, p in enumerate(parents) if p == node]
                    before = [] if flaw == "path" else path
                    token = _token(flaw, table[at], seq, before, eos_token_ids, [tokens[c] for c in children])
                    child = next((c for c in children if tokens[c] == token), None)
                    if flaw == "one too many" and child is None and children and not spent:
                        child, spent = children[0], True
                        token = tokens[child]
                    if flaw == "any child" and children:
                        child = children[0]
                    if flaw == "reject all":
                        child = None
                    if seq.params.logprobs is not None:
                        known = [] if flaw == "logprobs" else path
                        logprobs.append(sampling.token_logprob(table[at], seq, known, token, eos_token_ids))
                    path.append(token)
                    if child is None:
                        break
                    nodes.append(child)
                    node = child
                row += 1 + (len(nodes) if flaw == "rows" else len(tokens))
                seq.seed = seed
            out.tokens.append(path)
            out.nodes.append(nodes)
            out.logprobs.append(logprobs)
            out.failed.append(False)
        return out

    return walk


def _row(flaw: str, row: int, node: int, depth: int) -> int:
    """The row of the logits that decides the token after a node."""
    if flaw == "row before":
        return row + max(node, 0)
    return row + (depth if flaw == "row by depth" else 1 + node)


def _token(flaw: str, row: Any, seq: Sequence, path: Seq[int], eos: Seq[int], guesses: Seq[int]) -> int:
    """The token there, as the flawed rule has it."""
    if flaw in ("threshold", "no residual") and guesses and not seq.params.greedy:
        uniform = random.Random(seq.seed * 7919 + len(seq) + len(path)).random()
        for guess in guesses:
            p = sampling.probability(row, seq, guess)
            # The rule of rejection accepts with min(1, p/q), here q = 1; then it must draw from what is left of p.
            if p > (LIKELY if flaw == "threshold" else uniform):
                return guess
    return sampling.choose(row, seq, path, eos)


def commit(flaw: str) -> Callable[..., Tensor | None]:
    """`ModelRunner.commit` with a flaw."""

    def keep(
        self: ModelRunner, seqs: Seq[Sequence], num_pending: Seq[int], nodes: Seq[Seq[int]], output: Output
    ) -> Tensor | None:
        src: list[int] = []
        dst: list[int] = []
        for b, seq in enumerate(seqs):
            known = seq.num_cached + num_pending[b]
            count = output.row_offsets[b + 1] - output.row_offsets[b] - num_pending[b]  # nodes
            rejected = [n for n in range(count) if n not in nodes[b]]
            for place, node in enumerate(nodes[b]):
                if flaw == "keeps a rejected row" and rejected and place == len(nodes[b]) - 1:
                    node = rejected[-1]
                if node != place:
                    src.append(self._slot(seq, known + node - (flaw == "from the place before")))
                    dst.append(self._slot(seq, known + place + (flaw == "to the place after")))
            seq.num_cached = known + len(nodes[b])
        if src and flaw != "moves nothing":
            self._move(src, dst)
        return None

    return keep


def ancestor_masks(flaw: str) -> Callable[[Seq[int]], tuple[list[int], list[int]]]:
    """`batch.ancestor_masks` with a flaw."""

    def masks_of(parents: Seq[int]) -> tuple[list[int], list[int]]:
        masks: list[int] = []
        depths: list[int] = []
        for i, parent in enumerate(parents):
            above = 0 if parent < 0 else masks[parent]
            if flaw == "siblings":
                above = (1 << i) - 1
            elif flaw == "grandparents" and parent >= 0:
                above = 1 << parent
            masks.append(above | 1 << i)
            depths.append(0 if parent < 0 else i if flaw == "place" else depths[parent] + 1)
        if flaw == "shifted":
            masks = [m >> 1 | 1 << i for i, m in enumerate(masks)]
        return masks, depths

    return masks_of


def noise_key(flaw: str) -> Callable[[int, int], int]:
    """`sampling.noise_key` that leaves the seed or the position out."""
    return lambda seed, position: _noise_key(0 if flaw == "seed" else seed, 0 if flaw == "position" else position)


def gumbel_noise(flaw: str) -> Callable[..., Any]:
    """`sampling.gumbel_noise` without the token, or uniform."""

    def noise(seed: int, position: int, token_ids: Any) -> Any:
        if flaw == "token":
            return np.full(len(token_ids), _gumbel(seed, position, token_ids[:1])[0])
        return np.exp(-np.exp(-_gumbel(seed, position, token_ids)))

    return noise


def survivors(flaw: str) -> Callable[..., Any]:
    """`sampling.survivors` with a border or a temperature that is off."""

    def left(row: Any, params: SamplingParams) -> Any:
        if flaw == "top-k" and params.top_k > 0:
            params = replace(params, top_k=params.top_k + 1)
        if flaw == "top-p":
            params = replace(params, top_p=params.top_p * 0.9)
        if flaw == "temperature":
            params = replace(params, temperature=params.temperature**2)
        return _survivors(row, params)

    return left


def penalize(row: Any, params: SamplingParams, state: Any, path: Seq[int]) -> None:
    """`sampling._penalize` that does not see the drafted tokens before this one."""
    _penalize(row, params, state, [])


def derive_seed(seed: int, index: int) -> int:
    """`sampling.derive_seed` that gives every completion of a request the same seed."""
    return seed


def preempt(self: Any, seq: Sequence) -> None:
    """`Scheduler._preempt` that gives the blocks away and goes on counting some of their rows.

    As many as reserving does not notice, since it counts blocks: with more, the pass would run over the block table.
    """
    self.running.remove(seq)
    self.blocks.forget(seq)  # what is found again would make up for it
    self.blocks.trim(seq, 0)
    seq.num_cached = min(seq.num_cached, (len(seq) - 1) % self.blocks.block_size)
    self.waiting.insert(0, seq)
    seq.num_preemptions += 1
    self.num_preemptions += 1


def finish(self: Any, seq: Sequence) -> None:
    """`Scheduler.finish` that keeps the blocks."""
    if seq in self.running:
        self.running.remove(seq)
    elif seq in self.waiting:
        self.waiting.remove(seq)


def late_end(end: Callable[..., FinishReason | None]) -> Callable[..., FinishReason | None]:
    """`Running._end` that looks at the last token of a round only."""

    def check(self: Any, token: int, length: int) -> FinishReason | None:
        found = end(self, token, length)
        return found if length >= len(self.seq) else None

    return check


def long_end(end: Callable[..., FinishReason | None]) -> Callable[..., FinishReason | None]:
    """`Running._end` that counts one token too few."""

    def check(self: Any, token: int, length: int) -> FinishReason | None:
        found = end(self, token, length)
        at_length = length - self.seq.num_prompt == self.request.params.max_tokens
        return None if found is FinishReason.LENGTH and at_length else found

    return check
