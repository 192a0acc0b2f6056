"""A request through vLLM that goes wrong: what its client gets and what is counted. Events lose internals only."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from sameseed.server import answer
from sameseed.server.config import ServerConfig
from sameseed.server.connection import CUT, Patient, Visit
from sameseed.server.errors import ApiError, unavailable
from sameseed.server.gate import Gate
from sameseed_vllm import relay
from sameseed_vllm.proxy import create_proxy
from sameseed_vllm.relay import Events, Relay, without_places

EVENT = b'data: {"choices":[]}\n\n'
STREAM, WHOLE = "text/event-stream; charset=utf-8", "application/json"


class Answered:
    """vLLM's answer: chunks, then its end, silence, a flood or vLLM's death."""

    status = 200

    def __init__(self, kind: str, chunks: list[bytes], end: str = "ends") -> None:
        self.headers, self.content = {"content-type": kind}, self
        self._arrives, self._end = chunks, end

    async def iter_any(self) -> AsyncIterator[bytes]:
        for chunk in self._arrives:
            yield chunk
            await asyncio.sleep(0)
        while self._end == "floods":
            yield b"data: " + b"x" * 60000 + b"\n\n"
            await asyncio.sleep(0)
        if self._end == "is silent":
            await asyncio.sleep(1e6)
        if self._end == "dies":
            raise unavailable("the engine stopped")


class Alone:
    """Stands in for VllmClient: no process, and one answer for every request."""

    state, facts = "ready", {"max_num_seqs": 8, "method": "none"}

    def __init__(self, answered: Answered) -> None:
        self.answered = answered

    @asynccontextmanager
    async def living(self, app: Any) -> AsyncIterator[None]:
        yield

    def check_ready(self) -> None:
        pass

    @asynccontextmanager
    async def post(self, request: Any, path: str, body: bytes) -> AsyncIterator[Answered]:
        yield self.answered


class Told:
    """What a relay sent, and its gate and visit."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.visit = Visit("r")
        self.gate = Gate(4)
        self.num_cuts = 0

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.sent)

    @property
    def ended(self) -> bool:
        return not self.sent[-1].get("more_body", True)


async def relayed(answered: Answered, *, reads: bool = True, timeout: float = 10.0, stopped: bool = False) -> Told:
    """Relay this answer. `reads`: whether the client reads; `stopped`: the server shuts down meanwhile."""
    told = Told()

    def count() -> None:
        told.num_cuts += 1

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(1e6)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        assert (message["type"] == "http.response.start") == (not told.sent)
        if told.sent and not reads:
            await asyncio.sleep(1e6)
        told.sent.append(message)

    client: Any = Alone(answered)
    made = Relay(client, "/v1/completions", b"{}", told.gate.enter("", 1, 10), timeout)
    if stopped:
        asyncio.get_running_loop().call_later(0.02, made.leave, unavailable("the server is shutting down"))
    scope: Any = {"type": "http", "sameseed": told.visit, CUT: count}
    await asyncio.wait_for(made(scope, receive, send), 20)  # type: ignore[arg-type]
    assert told.gate.num_inside == told.gate.size_inside == 0
    return told


@pytest.mark.parametrize(("timeout", "stopped", "status"), [(0.02, False, 408), (10.0, True, 503)])
@pytest.mark.parametrize("kind", [STREAM, WHOLE])
async def test_who_does_not_read_is_cut_off(
    kind: str, timeout: float, stopped: bool, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer, "GRACE", 0.02)
    told = await relayed(Answered(kind, [EVENT], "is silent"), reads=False, timeout=timeout, stopped=stopped)
    assert told.visit.outcome == status and told.num_cuts == 1 and not told.body


async def test_who_reads_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments while vLLM is silent, since only writing shows that a client has left; then the error."""
    monkeypatch.setattr(answer, "QUIET", 0.01)
    told = await relayed(Answered(STREAM, [EVENT], "is silent"), timeout=1.0)
    first, *comments, error, done, rest = told.body.split(b"\n\n")
    assert first + b"\n\n" == EVENT and set(comments) == {b":"} and (done, rest) == (b"data: [DONE]", b"")
    assert json.loads(error[5:])["error"]["code"] == "timeout"
    assert told.visit.outcome == 408 and told.ended and not told.num_cuts
    late = await relayed(Answered(WHOLE, [], "dies"))
    assert late.visit.outcome == 503 and late.sent[0]["status"] == 200 and late.num_cuts == 1


async def test_half_of_a_body_is_cut_off() -> None:
    """No error can be sent in the middle of a body; the request still counts as failed."""
    told = await relayed(Answered(WHOLE, [b'{"id": '], "dies"))
    assert told.visit.outcome == 503 and told.body == b'{"id": ' and not told.ended and told.num_cuts == 1


async def test_half_of_an_event_is_not_passed_on() -> None:
    told = await relayed(Answered(STREAM, [EVENT + b'data: {"choices":[{"te', b'xt": "x'], "dies"))
    events = told.body.split(b"\n\n")
    assert events[0] + b"\n\n" == EVENT and len(events) == 4
    assert json.loads(events[1][5:])["error"]["type"] == "service_unavailable_error" and told.ended
    assert told.visit.outcome == 503


async def test_an_error_in_a_stream_is_counted() -> None:
    parts = [b'data: {"err', b'or": {"message": "/srv/secret/x failed", "code": 500}}\n', b"\ndata: [DONE]\n\n"]
    told = await relayed(Answered(STREAM, parts))
    assert b"secret" not in told.body and b"... failed" in told.body and told.body.endswith(b"data: [DONE]\n\n")
    assert told.visit.outcome == 500
    fine = await relayed(Answered(STREAM, [EVENT, b"data: [DONE]\n", b"\n"]))
    assert fine.visit.outcome == 200 and fine.body == EVENT + b"data: [DONE]\n\n"


HEAD = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


async def test_connections_of_those_who_do_not_read_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a server and sockets: the place and the connection become free, although the client keeps its end open."""
    monkeypatch.setattr(answer, "GRACE", 0.2)
    client: Any = Alone(Answered(STREAM, [], "floods"))
    app, gate = create_proxy(client, ServerConfig(model_name="m", max_queue=0, request_timeout=0.5))
    sizes: list[int] = []
    count = gate.count
    monkeypatch.setattr(gate, "count", lambda *counted: (sizes.append(counted[-1]), count(*counted)))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    config = uvicorn.Config(app, http=Patient, lifespan="on", log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    body = b'{"prompt": "a", "stream": true}'
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.setblocking(False)
        await asyncio.get_running_loop().sock_connect(silent, listener.getsockname())
        chunked = b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        await asyncio.get_running_loop().sock_sendall(silent, HEAD.encode() + chunked)
        for _ in range(200):
            await asyncio.sleep(0.05)
            if sizes and not gate.num_inside and not server.server_state.connections:
                break
        assert sizes and not gate.num_inside and not server.server_state.connections
        assert sizes == [len(body), -len(body)]  # without content-length, the bytes read are counted
    server.should_exit = True
    await asyncio.wait_for(task, 10)


# --- events, however they are split into chunks ---

SECRET = "no /srv/secret/x.py at http://10.0.0.1:80/a, tcp://node:5555 or 10.0.0.2:443, 0x7f00aabbccdd"


def data(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("line", [b"\n", b"\r\n"])
def test_whole_events_in_any_chunks(size: int, line: bytes) -> None:
    first = b"event: a" + line + b'data: {"text": "\\"error\\": x"}' + line * 2
    rest = b": still here" + line * 2 + b"data: [DONE]" + line * 2
    fault = b'data: {"choices": [], "error": {"message": "/srv/secret/x"}}' + line * 2
    every = first + fault + rest
    taker = Events()
    given = [taker.feed(every[at : at + size]) for at in range(0, len(every), size)]
    assert all(not g or g.endswith((b"\n\n", b"\n\r\n")) for g in given)
    made = b"".join(given) + taker.end()
    assert made.startswith(first) and made.endswith(rest)
    assert b"secret" not in made and taker.failed and json.loads(made[len(first) : -len(rest)][5:])["error"]


@pytest.mark.parametrize(
    "fault",
    [
        {"error": {"message": SECRET, "code": 500}},
        {"choices": [], "error": {"message": SECRET}},
        {"error": SECRET},
        {"type": "error", "message": SECRET, "code": SECRET, "param": None, "sequence_number": 3},
        {"type": "response.failed", "response": {"output": [], "error": {"code": "server_error", "message": SECRET}}},
    ],
)
def test_errors_hold_no_inside(fault: dict[str, Any]) -> None:
    taker = Events()
    made = taker.feed(b"event: error\n" + data(fault))
    for inside in (b"secret", b"10.0.0", b"node", b"0x7f"):
        assert inside not in made
    head, line = made.rstrip(b"\n").split(b"\n")
    told = json.loads(line[5:])
    assert taker.failed and head == b"event: error" and told.get("type") == fault.get("type")
    assert ("error" in told) == ("error" in fault) and told.get("sequence_number") == fault.get("sequence_number")


@pytest.mark.parametrize(
    "fine", [{"response": {"error": None, "output": []}}, {"error": None, "choices": []}, {"text": '{"error": 1}'}, [1]]
)
def test_what_tells_of_no_error_stays(fine: Any) -> None:
    taker = Events()
    assert taker.feed(data(fine)) == data(fine) and not taker.failed


def test_what_is_no_json_is_not_repeated() -> None:
    made = Events().feed(b'data: {"error": /srv/secret\n\n')
    assert b"secret" not in made and b"failed" in made
    taker = Events()
    assert taker.feed(b'data: {"error": "/srv/secret"}') == b"" and b"secret" not in taker.end() and taker.end() == b""


def test_an_event_without_end_is_not_held_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MAX_EVENT", 100)
    taker = Events()
    with pytest.raises(ApiError):
        for _ in range(20):
            assert taker.feed(b"data: xxxx") == b""


def test_places() -> None:
    assert without_places("max_tokens 5.5 of 1.2.3, [1:2] and 10:30 o'clock") == (
        "max_tokens 5.5 of 1.2.3, [1:2] and 10:30 o'clock"
    )
    assert without_places("at http://a/b?c=d. [::1]:80 localhost:8000 192.168.0.1") == "at ... ... ... ..."
