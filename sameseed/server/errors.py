"""API errors in OpenAI's format, the same for every route. They never show memory addresses, paths or stack traces."""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse

if TYPE_CHECKING:
    from sameseed.server.connection import Visit

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error"}
_TYPES |= {429: "rate_limit_error", 503: "service_unavailable_error"}
MAX_MESSAGE = 1000
_LEAKS = re.compile(r"0x[0-9a-fA-F]{4,}|(?<![\w/.])(?:~|\.{1,2})?/(?!v1/)(?:[\w.@-]+/)+[\w.@-]+|<[\w.]+ object[^>]*>")


@dataclass(eq=False)
class ApiError(Exception):
    """An error response: its HTTP status, OpenAI's fields, and `retry_after` (seconds after which to try again)."""

    status: int
    message: str
    _: KW_ONLY
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None

    def __post_init__(self) -> None:
        self.message = clean(self.message)

    def __str__(self) -> str:
        return self.message

    def body(self, request_id: str | None = None) -> dict[str, Any]:
        """The JSON body, or the payload of an event in a stream that has begun, with the request's id if it has one."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error} | ({} if request_id is None else {"request_id": request_id})

    def headers(self) -> dict[str, str]:
        """HTTP headers of the response."""
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status == 408:  # OpenAI's clients would send it again at once
            headers["x-should-retry"] = "false"
        return headers


def clean(message: str) -> str:
    """A message without memory addresses, file paths and object representations, in one line of bounded length."""
    text = _LEAKS.sub("...", " ".join(message[: 4 * MAX_MESSAGE].split())).encode("utf-8", "replace").decode()
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "..."


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The error 400: an invalid value."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, retry_after: int = 5) -> ApiError:
    """The error 503: not available now, but perhaps after `retry_after` seconds."""
    return ApiError(503, message, code="unavailable", retry_after=retry_after)


def internal(why: str = "its log says why") -> ApiError:
    """The error 500: a fault of the server. Details are in the log, under the request's id."""
    return ApiError(500, f"the server failed on this request: {why}", code="internal_error")


def error_response(error: ApiError, visit: Visit) -> JSONResponse:
    """An error as the response to a request, the same for every route."""
    visit.error = error.message
    return JSONResponse(error.body(visit.shown_id), error.status, error.headers())
