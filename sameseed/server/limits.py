"""Limits on requests, and the JSON reader that enforces them: a body that is too large is refused before parsing."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sameseed.server.errors import ApiError, bad_request

MAX_BODY = 8 * 2**20  # bytes
MAX_HEADERS = 64 * 2**10  # bytes, request line included
MAX_NESTING = 64
MAX_VALUES = 2**20  # JSON values in a body: each takes many times the memory of its bytes
MAX_CONTAINERS = 2**16  # lists and objects among them
MAX_N = 16
MAX_PROMPTS = 64
MAX_TOP_LOGPROBS = 20
MAX_STOP = 64
MAX_STOP_LENGTH = 256
MAX_STOP_TOKENS = 64
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED = 4096
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_OPTIONS, MAX_DOCUMENTS = 64, 1024  # of a chat template
MAX_CHOICES, MAX_CHOICE_LENGTH = 256, 1024
MAX_GRAMMAR = 64 * 2**10  # characters of a schema or a grammar
MAX_TOOL_SCHEMAS = 256 * 2**10  # characters of the schemas of all tools that are enforced
MAX_REGEX = 4096  # characters
MAX_SCHEMA_NODES, MAX_SCHEMA_DEPTH, MAX_ENUM, MAX_PATTERNS = 2000, 32, 1000, 64
MAX_COMPILED = 8 * 2**20  # bytes of a compiled grammar
COMPILE_SECONDS, TEMPLATE_SECONDS = 1.0, 1.0  # of CPU time
COMPILE_MEMORY = 512 * 2**20  # bytes beyond what the process already has
BODY_TIMEOUT = 30.0  # seconds for a body to arrive
MAX_DIGITS = 4300  # of a whole number: Python's own limit (sys.int_info.default_max_str_digits)

log = logging.getLogger("sameseed.server")
T = TypeVar("T")
_BODIES = ThreadPoolExecutor(2, "bodies")  # more would only take turns on the interpreter lock
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_STRING = re.compile(rb'"[^"]*"')  # strings without escapes; with escapes the expression would take quadratic time


async def away(large: bool, work: Callable[[], T], threads: ThreadPoolExecutor | None = _BODIES) -> T:
    """Do work; if it is large, in one of `threads` (None: asyncio's own), while the event loop goes on."""
    return await asyncio.get_running_loop().run_in_executor(threads, work) if large else work()


def parse_object(raw: bytes, name: str = "the body") -> dict[str, Any]:
    """Parse the JSON object of a request's body, or of a text in the body. `name`: what errors call it.

    Numbers stay as `json.loads` reads them. Raises ApiError 400 for anything else, also a key that comes twice in an
    object. Who reads a body limits its size: see `connection.held`.
    """
    check_values(raw, f"{name} holds")
    try:
        value = _parse(raw.decode("utf-8-sig"))  # some editors write a byte order mark
    except UnicodeDecodeError as error:
        raise bad_request(f"{name} is no UTF-8 ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise bad_request(f"{name} is no JSON: {error.msg} at {where}", code="invalid_json") from None
    except ValueError as error:  # of the functions below
        raise bad_request(str(error), code="invalid_json") from None
    except RecursionError:
        raise _too_deep(name) from None
    if not isinstance(value, dict):
        raise bad_request(f"{name} must be a JSON object", code="invalid_json")
    check_nesting(value, name)
    if _SURROGATE.search(raw):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise bad_request(f"{name} holds half of a surrogate pair, which is no text") from None
    return value


def check_values(raw: bytes, what: str) -> None:
    """Raise ApiError 400, before parsing, for JSON with too many lists, objects or values."""
    # Brackets and commas within strings are harmless: count again without strings. Remove pairs of backslashes first,
    # because the second backslash of a pair escapes nothing.
    if _too_many(raw) and _too_many(_STRING.sub(b"", raw.replace(b"\\\\", b"").replace(b'\\"', b""))):
        raise bad_request(f"{what} more than {MAX_CONTAINERS} lists and objects, or {MAX_VALUES} values")


def _too_many(raw: bytes) -> bool:
    return raw.count(b"[") + raw.count(b"{") > MAX_CONTAINERS or raw.count(b",") > MAX_VALUES


def check_nesting(value: Any, name: str = "the body") -> None:
    """Raise ApiError 400 for lists and objects that nest deeper than the limit."""
    level = [value]
    for _ in range(MAX_NESTING):
        level = [
            child
            for container in level
            for child in (container.values() if isinstance(container, dict) else container)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise _too_deep(name)


def too_large() -> ApiError:
    """The error 413: the body is too large."""
    return ApiError(413, f"the body is larger than {MAX_BODY} bytes", code="body_too_large")


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's members. Raises ValueError for a key that comes twice: parsers differ in which one they take."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"an object has the key {key[:64]!r} twice; give it once")
        made[key] = value
    return made


def _number(text: str) -> float:
    """A number that is not whole. Raises ValueError if it is not finite: JSON has no NaN, and 1e400 is too large."""
    if not math.isfinite(value := float(text)):
        raise ValueError("a number is not finite, or too large")
    return value


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a whole number has more than {MAX_DIGITS} digits")
    return int(digits)


_parse = json.JSONDecoder(
    parse_float=_number, parse_constant=_number, parse_int=_whole, object_pairs_hook=unique
).decode


def _too_deep(name: str) -> ApiError:
    return bad_request(f"{name} nests deeper than {MAX_NESTING} levels", code="invalid_json")
