"""A block manager under test, with a model of its memory: what each row holds, and what it should hold."""

import random

from sameseed.kvcache.blocks import BlockManager
from sameseed.request import SamplingParams, Sequence

Row = tuple[str, tuple[int, ...]]  # what a row depends on: its tenant, and all tokens up to this one
SALTS = ("", "a", "\udcff")  # the last: bytes of a command line that are no UTF-8
WRONG_GUESS = ("nobody", ())
MAX_SEQS, MAX_TOKENS = 5, 20
# Actions, and the ranges of their arguments.
ACTIONS = {
    "add": {"salt": (0, 2), "length": (1, 14), "other": (0, 15)},
    "start": {"which": (0, 4)},
    "adopt": {"which": (0, 4)},
    "compute": {"which": (0, 4), "count": (1, 9), "guessed": (0, 3), "certain": (0, 3)},
    "grow": {"which": (0, 4), "length": (1, 4), "bits": (0, 15)},
    "take_back": {"which": (0, 4), "keep": (1, 14), "length": (1, 8), "bits": (0, 3)},
    "compute_again": {"which": (0, 4), "keep": (0, 14)},
    "trim": {"which": (0, 4)},
    "release": {"which": (0, 4), "leaves": (0, 1)},
    "fail": {"which": (0, 4)},
}

WEIGHTS = (3, 3, 3, 3, 1, 2, 1, 1, 1, 1)


def tokens_of(bits, length):
    return [bits >> i & 1 for i in range(length)]


class Watched:
    """Sequences of a few tokens and tenants start, compute, guess, take back, leave and fail in a small cache."""

    def __init__(self, num_blocks, block_size):
        self.blocks = BlockManager(num_blocks, block_size)
        self.memory: dict[int, Row] = {}  # by slot
        self.seqs: list[Sequence] = []
        self.failed: set[Row] = set()  # last rows of blocks that must not be found again
        self.num_added = self.num_saved = 0

    def act(self, name, **numbers):
        """Do one action if it is possible, then check all rows and blocks."""
        which = numbers.pop("which", None)
        if which is None:
            getattr(self, name)(**numbers)
        elif which < len(self.seqs):
            getattr(self, name)(self.seqs[which], **numbers)
        self.check_rows()
        self.check_blocks()

    def add(self, salt, length, other):
        """Add a text of zeros with perhaps one 1, so that most texts share a prefix and look alike after it."""
        if len(self.seqs) < MAX_SEQS:
            tokens = [int(i == other) for i in range(length)]
            self.seqs.append(Sequence(self.num_added, tokens, SamplingParams(), 0, SALTS[salt]))
            self.num_added += 1

    def start(self, seq):
        """Do what the scheduler does: start the sequence if it fits, then compute all its rows as certain ones."""
        if not seq.blocks and self.blocks.fits(seq, len(seq)):
            self.adopt(seq)
            assert self.blocks.reserve(seq, len(seq)), "it was said to fit"
            self.compute(seq, len(seq), 0, 1)

    def adopt(self, seq):
        before = seq.num_cached
        fits = self.blocks.fits(seq, len(seq)) if not seq.blocks else None
        saved = self.blocks.adopt(seq)
        assert seq.num_cached == before + saved
        assert seq.num_pending >= 1 or not saved, "somebody must compute the logits after the last token"
        self.num_saved += saved
        size = self.blocks.block_size
        found = {self.row(seq, i) for i in range(before // size * size + size - 1, seq.num_cached, size)}
        assert not saved or not found & self.failed, "what failed is found again"
        if fits is not None:
            assert self.blocks.reserve(seq, len(seq)) == fits

    def compute(self, seq, count, guessed, certain):
        """Store pending rows, and behind them rows of guesses that turn out wrong."""
        start, end = seq.num_cached, min(seq.num_cached + count, len(seq))
        before, limit = list(seq.blocks), self.blocks.reservable(seq)
        granted = self.blocks.reserve(seq, end + guessed)
        assert granted == (end + guessed <= limit)
        assert seq.blocks[: len(before)] == before, "blocks that hold rows never move"
        assert len(seq.blocks) == max(len(before), self.blocks.blocks_for(end + guessed) if granted else 0)
        if not granted:
            return
        for i in range(start, end + guessed):
            self.memory[self.slot(seq, i)] = self.row(seq, i) if i < end else WRONG_GUESS
        seq.num_cached = end
        if certain:
            self.blocks.enter(seq, end)
            self.failed -= {self.row(seq, i) for i in range(end)}  # these rows were computed again

    def grow(self, seq, length, bits):
        if len(seq) + length <= MAX_TOKENS:
            seq.token_ids += tokens_of(bits, length)

    def take_back(self, seq, keep, length, bits):
        """Replace the tokens after `keep`, as in a drafter's copy of a sequence after wrong guesses."""
        if keep < len(seq) and keep + length <= MAX_TOKENS:
            del seq.token_ids[keep:]
            self.blocks.retract(seq, keep)
            assert seq.num_cached <= keep
            seq.token_ids += tokens_of(bits, length)

    def compute_again(self, seq, keep):
        self.blocks.rewind(seq, keep)
        assert seq.num_cached <= keep

    def trim(self, seq):
        before = list(seq.blocks)
        self.blocks.trim(seq, len(seq))
        assert seq.blocks == before[: -(-len(seq) // self.blocks.block_size)]

    def release(self, seq, leaves):
        self.blocks.release(seq)
        assert (seq.blocks, seq.num_cached) == ([], 0)
        if leaves:
            self.seqs.remove(seq)

    def fail(self, seq):
        size = self.blocks.block_size
        self.failed |= {self.row(seq, i) for i in range(size - 1, len(seq.digests) * size, size)}
        self.blocks.forget(seq)
        self.release(seq, 1)

    def row(self, seq, i):
        """What row i of a sequence should hold."""
        return seq.tenant, tuple(seq.token_ids[: i + 1])

    def slot(self, seq, i):
        size = self.blocks.block_size
        return seq.blocks[i // size] * size + i % size

    def check_rows(self):
        """Check that each cached row holds its own data: no others' tokens, no guesses, no data of a reused block."""
        for seq in self.seqs:
            for i in range(seq.num_cached):
                assert self.memory[self.slot(seq, i)] == self.row(seq, i)

    def check_blocks(self):
        blocks = self.blocks
        held = [b for seq in self.seqs for b in seq.blocks]
        free = blocks.free_blocks
        assert len(free) == len(set(free)) == blocks.num_free
        assert sorted({*held, *free}) == list(range(blocks.num_blocks)), "no block is lost"
        assert not set(held) & set(free), "no block is both free and owned"
        assert all(held.count(b) == n for b, n in enumerate(blocks._num_users))
        assert set(blocks._idle) == {b for b in free if b in blocks.prefixes}
        for seq in self.seqs:
            assert len(seq.blocks) == len(set(seq.blocks))
            assert seq.num_known * blocks.block_size <= seq.num_cached, "rows that will be written are not known"
            for b in seq.blocks[seq.num_known :]:
                assert held.count(b) == 1, "what may be written is nobody else's"
                assert b not in blocks.prefixes

    def leave(self):
        for seq in self.seqs:
            self.blocks.release(seq)
        assert sorted(self.blocks.free_blocks) == list(range(self.blocks.num_blocks))


def shake(rounds, seed=0, steps=60):
    """Run random work on `rounds` caches; returns the number of rows that were shared."""
    rng, saved = random.Random(seed), 0
    for _ in range(rounds):
        watched = Watched(rng.randint(4, 20), rng.randint(1, 3))
        for _ in range(steps):
            name = rng.choices(list(ACTIONS), WEIGHTS)[0]
            watched.act(name, **{k: rng.randint(*span) for k, span in ACTIONS[name].items()})
        watched.leave()
        saved += watched.num_saved
    return saved
