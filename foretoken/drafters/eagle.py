"""eagle drafter: a head reads the target's own hidden states and guesses a tree (EAGLE-2 and 3: Li et al., 2024, 2025).

The tree is dynamic: level by level the likeliest paths are expanded, all nodes of a level in one pass of the head, and
the likeliest nodes of all are kept. With sampling, paths are ranked by what the target's own noise makes of the head's
probabilities: that noise is known before the target's choice is (coupled sampling).
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.batch import MAX_NODES
from foretoken.drafters._eagle_context import Contexts
from foretoken.errors import ConfigError
from foretoken.models.eagle_loader import with_vocabulary
from foretoken.models.eagle_runner import HeadRunner, Level
from foretoken.request import Sequence
from foretoken.spec.draft import Draft
from foretoken.spec.drafter import Drafter, Parts, Span
from foretoken.spec.sampling import adjust, gumbel_noise, needs_adjusting, survivors
from foretoken.spec.tree import Tree

CANDIDATES = 64  # of the head's likeliest tokens, those that noise may reorder
LEFT_OUT = 3.0  # taken off the logarithm of what the head's own truncation excludes
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """The head's logits at one place: all [Vd]; the best, falling, with the target's ids; the log of all mass."""

    logits: NDArray[np.float32]
    best: Floats
    ids: NDArray[np.int64]
    total: float


class EagleDrafter(Drafter):
    """An EAGLE head with its own format and cache, which follows each sequence by the target's hidden states."""

    @dataclass(frozen=True)
    class Options(Drafter.Options):
        """`depth`: the longest path of a tree; `top_k`: nodes that are expanded a level, and children of each (1: a
        chain). How many nodes are kept, `--k` says. `vocabulary`: the tokens that the head may guess, where not all
        that it has: a number (the first so many), or a file with their ids (JSON or lines); fewer cost less.
        `beyond`: past the head's own context its window "slide"s, or it "stop"s. `window`: tokens that it sees at most
        (0: its own context). `prefill_rows`: the most rows of one pass while it catches up.
        """

        depth: int = 5
        top_k: int = 8
        vocabulary: str = ""
        beyond: str = "slide"
        window: int = 0
        prefill_rows: int = 512

        def __post_init__(self) -> None:
            if not (1 <= self.depth <= MAX_NODES and 1 <= self.top_k <= MAX_NODES):
                raise ConfigError(f"depth and top_k must lie in 1..{MAX_NODES}, got {self.depth} and {self.top_k}")
            if self.beyond not in ("slide", "stop"):
                raise ConfigError(f"beyond must be 'slide' or 'stop', got {self.beyond!r}")
            if self.prefill_rows < 1 or self.window < 0:
                raise ConfigError("prefill_rows must be at least 1, window at least 0")

    needs_model = True
    of_head = True
    branches = True

    def __init__(
        self, options: Options, runner: HeadRunner, captures: tuple[int, ...], eos_token_ids: Seq[int] = ()
    ) -> None:
        """`captures`: the target's layers that the head reads; `eos_token_ids`: the target's."""
        head = runner.model
        own = min(options.window or head.config.layer.max_model_len, head.config.layer.max_model_len)
        if options.beyond == "slide":
            runner.window = own if own < head.max_model_len else None
        limit = head.max_model_len if options.beyond == "slide" else min(own, head.max_model_len)
        self.options = options
        self.runner = runner
        self.captures = captures
        self.eos_token_ids = tuple(eos_token_ids)
        self.followers = Contexts(runner, options.prefill_rows, limit)
        self._vocab_size = head.config.layer.vocab_size
        ids = head.weights.target_ids
        self._target_ids = None if ids is None else ids.cpu().numpy().astype(np.int64)  # [Vd]

    @classmethod
    def build(cls, options: Drafter.Options, parts: Parts) -> EagleDrafter:
        assert isinstance(options, cls.Options) and parts.head is not None
        target, head = parts.target.model.config, parts.head.model
        head.config.check_target(target)
        if options.vocabulary:
            parts.head.model = with_vocabulary(head, read_vocabulary(options.vocabulary, target.vocab_size))
        return cls(options, parts.head, head.config.captures(target.num_layers), target.eos_token_ids)

    def observe(self, seqs: Seq[Sequence], spans: Seq[Span], hidden: Tensor | None) -> None:
        if hidden is not None:
            self.followers.observe(seqs, spans, hidden)

    def rewind(self, seq: Sequence, length: int) -> None:
        self.followers.rewind(seq, length)

    def release(self, seq: Sequence) -> None:
        self.followers.release(seq)

    def propose(self, seqs: Seq[Sequence], num_draft: Seq[int]) -> Draft:
        """Trees for all sequences together, of at most num_draft[b] nodes; confidence: probabilities of the paths."""
        self.followers.make_room(seqs)
        growing: dict[int, _Growing] = {}
        for b, (seq, k) in enumerate(zip(seqs, num_draft, strict=True)):
            depth = self.followers.room(seq, min(self.options.depth, k, seq.draft_depth))
            width = min(self.options.top_k, k)
            if depth > 0 and self.followers.reserve(seq, min(width * (depth - 1), MAX_NODES)):
                growing[b] = _Growing(seq, Tree(min(k, MAX_NODES)), depth, width)
        if growing:
            self._grow(list(growing.values()))
        trees: list[tuple[list[int], list[int]]] = [([], []) for _ in seqs]
        sure: list[list[float]] = [[] for _ in seqs]
        for b, g in growing.items():
            tokens, parents, sure[b] = g.tree.best()
            trees[b] = tokens, parents
            self.followers.settle(seqs[b])
        return Draft.trees(trees, sure)

    def _grow(self, growing: Seq[_Growing]) -> None:
        """The first level from the last known positions, then a pass of the head for each further one."""
        logits, features = self.followers.catch_up([g.seq for g in growing])
        num = max(g.width if g.seq.params.greedy else max(CANDIDATES, g.width) for g in growing)
        for g, known in zip(growing, self.rows(logits, num), strict=True):
            self._children(g, -1, known)
        for depth in range(2, max(g.depth for g in growing) + 1):
            levels: list[Level] = []
            parents: list[int] = []  # rows of `features`
            running: list[tuple[_Growing, list[int]]] = []
            for i, g in enumerate(growing):
                nodes = g.tree.expand(g.width) if depth <= g.depth else []
                if not nodes:
                    continue
                tree = g.tree
                masks, places = [tree.mask(n) for n in nodes], [tree.places[n] for n in nodes]
                levels.append(Level(self.followers[g.seq].holder, [tree.tokens[n] for n in nodes], masks, places))
                parents += [i if tree.parents[n] < 0 else g.rows[tree.parents[n]] for n in nodes]
                running.append((g, nodes))
            if not running:
                return
            logits, features = self.runner.expand(levels, features[torch.tensor(parents, device=features.device)])
            rows, at = self.rows(logits, num), 0
            for g, nodes in running:
                g.tree.start_level()
                g.rows = {n: at + j for j, n in enumerate(nodes)}
                for n in nodes:
                    self._children(g, n, rows[at])
                    at += 1

    def _children(self, g: _Growing, node: int, row: Row) -> None:
        """Grow the tree by the likeliest tokens after a node (-1: the last known token), from the head's row there."""
        path = [g.tree.tokens[i] for i in g.tree.path(node)] if node >= 0 else []
        tokens, log_probs = self.choices(row, g.seq, path, g.width)
        ended = [self.policy.stop(float(np.exp(p))) for p in log_probs] if self.policy.uses_confidence else []
        g.tree.grow(node, tokens, log_probs, ended or [False] * len(tokens))

    def rows(self, logits: Tensor, num: int) -> list[Row]:
        """Each row of logits [T, Vd] with its `num` likeliest tokens. In NumPy a row's sum has its own order."""
        values, index = logits.topk(min(num, logits.shape[1]))  # [T, num]
        best: Floats = values.cpu().numpy().astype(np.float64)
        ids = index.cpu().numpy()
        ids = ids if self._target_ids is None else self._target_ids[ids]
        table = logits.cpu().numpy()
        with np.errstate(all="ignore"):  # logits that are no numbers give no guess
            totals = best[:, 0] + np.log(np.exp(table - table.max(axis=1, keepdims=True)).sum(axis=1))
        return [Row(*parts) for parts in zip(table, best, ids, totals.tolist(), strict=True)]

    def choices(self, row: Row, seq: Sequence, path: Seq[int], count: int) -> tuple[list[int], list[float]]:
        """The target's likely choices after the sequence and `path`, from the head's row; log-probabilities.

        Greedy: the likeliest tokens. Sampled: of log p + noise, the largest, as shares of their exponentials: the
        target's choice is the largest of its own log p + the same noise.
        """
        if needs_adjusting(seq, len(path)):
            return self._adjusted(row.logits, seq, path, count)
        if not np.isfinite(row.total):
            return [], []
        if seq.params.greedy:
            return row.ids[:count].tolist(), np.minimum(row.best[:count] - row.total, 0.0).tolist()
        return _sampled(row.best, row.ids, seq, len(path), count)

    def _adjusted(
        self, logits: NDArray[np.float32], seq: Sequence, path: Seq[int], count: int
    ) -> tuple[list[int], list[float]]:
        """`choices` under penalties, bias, bans: they need a row over the target's vocabulary."""
        if self._target_ids is not None:
            whole = np.full(self._vocab_size, -np.inf, np.float32)
            whole[self._target_ids] = logits
            logits = whole
        values = adjust(logits, seq, path, self.eos_token_ids)
        best = np.argsort(-values, kind="stable")[: max(CANDIDATES, count)].astype(np.int64)
        if not np.isfinite(values[best[0]]):
            return [], []
        if seq.params.greedy:
            total = np.log(np.exp(values - values[best[0]]).sum())
            best = best[:count]
            return best.tolist(), (values[best] - values[best[0]] - total).tolist()
        return _sampled(values[best], best, seq, len(path), count)


@dataclass
class _Growing:
    """One sequence's tree in the making. `rows`: of each node of the last level, its row in the pass."""

    seq: Sequence
    tree: Tree
    depth: int
    width: int

    def __post_init__(self) -> None:
        self.rows: dict[int, int] = {}


def _sampled(
    logits: Floats, ids: NDArray[np.int64], seq: Sequence, num_path: int, count: int
) -> tuple[list[int], list[float]]:
    """The candidates with the largest log p + noise, and the log-shares of these sums.

    What top-k, top-p or min-p leave out of the head's distribution, the target may still have: it comes later.
    """
    kept, _ = survivors(logits, seq.params)
    values: Floats = (logits - logits[0]) / (seq.params.temperature or 1.0) - LEFT_OUT
    values[kept] += LEFT_OUT
    values += gumbel_noise(seq.seed, len(seq) + num_path, ids)
    best = np.argsort(-values, kind="stable")[:count]
    values -= values[best[0]]
    values -= np.log(np.exp(values).sum())
    return ids[best].tolist(), values[best].tolist()


def read_vocabulary(text: str, vocab_size: int) -> Tensor:
    """Token ids int64 [n] of the option `vocabulary`. Raises ConfigError."""
    if text.isdigit():
        if not 1 <= int(text) <= vocab_size:
            raise ConfigError(f"vocabulary must be 1..{vocab_size} tokens of the target, got {text}")
        return torch.arange(int(text))
    try:
        content = Path(text).expanduser().read_text(encoding="utf-8")
        ids = json.loads(content) if content.lstrip().startswith("[") else [int(t) for t in content.split()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"vocabulary {text!r} cannot be read ({error}); name a file of token ids") from None
    if not ids or any(type(t) is not int or not 0 <= t < vocab_size for t in ids):
        raise ConfigError(f"vocabulary {text!r} must list token ids in 0..{vocab_size - 1}")
    return torch.tensor(sorted(set(ids)))


DRAFTER = EagleDrafter
