"""Names and patterns of modules in a quantization_config. "re:" expressions are untrusted, so their cost is bounded."""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Iterable
from functools import cache, lru_cache
from typing import Any

from sameseed.errors import ModelLoadError

LONGEST = 400  # most characters of an expression
MOST = 99  # largest repeat count: a{99}
FEW = 4  # most repetitions of a part that itself repeats or branches: beyond, matching is exponential
TIMES = 1000  # most repetitions of a part in total, with all enclosing ones; an unbounded one counts as MOST
WAYS = 23  # bits: base-2 logarithm of the number of ways to match that may be tried
# Bits of a part that repeats without bound: names have tens of characters, but few digits in a row.
FREE, DIGITS = 4.5, 2
_PARSER: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
# Where a model that also sees or hears has its language model, and our names for it.
TEXT_PARTS = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head": "lm_head"}
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


@cache
def expression(text: str) -> re.Pattern[str]:
    """A compiled expression. Raises ModelLoadError for an invalid one, or one that might take too long to match."""
    try:
        if len(text) <= LONGEST and _bits(_PARSER.parse(text), 1) <= WAYS:
            return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        reason = str(error)[:80]
        raise ModelLoadError(f"{text[:80]!r} in quantization_config is no regular expression ({reason})") from None
    raise ModelLoadError(f"{text[:80]!r} in quantization_config is too involved to be matched; name the modules")


def _bits(parsed: Iterable[tuple[Any, Any]], times: int) -> float:
    """Log2 of the number of ways to match a parsed expression repeated up to `times` times; inf: exponentially many."""
    total = 0.0
    for kind, value in parsed:
        name = str(kind)
        if name in _REPEATS:
            low, high, body = value
            unbounded, exact = high == _PARSER.MAXREPEAT, low == high
            most = MOST if unbounded else int(high)
            if most > MOST or low > MOST or times * most > TIMES or (times > FEW and not exact):
                return math.inf
            classes = [[str(x) for _, x in inner] for part, inner in body if str(part) == "IN"]
            free = DIGITS if classes == [["CATEGORY_DIGIT"]] else FREE
            total += times * (0.0 if exact else free if unbounded else math.log2(high - low + 1))
            total += _bits(body, times * max(most, 1))
        elif name == "BRANCH":
            alternatives = [_bits(a, times) for a in value[1]]
            total += math.inf if times > FEW else times * math.log2(sum(2.0 ** min(b, 2 * WAYS) for b in alternatives))
        elif name.startswith("GROUPREF"):  # the cost of a back-reference cannot be bounded this way
            return math.inf
        elif name in ("SUBPATTERN", "ASSERT", "ASSERT_NOT"):
            total += _bits(value[-1], times)
        elif name == "ATOMIC_GROUP":
            total += _bits(value, times)
    return total


@lru_cache(1)  # asked again for each pattern
def spellings(name: str) -> tuple[str, ...]:
    """The names that a quantization_config may use for module `name`: ours, and those of wrapped models."""
    names = [name, *(long + name.removeprefix(short) for long, short in TEXT_PARTS.items() if name.startswith(short))]
    return (*names, *(n.replace(".mlp.experts.", ".experts.") for n in names if ".mlp.experts." in n))


def fits(target: str, name: str, kind: str = "Linear") -> bool:
    """Whether a target (a name, "re:...", or a class of modules) matches module `name` of class `kind`."""
    if target.startswith("re:"):
        return any(expression(target[3:]).match(n) for n in spellings(name))
    return target == kind or target in spellings(name)


def covers(pattern: str, name: str) -> bool:
    """Whether an entry of "modules not to convert" matches module `name`: its name, a part of it, or an expression."""
    if pattern.startswith("re:"):
        return fits(pattern, name)
    return pattern == name or name.startswith(f"{pattern}.") or f".{pattern}." in f".{name}."
