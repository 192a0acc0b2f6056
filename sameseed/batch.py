"""Batch: the rows of one forward pass as tensors. Sequences are packed one after the other, without padding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sameseed import devices

MAX_NODES = 64  # draft nodes per sequence: a node's ancestors fit into one 64-bit mask
UNKNOWN = -1  # stands for a token that the host has not read (`Batch.late`)


class Draw(NamedTuple):
    """How the token after a row of logits is drawn."""

    key: int  # of the noise, uint64
    divisor: float  # the temperature
    floor: float  # the lowest scaled logit that min-p keeps
    greedy: bool  # the token is the argmax, and the other fields are ignored
    top_k: int = 0  # 0 or less: off
    top_p: float = 1.0  # 1: off


GREEDY = Draw(0, 1.0, -math.inf, True)


@dataclass(frozen=True)
class Draws:
    """How each of R rows is drawn, for a backend that chooses tokens (`Ops.choose`)."""

    keys: Tensor  # int64 [R]
    divisors: Tensor  # float64 [R]
    floors: Tensor  # float64 [R]
    greedy: Tensor  # int32 [R]
    cut: Tensor  # int64 [2, n]: the rows with a top-k, and their k - 1
    most: int  # the largest k
    shares: tuple[tuple[int, float], ...]  # rows with a top-p, and that
    sure: bool = False  # are the probabilities of the choices wanted too?

    @classmethod
    def of(cls, rows: Seq[Draw], sure: bool = False) -> Draws:
        """The Draws of these rows, on the CPU."""
        keys = np.array([r.key for r in rows], np.uint64).view(np.int64)
        divisors, floors = np.array([r[1:3] for r in rows], np.float64).reshape(-1, 2).T.copy()
        cut = [(i, r.top_k - 1) for i, r in enumerate(rows) if r.top_k > 0 and not r.greedy]
        return cls(
            torch.from_numpy(keys),
            torch.from_numpy(divisors),
            torch.from_numpy(floors),
            torch.from_numpy(np.array([r.greedy for r in rows], np.int32)),
            torch.from_numpy(np.array(cut, np.int64).reshape(-1, 2).T.copy()),
            max((k + 1 for _, k in cut), default=0),
            tuple((i, r.top_p) for i, r in enumerate(rows) if r.top_p < 1.0 and not r.greedy),
            sure,
        )

    def on(self, device: torch.device) -> Draws:
        """The same Draws on a device, moved by one copy; the object itself if it is there already."""
        return self if self.keys.device == device else replace(self, **_moved(_tensors(self), device))


@dataclass(frozen=True)
class Batch:
    """T rows of B sequences; sequence b owns rows row_offsets[b] .. row_offsets[b+1].

    First come its `num_pending[b]` pending rows, at positions `kv_lens[b] - num_pending[b]` .. `kv_lens[b] - 1`, then
    its draft nodes. Node i is stored at index `kv_lens[b] + i` of the sequence; its position is `kv_lens[b] + depth`.
    `tree_mask` is 0 for a pending row. For node i, bit j is set if node j is i itself or an ancestor of i. If rows
    attend to only a part of their sequence, `block_tables` and `kv_lens` describe that part, and `key_positions` count
    within it.
    """

    token_ids: Tensor  # int32 [T]
    positions: Tensor  # int32 [T]
    slots: Tensor  # int32 [T]
    row_offsets: Tensor  # int32 [B+1]
    num_pending: Tensor  # int32 [B]
    kv_lens: Tensor  # int32 [B]
    block_tables: Tensor  # int32 [B, M]
    tree_mask: Tensor | None  # int64 [T]
    logit_rows: Tensor  # int32 [R]: the rows whose logits are wanted
    key_positions: Tensor | None = None  # int32 [T]: positions for attention, if they are not `positions`
    draws: Draws | None = None  # for the R rows, if the backend should choose tokens
    late_rows: Tensor | None = None  # int64 [n]: rows whose `token_ids` are UNKNOWN, as the host has not read them
    late: Tensor | None = None  # int32 [n], on the device: their tokens, which an earlier pass chose there
    # int32 [3, B], of a model with recurrent layers: slot, tokens that the stored state covers, and that it will cover
    states: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_seqs(self) -> int:
        return self.num_pending.shape[0]

    def without_chains(self) -> Batch:
        """This batch on the CPU, with chains of draft nodes described as pending rows, which see the same keys.

        Attention computes the same bits for them, but can process the keys that they share in blocks.
        """
        if self.tree_mask is None:
            return self
        places = self.positions if self.key_positions is None else self.key_positions
        masks, offsets, positions = self.tree_mask.tolist(), self.row_offsets.tolist(), places.tolist()
        pending, known = self.num_pending.tolist(), self.kv_lens.tolist()
        branched = False
        for b, (start, end) in enumerate(itertools.pairwise(offsets)):
            if all(mask & (mask + 1) == 0 for mask in masks[start:end]):  # a chain: all nodes before it are ancestors
                if start < end:
                    pending[b], known[b] = end - start, max(known[b], positions[end - 1] + 1)
                masks[start:end] = [0] * (end - start)
            else:
                branched = True
        num_pending, kv_lens = int_tensors((pending, known))
        trees = torch.from_numpy(np.array(masks, np.int64)) if branched else None
        return replace(self, num_pending=num_pending, kv_lens=kv_lens, tree_mask=trees)

    def with_late(self, tokens: Tensor) -> Batch:
        """This batch on the CPU, with `tokens` int32 [n] on the device for its rows whose tokens are UNKNOWN."""
        rows = np.flatnonzero(self.token_ids.numpy() == UNKNOWN)
        return replace(self, late_rows=torch.from_numpy(rows), late=tokens)

    def on(self, device: torch.device) -> Batch:
        """This batch on a device, moved by one copy; the object itself if it is there already."""
        if self.token_ids.device == device:
            if self.late is not None and self.late_rows is not None:
                self.token_ids.index_copy_(0, self.late_rows, self.late)
            return self
        own, draws = _tensors(self), {} if self.draws is None else _tensors(self.draws)
        own.pop("late", None)
        moved = _moved({**own, **draws}, device)
        if self.draws is not None:
            moved["draws"] = replace(self.draws, **{name: moved.pop(name) for name in draws})
        if self.late is not None:
            moved["token_ids"].index_copy_(0, moved["late_rows"], self.late)
        return replace(self, **moved)


@dataclass(frozen=True)
class Steps:
    """What differs between k passes in which B sequences write chains, one row each."""

    slots: NDArray[np.int32]  # [k, B]; after its last row a sequence has slot -1: none is stored
    keys: NDArray[np.int64]  # of the noise [k, B]


def _tensors(of: Batch | Draws) -> dict[str, Tensor]:
    return {name: x for name, x in vars(of).items() if isinstance(x, Tensor)}


def _moved(parts: dict[str, Tensor], device: torch.device) -> dict[str, Any]:
    """CPU tensors with elements of 4 or 8 bytes, moved to a device: views of one copied buffer (see `int_tensors`)."""
    words = [x.numpy().reshape(-1).view(np.int32) for x in parts.values()]
    starts = list(itertools.accumulate((len(w) + -len(w) % 4 for w in words), initial=0))
    flat = np.zeros(starts[-1], np.int32)
    for start, w in zip(starts, words, strict=False):
        flat[start : start + len(w)] = w
    there, sizes = devices.put(torch.from_numpy(flat), device), map(len, words)
    own = (there[start : start + size] for start, size in zip(starts, sizes, strict=False))
    return {name: view.view(x.dtype).view(x.shape) for (name, x), view in zip(parts.items(), own, strict=True)}


@dataclass(frozen=True)
class Rows:
    """One sequence's part of a pass, as plain lists."""

    pending: Seq[int]  # token ids
    num_cached: int
    nodes: Seq[int]  # token ids of its draft
    parents: Seq[int]  # index among nodes, -1 = the last known token
    blocks: Seq[int]
    wants_logits: bool
    unseen: tuple[int, int] = (0, 0)  # blocks first .. end of `blocks` that the rows do not attend to
    state: tuple[int, int, int] | None = None  # its column of `Batch.states`


def ancestor_masks(parents: Seq[int]) -> tuple[list[int], list[int]]:
    """For each node, the 64-bit mask of itself and its ancestors, and its depth (0: child of the last known token)."""
    masks, depths = list[int](), list[int]()
    for i, parent in enumerate(parents):
        masks.append(1 << i if parent < 0 else masks[parent] | 1 << i)
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return masks, depths


def build_batch(rows: Seq[Rows], block_size: int, device: torch.device | None = None) -> Batch:
    """Make one Batch of the rows of several sequences, on the CPU, and copy it to `device` if one is given.

    Blocks must be reserved for pending rows and nodes.
    """
    token_ids, positions, slots, masks, logit_rows, kv_lens, left_out = (list[int]() for _ in range(7))
    offsets = [0]
    for r in rows:
        start, kv_len = r.num_cached, r.num_cached + len(r.pending)
        unseen = (r.unseen[1] - r.unseen[0]) * block_size
        kv_lens.append(kv_len - unseen)
        left_out += [unseen] * (len(r.pending) + len(r.nodes))
        token_ids += r.pending
        positions += range(start, kv_len)
        slots += slots_of(r.blocks, start, kv_len + len(r.nodes), block_size)
        masks += [0] * len(r.pending)
        if r.wants_logits:
            first = offsets[-1] + len(r.pending) - 1
            logit_rows += range(first, first + 1 + len(r.nodes))
        if r.nodes:
            node_masks, depths = ancestor_masks(r.parents)
            token_ids += r.nodes
            positions += [kv_len + d for d in depths]
            masks += node_masks
        offsets.append(len(token_ids))
    seen = [[*r.blocks[: r.unseen[0]], *r.blocks[r.unseen[1] :]] if any(r.unseen) else r.blocks for r in rows]
    num_pending = [len(r.pending) for r in rows]
    numbers = (token_ids, positions, slots, offsets, num_pending, kv_lens, logit_rows)
    batch = pack(numbers, seen, masks if any(r.nodes for r in rows) else None)
    if states := [r.state for r in rows if r.state is not None]:
        batch = replace(batch, states=torch.tensor(states, dtype=torch.int32, device="cpu").T.contiguous())
    if any(left_out):
        batch = replace(batch, key_positions=batch.positions - torch.tensor(left_out, dtype=torch.int32, device="cpu"))
    return batch if device is None else batch.on(device)


def slots_of(blocks: Seq[int], start: int, end: int, block_size: int) -> list[int]:
    """Cache slots of rows start..end-1 of a sequence with these blocks."""
    return [blocks[i // block_size] * block_size + i % block_size for i in range(start, end)]


def pack(numbers: Seq[list[int]], blocks: Seq[Seq[int]], masks: list[int] | None) -> Batch:
    """A Batch from plain lists: token_ids .. kv_lens and logit_rows, each sequence's blocks, masks as uint64."""
    width = max((len(own) for own in blocks), default=0)
    flat = [block for own in blocks for block in (*own, *[0] * (width - len(own)))]
    token_ids, positions, slots, offsets, num_pending, kv_lens, logit_rows, tables = int_tensors((*numbers, flat))
    tables = tables.view(len(blocks), width)
    tree_mask = None if masks is None else torch.from_numpy(np.array(masks, np.uint64).view(np.int64))
    return Batch(token_ids, positions, slots, offsets, num_pending, kv_lens, tables, tree_mask, logit_rows)


def int_tensors(parts: Seq[list[int]], device: torch.device | None = None) -> tuple[Tensor, ...]:
    """Each part as an int32 tensor. All are views of one tensor, since each tensor, and each copy, costs microseconds.

    Each part begins at a multiple of 16 bytes: else a GPU compiler would compile each kernel for every pattern of
    alignments.
    """
    flat, sizes = list[int](), list[int]()
    for part in parts:
        flat += part
        spare = -len(part) % 4
        flat += [0] * spare
        sizes += (len(part), spare)
    values = torch.from_numpy(np.array(flat, np.int32))
    if device is not None:
        values = devices.put(values, device)
    return values.split_with_sizes(sizes)[::2]
