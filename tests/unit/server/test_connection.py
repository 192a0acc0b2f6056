"""Connections: a request's length can be read in one way only, and half-closed clients get their answers."""

import asyncio
import socket
import struct
from contextlib import asynccontextmanager

import pytest
import uvicorn
from fixtures_server import until

from sameseed.server import connection, run
from sameseed.server.app import create_app
from sameseed.server.client import EngineClient
from sameseed.server.config import ServerConfig

HOST = b"Host: localhost\r\n"
GET = b"GET / HTTP/1.1\r\n" + HOST + b"\r\n"
POST = b"POST / HTTP/1.1\r\n" + HOST
H2C = GET[:-2] + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n"  # as Java's client asks
CHUNKED = b"Transfer-Encoding: chunked\r\n"
WAITS = {"/slow": 1.2, "/long": 60.0}  # seconds until the answer, unless the client leaves
BODY, CHUNKS = b"hello", b"5\r\nhello\r\n0\r\n\r\n"


@asynccontextmanager
async def served(app):
    """The address of a server of this application."""
    listener = run.bind("127.0.0.1", 0)
    config = uvicorn.Config(app, http=connection.Patient, lifespan="off", log_config=None, access_log=False)
    server = run._Server(config)
    serving = asyncio.create_task(server.serve([listener]))
    yield listener.getsockname()
    server.should_exit = True
    await serving


@pytest.fixture
async def address():
    """A server that answers "ok", on some paths late, and what became of its late requests."""
    ends = []

    async def app(scope, receive, send):
        while (message := await receive())["type"] == "http.request" and message["more_body"]:
            pass
        if (seconds := WAITS.get(scope["path"])) is not None:
            left = asyncio.ensure_future(receive())
            await asyncio.wait([left], timeout=seconds)
            ends.append("left" if left.done() else "answered")
            left.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async with served(app) as made:
        yield made, ends


@pytest.mark.parametrize("length", [b"Content-Length: 9437184\r\n", b"Transfer-Encoding: chunked\r\n"])
async def test_who_sends_too_much_and_then_reads_is_told(length):
    """The rest of the body is read and dropped before the connection closes, or the answer would be lost."""
    app, _ = create_app(EngineClient("x", {}), ServerConfig())
    head = POST.replace(b" / ", b" /tokenize ") + b"Connection: close\r\nContent-Type: application/json\r\n"
    body = b"x" * (9 * 2**20)
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if b"chunked" in length else body
    async with served(app) as address:
        got = await said(address, head + length + b"\r\n" + body, half_close=False)
    assert got.startswith(b"HTTP/1.1 413") and b"body_too_large" in got


async def said(address, sent, half_close=True):
    reader, writer = await asyncio.open_connection(*address)
    writer.write(sent)
    await writer.drain()
    if half_close:
        writer.write_eof()
    try:
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()


UNCLEAR = {
    "both": POST + b"Content-Length: 5\r\n" + CHUNKED + b"\r\n" + CHUNKS,
    "both, the other way round": POST + CHUNKED + b"content-length: 5\r\n\r\n" + CHUNKS,
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + BODY,
    "one length twice": POST + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\n" + BODY,
    "a list": POST + b"Content-Length: 5, 5\r\n\r\n" + BODY,
    "a sign": POST + b"Content-Length: +5\r\n\r\n" + BODY,
    "another coding": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKS,
    "no known coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKS,
    "chunked twice": POST + CHUNKED + CHUNKED + b"\r\n" + CHUNKS,
    "an old version": POST.replace(b"1.1", b"1.0") + CHUNKED + b"Connection: keep-alive\r\n\r\n" + CHUNKS,
    "a folded coding": POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n" + CHUNKS,
    "a folded line": GET[:-2] + b"X: a\r\n\tb\r\n\r\n",
    "a hidden length": GET[:-2] + b"X: a\nContent-Length: 5\r\n\r\n",
    "a space before the colon": POST + b"Content-Length : 5\r\n\r\n" + BODY,
    "no chunk size": POST + CHUNKED + b"\r\nx\r\n",
    "a signed chunk size": POST + CHUNKED + b"\r\n-5\r\nhello\r\n0\r\n\r\n",
    "a chunk size as in C": POST + CHUNKED + b"\r\n0x5\r\nhello\r\n0\r\n\r\n",
    "a chunk that is too long": POST + CHUNKED + b"\r\n4\r\nhello\r\n0\r\n\r\n",
    "chunks without CR": POST + CHUNKED + b"\r\n5\nhello\n0\n\n",
}


@pytest.mark.parametrize("name", UNCLEAR)
async def test_what_can_be_read_in_several_ways_is_refused(address, name):
    """One answer at most, and the connection ends: what follows is not taken for a request."""
    got = await said(address[0], UNCLEAR[name] + GET, half_close=False)
    assert got.startswith(b"HTTP/1.1 400") and got.count(b"HTTP/1.1 ") == 1 and b'"error"' in got


@pytest.mark.parametrize("target", [b"http://h/slow", b"HTTP://user@h:80/slow?a=b", b"http://h?a=/slow"])
async def test_a_whole_address_as_the_target(address, target):
    """As a client of a proxy sends it. A target without a path means the root."""
    got = await said(address[0], GET.replace(b" / ", b" " + target + b" "))
    assert b"HTTP/1.1 200" in got and address[1] == ["answered"] * (b"h?" not in target)


@pytest.mark.parametrize(
    "sent", [GET, H2C, POST + b"Content-Length: 5\r\n\r\n" + BODY, POST + CHUNKED + b"\r\n" + CHUNKS, GET + GET + GET]
)
async def test_who_closes_one_half_gets_all_answers(address, sent, caplog):
    got = await said(address[0], sent)
    assert got.count(b"HTTP/1.1 200") == sent.count(b" / HTTP/1.1") and got.endswith(b"ok")
    slow = await said(address[0], sent.replace(b" / ", b" /slow ", 1))
    assert slow.count(b"HTTP/1.1 200") == got.count(b"HTTP/1.1 200") and slow.endswith(b"ok")
    assert address[1] == ["answered"] and not caplog.records


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("reset", [False, True])
async def test_who_left_is_noticed(address, version, reset):
    with socket.create_connection(address[0]) as left:
        left.sendall(GET.replace(b" / ", b" /long ").replace(b"1.1", version))
        if reset:
            left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await until(lambda: address[1])
    assert address[1] == ["left"]


async def test_half_requests_are_not_waited_for(address, monkeypatch):
    """An answer may take longer than a request's head; after it, a silent client is not waited for either."""
    monkeypatch.setattr(connection, "WAIT", 0.4)
    slow = GET.replace(b" / ", b" /slow ")
    for sent in (b"", slow[:9], slow):
        got = await said(address[0], sent, half_close=False)
        assert got.endswith(b"ok") if sent == slow else got == b""
