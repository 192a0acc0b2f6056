"""History: an index of texts (token ids) that finds earlier occurrences of a suffix.

In place of a suffix tree, a hash table maps each n-gram to its latest places. A lookup extends each place backwards to
the longest match. There is one entry per token. The oldest texts are dropped when the token limit is reached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass

Text = list[int]


@dataclass(frozen=True)
class Place:
    """A match: `text[:end]` ends with the last `length` tokens of the suffix that was looked up."""

    text: Text
    end: int
    length: int


class History:
    """Texts by key. A text may grow at its end. Its last token is not indexed, so that its end never matches itself."""

    def __init__(self, ngram: int, most_places: int, most_tokens: int | None = None) -> None:
        """`ngram`: shortest match; `most_places`: latest places kept per n-gram; `most_tokens`: limit for all texts."""
        self.ngram = ngram
        self.most_places = most_places
        self.most_tokens = most_tokens
        self.num_tokens = 0
        self._texts: dict[int, Text] = {}  # in order of entry
        self._indexed: dict[int, int] = {}
        self._places: dict[tuple[int, ...], deque[tuple[int, int]]] = {}  # (key, end), the latest last
        self._num_places = 0

    def __contains__(self, key: int) -> bool:
        return key in self._texts

    def __iter__(self) -> Iterator[Text]:
        return iter(self._texts.values())

    def add(self, key: int, text: Text) -> None:
        """Index a new text, or the tokens that a known text has grown by."""
        self._texts.setdefault(key, text)
        n, start = self.ngram, self._indexed.get(key, 0)
        self.num_tokens += max(0, len(text) - 1 - start)
        for end in range(max(start + 1, n), len(text)):
            gram = tuple(text[end - n : end])
            places = self._places.get(gram)
            if places is None:
                places = self._places[gram] = deque(maxlen=self.most_places)
            self._num_places += len(places) < self.most_places
            places.append((key, end))
        self._indexed[key] = max(start, len(text) - 1)
        while self.most_tokens is not None and self.num_tokens > self.most_tokens and len(self._texts) > 1:
            self._drop(next(iter(self._texts)))

    def rewind(self, key: int, length: int) -> None:
        """Remove the places of tokens from `length` on from the index. Called before the text loses these tokens."""
        n, text = self.ngram, self._texts.get(key)
        if text is None:
            return
        for end in range(self._indexed[key], length - 1, -1):
            gram = tuple(text[end - n : end]) if end >= n else ()
            places = self._places.get(gram)
            if places and places[-1] == (key, end):
                places.pop()
                self._num_places -= 1
        kept = min(self._indexed[key], max(0, length - 1))
        self.num_tokens -= self._indexed[key] - kept
        self._indexed[key] = kept

    def _drop(self, key: int) -> None:
        del self._texts[key]
        self.num_tokens -= self._indexed.pop(key)
        if self._num_places <= 2 * self.num_tokens + 1024:
            return
        self._num_places = 0  # most places in the index belong to dropped texts
        for gram in list(self._places):
            alive = [p for p in self._places[gram] if p[0] in self._texts]
            if alive:
                self._places[gram] = deque(alive, maxlen=self.most_places)
                self._num_places += len(alive)
            else:
                del self._places[gram]

    def find(self, suffix: Seq[int], longest: int) -> list[Place]:
        """Earlier places that match the end of `suffix`, the latest first, each by at most `longest` tokens."""
        found: list[Place] = []
        for key, end in reversed(self._places.get(tuple(suffix[-self.ngram :]), ())):
            text = self._texts.get(key)
            if text is None:
                continue
            length, most = self.ngram, min(longest, end, len(suffix))
            while length < most and text[end - length - 1] == suffix[-length - 1]:
                length += 1
            found.append(Place(text, end, length))
        return found
