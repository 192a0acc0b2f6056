"""Reads request bodies within limits of size and time, and validates their values, for all routes in this one place.

An error names the field and never repeats its value.

Unknown fields are accepted, as by OpenAI, and named in the debug log. Fields of other servers that would change the
text (`habits.REQUEST`) are refused by name, on routes that have no such field.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from sameseed.habits import REQUEST
from sameseed.server import limits
from sameseed.server.connection import visit_of
from sameseed.server.conversation import Fields
from sameseed.server.errors import ApiError, bad_request, unavailable
from sameseed.server.gate import Gate

log = logging.getLogger("sameseed.server")
INLINE = 2**16  # bytes: a larger body is parsed in a thread
MAX_ARRIVING = 128 * 2**20  # bytes of all bodies that are being read, parsed or checked

_NEUTRAL: tuple[Any, ...] = (None, False, [], {}, "", {"type": "text"})
_NEVER_NEUTRAL = ("enable_thinking", "thinking", "add_generation_prompt")  # false is a request too

F = TypeVar("F", bound=Fields)


@asynccontextmanager
async def held(request: Request, gate: Gate) -> AsyncIterator[dict[str, Any]]:
    """Yields the JSON object of a request's body. Its bytes (the visit's `size`) count until the context is left.

    Raises ApiError: 400, 408, 413, 415, 503.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a page of another site can send other types without CORS
        raise ApiError(415, "send JSON, with 'Content-Type: application/json'")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(415, "send the body as it is, without 'Content-Encoding'")
    visit, parts = visit_of(request), list[bytes]()

    async def collect() -> None:
        async for part in request.stream():
            if visit.size + len(part) > limits.MAX_BODY:
                raise limits.too_large()
            if gate.size_arriving + len(part) > MAX_ARRIVING:
                raise unavailable("too many large requests arrive at once; try again later", retry_after=1)
            parts.append(part)
            visit.size += len(part)
            gate.size_arriving += len(part)

    try:
        try:
            await asyncio.wait_for(collect(), limits.BODY_TIMEOUT)
        except asyncio.TimeoutError:
            raise ApiError(408, "the body did not arrive in time", code="timeout") from None
        yield await limits.away(visit.size > INLINE, lambda: limits.parse_object(b"".join(parts)), None)
    except ClientDisconnect:
        raise ApiError(400, "the client left") from None
    finally:
        gate.size_arriving -= visit.size


def _kinds(base: type[Fields]) -> Iterator[type[Fields]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)


_NAMES = frozenset(n for k in _kinds(Fields) for f, info in k.model_fields.items() for n in (f, info.alias) if n)


def read(kind: type[F], body: dict[str, Any]) -> F:
    """Validate a body as fields of this kind. Raises ApiError 400 that names one bad field."""
    for name in sorted(body.keys() & REQUEST.keys() - kind.model_fields.keys()):
        word, value = REQUEST[name], body[name]
        neutral = [*word.same, *([None] if name in _NEVER_NEUTRAL else _NEUTRAL)]
        neutral += [body.get("n") or 1] if name == "best_of" else []
        if not any(value == v and isinstance(v, bool) == isinstance(value, bool) for v in neutral):
            raise bad_request(f"{name!r} is not supported: {word.why}", param=name, code="unsupported_parameter")
    try:
        fields = kind.model_validate(body)
    except ValidationError as error:
        # If a field may have several forms, report the fault of the form that got furthest; never the value.
        faults = error.errors(include_url=False, include_input=False)
        fault = max(faults, key=lambda f: (not f["type"].endswith("_type"), len(f["loc"])))
        place = ""
        for part in fault["loc"]:  # skip names of forms, which stand between the fields' names
            if isinstance(part, int):
                place += f"[{part}]"
            elif part in _NAMES:
                place += f".{part}" if place else part
        param = str(fault["loc"][0])[:64] if fault["loc"] else None
        tags = fault["ctx"]["expected_tags"] if fault["type"] == "union_tag_invalid" else None
        told = f"'type' must be one of {tags}" if tags else fault["msg"][:500]  # that one's message repeats the value
        raise bad_request(f"{place or 'body'}: {told}", param, "invalid_value") from None
    unknown = sorted((fields.model_extra or {}).keys() - REQUEST.keys())
    if unknown:
        log.debug("fields that nobody reads: %s", ", ".join(repr(name[:64]) for name in unknown[:32]))
    return fields
