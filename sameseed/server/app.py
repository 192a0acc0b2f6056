"""The FastAPI application: its routes and middleware. `create_app` builds it; `server/run.py` serves it."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

import sameseed
from sameseed.server import metrics, protocol
from sameseed.server.client import EngineClient
from sameseed.server.config import ServerConfig
from sameseed.server.errors import ApiError, bad_request, error_response, unavailable
from sameseed.server.gate import Gate
from sameseed.server.guard import Count, Guard, visit_of
from sameseed.server.interface import SUMMARY, described, errors, fitted, gives, page, playground, secured
from sameseed.server.service import TOKENIZE, Service
from sameseed.server.supervised import Backend


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
        openapi_url="/openapi.json",
        responses=errors(400, 401, 403, 500),  # the guard's errors, on every route
    )

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> Response:
        return error_response(
            bad_request("the request's path or query is not what this route takes"), visit_of(request)
        )

    _add_writing(app, service)
    add_state(app, client, service.gate)
    _add_reading(app, service)
    describe = app.openapi
    app.openapi = lambda: fitted(describe(), config.names, client.text, bool(config.keys))  # type: ignore[method-assign]
    return guarded(app, config, service.metrics.answered), service


def _add_writing(app: FastAPI, service: Service) -> None:
    """Add the routes that generate text, and those that convert between text and tokens."""
    answer = "id:string object:string created:integer model:string choices:array usage:object metrics:object"
    completions = described("Continue a text", answer, protocol.CompletionFields, streams=True)
    app.post("/v1/completions", **completions)(service.completions)
    chat = described("Answer a conversation", answer, protocol.ChatFields, streams=True)
    app.post("/v1/chat/completions", **chat)(service.chat)
    response = "id:string object:string created_at:integer status:string model:string output:array usage:object"
    newer = described("Answer, in the newer form; nothing is stored", response, protocol.ResponseFields, streams=True)
    app.post("/v1/responses", **newer)(service.responses)
    tokenize = described("Token ids of a text, or of a conversation", "count:integer tokens:array", *TOKENIZE)
    app.post("/tokenize", **tokenize)(service.tokenize)
    app.post("/detokenize", **described("Text of token ids", "prompt:string", protocol.DetokenizeFields))(
        service.detokenize
    )
    about = "Special tokens and the chat template"
    app.get(
        "/tokenizer_info",
        summary=about,
        responses=errors(503) | gives("bos_token:string|null chat_template:string|null"),
    )(service.tokenizer_info)


def guarded(app: ASGIApp, config: ServerConfig, count: Count) -> ASGIApp:
    """Wrap an application in the guard, and in CORS middleware if the operator allows other web origins."""
    made: ASGIApp = Guard(app, config, count)
    if config.cors:
        shown = ["x-request-id", "retry-after"]
        methods = ["GET", "HEAD", "POST"]
        made = CORSMiddleware(made, config.cors, allow_methods=methods, allow_headers=["*"], expose_headers=shown)
    return made


def add_state(app: FastAPI, client: Backend, gate: Gate) -> None:
    """Add the routes /health and /ready, and the handlers that turn exceptions into error responses."""

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        words = {404: "there is nothing at this path; see /docs", 405: "this path takes another method; see /docs"}
        fault = ApiError(error.status_code, words.get(error.status_code, str(error.detail)))
        made = error_response(fault, visit_of(request))
        made.headers.update(error.headers or {})
        return made

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error_response(error, visit_of(request))

    state = errors(503) | gives("status:string")

    @app.get("/health", summary="Is the server alive? 503 while a dead engine is replaced", responses=state)
    async def health() -> JSONResponse:
        if client.state in ("down", "failed", "closed"):
            raise unavailable("the engine has stopped")
        return JSONResponse({"status": "ok", **client.told})

    @app.get("/ready", summary="May requests be sent? Not while loading or draining", responses=state)
    async def ready() -> JSONResponse:
        if gate.closed:
            raise unavailable("the server is shutting down")
        client.check_ready()
        return JSONResponse({"status": "ready"})


def _add_reading(app: FastAPI, service: Service) -> None:
    """Add the routes that describe the server and its model, and the web pages."""
    (body, headers), created = playground(), int(time.time())

    def model(name: str) -> dict[str, Any]:
        known, facts = ("method", "levels", "policy", "num_draft_tokens"), service.client.facts
        made = {"id": name, "object": "model", "created": created, "owned_by": "sameseed"}
        more = {"max_model_len": facts["max_model_len"], "speculation": {k: facts[k] for k in known}} if facts else {}
        return {**made, **more}

    @app.get("/v1/models", summary="The model that is served", responses=gives("object:string data:array"))
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [model(name) for name in service.config.names]})

    @app.get(
        "/v1/models/{name:path}",
        summary="One model",
        responses=errors(404) | gives("id:string object:string created:integer"),
    )
    async def one_model(name: str) -> JSONResponse:
        if name not in service.config.names:
            raise ApiError(404, "no model of this name here; see /v1/models", param="model", code="model_not_found")
        return JSONResponse(model(name))

    @app.get("/", include_in_schema=False)
    async def page_for_people() -> Response:
        return Response(body, media_type="text/html", headers=headers)

    @app.get("/version", summary="The server's version", responses=gives("version:string"))
    async def version() -> JSONResponse:
        return JSONResponse({"version": sameseed.__version__})

    @app.get("/metrics", summary="Counters and times, for Prometheus", response_class=PlainTextResponse)
    async def counters() -> PlainTextResponse:
        return PlainTextResponse(generate_latest(service.metrics.registry), media_type=metrics.CONTENT_TYPE)

    @app.get("/docs", summary="This interface, as a page", response_class=HTMLResponse)
    async def docs() -> HTMLResponse:
        made = page(app.openapi()).encode()
        return HTMLResponse(made, headers=secured(made))
