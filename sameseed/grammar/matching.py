"""Matching: texts in the language of a grammar, by xgrammar's automata (Dong et al., 2024), drafts included.

`Matching.compiled` makes data of a source, in a process that may be ended; `Matched` follows one text by it.
"""

from __future__ import annotations

import os
import re
import sys
import types
from collections.abc import Callable, Collection, Sequence as Seq
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sameseed.errors import RequestError
from sameseed.grammar import Allowance, Vocabulary

TRIED = 96  # tokens of a trial: a grammar that cannot write so many in time is not taken
_PLACE = re.compile(r"^\[[\d:]+\] \S+\.(?:cc|h):\d+: ")
_WARNING = re.compile(r"Warning: (.*)")
# No JSON has them but as \\u0000, yet the library lets them into strings of a given length. Lines may end: tools' calls
# have that beside their JSON.
_CONTROL = re.compile(rb"[\x00-\x09\x0b-\x1f]")
_SPACE = r"[ \n\r\t]*"  # as the library's grammar of JSON has it
_NAMED = ("PreTrainedTokenizerBase", "PreTrainedTokenizerFast", "LogitsProcessor")


def library() -> Any:
    """The module xgrammar. It imports transformers for the names of types only, which takes a second: stand-ins do.

    Raises RequestError where it is not installed.
    """
    if "xgrammar" in sys.modules or "transformers" in sys.modules:
        return _import()
    stand_in: Any = types.ModuleType("transformers")
    for name in _NAMED:
        setattr(stand_in, name, type(name, (), {}))
    sys.modules["transformers"] = stand_in
    try:
        return _import()
    finally:
        del sys.modules["transformers"]


def _import() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise RequestError(f"structured output needs xgrammar ({error}); install it: pip install '.[server]'") from None
    return xgrammar


class Language(NamedTuple):
    """A compiled grammar, and the tokens bool [V] that its texts may have."""

    grammar: Any
    writable: NDArray[np.bool_]


class Matching:
    """xgrammar's view of a vocabulary; made once a process."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._library = library()
        self.vocabulary = vocabulary
        ends = set(vocabulary.eos_token_ids)
        pieces = [b"" if token in ends else piece for token, piece in enumerate(vocabulary.pieces)]
        self._info = self._library.TokenizerInfo(
            pieces,
            vocab_type=self._library.VocabType.RAW,
            vocab_size=len(pieces),
            stop_token_ids=sorted(ends),
            add_prefix_space=False,
        )
        control = np.array([bool(_CONTROL.search(piece)) for piece in pieces], np.bool_)
        self._of_json = vocabulary.writable & ~control

    def compiled(self, kind: str, source: str) -> str:
        """A grammar as data for `language`, tried on a short text. What the library would leave out of it is an error.

        `kind`: "json" (a JSON schema), "object" (any JSON object; no source), "regex", "grammar" (GBNF, or Lark), "tag"
        (xgrammar's structural tags).
        Raises RequestError. It may take for ever, and any amount of memory: that is for the caller to bound.
        """
        with _Warnings() as said:
            try:
                made = self._compile(kind, source)
            except (RuntimeError, ValueError, TypeError) as error:
                raise RequestError(f"the {_NAMES[kind]} cannot be used: {_plain(str(error))}") from None
        if said.warning:
            raise RequestError(f"the {_NAMES[kind]} cannot be followed to the letter: {said.warning}")
        self._try(kind, self.matched(self._language(kind, made)))
        return f"{kind} {made.serialize_json()}"

    def language(self, data: str) -> Language:
        """What `compiled` made of a source, here: for any number of texts."""
        kind, _, made = data.partition(" ")
        return self._language(kind, self._library.CompiledGrammar.deserialize_json(made, self._info))

    def matched(self, language: Language) -> Matched:
        """A new text."""
        make = partial(self._library.GrammarMatcher, language.grammar)
        return Matched(make, language.writable, self.vocabulary.eos_token_ids)

    def _language(self, kind: str, grammar: Any) -> Language:
        return Language(grammar, self._of_json if kind in _OF_JSON else self.vocabulary.writable)

    def _compile(self, kind: str, source: str) -> Any:
        compiler = self._library.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        if kind == "object":
            return compiler.compile_grammar(_any_object(str(self._library.Grammar.builtin_json_grammar())))
        if kind == "json":  # any amount of space would let a model write it for ever
            return compiler.compile_json_schema(source, max_whitespace_cnt=1)
        if kind == "regex":
            return compiler.compile_regex(source)
        if kind == "tag":
            return compiler.compile_structural_tag(source)
        return compiler.compile_grammar(source) if "::=" in source else compiler.compile_lark(source)

    def _try(self, kind: str, matched: Matched) -> None:
        """Write something, always the same. Raises RequestError where nothing can be written."""
        written: list[int] = []
        for i in range(TRIED):
            allowed = np.flatnonzero(matched.allowed(written, ()))
            if not len(allowed):
                raise RequestError(f"no text can match the {_NAMES[kind]}; loosen it")
            token = int(allowed[(i * 7919) % len(allowed)])
            if token in self.vocabulary.eos_token_ids:
                return
            written.append(token)


_OF_JSON = ("json", "object", "tag")
_NAMES = {
    "json": "schema",
    "object": "JSON object",
    "regex": "regular expression",
    "grammar": "grammar",
    "tag": "tools",
}


class Matched:
    """The text of one sequence matches a grammar, then an end token comes.

    The matcher holds the tokens of the last question; for the next one it takes back those that are not shared and adds
    the rest. So the answer depends on the question alone, and a draft's path costs one step a token.
    """

    def __init__(self, make: Callable[[], Any], writable: NDArray[np.bool_], eos_token_ids: Collection[int]) -> None:
        """`make` makes a matcher; `writable` bool [V]: tokens that the text may have at all."""
        self._make, self._matcher = make, make()
        self._writable = writable
        self._size = len(writable)
        self._ends = frozenset(eos_token_ids)
        self._held: list[int] = []
        self._mask: NDArray[np.bool_] | None = None  # after `_held`
        self._bits = np.zeros((1, (self._size + 31) // 32), np.int32)
        self._allowance = Allowance()

    def allowed(self, output: Seq[int], path: Seq[int]) -> NDArray[np.bool_]:
        """bool [V]: the tokens that may come after the output's tokens and then those of `path`.

        None after what does not match. Raises RequestError once this text has taken too much time.
        """
        with self._allowance:
            return self._after([*output, *path])

    def another(self) -> Matched:
        """The same grammar with a matcher of its own, for another reader."""
        return Matched(self._make, self._writable, self._ends)

    def _after(self, wanted: list[int]) -> NDArray[np.bool_]:
        """The answer for a text of these tokens, which the matcher then holds as far as they match."""
        held = self._held
        shared = _shared(held, wanted)
        if shared < len(held):
            self._matcher.rollback(len(held) - shared)
            del held[shared:]
            self._mask = None
        for token in wanted[shared:]:
            if token in self._ends:
                return self._end()
            if not (0 <= token < self._size and self._writable[token] and self._matcher.accept_token(token)):
                return np.zeros(self._size, np.bool_)
            held.append(token)
            self._mask = None
        return self._fill() if self._mask is None else self._mask

    def _end(self) -> NDArray[np.bool_]:
        """Behind an end token: only such, if the text might end there."""
        mask = np.zeros(self._size, np.bool_)
        mask[list(self._ends)] = self._matcher.is_completed()
        return mask

    def _fill(self) -> NDArray[np.bool_]:
        self._bits.fill(-1)
        self._matcher.fill_next_token_bitmask(self._bits)
        mask = np.unpackbits(self._bits.view(np.uint8)[0], count=self._size, bitorder="little").view(np.bool_)
        mask &= self._writable  # where all may come, the library does not look which there are
        self._mask = mask
        return mask


def _shared(held: list[int], wanted: list[int]) -> int:
    """Tokens that two texts have in common; a few comparisons of slices, however long they are."""
    low, high = 0, min(len(held), len(wanted))
    if held[:high] == wanted[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if held[low:middle] == wanted[low:middle] else (low, middle - 1)
    return low


def _any_object(grammar: str) -> str:
    """The library's grammar of JSON, which is much faster than that of a schema without properties, for objects alone.

    Space is one character at most, as elsewhere. Raises RequestError where the library writes its grammar otherwise.
    """
    _, end, rules = grammar.partition("\n")
    if "\nmembers_and_embrace ::=" not in grammar or _SPACE not in rules:
        raise RequestError("this version of xgrammar cannot be used for JSON objects; give a schema")
    return ('root ::= "{" ' + _SPACE + " members_and_embrace" + end + rules).replace(_SPACE, "[ \\n]?")


class _Warnings:
    """Catches what native code writes to the standard error: the library says there what it leaves out of a schema."""

    def __enter__(self) -> _Warnings:
        self.warning = ""
        self._file = os.memfd_create("warnings")
        self._kept = os.dup(2)
        os.dup2(self._file, 2)
        return self

    def __exit__(self, *raised: object) -> None:
        os.dup2(self._kept, 2)
        os.close(self._kept)
        os.lseek(self._file, 0, os.SEEK_SET)
        found = _WARNING.search(os.read(self._file, 2**16).decode("utf-8", "replace"))
        os.close(self._file)
        self.warning = found[1].strip() if found else ""


def _plain(message: str) -> str:
    """What the library says, without where in its sources it says so."""
    return _PLACE.sub("", message.strip().splitlines()[0] if message.strip() else "it is not valid")
