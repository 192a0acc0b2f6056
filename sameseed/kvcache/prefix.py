"""Prefixes: the table of blocks by text prefix (prefix cache), so that a common prefix is computed only once.

A full block's key is a SHA-256 chain: the digest of the block before it and its own tokens, salted by the tenant. So it
covers everything that the block's rows depend on (after Kwon et al., 2023; a cache serves one model only). Pure Python.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence as Seq

from sameseed.request import Sequence


class Prefixes:
    """A table of digests and blocks. Ownership and eviction of blocks are left to the BlockManager."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.num_queries = self.num_hits = 0  # tokens of all started sequences, and those that were found
        self._blocks: dict[bytes, int] = {}
        self._held: dict[int, tuple[bytes, bytes]] = {}  # digest and tokens of each known block

    def __contains__(self, block: int) -> bool:
        return block in self._held

    def __len__(self) -> int:
        return len(self._held)

    def find(self, seq: Sequence, first: int) -> list[int]:
        """Known blocks for the tokens of `seq` from its block `first` on, in order, up to the first that is unknown.

        The last token is never in one of them, because the logits after it must be computed.
        """
        count = (len(seq) - 1) // self.block_size
        if count <= first:
            return []
        digests = self._digests(seq, count)
        found: list[int] = []
        for i in range(first, count):
            block = self._blocks.get(digests[i])
            # The tokens are compared too: a false match would use rows of another text.
            if block is None or self._held[block][1] != self._pack(seq.token_ids, i):
                break
            found.append(block)
        return found

    def enter(self, seq: Sequence, first: int, end: int) -> None:
        """Make blocks first .. end - 1 of `seq` known, except those whose content another known block holds already."""
        digests = self._digests(seq, end)
        for i in range(first, end):
            if digests[i] not in self._blocks:
                block = seq.blocks[i]
                self._held[block] = digests[i], self._pack(seq.token_ids, i)
                self._blocks[digests[i]] = block

    def drop(self, block: int) -> None:
        """Remove a block from the table; does nothing if the block is not known."""
        held = self._held.pop(block, None)
        if held is not None:
            del self._blocks[held[0]]

    def of(self, seq: Sequence) -> Iterator[int]:
        """Known blocks that hold prefixes of `seq`, in use or not."""
        return iter([self._blocks[d] for d in seq.digests if d in self._blocks])

    def digest(self, seq: Sequence, count: int) -> bytes:
        """The digest of the first `count` blocks of tokens."""
        return self._digests(seq, count)[count - 1]

    def _digests(self, seq: Sequence, count: int) -> list[bytes]:
        """The digests of at least the first `count` blocks of tokens; each is computed once."""
        known = seq.digests
        parent = known[-1] if known else hashlib.sha256(seq.tenant.encode("utf-8", "surrogatepass")).digest()
        for i in range(len(known), count):
            # A block's input is longer than the salt's digest alone, so no salt can be mistaken for a block.
            parent = hashlib.sha256(parent + self._pack(seq.token_ids, i)).digest()
            known.append(parent)
        return known

    def _pack(self, token_ids: Seq[int], i: int) -> bytes:
        return array("i", token_ids[i * self.block_size : (i + 1) * self.block_size]).tobytes()


class KeptStates:
    """Slots of recurrent states at ends of blocks, by the digest of the text up to there (kvcache/state.py).

    If none is free, the one used longest ago is replaced. `copies`: from slot to slot, due before the next pass.
    """

    def __init__(self, slots: Seq[int]) -> None:
        self.copies: list[tuple[int, int]] = []
        self._free = list(slots)
        self._slots: dict[bytes, int] = {}  # used longest ago first

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slots

    def keep(self, digest: bytes, slot: int) -> None:
        """Copy the state in a sequence's slot, unless the same text's is kept already."""
        if digest not in self._slots and (self._free or self._slots):
            self._slots[digest] = self._free.pop() if self._free else self._slots.pop(next(iter(self._slots)))
            self.copies.append((slot, self._slots[digest]))

    def give(self, digest: bytes, slot: int) -> None:
        """Copy a kept state to a sequence's slot."""
        self._slots[digest] = self._slots.pop(digest)
        self.copies.append((self._slots[digest], slot))

    def drop(self, digest: bytes) -> None:
        if digest in self._slots:
            self._free.append(self._slots.pop(digest))
