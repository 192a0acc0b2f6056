"""BlockManager: which blocks of the cache belong to which sequences. Pure Python.

A block whose rows are all certain may be entered in the prefix table (prefix.py); it is then called known. Sequences
with the same beginning share known blocks, which are only read. A known block that no sequence uses stays until its
memory is needed; the block unused for longest goes first.
"""

from __future__ import annotations

from sameseed.kvcache.prefix import KeptStates, Prefixes
from sameseed.request import Sequence

KEPT_EVERY = 512  # tokens after which a state is kept for the prefix cache, beside that near a prompt's end
MOST_UNSETTLED = 24  # tokens beyond a stored recurrent state; their log takes half its memory at Qwen3.5-4B


class BlockManager:
    """Allocates `num_blocks` cache blocks of `block_size` rows. Without `shares`, no block is shared by sequences.

    `num_slots`: of a model with recurrent layers, the number of sequences that can have a state (kvcache/state.py); 0
    for other models. Blocks of such a model are shared up to a block's end whose state is kept, in as many more slots.
    """

    def __init__(self, num_blocks: int, block_size: int, shares: bool = True, num_slots: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.shares = shares
        self.num_slots = num_slots
        self.kept = KeptStates(range(num_slots, 2 * num_slots))
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self.prefixes = Prefixes(block_size)
        self._num_users = [0] * num_blocks  # number of sequences that use each block
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is warm in the CPU's caches
        self._idle: dict[int, None] = {}  # known blocks that no sequence uses, least recently used first

    @property
    def num_free(self) -> int:
        """Number of blocks that no sequence uses; some of them may still be known."""
        return len(self._free) + len(self._idle)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def free_blocks(self) -> list[int]:
        """The blocks that no sequence uses, in the order in which they will be allocated."""
        return [*reversed(self._free), *self._idle]

    def blocks_for(self, num_rows: int) -> int:
        return -(-num_rows // self.block_size)

    def reserve(self, seq: Sequence, num_rows: int) -> bool:
        """Make sure that `seq` has blocks for `num_rows` rows. If too few are free, allocate none and return False."""
        missing = self.blocks_for(num_rows) - len(seq.blocks)
        if missing > self.num_free or (self.num_slots and seq.slot < 0 and not self._free_slots):
            return False
        if self.num_slots and seq.slot < 0:
            seq.slot, seq.num_settled = self._free_slots.pop(), 0
        for _ in range(missing):
            if self._free:
                block = self._free.pop()
            else:  # the least recently used known block
                block = next(iter(self._idle))
                del self._idle[block]
                self.prefixes.drop(block)
            self._num_users[block] = 1
            seq.blocks.append(block)
        return True

    def reservable(self, seq: Sequence) -> int:
        """The most rows for which `reserve` would succeed for this sequence now."""
        rows = (len(seq.blocks) + self.num_free) * self.block_size
        return min(rows, len(seq) + MOST_UNSETTLED) if self.num_slots else rows

    def fits(self, seq: Sequence, num_rows: int) -> bool:
        """Could a sequence without blocks get `num_rows` rows now, shared known blocks included?"""
        shared = sum(self._num_users[b] > 0 for b in self.find(seq))
        return self.blocks_for(num_rows) - shared <= self.num_free

    def find(self, seq: Sequence) -> list[int]:
        """Known blocks that continue the cached rows of `seq`; its last token is in none of them."""
        first = seq.num_cached // self.block_size
        found = self.prefixes.find(seq, first) if self.shares else []
        while self.num_slots and found and seq.digests[first + len(found) - 1] not in self.kept:
            found.pop()
        return found

    def adopt(self, seq: Sequence) -> int:
        """Let `seq` share the known blocks that continue its cached rows. Returns the number of rows saved."""
        found = self.find(seq)
        if not found or (self.num_slots and seq.slot < 0 and not self._free_slots):
            return 0
        before, first = seq.num_cached, seq.num_cached // self.block_size
        for block in found:
            self._idle.pop(block, None)
            self._num_users[block] += 1
        self.trim(seq, first * self.block_size)  # a partly filled block is replaced by a found one
        seq.blocks += found
        seq.num_cached = len(seq.blocks) * self.block_size
        seq.num_known = len(seq.blocks)
        if self.num_slots:
            seq.slot = self._free_slots.pop() if seq.slot < 0 else seq.slot
            self.kept.give(seq.digests[seq.num_known - 1], seq.slot)
            seq.num_settled = seq.num_cached
        return seq.num_cached - before

    def enter(self, seq: Sequence, num_rows: int) -> None:
        """Make the full blocks among the first `num_rows` rows of `seq` known; these rows are certain and stored."""
        end = num_rows // self.block_size
        if end > seq.num_known and self.shares:
            self.prefixes.enter(seq, seq.num_known, end)
            seq.num_known = end
            if 0 < seq.num_settled <= num_rows and seq.num_settled in self.kept_ends(seq, seq.num_settled):
                self.kept.keep(self.prefixes.digest(seq, seq.num_settled // self.block_size), seq.slot)

    def kept_ends(self, seq: Sequence, num_tokens: int) -> tuple[int, ...]:
        """The last ends of blocks among the first `num_tokens` tokens whose states are worth keeping; 0: none."""
        if not (self.num_slots and self.shares):
            return ()
        prompt = (seq.num_prompt - 1) // self.block_size * self.block_size  # another text may go on behind the prompt
        every = KEPT_EVERY // self.block_size * self.block_size
        return (prompt if prompt <= num_tokens else 0, num_tokens // every * every if every else 0)

    def rewind(self, seq: Sequence, num_rows: int) -> None:
        """Prepare for rows of `seq` from `num_rows` on to be overwritten: their blocks must not be known or shared."""
        # The state is known after its settled tokens only: before that, the sequence starts anew.
        num_rows = 0 if num_rows < seq.num_settled else num_rows
        seq.num_cached, seq.num_settled = min(seq.num_cached, num_rows), min(seq.num_settled, num_rows)
        first = seq.num_cached // self.block_size
        for i in range(first, seq.num_known):
            if self._num_users[seq.blocks[i]] > 1:  # shared: this sequence computes the whole block again
                kept = i * self.block_size if i * self.block_size >= seq.num_settled else 0
                self.trim(seq, kept)
                seq.num_cached, seq.num_settled = min(seq.num_cached, kept), min(seq.num_settled, kept)
                break
            self.prefixes.drop(seq.blocks[i])
        seq.num_known = min(seq.num_known, first)

    def retract(self, seq: Sequence, length: int) -> None:
        """Take back the tokens of `seq` from `length` on, and their rows."""
        del seq.digests[length // self.block_size :]
        self.rewind(seq, length)

    def trim(self, seq: Sequence, num_rows: int) -> None:
        """Free the blocks of `seq` beyond those for its first `num_rows` rows."""
        keep = self.blocks_for(num_rows)
        if len(seq.blocks) <= keep:
            return
        while len(seq.blocks) > keep:
            block = seq.blocks.pop()
            self._num_users[block] -= 1
            if not self._num_users[block]:
                if block in self.prefixes:
                    self._idle[block] = None  # last blocks first, so a text's end is evicted before its start
                else:
                    self._free.append(block)
        seq.num_known = min(seq.num_known, keep)

    def release(self, seq: Sequence) -> None:
        """Free all blocks and the slot of `seq`, which then has no cached rows. Its known blocks stay in the table."""
        self.trim(seq, 0)
        seq.num_cached = 0
        if seq.slot >= 0:
            self._free_slots.append(seq.slot)
            seq.slot, seq.num_settled = -1, 0

    def forget(self, seq: Sequence) -> None:
        """Remove all blocks of the text of `seq` from the prefix table, after an error with this sequence."""
        for digest in seq.digests:
            self.kept.drop(digest)
        for block in self.prefixes.of(seq):
            self.prefixes.drop(block)
            if block in self._idle:
                del self._idle[block]
                self._free.append(block)
