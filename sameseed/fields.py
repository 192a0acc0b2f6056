"""Makes frozen dataclasses from plain data (a TOML table, JSON keys, flags), with errors that name the remedy."""

from __future__ import annotations

import dataclasses
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from numbers import Integral, Real
from typing import Any, TypeVar

from sameseed.errors import ConfigError, SameseedError, nearest

if sys.version_info >= (3, 11):
    import tomllib as tomllib
else:
    import tomli as tomllib  # noqa: F401  # for the modules that read TOML

T = TypeVar("T")
NAMES = {Mapping: "object", tuple: "list", type(None): "none"}
LARGEST = sys.float_info.max  # an upper bound that keeps infinity out


def parse(kind: type[T], data: object, where: str = "") -> T:
    """The dataclass `kind` from a mapping; nested tables become dataclasses or tuples of them.

    A whole number is accepted for a float, and for a string (its digits). Raises ConfigError, whose text begins with
    `where`, for an unknown or a missing key, or a value of a wrong type.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where or 'options'}: expected a table, got {data!r}")
    wanted = hints(kind)
    check_keys(data, wanted, where)
    for f in dataclasses.fields(kind):  # type: ignore[arg-type]  # a dataclass
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and f.name not in data:
            raise ConfigError(f"{_place(where)}option {f.name!r} is missing; add it")
    given = {k: str(v) if wanted[k] is str and type(v) is int else v for k, v in data.items()}
    return kind(**{k: value_of(wanted[k], v, k, where) for k, v in given.items()})


def within(default: Any, low: float, high: float = math.inf, above: bool = False, help: str = "") -> Any:
    """A field of a dataclass whose number must lie in low..high (`above`: and not be `low`): see `check_ranges`.

    `help`: the help text of its flag; without one, that is the comment at the field.
    """
    said = {"help": help} if help else {}
    return dataclasses.field(default=default, metadata={"within": (low, high, above), **said})


def setting(default: Any, help: str) -> Any:
    """A field of a dataclass with the help text of its flag."""
    return dataclasses.field(default=default, metadata={"help": help})


def check(options: object, error: type[SameseedError] = ConfigError) -> None:
    """Bring a dataclass's fields to their types. Raises `error` for other values, and numbers out of their range."""
    try:
        for name, kind in hints(type(options)).items():
            object.__setattr__(options, name, value_of(kind, getattr(options, name), name))
        check_ranges(options)
    except ConfigError as found:
        raise error(str(found)) from None


def check_ranges(options: object, name: Callable[[str], str] = str) -> None:
    """Raise ConfigError if a field of a dataclass that is `within` bounds holds a number out of them.

    All numbers of a list must lie within, and it must hold one. `name` gives a field's name in errors.
    """
    for f in dataclasses.fields(options):  # type: ignore[arg-type]  # a dataclass
        value, (low, high, above) = getattr(options, f.name), f.metadata.get("within", (0, 0, None))
        numbers = value if isinstance(value, tuple) else (value,)
        if value is None or above is None:
            continue
        if numbers and all(low <= n <= high and not (above and n == low) for n in numbers):
            continue
        least = f"{'finite and ' * (math.inf in numbers)}{'above' if above else 'at least'} {low:g}"
        bounds = f"be {least}" if high >= LARGEST or above else f"lie in {low}..{high}"
        most = f" and at most {high:g}" if above and high < LARGEST else ""
        raise ConfigError(f"{name(f.name)} must {bounds}{most}, got {value!r}")


def flag(name: str) -> str:
    """The flag of a field."""
    return f"--{name.replace('_', '-')}"


def check_keys(
    given: Iterable[str], known: Iterable[str], where: str = "", error: type[SameseedError] = ConfigError
) -> None:
    """Raise `error` for an unknown key, naming the nearest known one."""
    known = tuple(known)
    for key in given:
        if key not in known:
            there = f" (there are: {', '.join(known) or 'none'})"
            raise error(f"{_place(where)}unknown option {key!r}{nearest(key, known)}{there}")


def value_of(kind: Any, value: Any, name: str, where: str = "") -> Any:
    """The value as type `kind`: a class, a union, `tuple[X, ...]`, a mapping, a dataclass. Raises ConfigError."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for choice in arguments:
            with suppress(ConfigError):
                return value_of(choice, value, name, where)
    elif origin is tuple and isinstance(value, list | tuple | set | frozenset | range):
        return tuple(value_of(arguments[0], item, f"{name}[{i}]", where) for i, item in enumerate(value))
    elif origin is Mapping and isinstance(value, Mapping):
        own, of = arguments
        return {value_of(own, k, f"{name}.{k}", where): value_of(of, v, f"{name}.{k}", where) for k, v in value.items()}
    elif kind is Any or (isinstance(value, origin or kind) and not (isinstance(value, bool) and kind is int)):
        return value
    elif kind in (int, float) and isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool):
        with suppress(OverflowError):
            return kind(value)  # of NumPy's
    elif dataclasses.is_dataclass(kind):
        return parse(kind, value, f"{_place(where)}{name}")  # type: ignore[arg-type]  # a class
    choices = arguments if origin in (typing.Union, types.UnionType) else (kind,)
    wanted = " or ".join(NAMES.get(typing.get_origin(c) or c) or c.__name__ for c in choices)
    raise ConfigError(f"{_place(where)}option {name!r} must be of type {wanted}, got {value!r}")


def _hints(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields, by name."""
    found = typing.get_type_hints(kind)
    return {f.name: found[f.name] for f in dataclasses.fields(kind)}


hints: Callable[[type], dict[str, Any]] = cache(_hints)


def _place(where: str) -> str:
    return f"{where}: " if where else ""
