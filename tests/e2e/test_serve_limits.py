"""A server with few file descriptors, a full disk for its log and clients that only wait: it keeps working."""

import json
import os
import resource
import signal
import socket
from contextlib import ExitStack
from functools import partial

import httpx
import pytest
from fixtures_server import START, Server, children, gauge, num_files, wait_until

FILES = 120
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
FIELDS = {"prompt": "the sum of", "max_tokens": 20, "temperature": 0.8, "seed": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(pair_folders):
    """A server with few file descriptors, whose log goes to a device that is always full."""
    flags = ["--model", str(pair_folders[0]), "--draft", "ngram", "--max-num-seqs", "4"]
    limits = FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with open("/dev/full", "w") as full:
        few = partial(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        made = Server(*flags, stderr=full, preexec_fn=few)
    try:
        wait_until(lambda: httpx.get(f"{made.url}/ready").is_success, START)
        yield made
    finally:
        assert made.stop() == 0
        assert not children(made.process.pid)


def text_of(http):
    response = http.post("/v1/completions", json=FIELDS)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def was_refused(connection):
    """Whether the server closed the connection at once because there are too many."""
    connection.settimeout(0.05)
    try:
        said = connection.recv(4096)
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    assert not said or (b"503 Service Unavailable" in said and json.loads(said.partition(b"\r\n\r\n")[2])["error"])
    return True


def test_connections_without_number(server):
    """200 silent connections use up the file descriptors that are meant for clients, and no more.

    Accepted clients are not affected, a dead engine is still replaced, and once the connections close there is room
    again.
    """
    with server.client() as http, ExitStack() as stack:
        alone, before = text_of(http), num_files(server.process.pid)
        idle = [stack.enter_context(server.connect()) for _ in range(200)]
        assert text_of(http) == alone
        refused = [was_refused(connection) for connection in idle]
        assert refused.count(False) < FILES and refused.count(True) > 200 - FILES
        assert num_files(server.process.pid) < FILES
        engine = server.engine_pid
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: http.get("/health").status_code == 503)
        wait_until(lambda: http.get("/ready").status_code == 200)
        assert text_of(http) == alone and server.engine_pid != engine
        stack.close()
        wait_until(lambda: num_files(server.process.pid) <= before)
        with server.client() as other:
            assert text_of(other) == alone


def test_who_does_not_read_holds_up_nobody(server):
    body = json.dumps({**FIELDS, "n": 8, "max_tokens": 200, "stream": True, "logprobs": 20}).encode()
    with server.client() as http, ExitStack() as stack:
        alone = text_of(http)
        for _ in range(3):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(HEAD + b"%d\r\n\r\n" % len(body) + body)
        wait_until(lambda: gauge(http, "num_requests_running") > 0)
        assert text_of(http) == alone
        wait_until(lambda: gauge(http, "num_requests_running") == 0)  # the engine does not wait for readers
        stack.close()
        wait_until(lambda: gauge(http, "kv_cache_usage_perc") == 0)
        wait_until(lambda: num_files(server.process.pid) < 40)
        assert text_of(http) == alone
