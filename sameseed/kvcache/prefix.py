"""Prefixes: which blocks hold which beginnings of texts, so that a text that begins alike need not be computed again.

A full block is known by a SHA-256 chain: of its parent's digest and its own tokens, from the salt of whose text it is
on. So a digest names all that a block's rows depend on (the idea: Kwon et al., 2023; one model a cache). Pure Python.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass

from sameseed.request import Sequence


@dataclass
class Hits:
    """Tokens of sequences that started, and those of them whose rows were there already."""

    num_queries: int = 0
    num_hits: int = 0


class Prefixes:
    """A table of digests and blocks. Who owns a block, and when its rows go, is the BlockManager's business."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.hits = Hits()
        self._blocks: dict[bytes, int] = {}
        self._held: dict[int, tuple[bytes, bytes]] = {}  # digest and tokens of each known block

    def __contains__(self, block: int) -> bool:
        return block in self._held

    def __len__(self) -> int:
        return len(self._held)

    def find(self, seq: Sequence, first: int) -> list[int]:
        """Known blocks for the tokens of `seq` from its block `first` on, in order, up to the first that is unknown.

        The last token is never among them: somebody must compute the logits after it.
        """
        count = (len(seq) - 1) // self.block_size
        if count <= first:
            return []
        digests = self._digests(seq, count)
        found: list[int] = []
        for i in range(first, count):
            block = self._blocks.get(digests[i])
            # An equal digest is not believed alone: what is shared by mistake is another's text.
            if block is None or self._held[block][1] != self._pack(seq.token_ids, i):
                break
            found.append(block)
        return found

    def enter(self, seq: Sequence, first: int, end: int) -> None:
        """Make blocks first .. end - 1 of `seq` known; one whose rows another block holds already stays unknown."""
        digests = self._digests(seq, end)
        for i in range(first, end):
            if digests[i] not in self._blocks:
                block = seq.blocks[i]
                self._held[block] = digests[i], self._pack(seq.token_ids, i)
                self._blocks[digests[i]] = block

    def drop(self, block: int) -> None:
        """A block is known no longer; does nothing where it was not."""
        held = self._held.pop(block, None)
        if held is not None:
            del self._blocks[held[0]]

    def of(self, seq: Sequence) -> Iterator[int]:
        """Known blocks that hold a beginning of `seq`, in use or not."""
        return iter([self._blocks[d] for d in seq.digests if d in self._blocks])

    def _digests(self, seq: Sequence, count: int) -> list[bytes]:
        """The digests of at least the first `count` blocks of tokens; each is computed once."""
        known = seq.digests
        parent = known[-1] if known else hashlib.sha256(seq.tenant.encode("utf-8", "surrogatepass")).digest()
        for i in range(len(known), count):
            # A block's input is longer than the salt's digest alone, so no salt can pass for a block.
            parent = hashlib.sha256(parent + self._pack(seq.token_ids, i)).digest()
            known.append(parent)
        return known

    def _pack(self, token_ids: Seq[int], i: int) -> bytes:
        return array("i", token_ids[i * self.block_size : (i + 1) * self.block_size]).tobytes()
