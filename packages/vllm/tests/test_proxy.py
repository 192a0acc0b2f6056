"""The server in front of vLLM, without vLLM: who is admitted, what is passed on, errors, and the only connection."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from fixtures_server import program, until, visiting

from sameseed.errors import ConfigError
from sameseed.server.config import Keys, ServerConfig
from sameseed.server.errors import ApiError
from sameseed_vllm import client as vllm, environments, relay
from sameseed_vllm.client import VllmClient
from sameseed_vllm.environments import look
from sameseed_vllm.link import Link
from sameseed_vllm.passable import REFUSED, check
from sameseed_vllm.proxy import PATHS, create_proxy, salt

KEY = "a-key-for-the-test"
FACTS = {"max_num_seqs": 2, "method": "none"}
IMAGE = {"type": "input_image", "image_url": "http://inside", "detail": "auto"}


def never_started(**facts: Any) -> VllmClient:
    return VllmClient([], {**FACTS, **facts}, python=sys.executable)


def visitor(config: ServerConfig) -> httpx.AsyncClient:
    app, _ = create_proxy(never_started(), config)
    return visiting(app)


async def test_every_route_but_health_wants_a_key() -> None:
    async with visitor(ServerConfig(host="0.0.0.0", keys=Keys((KEY,)))) as client:
        routes = [("POST", p) for p in PATHS]
        routes += [("GET", p) for p in ("/v1/models", "/version", "/metrics", "/docs", "/pause", "//health")]
        for method, path in routes:
            url = httpx.URL("http://127.0.0.1").copy_with(raw_path=path.encode())  # the path unchanged, not normalized
            response = await client.request(method, url)
            assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key", path
        assert (await client.get("/health")).status_code == 200


async def test_sampled_requests_are_refused_where_vllm_samples_wrongly(tmp_path: Path) -> None:
    client = never_started(greedy_only=True)
    client.state, client.link = "ready", Link(str(tmp_path / "none"), "key")
    app, _ = create_proxy(client, ServerConfig())
    async with visiting(app) as http:
        for body in ({}, {"temperature": 0.8}, {"temperature": None}):
            response = await http.post("/v1/completions", json={"prompt": "x", **body})
            assert response.status_code == 400 and "temperature 0" in response.json()["error"]["message"]
        unreached = await http.post("/v1/completions", json={"prompt": "x", "temperature": 0})
        assert unreached.status_code == 503 and int(unreached.headers["retry-after"]) > 0
        assert "sameseed:engine_up 1.0" in (await http.get("/metrics")).text, "without vLLM's own page"
    await client.link.close()


async def test_vllms_own_routes_are_not_there() -> None:
    async with visitor(ServerConfig()) as client:
        for path in ("/invocations", "/pause", "/update_weights", "/v1/load_lora_adapter", "/openapi.json", "/docs"):
            assert (await client.post(path, json={})).status_code == 404
        for path in PATHS:
            response = await client.post(path, json={"prompt": "x"})
            assert response.status_code == 503 and response.headers["retry-after"]
            assert (await client.post(path, content=b"{", headers={"content-type": "text/plain"})).status_code == 415
        assert (await client.get("/ready")).status_code == 503
        page = (await client.get("/metrics")).text
        assert "sameseed:engine_up 0.0" in page and 'route="/v1/completions",status="503"' in page


@pytest.mark.parametrize(
    "body",
    [
        *({name: "x"} for name in REFUSED),
        *({"n": value} for value in (17, 0, 1.5, True)),
        *({name: 21} for name in ("best_of", "logprobs", "top_logprobs", "prompt_logprobs")),
        {"logprobs": -1},
        {"stop": ["a"] * 65},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"chat_template_kwargs": {"x": ["y"]}},
        {"chat_template_kwargs": "x"},
        {"logit_bias": {str(i): 1 for i in range(1025)}},
        {"prompt": ["a"] * 65},
        {"prompt": [[1]] * 65},
        {"messages": [{"role": "user", "content": "x"}] * 4097},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://inside"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "audio_url"}]}]},
        {"messages": [{"role": "user", "content": ["x"]}]},
        {"messages": [{"role": "user", "content": {"type": "image_url", "image_url": {"url": "http://inside"}}}]},
        {"messages": [{"role": "user", "content": {"type": "text", "text": "x"}}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "uuid": "x", "image_url": "http://inside"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"image_url": "http://inside"}]}]},
        {"messages": [[{"role": "user", "content": [{"type": "input_audio"}]}]]},
        {"messages": [{"role": "tool", "tool_call_id": "x", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "assistant", "audio": {"id": "x"}}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://inside"}]}]},
        {"input": [{"type": "function_call_output", "call_id": "x", "output": [IMAGE]}]},
        {"input": [{"type": "function_call_output", "call_id": "x", "output": IMAGE}]},
        {"input": [{"type": "function_call_output", "call_id": "x", "output": [{"type": "text", "more": [IMAGE]}]}]},
        {"input": [{"type": "computer_call_output", "output": "x"}]},
        {"input": [{"type": "reasoning", "summary": [{"type": ["text"], "text": "x"}]}]},
        {"input": {"role": "user", "content": [IMAGE]}},
        {"prompt": {"id": "x", "variables": {"a": IMAGE}}},
        {"prompt": ["x", {"multi_modal_data": {}}]},
        {"tools": [{"type": "mcp", "server_label": "x", "server_url": "http://inside"}]},
        {"prompt_logprobs": "-1"},
        {"stop": "a" * 257},
        {"bad_words": ["a"] * 65},
        {"bad_words": ["a" * 257]},
        {"documents": [{}] * 4097},
    ],
    ids=lambda b: next(iter(b)),
)
def test_what_is_not_passed_on(body: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        check(body)
    assert caught.value.status == 400 and caught.value.param == next(iter(body))


def test_what_is_passed_on() -> None:
    check({"prompt": [1, 2, 3] * 100, "n": 16, "stop": ["a"] * 4, "logprobs": 20, "chat_template": None})
    check({"chat_template_kwargs": {"enable_thinking": False}})
    check(
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}, {"role": "user", "content": "y"}]}
    )
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"image_url": 1}'}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"file": {"type": "string"}}}}}
    answered = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "x"}]}
    check({"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}, answered], "tools": [tool]})
    check({"messages": [{"role": "assistant", "content": "x", "audio": None, "refusal": None, "annotations": []}]})
    said = {"type": "output_text", "text": "x", "annotations": []}
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "assistant", "content": [said]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
    ]
    check({"input": items, "tools": [{"type": "function", "name": "f"}], "text": {"format": {"type": "text"}}})
    check({"tokens": [1] * 5000})
    check({"input": "x", "logprobs": True, "background": False, "response_format": {"type": "json_object"}})


def test_tenants_share_no_prefix() -> None:
    def salted(tenant: str, **body: Any) -> str | None:
        salt(body, tenant)
        return body.get("cache_salt")

    assert salted("") is None
    found = [salted("a"), salted("b"), *(salted(tenant, cache_salt="x") for tenant in ("a", "b", ""))]
    assert None not in found and len(set(found)) == 5 and salted("a") == found[0]


def test_errors_lose_paths_and_addresses() -> None:
    body = {"error": {"message": "no /srv/secret/model.py at 0x7f00aabbccdd", "type": "x", "param": "p", "code": 422}}
    made = relay.told(422, json.dumps(body).encode())
    assert (made.status, made.param, made.message) == (400, "p", "no ... at ...")
    assert relay.told(401, b'{"error": "Unauthorized"}').status == 500  # a matter between us and vLLM
    assert relay.told(503, b"<html>").status == 503 and relay.told(404, b"[]").status == 404
    made = relay.told(400, b'{"error": {"message": "ask http://10.0.0.1:80/x or 10.0.0.2:5555", "param": "10.0.0.3"}}')
    assert (made.status, made.param, made.message) == (400, "...", "ask ... or ...")


async def test_one_that_never_gets_ready_is_a_dead_one(tmp_path: Path) -> None:
    python = program(tmp_path / "python", "exec sleep 600")
    failures: list[str] = []
    client = VllmClient([], FACTS, python=str(python), load_timeout=0.2)
    client.on_failure = failures.append
    client.start()
    with pytest.raises(ApiError):
        await asyncio.wait_for(client.wait_ready(), 10)
    assert client.state == "failed" and len(failures) == 1
    await client.close()


async def test_a_vllm_that_is_gone_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM that reports no facts still serves; then it dies, and it cannot be started again."""
    said: list[str] = []
    python = program(tmp_path / "python", "exec sleep 60")

    async def page(link: Link, path: str, patience: float = 0.0) -> tuple[int, bytes]:
        return 200, b'{"data": null}'

    monkeypatch.setattr(Link, "get", page)
    monkeypatch.setattr(vllm, "LOADING", 0.0)
    client = VllmClient([], {}, python=str(python), max_restarts=2, first_delay=0.01)
    client.on_failure = said.append
    client.start()
    await asyncio.wait_for(client.wait_ready(), 20)
    python.unlink()
    os.kill(client.pid or 0, 9)
    await until(lambda: said)
    assert said[0] == "vLLM could not be started: No such file or directory"
    await client.close()


def test_no_vllm_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="pip install vllm"):
        VllmClient([], FACTS)
    with pytest.raises(ConfigError, match="--vllm-python"):
        VllmClient([], FACTS, python="/nowhere/python")


def test_an_interpreter_is_asked_what_vllm_it_has(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not run Python programs .*no such thing"):
        look(str(program(tmp_path / "broken", "echo no such thing >&2; exit 1")))
    python = program(tmp_path / "python", f'PYTHONPATH={tmp_path} exec {sys.executable} "$@"')
    args = tmp_path / "vllm/engine/arg_utils.py"
    args.parent.mkdir(parents=True)
    args.write_text('add("-x", "--written-out")\nclass EngineArgs:\n    a_field: int = 0\n')
    (tmp_path / "vllm/__init__.py").write_text("raise SystemExit('loaded')")
    (tmp_path / "vllm/_version.py").write_text("__version__ = version = '0.31.2+cpu'\n")
    (tmp_path / "ray.py").write_text("")
    found = look(str(python))
    assert (found.version, found.number, found.cpu) == ("0.31.2+cpu", (0, 31), True)
    assert found.flags == {"--written-out", "--a-field"} and found.modules == {"ray"}


async def test_the_one_connection_is_to_the_socket(tmp_path: Path) -> None:
    """Whatever a request contains, the server connects only to the socket's path."""
    path = str(tmp_path / "s")
    seen: list[Any] = []
    on = True

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        if on and name == "socket.connect":
            seen.append(arguments[1])

    sys.addaudithook(hook)
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 307 Elsewhere\r\nlocation: http://127.0.0.1:9/x\r\nconnection: close\r\n")
        writer.write(b"content-length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, path)
    link = Link(path, "secret")
    try:
        assert (await link.get("/health", 5.0))[0] == 307  # redirects are not followed
        async with link.post("/v1/completions", b"{}") as response:
            assert response.status == 307
        assert (await link.get("//elsewhere/x"))[0] in (0, 307)
    finally:
        await link.close()
        server.close()
        on = False
    assert seen and set(seen) == {path}
    assert all(b"Bearer secret" in head for head in heads)


ENTRY = "import sys, time\ndef main():\n    print(sys.argv, sys.path[0], flush=True)\n    time.sleep(60)\n"


@pytest.mark.parametrize("named", [True, False])
def test_the_start_of_vllm(named: bool, tmp_path: Path) -> None:
    """It calls vLLM's command, or its server if the package has another name, and ends when its pipe is closed."""
    place = tmp_path / ("vllm/entrypoints/cli/main.py" if named else "vllm/entrypoints/launchers/api_server/entry.py")
    place.parent.mkdir(parents=True)
    place.write_text(ENTRY)
    if named:
        (tmp_path / "vllm-1.dist-info").mkdir()
        (tmp_path / "vllm-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 1\n")
    theirs, ours = os.pipe()
    process = subprocess.Popen(
        [sys.executable, str(vllm.START), str(theirs), "MODEL", "--uds", "s"],
        pass_fds=(theirs,),
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(tmp_path)},
        start_new_session=True,
    )
    os.close(theirs)
    assert process.stdout is not None
    said = process.stdout.readline()
    assert (
        "['vllm', 'serve', 'MODEL', '--uds', 's']" if named else "['vllm', '--model', 'MODEL', '--uds', 's']"
    ) in said
    assert str(tmp_path) in said  # vLLM's modules, not those beside vllm_start.py
    assert process.poll() is None
    os.close(ours)
    assert process.wait(10) == -9
