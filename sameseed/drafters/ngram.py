"""n-gram drafter (prompt lookup decoding: Saxena, 2023): what followed the last tokens when they occurred before?"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from sameseed.errors import ConfigError
from sameseed.fields import within
from sameseed.request import Sequence
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Drafter


class NgramDrafter(Drafter):
    """Finds the latest earlier occurrence of the longest suffix of prompt and output, and copies what followed it."""

    @dataclass(frozen=True)
    class Options(Drafter.Options):
        max_ngram: int = within(4, 1, 32, help="the longest suffix that is looked up, in tokens")
        min_ngram: int = within(2, 1, 32, help="the shortest")

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.min_ngram > self.max_ngram:
                raise ConfigError(f"min_ngram ({self.min_ngram}) must be at most max_ngram ({self.max_ngram})")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self._indexes: dict[int, _Index] = {}

    def propose(self, seqs: Seq[Sequence], num_draft: Seq[int]) -> Draft:
        o, chains = self.options, []
        for seq, num in zip(seqs, num_draft, strict=True):
            index = self._indexes.setdefault(seq.seq_id, _Index(o.min_ngram, o.max_ngram))
            start = index.find(seq.token_ids) if num else None
            chain = [] if start is None else seq.token_ids[start : start + num]
            for i in range(num - len(chain) if chain else 0):  # past the text's end, the copy repeats
                chain.append(chain[i])
            chains.append(chain)
        return Draft.chains(chains)

    def rewind(self, seq: Sequence, length: int) -> None:
        index = self._indexes.get(seq.seq_id)
        if index is not None:
            index.rewind(seq.token_ids, length)

    def release(self, seq: Sequence) -> None:
        self._indexes.pop(seq.seq_id, None)


class _Index:
    """Maps each n-gram of a growing list of tokens to the ends of its occurrences. Each token is indexed once."""

    def __init__(self, low: int, high: int) -> None:
        self._sizes = range(low, high + 1)
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._num_indexed = 0

    def find(self, tokens: list[int]) -> int | None:
        """The index after the latest earlier occurrence of the longest suffix that has one; None if no suffix has."""
        # The n-grams that end with the last token are looked up but not entered yet: they would match themselves.
        for end in range(self._num_indexed + 1, len(tokens)):
            for gram in self._grams(tokens, end):
                self._ends.setdefault(gram, []).append(end)
        self._num_indexed = max(self._num_indexed, len(tokens) - 1)
        for gram in reversed(self._grams(tokens, len(tokens))):
            if ends := self._ends.get(gram):
                return ends[-1]
        return None

    def rewind(self, tokens: list[int], length: int) -> None:
        """Undo the entries for tokens from `length` on. Called before the list loses these tokens."""
        for end in range(self._num_indexed, length - 1, -1):
            for gram in self._grams(tokens, end):
                self._ends[gram].pop()
        self._num_indexed = min(self._num_indexed, max(0, length - 1))

    def _grams(self, tokens: list[int], end: int) -> list[tuple[int, ...]]:
        """The n-grams that end before index `end`, the shortest first."""
        return [tuple(tokens[end - n : end]) for n in self._sizes if n <= end]


DRAFTER = NgramDrafter
