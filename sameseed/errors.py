"""The errors that sameseed raises on purpose, and notices. Each message names the remedy."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable
from functools import cache


class SameseedError(ValueError):
    """Base class: something the user asked for cannot be done; the text says what to do instead."""


class RequestError(SameseedError):
    """A request that cannot be served as asked: an empty prompt, a parameter out of range, too long a prompt."""

    def __init__(self, message: str, field: str | None = None) -> None:
        """`field`: the parameter at fault, if it is a single one."""
        super().__init__(message)
        self.field = field


class ConfigError(SameseedError):
    """Settings that contradict each other or lie out of range."""


class ModelLoadError(SameseedError):
    """A checkpoint that cannot be read; the text names the file and the tensor."""


class ModelSaveError(SameseedError):
    """A checkpoint that cannot be written where it was asked for; nothing is left under its name."""


class VocabularyError(SameseedError):
    """A draft model that does not share the target's vocabulary."""


class NoSuchNameError(SameseedError, AttributeError):
    """An attribute that only another library has; the text says what to write instead."""


class RegistryError(SameseedError):
    """A name that a registry does not have; the text names the nearest entry."""


@cache
def say_once(text: str) -> None:
    """Log a notice to the user, only the first time."""
    logging.getLogger("sameseed").warning(text)


def reason(error: BaseException) -> str:
    """Why something failed, for whoever asked. An unforeseen error's own words may hold data: they are for the log."""
    if isinstance(error, SameseedError):
        return str(error)
    signs = ("out of memory", "allocate memory", "bad_alloc")
    if isinstance(error, MemoryError) or any(sign in str(error) for sign in signs):
        return "memory ran out; lower max_num_seqs or max_model_len"
    return f"{type(error).__name__}, an unforeseen error; the log has its trace"


def nearest(word: str, known: Iterable[str]) -> str:
    """A suffix for errors about an unknown word: "; did you mean 'x'?", or "" if no known word is close."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
