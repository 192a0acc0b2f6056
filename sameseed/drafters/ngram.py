"""n-gram drafter (prompt lookup decoding: Saxena, 2023): what followed the last tokens when they occurred before?"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from sameseed.drafters._history import History
from sameseed.errors import ConfigError
from sameseed.fields import within
from sameseed.request import Sequence
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Drafter

# The latest occurrences of the last `min_ngram` tokens that are compared. The commonest pair of the first 20,000 tokens
# of csrc/ (as Qwen2.5-Coder reads it) has 304, so that the longest match is found in texts of that length.
MOST_PLACES = 512


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
        self._own: dict[int, History] = {}  # by sequence

    def propose(self, seqs: Seq[Sequence], num_draft: Seq[int]) -> Draft:
        return Draft.chains([self._copied(seq, k) if k else [] for seq, k in zip(seqs, num_draft, strict=True)])

    def _copied(self, seq: Sequence, num_draft: int) -> list[int]:
        o, best, chain = self.options, 0, list[int]()
        text = self._own.setdefault(seq.seq_id, History(o.min_ngram, MOST_PLACES))
        text.add(0, seq.token_ids)
        for place in text.find(seq.token_ids, o.max_ngram):  # the latest first
            if place.length > best:
                best, chain = place.length, seq.token_ids[place.end : place.end + num_draft]
            if best == o.max_ngram:
                break
        for i in range(num_draft - len(chain) if chain else 0):  # past the text's end, the copy repeats
            chain.append(chain[i])
        return chain

    def rewind(self, seq: Sequence, length: int) -> None:
        if (text := self._own.get(seq.seq_id)) is not None:
            text.rewind(0, length)

    def release(self, seq: Sequence) -> None:
        self._own.pop(seq.seq_id, None)


DRAFTER = NgramDrafter
