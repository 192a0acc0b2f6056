"""Mutant: the shipped code with one piece of its source replaced."""

import __future__

import inspect
import logging
import textwrap
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from sameseed.spec import sampling

log = logging.getLogger("sameseed")
REFERENCE = {"backend": "reference"}  # for mistakes in kernels: the reference backend's ops are Python


@dataclass(frozen=True)
class Mutant:
    """`function` with `old` in its source replaced by `new`; `checks`: those that should reject it, the cheapest first.

    `settings`: settings of the toy that the checks run on. `native`: the mistake is in the call of the native sampler,
    which then stays in use.
    """

    name: str
    function: Any
    old: str
    new: str
    checks: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    native: bool = False

    def code(self):
        """The compiled wrong version."""
        source = textwrap.dedent(inspect.getsource(self.function))
        assert source.count(self.old) == 1, f"{self.old!r} must occur once in {self.function.__qualname__}"
        flags = __future__.annotations.compiler_flag
        wrong = compile(source.replace(self.old, self.new), "<mutant>", "exec", flags, dont_inherit=True)
        return next(c for c in wrong.co_consts if isinstance(c, CodeType) and c.co_name == self.function.__name__)

    @contextmanager
    def alive(self):
        """Context in which the function runs the wrong version for every caller; the right one is restored afterwards.

        Meanwhile sampling uses the Python sampler instead of the native one (unless `native`), and nothing is logged.
        """
        function = inspect.unwrap(self.function)
        kept = function.__code__, sampling.HAS_NATIVE, log.handlers, log.propagate
        try:
            function.__code__, log.handlers, log.propagate = self.code(), [logging.NullHandler()], False
            sampling.HAS_NATIVE = sampling.HAS_NATIVE and self.native
            yield
        finally:
            function.__code__, sampling.HAS_NATIVE, log.handlers, log.propagate = kept
