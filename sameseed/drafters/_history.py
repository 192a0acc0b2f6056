"""Texts (token ids) of requests: History, an index that finds earlier occurrences of a suffix, and TextStore, a file.

In place of a suffix tree, a hash table maps each n-gram to its latest places, and a lookup extends each place
backwards. The oldest texts are dropped when the token limit is reached.
"""

from __future__ import annotations

import logging
import os
import struct
from collections import deque
from collections.abc import Iterator, Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sameseed.errors import ConfigError
from sameseed.store import PRIVATE, replacing

log = logging.getLogger("sameseed.spec")

MAGIC = b"sameseed texts 1\n"
_HEAD = struct.Struct("<II")  # number of tokens, their sum modulo 2^32
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

    def add(self, key: int, text: Text) -> None:
        """Index a new text, or the tokens that a known text has grown by."""
        self._texts.setdefault(key, text)
        n, start = self.ngram, self._indexed.get(key, 0)
        self.num_tokens += max(0, len(text) - 1 - start)
        for end in range(max(start + 1, n), len(text)):
            gram = tuple(text[end - n : end])
            if gram not in self._places:
                self._places[gram] = deque(maxlen=self.most_places)
            self._places[gram].append((key, end))
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
        kept = min(self._indexed[key], max(0, length - 1))
        self.num_tokens -= self._indexed[key] - kept
        self._indexed[key] = kept

    def _drop(self, key: int) -> None:
        text, indexed = self._texts.pop(key), self._indexed.pop(key)
        self.num_tokens -= indexed
        for end in range(self.ngram, indexed + 1):
            gram = tuple(text[end - self.ngram : end])
            kept = [place for place in self._places.pop(gram, ()) if place[0] != key]
            if kept:
                self._places[gram] = deque(kept, maxlen=self.most_places)

    def find(self, suffix: Seq[int], longest: int) -> Iterator[Place]:
        """Earlier places that match the end of `suffix`, the latest first, each by at most `longest` tokens."""
        for key, end in reversed(self._places.get(tuple(suffix[-self.ngram :]), ())):
            text = self._texts[key]
            length, most = self.ngram, min(longest, end, len(suffix))
            while length < most and text[end - length - 1] == suffix[-length - 1]:
                length += 1
            yield Place(text, end, length)


def _texts(data: bytes, at: int, vocab_size: int) -> tuple[list[list[int]], int]:
    """The complete texts in `data` from byte `at` on, up to one that makes no sense, and the byte where they end."""
    texts: list[list[int]] = []
    while at + _HEAD.size <= len(data):
        length, total = _HEAD.unpack_from(data, at)
        end = at + _HEAD.size + 4 * length
        if end > len(data):
            break
        tokens = np.frombuffer(data, np.int32, length, at + _HEAD.size)
        known = not length or 0 <= tokens.min() <= tokens.max() < vocab_size
        if int(tokens.sum(dtype=np.int64)) % 2**32 != total or not known:
            break
        texts.append(tokens.tolist())
        at = end
    return texts, at


class TextStore:
    """A file: MAGIC, the vocabulary size (uint32), then for each text its length, its token sum, and its tokens int32.

    A text that was cut off while it was written is dropped, with all texts after it. Raises ConfigError for a file that
    it cannot use. After a failed write, a warning is logged and no more is written: requests must not fail for that.
    """

    def __init__(self, path: Path, max_tokens: int, vocab_size: int | None) -> None:
        self.path = Path(os.path.expanduser(path))
        self.max_tokens = max_tokens
        self.vocab_size = vocab_size or 0
        self._since_rewrite = 0
        self._failed = False
        if not self.path.parent.is_dir():
            raise ConfigError(f"the store {self.path} has no folder; make {self.path.parent} first")
        if self.path.is_dir():
            raise ConfigError(f"the store {self.path} is a folder; name a file")

    def read(self) -> list[list[int]]:
        """The latest texts, the oldest first, at most `max_tokens` tokens in all; the end of one that is longer."""
        try:
            data = self.path.read_bytes()
            if self.path.stat().st_mode & 0o077:  # earlier versions left it readable by every user of the machine
                with suppress(OSError):  # somebody else's file
                    self.path.chmod(PRIVATE)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(f"cannot read the store {self.path} ({error.strerror}); name another file") from None
        at = len(MAGIC) + 4
        if data[: len(MAGIC)] != MAGIC or len(data) < at:
            raise ConfigError(f"{self.path} is no store of texts; name another file, or delete it")
        width = struct.unpack_from("<I", data, len(MAGIC))[0]
        if width != self.vocab_size:
            raise ConfigError(f"{self.path} is of a model of {width} tokens, not {self.vocab_size}; name another file")
        texts, at = _texts(data, at, self.vocab_size or 2**31)
        kept, size = len(texts), 0
        while kept and size + len(texts[kept - 1]) <= self.max_tokens:
            kept -= 1
            size += len(texts[kept])
        latest = texts[kept:] or [text[-self.max_tokens :] for text in texts[-1:]]
        if kept or at != len(data):
            try:
                self._write(latest)
            except OSError as error:
                self._stop(error)
        return latest

    def append(self, text: list[int]) -> None:
        """Append a text; does nothing once a write has failed."""
        if self._failed:
            return
        try:
            if not self.path.exists():
                self._write([])
            size = self.path.stat().st_size
            try:
                with self.path.open("ab") as file:
                    file.write(_packed(text))
            except OSError:
                with suppress(OSError):  # a partly written text would hide all texts appended later
                    os.truncate(self.path, size)
                raise
            self._since_rewrite += len(text)
            if self._since_rewrite > self.max_tokens:  # reading drops what is too old
                self._since_rewrite = 0
                self.read()
        except (OSError, ConfigError) as error:
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        if not self._failed:
            log.warning("the store %s fails (%s): it gets no more texts; make room, and restart", self.path, error)
        self._failed = True

    def _write(self, texts: list[list[int]]) -> None:
        with replacing(self.path, PRIVATE) as file:
            file.write(MAGIC + struct.pack("<I", self.vocab_size))
            for text in texts:
                file.write(_packed(text))


def _packed(text: list[int]) -> bytes:
    return _HEAD.pack(len(text), sum(text) % 2**32) + np.array(text, np.int32).tobytes()
