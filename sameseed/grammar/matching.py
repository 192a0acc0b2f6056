"""Matching: grammars by xgrammar's automata (Dong et al., 2024), for texts and for paths of drafts.

`Matching.compiled` compiles a source to data, in a process that may be killed. `Matched` follows one text with it.
"""

from __future__ import annotations

import os
import re
import sys
import types
from collections.abc import Callable, Collection, Iterator, Sequence as Seq
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sameseed.errors import RequestError
from sameseed.grammar import Allowance, Vocabulary
from sameseed.tokenizer import shared

TRIED = 96  # tokens of the trial text: a grammar that cannot write so many in time is refused
_PLACE = re.compile(r"^\[[\d:]+\] \S+\.(?:cc|h):\d+: ")
_WARNING = re.compile(r"Warning: (.*)")
# JSON has control characters only as \\u0000, but the library allows them in strings of a given length. Line feeds stay
# allowed: tool calls have them next to their JSON.
_CONTROL = re.compile(rb"[\x00-\x09\x0b-\x1f]")
_SPACE = r"[ \n\r\t]*"  # as in the library's JSON grammar
# A string of a least length, which the library writes without escapes. Beside a greatest length these cost too much.
_AT_LEAST = re.compile(r'\w+_characters\{([1-8]), -1\} "\\""')
_NAMED = ("PreTrainedTokenizerBase", "PreTrainedTokenizerFast", "LogitsProcessor")


def library() -> Any:
    """The module xgrammar, imported without transformers, which it needs for type names only. Raises RequestError."""
    stand_in: Any = None if sys.modules.keys() & {"xgrammar", "transformers"} else types.ModuleType("transformers")
    if stand_in is not None:
        for name in _NAMED:
            setattr(stand_in, name, type(name, (), {}))
        sys.modules["transformers"] = stand_in
    try:
        import xgrammar
    except ImportError as error:
        raise RequestError(f"structured output needs xgrammar ({error}); install it: pip install '.[server]'") from None
    finally:
        if stand_in is not None:
            del sys.modules["transformers"]
    return xgrammar


_NAMES = {"json": "schema", "object": "JSON object", "regex": "regular expression", "tag": "tools"}


class Language(NamedTuple):
    """A compiled grammar, and a mask bool [V] of the tokens that its texts may contain."""

    grammar: Any
    writable: NDArray[np.bool_]


class Matching:
    """xgrammar's view of a vocabulary; made once per process."""

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
        self._of_json, self._of_calls = vocabulary.writable & ~control, vocabulary.in_calls & ~control

    def compiled(self, kind: str, source: str) -> str:
        """Compile a grammar to data for `language`, and try it on a short text.

        `kind`: "json" (a JSON schema), "object" (any JSON object; no source), "regex", "grammar" (GBNF, or Lark), "tag"
        (xgrammar's structural tags). Raises RequestError, also for parts of a source that the library would ignore.
        Compilation may take forever and any amount of memory: the caller must limit both.
        """
        grammars = self._library.Grammar
        compiler = self._library.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        with _warnings() as said:
            try:
                if kind == "object":  # the library's JSON grammar is much faster than an empty schema
                    _, end, rules = str(grammars.builtin_json_grammar()).partition("\n")
                    if "members_and_embrace ::=" not in rules or _SPACE not in rules:
                        raise RequestError("this version of xgrammar cannot be used for JSON objects; give a schema")
                    objects = 'root ::= "{" ' + _SPACE + " members_and_embrace" + end + rules  # objects only
                    made = compiler.compile_grammar(objects.replace(_SPACE, "[ \\n]?"))  # at most one space
                elif kind == "json":  # with unlimited space a model could write it forever
                    made = compiler.compile_grammar(_escaping(grammars.from_json_schema(source, max_whitespace_cnt=1)))
                elif kind == "tag":
                    made = compiler.compile_grammar(_escaping(grammars.from_structural_tag(source)))
                elif kind == "grammar" and "::=" not in source:
                    made = compiler.compile_lark(source)
                else:
                    made = (compiler.compile_regex if kind == "regex" else compiler.compile_grammar)(source)
            except (RuntimeError, ValueError, TypeError) as error:
                reason = _PLACE.sub("", str(error).strip().partition("\n")[0]) or "it is not valid"
                raise RequestError(f"the {_NAMES.get(kind, kind)} cannot be used: {reason}") from None
        if said:
            why = re.split(r" in regex|; matching", said[0])[0]  # without the source, which may hold anything
            raise RequestError(f"the {_NAMES.get(kind, kind)} cannot be followed to the letter: {why}")
        self._try(kind, self.matched(self._language(kind, made)))
        return f"{kind} {made.serialize_json()}"

    def language(self, data: str) -> Language:
        """Load the data of `compiled` in this process, for any number of texts."""
        kind, _, made = data.partition(" ")
        return self._language(kind, self._library.CompiledGrammar.deserialize_json(made, self._info))

    def matched(self, language: Language) -> Matched:
        make = partial(self._library.GrammarMatcher, language.grammar)
        return Matched(make, language.writable, self.vocabulary.eos_token_ids)

    def _language(self, kind: str, grammar: Any) -> Language:
        written = {"json": self._of_json, "object": self._of_json, "tag": self._of_calls}
        return Language(grammar, written.get(kind, self.vocabulary.writable))

    def _try(self, kind: str, matched: Matched) -> None:
        """Write a trial text, always the same one. Raises RequestError if at some point no token is allowed."""
        written: list[int] = []
        while len(written) < TRIED and not (written and written[-1] in self.vocabulary.eos_token_ids):
            allowed = np.flatnonzero(matched.allowed(written, ()))
            if not len(allowed):
                raise RequestError(f"no text can match the {_NAMES.get(kind, kind)}; loosen it")
            written.append(int(allowed[(len(written) * 7919) % len(allowed)]))


def _escaping(grammar: Any) -> Any:
    """The grammar, with strings of a least length that may hold escapes, each of which counts as one character."""
    text = str(grammar)
    if not (sizes := [int(size) for size in _AT_LEAST.findall(text)]):
        return grammar
    rules = ["basic_string_sub", *(f"basic_string_least_{size}" for size in range(1, max(sizes) + 1))]
    text = _AT_LEAST.sub(lambda found: rules[int(found[1])], text)
    for rest, rule in pairwise(rules):
        text += f'{rule} ::= [^\\"\\\\\\r\\n] {rest} | "\\\\" [\\"\\\\/bfnrt] {rest}\n'
    return text


class Matched:
    """A grammar for one sequence: its text matches a compiled grammar, then an end token comes.

    The matcher holds the tokens of the last call. For the next call it rolls back the tokens that differ and adds the
    new ones. So the result depends only on the call's arguments, and a draft path costs one step per token.
    """

    def __init__(self, make: Callable[[], Any], writable: NDArray[np.bool_], eos_token_ids: Collection[int]) -> None:
        """`make` makes a matcher; `writable` bool [V]: the tokens that the text may contain at all."""
        self._make, self._matcher = make, make()
        self._writable = writable
        self._size = len(writable)
        self._ends = frozenset(eos_token_ids)
        self._held: list[int] = []
        self._mask: NDArray[np.bool_] | None = None  # the mask after `_held`
        self._bits = np.zeros((1, (self._size + 31) // 32), np.int32)
        self._allowance = Allowance()

    def allowed(self, output: Seq[int], path: Seq[int]) -> NDArray[np.bool_]:
        """See `Grammar`; none after text without a match. Raises RequestError if the time limit is used up."""
        with self._allowance:
            wanted, held = [*output, *path], self._held
            same = shared(held, wanted)
            if same < len(held):
                self._matcher.rollback(len(held) - same)
                del held[same:]
                self._mask = None
            for token in wanted[same:]:
                if token in self._ends:  # after an end token: end tokens, if the text may end there
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
                # If all tokens are allowed, the library sets bits for tokens that do not exist or are not writable too.
                self._mask = bits.view(np.bool_) & self._writable
            return self._mask

    def another(self) -> Matched:
        return Matched(self._make, self._writable, self._ends)


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collects warnings that native code writes to stderr: the library names there what it ignores in a schema."""
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
