"""The application in front of vLLM: the same guard, gate, life cycle and errors as for sameseed's own engine."""

from __future__ import annotations

import hashlib
import json
import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from starlette.types import ASGIApp

import sameseed
from sameseed.server import limits
from sameseed.server.app import add_state, guarded
from sameseed.server.config import ServerConfig
from sameseed.server.connection import INLINE, held, visit_of
from sameseed.server.gate import Gate
from sameseed.server.metrics import CONTENT_TYPE
from sameseed_vllm.client import VllmClient
from sameseed_vllm.passable import check, check_greedy, num_prompts
from sameseed_vllm.relay import Relay

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize")


def own_metrics(client: VllmClient, gate: Gate) -> tuple[CollectorRegistry, Counter]:
    """The proxy's own metrics, named apart from vLLM's, whose page is passed on; and the counter of answers."""
    registry = CollectorRegistry()
    what = "requests, by route and status (499: the client left)"
    requests = Counter("sameseed:http_requests", what, ("route", "status"), registry=registry)
    for name, text, value in (
        ("num_requests_inside", "sequences that run or wait", lambda: gate.num_inside),
        ("num_requests_refused", "requests refused by a full queue", lambda: gate.num_refused),
        ("engine_up", "1 while vLLM is loaded", lambda: float(client.state == "ready")),
        ("engine_restarts", "processes that replaced a dead one", lambda: client.num_restarts),
    ):
        Gauge(f"sameseed:{name}", text, registry=registry).set_function(value)
    return registry, requests


def create_proxy(client: VllmClient, config: ServerConfig) -> tuple[ASGIApp, Gate]:
    """The ASGI application and its gate. The application's lifespan starts and ends vLLM."""
    gate = Gate(config.max_queue, len(config.keys))
    gate.max_running = client.facts["max_num_seqs"]
    registry, requests = own_metrics(client, gate)
    created = int(time.time())
    app = FastAPI(lifespan=client.living, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    for path in PATHS:
        app.add_api_route(path, _passing(client, config, gate, path), methods=["POST"])
    add_state(app, client, gate)

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        # Not vLLM's own answer, which names the model's folder.
        limit = client.facts.get("max_model_len")
        made = {"object": "model", "created": created, "owned_by": "vllm"}
        made |= {"max_model_len": limit} if limit else {}
        return JSONResponse({"object": "list", "data": [{"id": name, **made} for name in config.names]})

    @app.get("/version")
    async def version() -> JSONResponse:
        return JSONResponse({"version": sameseed.__version__, "vllm": client.facts.get("version")})

    @app.get("/metrics")
    async def counters() -> PlainTextResponse:
        page = await client.page("/metrics") + generate_latest(registry)
        return PlainTextResponse(page, media_type=CONTENT_TYPE)

    return guarded(app, config, lambda visit, route, status: requests.labels(route, str(status)).inc()), gate


def _passing(client: VllmClient, config: ServerConfig, gate: Gate, path: str) -> Any:
    """A route that checks bodies and passes them on to vLLM's route of the same path."""

    async def route(request: Request) -> Relay:
        visit = visit_of(request)
        async with held(request, gate) as body:
            client.check_ready()
            large = visit.size > INLINE
            await limits.away(large, lambda: check(body))
            if path.startswith("/v1/"):
                if client.facts.get("greedy_only"):
                    check_greedy(body)
                salt(body, visit.tenant)
            count = int(body.get("n") or 1) * num_prompts(body.get("prompt"))
            with gate.enter(visit.tenant, count, visit.size) as ticket:
                raw = await limits.away(large, lambda: _written(body))
                return Relay(client, path, raw, ticket.pop_all(), config.request_timeout)

    return route


def salt(body: dict[str, Any], tenant: str) -> None:
    """Set `cache_salt` from the tenant and the request's own salt, so that tenants never share cached prefixes."""
    own = body.get("cache_salt")
    if tenant or own is not None:
        body["cache_salt"] = hashlib.sha256(json.dumps([tenant, own]).encode()).hexdigest()


def _written(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
