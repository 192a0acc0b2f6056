"""BlockManager: which blocks of the cache belong to which sequences. Pure Python.

A block whose rows are all certain may be known by what it holds (prefix.py). Then sequences that begin alike share it,
and when nobody uses it any more it stays until its room is needed: the one unused for longest goes first. A shared
block is only read: it is full, and what a sequence writes comes after what it has cached.
"""

from __future__ import annotations

from sameseed.kvcache.prefix import Prefixes
from sameseed.request import Sequence


class BlockManager:
    """Hands out cache blocks of `block_size` rows, `num_blocks` in all. Without `shares`, each to one sequence only."""

    def __init__(self, num_blocks: int, block_size: int, shares: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.shares = shares
        self.prefixes = Prefixes(block_size)
        self._num_users = [0] * num_blocks  # sequences that use each block
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is warm in the caches
        self._idle: dict[int, None] = {}  # blocks that nobody uses and that hold a known prefix, by last use

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses; what some of them hold may still be known."""
        return len(self._free) + len(self._idle)

    @property
    def free_blocks(self) -> list[int]:
        """These blocks, in the order in which they are given out."""
        return [*reversed(self._free), *self._idle]

    def blocks_for(self, num_rows: int) -> int:
        return -(-num_rows // self.block_size)

    def reserve(self, seq: Sequence, num_rows: int) -> bool:
        """Make sure that `seq` owns blocks for `num_rows` rows: all or nothing, False if too few blocks are free."""
        missing = self.blocks_for(num_rows) - len(seq.blocks)
        if missing <= 0:
            return True
        if missing > self.num_free:
            return False
        for _ in range(missing):
            if self._free:
                block = self._free.pop()
            else:  # of those with known rows, the one that was used longest ago
                block = next(iter(self._idle))
                del self._idle[block]
                self.prefixes.drop(block)
            self._num_users[block] = 1
            seq.blocks.append(block)
        return True

    def reservable(self, seq: Sequence) -> int:
        """The most rows that `reserve` could grant this sequence now."""
        return (len(seq.blocks) + self.num_free) * self.block_size

    def fits(self, seq: Sequence, num_rows: int) -> bool:
        """Could a sequence without blocks get `num_rows` rows now, known ones included?"""
        shared = sum(self._num_users[b] > 0 for b in self.find(seq))
        return self.blocks_for(num_rows) - shared <= self.num_free

    def find(self, seq: Sequence) -> list[int]:
        """Known blocks that go on where `seq` is cached; its last token is in none of them."""
        return self.prefixes.find(seq, seq.num_cached // self.block_size) if self.shares else []

    def adopt(self, seq: Sequence) -> int:
        """Let `seq` share the known blocks that go on where it is cached; returns the rows that this saves it."""
        found = self.find(seq)
        if not found:
            return 0
        before, first = seq.num_cached, seq.num_cached // self.block_size
        for block in found:
            self._idle.pop(block, None)
            self._num_users[block] += 1
        self.trim(seq, first * self.block_size)  # a block that it had begun is one of those found
        seq.blocks += found
        seq.num_cached = len(seq.blocks) * self.block_size
        seq.num_known = len(seq.blocks)
        return seq.num_cached - before

    def enter(self, seq: Sequence, num_rows: int) -> None:
        """The first `num_rows` rows of `seq` are certain and stored: its full blocks may be shared from now on."""
        end = num_rows // self.block_size
        if end > seq.num_known and self.shares:
            self.prefixes.enter(seq, seq.num_known, end)
            seq.num_known = end

    def rewind(self, seq: Sequence, num_rows: int) -> None:
        """Rows of `seq` from `num_rows` on will be written anew: no block that has one stays known, or is another's."""
        seq.num_cached = min(seq.num_cached, num_rows)
        first = seq.num_cached // self.block_size
        for i in range(first, seq.num_known):
            if self._num_users[seq.blocks[i]] > 1:  # others read it: this sequence makes the rows before anew as well
                self.trim(seq, i * self.block_size)
                seq.num_cached = min(seq.num_cached, i * self.block_size)
                break
            self.prefixes.drop(seq.blocks[i])
        seq.num_known = min(seq.num_known, first)

    def retract(self, seq: Sequence, length: int) -> None:
        """Tokens of `seq` from `length` on are taken back, and with them their rows."""
        del seq.digests[length // self.block_size :]
        self.rewind(seq, length)

    def trim(self, seq: Sequence, num_rows: int) -> None:
        """Give back the blocks of `seq` beyond those that hold `num_rows` rows."""
        keep = self.blocks_for(num_rows)
        if len(seq.blocks) <= keep:
            return
        while len(seq.blocks) > keep:
            block = seq.blocks.pop()
            self._num_users[block] -= 1
            if not self._num_users[block]:
                if block in self.prefixes:
                    self._idle[block] = None  # the end of a text comes first, so it goes before its beginning
                else:
                    self._free.append(block)
        seq.num_known = min(seq.num_known, keep)

    def release(self, seq: Sequence) -> None:
        """Give back every block of `seq`; nothing of it stays cached, but what is known of it may be found again."""
        self.trim(seq, 0)
        seq.num_cached = 0

    def forget(self, seq: Sequence) -> None:
        """Something went wrong with `seq`: whatever is known of its text, nobody shall find it again."""
        for block in self.prefixes.of(seq):
            self.prefixes.drop(block)
            if block in self._idle:
                del self._idle[block]
                self._free.append(block)
