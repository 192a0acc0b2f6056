"""BlockManager: which blocks of the cache belong to which sequence. Pure Python."""

from __future__ import annotations

from foretoken.request import Sequence


class BlockManager:
    """Hands out cache blocks of `block_size` rows, `num_blocks` in all. A block belongs to at most one sequence."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is warm in the caches

    @property
    def num_free(self) -> int:
        """Blocks that belong to nobody."""
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Rows in all."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_rows: int) -> int:
        """Blocks that hold `num_rows` rows."""
        return -(-num_rows // self.block_size)

    def reserve(self, seq: Sequence, num_rows: int) -> bool:
        """Make sure that `seq` owns blocks for `num_rows` rows: all or nothing, False if too few blocks are free."""
        missing = self.blocks_for(num_rows) - len(seq.blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            seq.blocks.append(self._free.pop())
        return True

    def reservable(self, seq: Sequence) -> int:
        """The most rows that `reserve` could grant this sequence now."""
        return (len(seq.blocks) + len(self._free)) * self.block_size

    def trim(self, seq: Sequence, num_rows: int) -> None:
        """Give back the blocks of `seq` beyond those that hold `num_rows` rows."""
        keep = self.blocks_for(num_rows)
        while len(seq.blocks) > keep:
            self._free.append(seq.blocks.pop())

    def release(self, seq: Sequence) -> None:
        """Give back every block of `seq`; nothing of it stays cached."""
        self.trim(seq, 0)
        seq.num_cached = 0
