"""Names and patterns of modules, as quantization_configs have them: "re:" expressions are a stranger's, so bounded."""

from __future__ import annotations

import re
from functools import cache

from foretoken.errors import ModelLoadError

LONGEST = 400  # characters of an expression
MOST = 5  # of its parts that repeat without bound: more take too long on names that do not fit


@cache
def expression(text: str) -> re.Pattern[str]:
    """A compiled expression. Raises ModelLoadError for one that is unsound, or might take for ever."""
    # A repeated group that itself repeats or branches is what makes matching exponential.
    nested = re.search(r"[*+}|][^()]*\)+\s*(?:[*+]|\{\d*,)", text)
    repeats = len(re.findall(r"(?<!\\)(?:[*+]|\{\d*,\d*\})", text))
    if len(text) > LONGEST or nested or repeats > MOST or re.search(r"\{\d{3,}|\(\?\(|\(\?P=|\\\d", text):
        raise ModelLoadError(
            f"the expression {text[:80]!r} in quantization_config is too involved to be matched safely; "
            "name the modules instead"
        )
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ModelLoadError(f"{text[:80]!r} in quantization_config is no regular expression ({error})") from None


def fits(target: str, name: str, kind: str = "Linear") -> bool:
    """Whether a target (a name, "re:...", or a class of modules) means module `name` of class `kind`."""
    if target.startswith("re:"):
        return expression(target[3:]).match(name) is not None
    return target in (name, kind)


def covers(pattern: str, name: str) -> bool:
    """Whether one of the "modules not to convert" means module `name`: its name, a part of it, or an expression."""
    if pattern.startswith("re:"):
        return fits(pattern, name)
    return pattern == name or name.startswith(f"{pattern}.") or f".{pattern}." in f".{name}."
