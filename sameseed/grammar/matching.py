"""Matching: texts in the language of a grammar, by xgrammar's automata (Dong et al., 2024), drafts included.

`Matching.compiled` makes data of a source, in a process that may be ended; `Matched` follows one text by it.
"""

from __future__ import annotations

import os
import re
import sys
import types
from collections.abc import Callable, Collection, Iterator, Sequence as Seq
from contextlib import contextmanager
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
    """The module xgrammar, without transformers, which it imports for names of types. Raises RequestError."""
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


_OF_JSON = ("json", "object", "tag")
_NAMES = {
    "json": "schema",
    "object": "JSON object",
    "regex": "regular expression",
    "grammar": "grammar",
    "tag": "tools",
}


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
        compiler = self._library.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        with _warnings() as said:
            try:
                if kind == "object":  # the library's grammar of JSON, much faster than a schema without properties
                    builtin = str(self._library.Grammar.builtin_json_grammar())
                    _, end, rules = builtin.partition("\n")
                    if "\nmembers_and_embrace ::=" not in builtin or _SPACE not in rules:
                        raise RequestError("this version of xgrammar cannot be used for JSON objects; give a schema")
                    objects = 'root ::= "{" ' + _SPACE + " members_and_embrace" + end + rules  # and nothing else
                    made = compiler.compile_grammar(objects.replace(_SPACE, "[ \\n]?"))  # space: one character
                elif kind == "json":  # any amount of space would let a model write it for ever
                    made = compiler.compile_json_schema(source, max_whitespace_cnt=1)
                elif kind == "grammar" and "::=" not in source:
                    made = compiler.compile_lark(source)
                else:
                    compiles = {"regex": compiler.compile_regex, "tag": compiler.compile_structural_tag}
                    made = compiles.get(kind, compiler.compile_grammar)(source)
            except (RuntimeError, ValueError, TypeError) as error:
                reason = _PLACE.sub("", str(error).strip().partition("\n")[0]) or "it is not valid"
                raise RequestError(f"the {_NAMES[kind]} cannot be used: {reason}") from None
        if said:
            raise RequestError(f"the {_NAMES[kind]} cannot be followed to the letter: {said[0]}")
        self._try(kind, self.matched(self._language(kind, made)))
        return f"{kind} {made.serialize_json()}"

    def language(self, data: str) -> Language:
        """What `compiled` made of a source, here: for any number of texts."""
        kind, _, made = data.partition(" ")
        return self._language(kind, self._library.CompiledGrammar.deserialize_json(made, self._info))

    def matched(self, language: Language) -> Matched:
        make = partial(self._library.GrammarMatcher, language.grammar)
        return Matched(make, language.writable, self.vocabulary.eos_token_ids)

    def _language(self, kind: str, grammar: Any) -> Language:
        return Language(grammar, self._of_json if kind in _OF_JSON else self.vocabulary.writable)

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
        """See `Grammar`; none after what does not match. Raises RequestError once it took too much time."""
        with self._allowance:
            wanted, held = [*output, *path], self._held
            shared = _shared(held, wanted)
            if shared < len(held):
                self._matcher.rollback(len(held) - shared)
                del held[shared:]
                self._mask = None
            for token in wanted[shared:]:
                if token in self._ends:  # behind it only such, if the text might end there
                    mask = np.zeros(self._size, np.bool_)
                    mask[list(self._ends)] = self._matcher.is_completed()
                    return mask
                if not (0 <= token < self._size and self._writable[token] and self._matcher.accept_token(token)):
                    return np.zeros(self._size, np.bool_)
                held.append(token)
                self._mask = None
            if self._mask is None:
                self._bits.fill(-1)
                self._matcher.fill_next_token_bitmask(self._bits)
                bits = np.unpackbits(self._bits.view(np.uint8)[0], count=self._size, bitorder="little")
                # Where all may come, the library does not look which there are.
                self._mask = bits.view(np.bool_) & self._writable
            return self._mask

    def another(self) -> Matched:
        return Matched(self._make, self._writable, self._ends)


def _shared(held: list[int], wanted: list[int]) -> int:
    """Tokens that two texts have in common; a few comparisons of slices, however long they are."""
    low, high = 0, min(len(held), len(wanted))
    if held[:high] == wanted[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if held[low:middle] == wanted[low:middle] else (low, middle - 1)
    return low


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What native code writes to the standard error: the library says there what it leaves out of a schema."""
    found: list[str] = []
    file, kept = os.memfd_create("warnings"), os.dup(2)
    os.dup2(file, 2)
    try:
        yield found
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.lseek(file, 0, os.SEEK_SET)
        found += [w.strip() for w in _WARNING.findall(os.read(file, 2**16).decode("utf-8", "replace"))]
        os.close(file)
