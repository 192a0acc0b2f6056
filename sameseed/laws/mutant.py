"""Mutant: the shipped code with one piece of its source replaced."""

from __future__ import annotations
import __future__

import inspect
import logging
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

from sameseed.errors import SameseedError
from sameseed.laws.check import named
from sameseed.spec import sampling

log = logging.getLogger("sameseed")
REFERENCE = {"backend": "reference"}  # where a kernel is wrong: its ops are Python


class MutantError(SameseedError):
    """A mutant that no longer fits the code: the text that it replaces is not there, or more than once."""


@dataclass(frozen=True)
class Mutant:
    """`function` with `old` in its source replaced by `new`; `checks`: those that should notice, the cheapest first.

    `settings`: of the toy that they look at; `native`: the flaw is in the way to the native sampler, which then runs.
    """

    name: str
    function: Any
    old: str
    new: str
    checks: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    native: bool = False

    def code(self) -> CodeType:
        """The compiled wrong version. Raises MutantError where the source has changed."""
        source = textwrap.dedent(inspect.getsource(self.function))
        if source.count(self.old) != 1:
            raise MutantError(
                f"mutant {self.name!r}: {self.old!r} occurs {source.count(self.old)} times in "
                f"{self.function.__qualname__}, not once; write the mutant anew"
            )
        flags = __future__.annotations.compiler_flag
        wrong = compile(source.replace(self.old, self.new), "<mutant>", "exec", flags, dont_inherit=True)
        return next(c for c in wrong.co_consts if isinstance(c, CodeType) and c.co_name == self.function.__name__)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process gets the function by its name, for what has that name may be a property of it."""
        name = self.function.__module__, self.function.__qualname__
        return _mutant, (name, {k: v for k, v in vars(self).items() if k != "function"})

    @contextmanager
    def alive(self) -> Iterator[None]:
        """The function runs the wrong version, whoever calls it; afterwards the right one again.

        Meanwhile the specification's sampler runs instead of the native one (unless `native`), and nothing is printed.
        """
        function: FunctionType = inspect.unwrap(self.function)
        kept = function.__code__, sampling.HAS_NATIVE, log.handlers, log.propagate
        try:
            function.__code__, log.handlers, log.propagate = self.code(), [logging.NullHandler()], False
            sampling.HAS_NATIVE = sampling.HAS_NATIVE and self.native
            yield
        finally:
            function.__code__, sampling.HAS_NATIVE, log.handlers, log.propagate = kept


def bare(found: Any) -> Any:
    """The function in a static method, a class method, a property or a cached one."""
    return getattr(found, "__func__", None) or getattr(found, "fget", None) or getattr(found, "func", found)


def _mutant(function: tuple[str, str], others: dict[str, Any]) -> Mutant:
    return Mutant(function=inspect.unwrap(bare(named(*function))), **others)
