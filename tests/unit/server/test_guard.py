"""The routes without an engine: keys, hosts, sizes, errors in one shape everywhere, and the playground's page."""

import asyncio
import base64
import hashlib
import re
from typing import Any

import httpx
import pytest
from fixtures_server import visiting, visitor

from sameseed.server import connection
from sameseed.server.app import PAGE, create_app
from sameseed.server.client import EngineClient
from sameseed.server.config import Keys, ServerConfig
from sameseed.server.limits import MAX_BODY

KEY = "a-key-for-the-test"
AUTHORIZED = {"authorization": f"Bearer {KEY}"}
WRITING = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


@pytest.fixture
async def locked():
    async with visitor(ServerConfig(host="0.0.0.0", keys=Keys((KEY, "another-key")))) as client:
        yield client


@pytest.fixture
async def open_():
    async with visitor(ServerConfig()) as client:
        yield client


def is_error(response, status):
    """Check that the response is an error in OpenAI's shape; returns the error."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"]
    assert not re.search(r"0x[0-9a-f]{4}|Traceback|\.py\b", response.text)
    return error


async def test_every_route_but_health_wants_a_key():
    """All routes, also one that is not in the OpenAPI document, unknown paths, and a connection that is not HTTP."""
    app: Any
    app, _ = create_app(EngineClient("x", {}), ServerConfig(host="0.0.0.0", keys=Keys((KEY,))))
    paths = {route.path.replace("{name:path}", "x") for route in app._app.routes} - {"/health", "/ready", "/"}
    assert paths >= {*WRITING, "/version", "/metrics", "/tokenize", "/openapi.json", "/v1/models/x"}
    methods = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE")
    routes = [(method, path) for path in sorted(paths) for method in methods]
    routes += [("GET", p) for p in ("/nowhere", "//", "/%2e%2e/", "/index.html", "//health", "/health/", "/HEALTH")]
    routes += [("POST", "/health"), ("POST", "/ready"), ("POST", "/")]
    async with visiting(app) as client:
        for method, path in routes:
            url = httpx.URL("http://127.0.0.1").copy_with(raw_path=path.encode())  # the path unchanged, not normalized
            for key in ({}, {"authorization": "Bearer wrong-key"}, {"authorization": f"Basic {KEY}"}, {"api-key": KEY}):
                response = await client.request(method, url, headers=key, content=b"{}")
                assert response.status_code == 401, (method, path)
                assert "bearer" in response.headers["www-authenticate"].lower()
                if method != "HEAD":
                    assert is_error(response, 401)["code"] == "invalid_api_key"
            assert (await client.request(method, path, headers=AUTHORIZED)).status_code != 401, (method, path)
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 503  # not loaded yet: a probe needs no key to learn it
        assert (await client.get("/")).status_code == 200  # the playground: the same page on every server, without data
    sent = []

    async def send(message):
        sent.append(message)

    await app({"type": "websocket", "path": "/v1/completions", "headers": []}, None, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.parametrize("host", ["x/health?", "localhost/health#", "x", "a@b:1/health"])
async def test_the_host_header_opens_nothing(locked, host):
    is_error(await locked.get("/v1/models", headers={"host": host}), 401)


async def test_keys_are_in_no_answer_and_no_log(locked, caplog):
    caplog.set_level("DEBUG")
    for key in (KEY, "a-wrong-key-here"):
        response = await locked.post("/v1/completions", headers={"authorization": f"Bearer {key}"}, json={"prompt": 1})
        assert key not in response.text
    assert KEY not in caplog.text and "a-wrong-key-here" not in caplog.text


async def test_other_names_of_this_machine_are_refused(open_):
    for host in ("localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST"):
        assert (await open_.get("/version", headers={"host": host})).status_code == 200
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8000", "localhost@evil.example", ""):
        for path in ("/version", "/"):
            is_error(await open_.get(path, headers={"host": host}), 403)
    async with visitor(ServerConfig(allowed_hosts=("My.Machine",))) as named:
        assert (await named.get("/version", headers={"host": "my.machine:80"})).status_code == 200


async def test_errors_have_one_shape_everywhere(open_):
    is_error(await open_.get("/nowhere"), 404)
    is_error(await open_.get("/v1/completions"), 405)
    is_error(await open_.get("/v1/models/other"), 404)
    for path in (*WRITING, "/tokenize", "/detokenize"):
        is_error(await open_.post(path, content=b"prompt=x"), 415)
        is_error(await open_.post(path, content=b"x", headers={"content-type": "text/plain"}), 415)
        for body in (b"{", b"[]", b"{}", b'{"a": NaN}'):
            is_error(await open_.post(path, content=body, headers={"content-type": "application/json"}), 400)
    packed = {"content-type": "application/json", "content-encoding": "gzip"}
    is_error(await open_.post("/detokenize", content=b"{}", headers=packed), 415)


async def test_large_bodies_are_refused_before_they_are_read(open_):
    json_type = {"content-type": "application/json"}
    for length in (str(MAX_BODY + 1), "9" * 30, "-1", "x"):
        is_error(await open_.post("/tokenize", content=b"{}", headers={**json_type, "content-length": length}), 413)
    is_error(await open_.get("/version", headers={f"x-{i}": "1" for i in range(200)}), 400)


async def test_bodies_are_bounded_together(open_, monkeypatch):
    """Until a body is read completely, its size is unknown: many at once must not fill the memory."""
    monkeypatch.setattr(connection, "MAX_ARRIVING", 1000)
    json_type, read, go_on = {"content-type": "application/json"}, asyncio.Event(), asyncio.Event()

    async def slow():
        yield b'{"prompt": "' + b"x" * 900
        read.set()  # the next chunk is requested, so this one is counted
        await go_on.wait()
        yield b'"}'

    waiting = asyncio.create_task(open_.post("/tokenize", content=slow(), headers=json_type))
    await read.wait()
    refused = await open_.post("/tokenize", json={"prompt": "x" * 200})
    assert "large requests" in is_error(refused, 503)["message"] and refused.headers["retry-after"] == "1"
    go_on.set()
    assert "loaded" in is_error(await waiting, 503)["message"], "it came as far as the engine"
    assert "loaded" in is_error(await open_.post("/tokenize", json={"prompt": "x" * 200}), 503)["message"]


async def test_without_an_engine(open_):
    bodies = {
        "/v1/completions": {"prompt": "x"}, "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/v1/responses": {"input": "x"}, "/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [1]},
    }  # fmt: skip
    for path, body in bodies.items():
        response = await open_.post(path, json=body)
        assert "loaded" in is_error(response, 503)["message"]
        assert int(response.headers["retry-after"]) > 0
        assert is_error(await open_.post(path, json={**body, "model": "other"}), 404)["code"] == "model_not_found"
    is_error(await open_.get("/ready"), 503)
    assert (await open_.get("/health")).json() == {"status": "ok", "engine": "loading"}
    assert (await open_.get("/v1/models")).json()["data"][0]["id"] == "embedded"


async def test_ids(open_):
    given = await open_.get("/version", headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    own = [
        (await open_.get("/version", headers={"x-request-id": bad})).headers["x-request-id"]
        for bad in ("a b", "x" * 200)
    ]
    assert len({*own, "a b"}) == 3 and all(re.fullmatch(r"[0-9a-f]{24}", i) for i in own)


async def test_metrics(open_):
    await open_.get("/nowhere/at/all")
    await open_.request("INVENTED", "/version")
    page = (await open_.get("/metrics")).text
    assert 'handler="other",method="GET",status="404"' in page and "nowhere" not in page
    assert 'method="other"' in page and "INVENTED" not in page


async def test_head_is_get_without_a_body(open_, locked):
    for path in ("/", "/health", "/version", "/v1/models"):
        head, got = await open_.head(path), await open_.get(path)
        assert head.status_code == 200 and not head.content
        assert head.headers["content-length"] == got.headers["content-length"]
    assert (await locked.head("/health")).status_code == 200
    assert (await open_.head("/v1/completions")).status_code == 405


async def test_other_names_of_the_model():
    async with visitor(ServerConfig(model_name="a", aliases=("b",))) as client:
        assert [m["id"] for m in (await client.get("/v1/models")).json()["data"]] == ["a", "b"]
        assert (await client.get("/v1/models/b")).json()["id"] == "b"
        is_error(await client.post("/detokenize", json={"tokens": [1], "model": "b"}), 503)
        is_error(await client.post("/detokenize", json={"tokens": [1], "model": "c"}), 404)


OTHERS, EVIL = "http://page.example", "http://evil.example"


@pytest.mark.parametrize(
    ("cors", "origin", "status", "leave"),
    [((), EVIL, 405, None), ((OTHERS,), EVIL, 400, None), ((OTHERS,), OTHERS, 200, OTHERS)],
)
async def test_pages_of_other_sites_may_call_where_the_operator_says_so(cors, origin, status, leave):
    asks = {"origin": origin, "access-control-request-method": "POST"}
    async with visitor(ServerConfig(cors=cors)) as client:
        assert (await client.options("/v1/completions", headers=asks)).status_code == status
        response = await client.get("/version", headers={"origin": origin})
        assert response.headers.get("access-control-allow-origin") == leave


async def test_the_page_is_the_same_for_everybody():
    """The page needs no key, since a browser has none to send; so it must not say anything about this server."""
    secret = ServerConfig(host="0.0.0.0", keys=Keys((KEY,)), model_name="a-secret-name")
    pages = []
    for config in (ServerConfig(), secret):
        async with visitor(config) as client:
            response = await client.get("/")
            assert response.status_code == 200
            names = ("content-type", "x-content-type-options", "x-frame-options", "referrer-policy")
            told = [response.headers[name] for name in names]
            assert told == ["text/html; charset=utf-8", "nosniff", "DENY", "no-referrer"]
            assert not [h for h in response.headers if h.startswith("access-control") or h == "set-cookie"]
            pages.append(response.content)
    assert pages[0] == pages[1] == PAGE.read_bytes()


async def test_the_browser_is_told_what_the_page_may_do():
    """One inline script and style, by hash, and requests to its own server; the page holds nothing else."""
    async with visitor(ServerConfig()) as client:
        header = (await client.get("/")).headers["content-security-policy"]
    rules, page = dict(rule.split(" ", 1) for rule in header.split("; ")), PAGE.read_text("utf-8")
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert rules["connect-src"] == "'self'" and rules["img-src"] == "data:"
    assert rules["require-trusted-types-for"] == "'script'" and rules["trusted-types"] == "'none'"
    assert "unsafe" not in header and "*" not in header and "http" not in header
    for kind in ("script", "style"):
        (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        assert rules[f"{kind}-src"] == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        page = page.replace(text, "")
    assert not re.search(
        r"<(iframe|object|embed|base|img|video|audio)\b|<[^>]*\s(on\w+|style|src|srcset|action)=", page
    )
    assert all("www.w3.org/2000/svg" in url for url in re.findall(r"https?://\S+", page)), "names of a namespace only"
