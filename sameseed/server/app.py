"""The FastAPI application: its routes and middleware. `create_app` builds it; `server/run.py` serves it."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, get_args, get_type_hints

from fastapi import FastAPI, Request, Security
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from prometheus_client import generate_latest
from pydantic import create_model
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

import sameseed
from sameseed.server import limits, metrics
from sameseed.server.client import EngineClient
from sameseed.server.config import ServerConfig
from sameseed.server.connection import INLINE, Count, Guard, held, visit_of
from sameseed.server.errors import ApiError, error_response, unavailable
from sameseed.server.gate import Gate
from sameseed.server.process import Supervised
from sameseed.server.protocol import read
from sameseed.server.service import Service

# The body of an error, with OpenAI's fields, for the document.
_FIELDS: dict[str, Any] = {
    "message": (str, ...),
    "type": (str, ...),
    "param": (str | None, ...),
    "code": (str | None, ...),
}
_BODY = create_model("ErrorAnswer", error=(create_model("Error", **_FIELDS), ...), request_id=(str | None, None))
_ERRORS: dict[str, Any] = {"model": _BODY, "description": "an error"}


class BodyRoute(APIRoute):
    """A route whose body the service reads, within its limits: FastAPI's own reader would hold and repeat any body.

    FastAPI describes the body from the endpoint's parameter `fields`; with two kinds, the last has "messages".
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint: Any = self.endpoint
        asked = get_type_hints(endpoint)["fields"]
        kinds = get_args(asked) or (asked,)

        async def handle(request: Request) -> Response:
            visit = visit_of(request)
            async with held(request, endpoint.__self__.gate) as body:
                kind = kinds[0 if body.get("messages") is None else -1]
                fields = await limits.away(visit.size > INLINE, lambda: read(kind, body))
            response: Response = await endpoint(visit, fields)
            return response

        return handle


def create_app(client: EngineClient, config: ServerConfig) -> tuple[ASGIApp, Service]:
    """The ASGI application and its service. The application's lifespan starts and ends the engine's process."""
    service = Service(client, config)
    app = FastAPI(
        title="sameseed",
        version=sameseed.__version__,
        summary=SUMMARY,
        lifespan=client.living,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses={"4XX": _ERRORS, "5XX": _ERRORS},
    )
    add_state(app, client, service.gate)
    if config.keys:  # described only: the guard checks the keys
        app.router.dependencies.append(Security(HTTPBearer(scheme_name="key", auto_error=False)))
    _add_writing(app, service)
    _add_reading(app, service)
    return guarded(app, config, service.metrics.answered), service


def _of_kind(kind: str) -> dict[int | str, dict[str, Any]]:
    """OpenAPI's description of an answer that is text of this kind."""
    return {200: {"content": {kind: {"schema": {"type": "string"}}}}}


def _add_writing(app: FastAPI, service: Service) -> None:
    streams = _of_kind("text/event-stream")
    for path, endpoint, summary, responses in (
        ("/v1/completions", service.completions, "Continue a text", streams),
        ("/v1/chat/completions", service.chat, "Answer a conversation", streams),
        ("/v1/responses", service.responses, "Answer, in the newer form; nothing is stored", streams),
        ("/tokenize", service.tokenize, "Token ids of a text, or of a conversation", None),
        ("/detokenize", service.detokenize, "Text of token ids", None),
    ):
        app.router.add_api_route(
            path, endpoint, methods=["POST"], summary=summary, responses=responses, route_class_override=BodyRoute
        )
    app.get("/tokenizer_info", summary="Special tokens and the chat template")(service.tokenizer_info)


def guarded(app: ASGIApp, config: ServerConfig, count: Count) -> ASGIApp:
    """Wrap an application in the guard, and in CORS middleware if the operator allows other web origins."""
    made: ASGIApp = Guard(app, config, count)
    if config.cors:
        shown = ["x-request-id", "retry-after"]
        methods = ["GET", "HEAD", "POST"]
        made = CORSMiddleware(made, config.cors, allow_methods=methods, allow_headers=["*"], expose_headers=shown)
    return made


def add_state(app: FastAPI, client: Supervised, gate: Gate) -> None:
    """Add the routes /health and /ready, and the handlers that turn exceptions into error responses."""

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        words = {404: "there is nothing at this path; see /openapi.json", 405: "method not allowed; see /openapi.json"}
        fault = ApiError(error.status_code, words.get(error.status_code, str(error.detail)))
        made = error_response(fault, visit_of(request))
        made.headers.update(error.headers or {})
        return made

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error_response(error, visit_of(request))

    @app.get("/health", summary="Is the server alive? 503 while a dead engine is replaced")
    async def health() -> JSONResponse:
        if client.state in ("down", "failed", "closed"):
            raise unavailable("the engine has stopped")
        return JSONResponse({"status": "ok", "engine": client.state})

    @app.get("/ready", summary="May requests be sent? Not while loading or draining")
    async def ready() -> JSONResponse:
        if gate.closed:
            raise unavailable("the server is shutting down")
        client.check_ready()
        return JSONResponse({"status": "ready"})


def _add_reading(app: FastAPI, service: Service) -> None:
    (body, headers), created = playground(), int(time.time())

    def model(name: str) -> dict[str, Any]:
        known, facts = ("method", "levels", "policy", "num_draft_tokens"), service.client.facts
        more = {"max_model_len": facts["max_model_len"], "speculation": {k: facts[k] for k in known}} if facts else {}
        return {"id": name, "object": "model", "created": created, "owned_by": "sameseed", **more}

    @app.get("/v1/models", summary="The model that is served")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [model(name) for name in service.config.names]})

    @app.get("/v1/models/{name:path}", summary="One model")
    async def one_model(name: str) -> JSONResponse:
        service.check_model(name)
        return JSONResponse(model(name))

    @app.get("/", include_in_schema=False)
    async def page_for_people() -> Response:
        return Response(body, media_type="text/html", headers=headers)

    @app.get("/version", summary="The server's version")
    async def version() -> JSONResponse:
        return JSONResponse({"version": sameseed.__version__})

    @app.get(
        "/metrics", summary="Counts and times for Prometheus", response_class=Response, responses=_of_kind("text/plain")
    )
    async def counters() -> PlainTextResponse:
        return PlainTextResponse(generate_latest(service.metrics.registry), media_type=metrics.CONTENT_TYPE)


PAGE = Path(__file__).with_name("playground.html")
SUMMARY = "OpenAI's API over a speculating engine: the same text, sooner."


def playground() -> tuple[bytes, dict[str, str]]:
    """The playground page, the only file that the server sends, and its HTTP headers.

    Its Content Security Policy allows its inline script and style, by hash, and requests to its own server. It allows
    no handlers or styles in attributes, no frames around the page, and no text that becomes markup (trusted types).
    """
    body = PAGE.read_bytes()
    policy = (
        f"default-src 'none'; script-src {_hashes(body, b'script')}; style-src {_hashes(body, b'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return body, {
        "content-security-policy": policy,
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-frame-options": "DENY",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
    }


def _hashes(page: bytes, tag: bytes) -> str:
    found = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in found)
