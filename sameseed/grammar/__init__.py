"""Grammars: which tokens may come next, asked at every node of a draft. `Choice`: the text is one of a given list."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Sequence as Seq
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from sameseed.errors import RequestError
from sameseed.request import Grammar

# Thread time in seconds that a grammar may take: FREE in all, plus EACH per mask. A grammar that takes more is given
# up, because it delays all sequences of a batch.
FREE, EACH = 1.0, 0.005
MAX_KNOWN = 256  # places in a text whose allowed tokens a Choice caches
_HEADS = (3, 8, 16, 32, 64)  # lengths of the piece prefixes by which the longest piece is looked up


class Allowance:
    """The time limit of one grammar; time inside `with` counts. Entering raises RequestError once it is used up."""

    def __init__(self) -> None:
        self._spent, self._num_asked, self._start = 0.0, 0, 0.0

    def __enter__(self) -> None:
        self._num_asked += 1
        if self._spent > FREE + EACH * self._num_asked:
            raise RequestError("the grammar takes too long to follow; simplify it")
        self._start = time.thread_time()

    def __exit__(self, *raised: object) -> None:
        self._spent += time.thread_time() - self._start


class Vocabulary:
    """The bytes that tokens spell: `pieces[t]`, empty for tokens without text. `marks`: tokens of tool calls alone."""

    def __init__(self, pieces: Seq[bytes], eos_token_ids: Seq[int], marks: Collection[int] = ()) -> None:
        self.pieces = tuple(pieces)
        self.eos_token_ids = tuple(eos_token_ids)
        self.in_calls = np.array([bool(piece) for piece in self.pieces], np.bool_)  # [V]: tokens that calls may hold
        self.in_calls[list(self.eos_token_ids)] = True
        self.writable = self.in_calls.copy()  # [V]: those that any text may hold
        self.writable[list({*marks} - {*self.eos_token_ids})] = False
        self._tokens: dict[bytes, list[int]] = {}
        self._longest: dict[bytes, int] = {}  # length of the longest piece, by piece prefix
        for token, piece in enumerate(self.pieces):
            if piece and self.writable[token] and token not in self.eos_token_ids:
                self._tokens.setdefault(piece, []).append(token)
                for head in (piece[:size] for size in _HEADS if size <= len(piece)):
                    self._longest[head] = max(self._longest.get(head, 0), len(piece))

    def beginning(self, text: bytes) -> list[int]:
        """The tokens that spell a prefix of `text`."""
        longest = len(text)
        for size in _HEADS:
            if size > longest:
                break
            longest = min(longest, self._longest.get(text[:size], size - 1))
        return [token for end in range(1, longest + 1) for token in self._tokens.get(text[:end], ())]

    def spell(self, token_ids: Seq[int]) -> bytes:
        """The bytes of `token_ids`, up to the first end token."""
        return b"".join(self.pieces[token] for token in takewhile(lambda t: t not in self.eos_token_ids, token_ids))


class Choice:
    """A grammar whose text is one of `choices`, then an end token. Allowed tokens of recent places are cached.

    Any number of sequences and threads may share one object.
    """

    def __init__(self, choices: Seq[str], vocabulary: Vocabulary) -> None:
        self._choices = sorted({c.encode("utf-8") for c in choices})
        self._vocabulary = vocabulary
        self._known: OrderedDict[tuple[int, int], NDArray[np.int64]] = OrderedDict()
        self._lock = threading.Lock()
        self._allowance = Allowance()

    def allowed(self, output: Seq[int], path: Seq[int]) -> NDArray[np.bool_]:
        with self._lock, self._allowance:
            mask = np.zeros(len(self._vocabulary.pieces), np.bool_)
            written = self._vocabulary.spell([*output, *path])
            begin = bisect_left(self._choices, written)
            end = bisect_left(self._choices, written + b"\xff", begin)  # 0xff occurs in no UTF-8 text
            if begin == end:
                return mask
            place = (begin, len(written))
            if place not in self._known:
                self._known[place] = np.array(self._tokens(begin, end, len(written)), np.int64)
                if len(self._known) > MAX_KNOWN:
                    self._known.popitem(last=False)
            self._known.move_to_end(place)
            mask[self._known[place]] = True
        return mask

    def another(self) -> Choice:
        return self

    def _tokens(self, begin: int, end: int, size: int) -> list[int]:
        """The tokens that may come next in the choices begin..end, which share their first `size` bytes."""
        tokens = list(self._vocabulary.eos_token_ids) if len(self._choices[begin]) == size else []
        for choice in self._choices[begin:end]:
            tokens += self._vocabulary.beginning(choice[size:])
        return tokens


class Beginning:
    """A grammar for a text with nothing before it: it begins with a token that has the same text there as elsewhere.

    `same` bool [V]: those tokens. At its beginning a text loses a space, which the grammar would still count.
    """

    def __init__(self, grammar: Grammar, same: NDArray[np.bool_]) -> None:
        self._grammar, self._same = grammar, same

    def allowed(self, output: Seq[int], path: Seq[int]) -> NDArray[np.bool_]:
        mask: NDArray[np.bool_] = self._grammar.allowed(output, path)
        return mask if output or path else mask & self._same

    def another(self) -> Beginning:
        return Beginning(self._grammar.another(), self._same)
