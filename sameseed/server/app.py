"""The application: routes, and what wraps them. `create_app` makes one; `server/run.py` serves it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence as Seq
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

import sameseed
from sameseed.server import metrics, protocol
from sameseed.server.answer import Answer, error_response
from sameseed.server.client import EngineClient
from sameseed.server.config import ServerConfig
from sameseed.server.conversation import plain
from sameseed.server.errors import ApiError, bad_request, unavailable
from sameseed.server.gate import Gate
from sameseed.server.guard import Guard, visit_of
from sameseed.server.interface import SUMMARY, described, errors, fitted, page
from sameseed.server.playground import Playground
from sameseed.server.service import Service
from sameseed.server.text import TextCodec

if TYPE_CHECKING:
    from sameseed.server.vllm import VllmClient


def create_app(client: EngineClient, config: ServerConfig) -> tuple[ASGIApp, Service]:
    """The application and its service. Its lifespan starts and ends the engine's process."""
    service = Service(client, config)
    app = FastAPI(
        title="sameseed",
        version=sameseed.__version__,
        summary=SUMMARY,
        lifespan=lifespan(client),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        openapi_url="/openapi.json",
        responses=errors(400, 401, 403, 500),  # of the guard, on every route
    )
    app.add_exception_handler(RequestValidationError, _validation_error)
    _add_writing(app, service)
    _add_models(app, client, config)
    add_state(app, client, service.gate)
    _add_reading(app, service)
    _add_tokens(app, service)
    _add_playground(app)
    describe = app.openapi
    app.openapi = lambda: fitted(describe(), config.model_name, client.text, bool(config.keys))  # type: ignore[method-assign]
    return Guard(app, config, service.metrics), service


def _add_writing(app: FastAPI, service: Service) -> None:
    """The routes that write text."""

    @app.post("/v1/completions", **described([protocol.CompletionFields], "Continue a text", True))
    async def completions(request: Request) -> Answer:
        return await service.completions(request)

    @app.post("/v1/chat/completions", **described([protocol.ChatFields], "Answer a conversation", True))
    async def chat(request: Request) -> Answer:
        return await service.chat(request)

    @app.post(
        "/v1/responses", **described([protocol.ResponseFields], "Answer, in the newer form; nothing is stored", True)
    )
    async def responses(request: Request) -> Answer:
        return await service.responses(request)


def _add_models(app: FastAPI, client: EngineClient, config: ServerConfig) -> None:
    """The routes that tell of the model."""
    created = int(time.time())

    def model() -> dict[str, Any]:
        made: dict[str, Any] = {"id": config.model_name, "object": "model", "created": created, "owned_by": "sameseed"}
        facts = client.facts
        if facts:
            made["max_model_len"] = facts["max_model_len"]
            made["speculation"] = {k: facts[k] for k in ("method", "levels", "policy", "num_draft_tokens")}
        return made

    @app.get("/v1/models", summary="The model that is served")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [model()]})

    @app.get("/v1/models/{name:path}", summary="One model", responses=errors(404))
    async def one_model(name: str) -> JSONResponse:
        if name != config.model_name:
            raise ApiError(404, f"no model {name[:256]!r} here", param="model", code="model_not_found")
        return JSONResponse(model())


def lifespan(client: EngineClient | VllmClient) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """An application's life: that of the engine's process."""

    @asynccontextmanager
    async def living(app: FastAPI) -> AsyncIterator[None]:
        client.start()
        yield
        await client.close()

    return living


def add_state(app: FastAPI, client: EngineClient | VllmClient, gate: Gate) -> None:
    """The routes that say whether the engine runs; and how errors are told."""
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ApiError, _api_error)

    @app.get("/health", summary="Is the server alive? 503 while a dead engine is replaced", responses=errors(503))
    async def health() -> JSONResponse:
        if client.state in ("down", "failed", "closed"):
            raise unavailable("the engine has stopped")
        return JSONResponse({"status": "ok", "engine": client.state})

    @app.get("/ready", summary="May requests be sent? Not while loading or draining", responses=errors(503))
    async def ready() -> JSONResponse:
        if gate.closed:
            raise unavailable("the server is shutting down")
        client.check_ready()
        return JSONResponse({"status": "ready"})


def _add_reading(app: FastAPI, service: Service) -> None:
    """The routes that tell of the server."""

    @app.get("/version", summary="The server's version")
    async def version() -> JSONResponse:
        return JSONResponse({"version": sameseed.__version__})

    @app.get("/metrics", summary="Counters and times, for Prometheus", response_class=PlainTextResponse)
    async def counters() -> PlainTextResponse:
        return PlainTextResponse(service.metrics.render(), media_type=metrics.CONTENT_TYPE)

    @app.get("/docs", summary="This interface, as a page", response_class=HTMLResponse)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page(app.openapi()))


def _add_tokens(app: FastAPI, service: Service) -> None:
    """Text to tokens and back."""

    forms = (protocol.TokenizeFields, protocol.TokenizeChatFields)

    @app.post("/tokenize", **described(forms, "Token ids of a text, or of a conversation"))
    async def tokenize(request: Request) -> JSONResponse:
        fields: protocol.TokenizeFields | protocol.TokenizeChatFields = await service.fields(request, *forms)
        text, visit = service.loaded(fields.model), visit_of(request)
        with service.gate.enter(visit.tenant, 0, visit.size):
            if isinstance(fields, protocol.TokenizeFields):
                ids = await text.encode(fields.prompt, fields.add_special_tokens is not False)
            else:
                messages = await service.aside(request, lambda: plain(fields.messages))
                ids = await text.encode_chat(messages, size=visit.size)
            return await service.aside(
                request, lambda: JSONResponse(_tokens(text, ids, bool(fields.return_token_strs)))
            )

    @app.get("/tokenizer_info", summary="Special tokens and the chat template", responses=errors(503))
    async def tokenizer_info() -> JSONResponse:
        tokenizer = service.loaded(None).tokenizer
        named = {name: tokenizer.special.get(name) for name in ("bos_token", "eos_token", "pad_token")}
        return JSONResponse({**named, "chat_template": tokenizer.chat_template})

    @app.post("/detokenize", **described([protocol.DetokenizeFields], "Text of token ids"))
    async def detokenize(request: Request) -> JSONResponse:
        fields = await service.fields(request, protocol.DetokenizeFields)
        visit = visit_of(request)
        with service.gate.enter(visit.tenant, 0, visit.size):
            return JSONResponse({"prompt": await service.loaded(fields.model).decode(fields.tokens)})


def _tokens(text: TextCodec, ids: Seq[int], shown: bool) -> dict[str, Any]:
    """The answer of /tokenize; `shown`: with what each token spells."""
    made: dict[str, Any] = {"count": len(ids), "max_model_len": text.max_model_len, "tokens": ids}
    return made | ({"token_strs": [text.pieces.text(i) for i in ids]} if shown else {})


def _add_playground(app: FastAPI) -> None:
    """The page for people. It is no part of the interface."""
    shown = Playground.read()

    @app.get("/", include_in_schema=False)
    async def playground() -> Response:
        return Response(shown.body, media_type="text/html", headers=shown.headers)


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
