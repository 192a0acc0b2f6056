"""The application: routes, and what wraps them. `create_app` makes one; `server/run.py` serves it."""

from __future__ import annotations

import html
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

import foretoken
from foretoken.server import metrics, protocol
from foretoken.server.answer import Answer, error_response
from foretoken.server.client import EngineClient
from foretoken.server.config import ServerConfig
from foretoken.server.errors import ApiError, bad_request, unavailable
from foretoken.server.guard import Guard
from foretoken.server.service import Service

_SUMMARY = "OpenAI's API over a speculating engine: the same text, sooner."


def create_app(client: EngineClient, config: ServerConfig) -> tuple[ASGIApp, Service]:
    """The application and its service. Its lifespan starts and ends the engine's process."""
    service = Service(client, config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        client.start()
        yield
        await client.close()

    app = FastAPI(
        title="foretoken",
        version=foretoken.__version__,
        summary=_SUMMARY,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        openapi_url="/openapi.json",
    )
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(ApiError, _api_error)
    _add_writing(app, service)
    _add_reading(app, service)
    _add_tokens(app, service)
    return Guard(app, config, service.metrics), service


def _add_writing(app: FastAPI, service: Service) -> None:
    """The routes that write text."""

    @app.post("/v1/completions", **_described(protocol.CompletionFields, "Continue a text"))
    async def completions(request: Request) -> Answer:
        return await service.completions(request)

    @app.post("/v1/chat/completions", **_described(protocol.ChatFields, "Answer a conversation"))
    async def chat(request: Request) -> Answer:
        return await service.chat(request)

    @app.post("/v1/responses", **_described(protocol.ResponseFields, "Answer, in the newer form; nothing is stored"))
    async def responses(request: Request) -> Answer:
        return await service.responses(request)


def _add_reading(app: FastAPI, service: Service) -> None:
    """The routes that tell of the server."""
    client, config = service.client, service.config
    created = int(time.time())

    def model() -> dict[str, Any]:
        made: dict[str, Any] = {"id": config.model_name, "object": "model", "created": created, "owned_by": "foretoken"}
        return made | ({"max_model_len": client.facts["max_model_len"]} if client.facts else {})

    @app.get("/v1/models", summary="The model that is served")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [model()]})

    @app.get("/v1/models/{name:path}", summary="One model", responses=_errors(404))
    async def one_model(name: str) -> JSONResponse:
        if name != config.model_name:
            raise ApiError(404, f"no model {name[:256]!r} here", param="model", code="model_not_found")
        return JSONResponse(model())

    @app.get("/health", summary="Is the server alive? 503 while a dead engine is replaced", responses=_errors(503))
    async def health() -> JSONResponse:
        if client.state in ("down", "failed", "closed"):
            raise unavailable("the engine has stopped")
        return JSONResponse({"status": "ok", "engine": client.state})

    @app.get("/ready", summary="May requests be sent? Not while loading or draining", responses=_errors(503))
    async def ready() -> JSONResponse:
        if service.gate.closed:
            raise unavailable("the server is shutting down")
        client.check()
        return JSONResponse({"status": "ready"})

    @app.get("/version", summary="The server's version")
    async def version() -> JSONResponse:
        return JSONResponse({"version": foretoken.__version__})

    @app.get("/metrics", summary="Counters and times, for Prometheus")
    async def counters() -> Response:
        return Response(service.metrics.render(), media_type=metrics.CONTENT_TYPE)

    @app.get("/docs", summary="This interface, as a page", response_class=HTMLResponse)
    async def docs() -> HTMLResponse:
        return HTMLResponse(_page(app.openapi()))


def _add_tokens(app: FastAPI, service: Service) -> None:
    """Text to tokens and back."""

    @app.post("/tokenize", **_described(protocol.TokenizeFields, "Token ids of a text or a conversation"))
    async def tokenize(request: Request) -> JSONResponse:
        fields = await service.fields(request, protocol.TokenizeFields)
        if (fields.prompt is None) == (fields.messages is None):
            raise bad_request("give either 'prompt' or 'messages'", "prompt")
        text = service.loaded(fields.model)
        if fields.messages is not None:
            ids = await text.chat([m.plain() for m in fields.messages])
        else:
            ids = await text.encode(fields.prompt or "", fields.add_special_tokens is not False)
        made: dict[str, Any] = {"count": len(ids), "max_model_len": text.max_model_len, "tokens": ids}
        if fields.return_token_strs:
            made["token_strs"] = [text.pieces.text(i) for i in ids]
        return JSONResponse(made)

    @app.post("/detokenize", **_described(protocol.DetokenizeFields, "Text of token ids"))
    async def detokenize(request: Request) -> JSONResponse:
        fields = await service.fields(request, protocol.DetokenizeFields)
        return JSONResponse({"prompt": await service.loaded(fields.model).decode(fields.tokens)})


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {404: "there is nothing at this path; see /docs", 405: "this path takes another method; see /docs"}
    made = error_response(ApiError(error.status_code, words.get(error.status_code, str(error.detail))))
    made.headers.update(error.headers or {})
    return made


async def _validation_error(request: Request, error: Exception) -> Response:
    return error_response(bad_request("the request's path or query is not what this route takes"))


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Descriptions of errors for the interface's document."""
    fields = {"message": {"type": "string"}, "type": {"type": "string"}}
    fields |= {k: {"type": ["string", "null"]} for k in ("param", "code")}  # type: ignore[dict-item]
    schema = {
        "type": "object",
        "properties": {"error": {"type": "object", "properties": fields}},
        "required": ["error"],
    }
    return {s: {"description": "error", "content": {"application/json": {"schema": schema}}} for s in statuses}


def _described(kind: type[BaseModel], summary: str) -> dict[str, Any]:
    """What the interface's document says of a route whose body is read by ourselves."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs", {})
    body = {"required": True, "content": {"application/json": {"schema": _inlined(schema, definitions)}}}
    responses = _errors(400, 401, 403, 404, 408, 413, 415, 429, 500, 503)
    return {"summary": summary, "openapi_extra": {"requestBody": body}, "responses": responses}


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """A schema without references: each route's stands by itself."""
    if isinstance(schema, list):
        return [_inlined(s, definitions) for s in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {k: _inlined(v, definitions) for k, v in schema.items()}


def _page(document: dict[str, Any]) -> str:
    """The interface as a page without any outside resource."""
    rows = [
        f"<tr><td><code>{method.upper()}</code></td><td><code>{html.escape(path)}</code></td>"
        f"<td>{html.escape(operation.get('summary', ''))}</td></tr>"
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>foretoken</title>"
        "<meta name=viewport content='width=device-width'><style>body{font-family:system-ui;margin:2em;"
        "color-scheme:light dark}td{padding:.3em 1em .3em 0}</style>"
        f"<h1>foretoken</h1><p>{html.escape(_SUMMARY)} All fields: <a href=openapi.json>openapi.json</a>.</p>"
        f"<table>{''.join(rows)}</table></html>"
    )
