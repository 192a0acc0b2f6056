"""The application in front of vLLM: the same guard, gate, life cycle and errors as for sameseed's own engine."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from starlette.types import ASGIApp

import sameseed
from sameseed.server import limits
from sameseed.server.app import add_state, guarded
from sameseed.server.config import ServerConfig
from sameseed.server.connection import visit_of
from sameseed.server.gate import Gate
from sameseed.server.metrics import CONTENT_TYPE
from sameseed.server.reading import INLINE, Intake
from sameseed_vllm.passable import check, check_greedy, num_prompts
from sameseed_vllm.relay import Relay
from sameseed_vllm.replicas import Replica, Replicas
from sameseed_vllm.routing import RoutedCall, beginnings

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize")
_PREFIX = re.compile(rb"^(# (?:HELP|TYPE) )?vllm:", re.MULTILINE)


def own_metrics(replicas: Replicas, gate: Gate) -> tuple[CollectorRegistry, Counter]:
    """The proxy's own metrics, named apart from vLLM's, whose page is passed on; and the counter of answers.

    If there are several replicas, each has values of its own, by label.
    """
    registry, several = CollectorRegistry(), len(replicas.all) > 1
    what = "requests, by route and status (499: the client left)"
    requests = Counter("sameseed:http_requests", what, ("route", "status"), registry=registry)
    for name, text, value in (
        ("num_requests_inside", "sequences that run or wait", lambda: gate.num_inside),
        ("num_requests_refused", "requests refused by a full queue", lambda: gate.num_refused),
    ):
        Gauge(f"sameseed:{name}", text, registry=registry).set_function(value)
    of_each: tuple[tuple[str, str, Callable[[Replica], float]], ...] = (
        ("engine_up", "1 while vLLM is loaded", lambda replica: float(replica.ready)),
        ("engine_restarts", "processes that replaced a dead one", lambda replica: replica.num_restarts),
        ("engine_load", "sequences that were sent there and are not answered", lambda replica: replica.load),
    )
    for name, text, of in of_each:
        gauge = Gauge(f"sameseed:{name}", text, ("replica",) if several else (), registry=registry)
        for replica in replicas.all:
            (gauge.labels(replica.number) if several else gauge).set_function(partial(of, replica))
    return registry, requests


def create_proxy(client: Replicas, config: ServerConfig) -> tuple[ASGIApp, Gate]:
    """The ASGI application and its gate. The application's lifespan starts and ends vLLM."""
    gate = Gate(config.max_queue, len(config.keys), config.keys.limits)
    gate.max_running = client.facts["max_num_seqs"] * len(client.all)
    registry, requests = own_metrics(client, gate)
    created = int(time.time())
    app = FastAPI(lifespan=client.living, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    intake = Intake()
    for path in PATHS:
        app.add_api_route(path, _passing(client, config, gate, intake, path), methods=["POST"])
    add_state(app, client, gate)

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        # Not vLLM's own answer, which names the model's folder.
        limit = client.facts.get("max_model_len")
        made = {
            "object": "model",
            "created": created,
            "owned_by": "vllm",
            **({"max_model_len": limit} if limit else {}),
        }
        return JSONResponse({"object": "list", "data": [{"id": name, **made} for name in config.names]})

    @app.get("/version")
    async def version() -> JSONResponse:
        return JSONResponse({"version": sameseed.__version__, "vllm": client.facts.get("version")})

    @app.get("/metrics")
    async def counters() -> PlainTextResponse:
        own = generate_latest(registry)
        pages = await client.pages("/metrics")
        page = joined(pages) if len(client.all) > 1 else b"".join(page for _, page in pages)
        prefix = config.metrics_prefix.encode()
        own = (page if prefix == b"vllm:" else _PREFIX.sub(rb"\g<1>" + prefix, page)) + own
        return PlainTextResponse(own, media_type=CONTENT_TYPE)

    return guarded(app, config, lambda visit, route, status: requests.labels(route, str(status)).inc()), gate


def _passing(client: Replicas, config: ServerConfig, gate: Gate, intake: Intake, path: str) -> Any:
    """A route that checks bodies and passes them on to vLLM's route of the same path."""

    async def route(request: Request) -> Relay:
        visit = visit_of(request)
        async with intake.held(request) as body:
            client.check_ready()
            large = visit.size > INLINE
            await limits.away(large, lambda: check(body))
            if path.startswith("/v1/"):
                if client.facts.get("greedy_only"):
                    check_greedy(body)
                salt(body, visit.tenant)
            count = int(body.get("n") or 1) * num_prompts(body.get("prompt"))
            with gate.enter(visit.tenant, count, visit.size) as ticket:
                made = path, body, count, len(client.all) > 1
                call = await limits.away(large, lambda: _call(*made))
                return Relay(client, call, ticket.pop_all(), config.request_timeout)

    return route


def salt(body: dict[str, Any], tenant: str) -> None:
    """Set `cache_salt` from the tenant and the request's own salt, so that tenants never share cached prefixes."""
    own = body.get("cache_salt")
    if tenant or own is not None:
        body["cache_salt"] = hashlib.sha256(json.dumps([tenant, own]).encode()).hexdigest()


def _call(path: str, body: Mapping[str, Any], num_seqs: int, several: bool) -> RoutedCall:
    """The call with the body as JSON. Digests of its beginnings are only needed to choose among several replicas."""
    raw = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    return RoutedCall(path, raw, beginnings(path, body) if several else (), num_seqs)


_HEAD = re.compile(rb"# (?:HELP|TYPE) (\S+)")
_SAMPLE = re.compile(rb"^([A-Za-z_:][\w:]*)(?:\{([^\n]*)\})?(?= )", re.MULTILINE)


def joined(pages: Iterable[tuple[int, bytes]]) -> bytes:
    """Join numbered pages in Prometheus's text format: `replica="NUMBER"` becomes the first label of each sample."""
    heads: dict[bytes, list[bytes]] = {}  # HELP and TYPE by metric, in the order of the first page
    samples: dict[bytes, list[bytes]] = {}
    for number, page in pages:
        name, label = b"", b'replica="%d"' % number
        for line in page.splitlines():
            head = _HEAD.match(line)
            if head is not None:
                name = head[1]
                if line not in heads.setdefault(name, []) and not samples.get(name):
                    heads[name].append(line)
            elif line and not line.startswith(b"#"):
                samples.setdefault(name, []).append(_labelled(line, label))
    names = dict.fromkeys([*heads, *samples])
    lines = [line for name in names for line in (*heads.get(name, ()), *samples.get(name, ()))]
    return b"".join(line + b"\n" for line in lines)


def _labelled(line: bytes, label: bytes) -> bytes:
    return _SAMPLE.sub(lambda m: m[1] + b"{" + label + (b"," + m[2] if m[2] else b"") + b"}", line, count=1)
