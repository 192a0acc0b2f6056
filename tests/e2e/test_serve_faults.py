"""The server's life: a dead engine, SIGTERM, bad settings, few file descriptors, a full disk, clients that wait."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
from fixtures_server import START, Server, children, gauge, num_files, wait_until

from sameseed.errors import ConfigError
from sameseed.server.run import bind

KEY = "key-of-the-tests"
ENVIRONMENT = {"SAMESEED_API_KEY": "key-of-the-environment"}
FIELDS = {"max_tokens": 20, "temperature": 0.8, "seed": 5, "ignore_eos": True}
LONG = {**FIELDS, "max_tokens": 230, "n": 4}


@contextmanager
def started(model, folder, *more):
    keys = folder / "keys"
    keys.write_text(f"{KEY}\n")
    flags = ["--model", str(model), "--served-model-name", "tiny", "--draft", "ngram", "--policy", "fixed", *more]
    flags += ["--api-key-file", str(keys), "--drain-timeout", "3", "--max-num-seqs", "4"]
    ignoring = partial(signal.signal, signal.SIGCHLD, signal.SIG_IGN)  # as some parents leave it
    made = Server(*flags, env=ENVIRONMENT, preexec_fn=ignoring)
    try:
        made.wait_log("ready")
        yield made
    finally:
        made.process.kill()
        made.process.wait()


@pytest.fixture(scope="module")
def server(pair_folders, tmp_path_factory):
    with started(pair_folders[0], tmp_path_factory.mktemp("keys")) as made:
        yield made


def visitor(server):
    return server.client(headers={"authorization": f"Bearer {KEY}"})


@pytest.fixture(scope="module")
def http(server):
    with visitor(server) as client:
        yield client


def complete(http, prompt="the sum of"):
    response = http.post("/v1/completions", json={"prompt": prompt, **FIELDS})
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


class Reader(threading.Thread):
    """Reads one stream to its end and notes when it ended."""

    def __init__(self, http, begun=lambda: None, **fields):
        """`begun` is called in this thread when the stream has begun, so that its end is still far away."""
        super().__init__(daemon=True)
        self._http, self._fields, self._begun = http, fields, begun
        self.lines: list[str] = []
        self.status = 0
        self.ended = 0.0
        self.start()

    def run(self):
        body = {"prompt": "the sum of", "stream": True, **self._fields}
        with self._http.stream("POST", "/v1/completions", json=body) as response:
            self.status = response.status_code
            for line in response.iter_lines():
                self.lines += [line.removeprefix("data: ")] if line else []
                if len(self.lines) == 3 and line:
                    self._begun()
        self.ended = time.monotonic()

    def wait_begun(self):
        wait_until(lambda: len(self.lines) > 2)


def test_keys(server, http):
    with server.client() as stranger:
        assert stranger.get("/health").status_code == 200
        assert stranger.post("/v1/completions", json={"prompt": "x"}).status_code == 401
    assert complete(http)
    with server.client(headers={"authorization": "Bearer key-of-the-environment"}) as other:
        assert other.get("/ready").status_code == 200
    log = json.dumps(server.log)
    assert KEY not in log and "key-of-the-environment" not in log
    assert b"key-of-the-environment" not in Path(f"/proc/{server.engine_pid}/environ").read_bytes()


def test_one_keys_flood_keeps_no_other_key_waiting(server, http):
    """Four sequences run at once. One key's 28 come first; another key's one must end while some of these wait."""
    ended = []

    def flood(number):
        assert http.post("/v1/completions", json={"prompt": "the sum of", **LONG}).status_code == 200
        ended.append(number)

    with ThreadPoolExecutor(7) as threads:
        waiting = [threads.submit(flood, number) for number in range(7)]
        wait_until(lambda: gauge(http, "num_requests_waiting") >= 16)
        with server.client(headers={"authorization": f"Bearer {ENVIRONMENT['SAMESEED_API_KEY']}"}) as other:
            alone = complete(other)
        assert len(ended) <= 4, "its turn was the next"
        for one in waiting:
            one.result()
    assert alone == complete(http), "whose turn it is changes no text"


def told(server, body):
    """The lines of the log that have the id of a failed request and the reason that its client got."""
    mine = [e for e in server.log if body["request_id"] in json.dumps(e)]
    return [entry for entry in mine if body["error"]["message"] in (entry.get("error") or entry["message"])]


def test_a_poisoned_request_ends_alone(server, http):
    """With every token banned, none can be chosen, and only the engine notices. Its neighbour must not be affected."""
    alone = complete(http)
    neighbour = Reader(http, **FIELDS)
    poison = {"prompt": "x", "banned_token_ids": list(range(304)), "max_tokens": 4}
    failed = http.post("/v1/completions", json=poison)
    said = failed.json()
    assert failed.status_code == 400 and "no token was left" in said["error"]["message"]
    assert said["request_id"] == failed.headers["x-request-id"]
    wait_until(lambda: len(told(server, said)) == 2)  # by the engine, and with the answer
    mine = {"x-request-id": "my-own-id"}
    for path, more in (("/v1/completions", {"stream": True}), ("/v1/completions", {"n": 99}), ("/v1/none", {})):
        refused = http.post(path, json=poison | more, headers=mine)
        assert "my-own-id" in refused.text
        wait_until(lambda: told(server, {"error": json.loads(refused.text)["error"], "request_id": "my-own-id"}))  # noqa: B023
    neighbour.join(60)
    assert neighbour.lines[-1] == "[DONE]"
    assert "".join(json.loads(line)["choices"][0]["text"] for line in neighbour.lines[:-1]) == alone
    assert http.get("/health").status_code == 200
    wait_until(lambda: gauge(http, "kv_cache_usage_perc") == 0)


def test_a_dead_engine_is_replaced(server, http):
    alone, drafted = complete(http), gauge(http, "spec_decode_num_drafts_total")
    engine = server.engine_pid
    many = {**LONG, "prompt": ["the sum of"] * 8, "n": 8}  # far from done when the engine dies
    killed = []
    others = []

    def kill():
        others.extend(Reader(http, **many) for _ in range(2))
        killed.append(time.monotonic())
        os.kill(engine, signal.SIGKILL)

    first = Reader(http, kill, **many)
    wait_until(lambda: len(killed) > 0)
    for reader in (first, *others):
        reader.join(60)
        assert reader.ended > killed[0], "told at once: what comes next finds no engine yet"
        if reader.status == 200:
            assert reader.lines[-1] == "[DONE]"
            assert json.loads(reader.lines[-2])["error"]["type"] == "service_unavailable_error"
        else:
            assert reader.status == 503
    assert first.status == 200
    for path, body in (("/health", None), ("/ready", None), ("/v1/completions", {"prompt": "x"})):
        response = http.get(path) if body is None else http.post(path, json=body)
        assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
    wait_until(lambda: http.get("/ready").status_code == 200)
    assert http.get("/health").status_code == 200
    assert server.engine_pid != engine
    assert complete(http) == alone
    assert gauge(http, "engine_restarts_total") == 1
    assert any("ended with code -9" in entry["message"] for entry in server.log)
    assert gauge(http, "spec_decode_num_drafts_total") >= drafted > 0, "counters never go back"


def test_a_stopped_engine_that_goes_on_is_no_dead_one(server, http):
    reader, engine = Reader(http, **FIELDS), server.engine_pid
    os.kill(engine, signal.SIGSTOP)
    time.sleep(0.5)
    assert http.get("/health").status_code == 200
    os.kill(engine, signal.SIGCONT)
    reader.join(60)
    assert reader.lines[-1] == "[DONE]" and server.engine_pid == engine


def test_sigterm_drains(pair_folders, tmp_path):
    """Running streams end well or with an error message, new requests are refused at once, no process is left."""
    with started(pair_folders[0], tmp_path, "--max-queue", "5000") as server, visitor(server) as http:
        alone = complete(http)
        quick = Reader(http, **FIELDS)
        quick.wait_begun()
        # One of these alone is 235,000 tokens: more than any machine makes in the time to drain.
        slow = [Reader(http, **{**LONG, "prompt": ["the sum of"] * 64, "n": 16}) for _ in range(3)]
        wait_until(lambda: any(len(r.lines) > 2 for r in slow))  # whichever came first: the others wait for it
        engine = server.engine_pid
        server.process.send_signal(signal.SIGTERM)
        server.wait_log("draining")
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
        assert http.get("/ready").status_code == 503
        assert http.get("/health").status_code == 200
        for reader in (quick, *slow):
            reader.join(60)
            assert reader.status in (200, 503), reader.lines
        assert "".join(json.loads(line)["choices"][0]["text"] for line in quick.lines[:-1]) == alone
        cut = [r for r in slow if r.status == 200 and "error" in json.loads(r.lines[-2])]
        assert cut, "the drain time was long enough for all of them"
        assert all(r.lines[-1] == "[DONE]" for r in slow if r.status == 200)
        assert server.process.wait(60) == 0
        assert not children(server.process.pid) and not Path(f"/proc/{engine}").exists()


def test_a_model_that_cannot_be_loaded_is_one_line():
    """The server reports what the engine's process finds out, and exits."""
    command = [sys.executable, "-m", "sameseed", "serve", "--port", "0", "--max-model-len", "100000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "is above the model's own" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="choose another --port"):
        bind("127.0.0.1", taken.getsockname()[1])


FILES = 120
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "


@pytest.fixture(scope="module")
def crowded(pair_folders):
    """A server with few file descriptors, whose log goes to a device that is always full."""
    limits = FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with open("/dev/full", "w") as full:
        few = partial(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        flags = ["--model", str(pair_folders[0]), "--draft", "ngram", "--max-num-seqs", "4"]
        made = Server(*flags, stderr=full, preexec_fn=few)
    try:
        wait_until(lambda: httpx.get(f"{made.url}/ready").is_success, START)
        yield made
    finally:
        assert made.stop() == 0
        assert not children(made.process.pid)


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


def test_connections_without_number(crowded):
    """200 silent connections use up the file descriptors that are meant for clients, and no more.

    Accepted clients are not affected, a dead engine is still replaced, and once the connections close there is room
    again.
    """
    with crowded.client() as http, ExitStack() as stack:
        alone, before = complete(http), num_files(crowded.process.pid)
        idle = [stack.enter_context(crowded.connect()) for _ in range(200)]
        assert complete(http) == alone
        refused = [was_refused(connection) for connection in idle]
        assert refused.count(False) < FILES and refused.count(True) > 200 - FILES
        assert num_files(crowded.process.pid) < FILES
        engine = crowded.engine_pid
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: http.get("/health").status_code == 503)
        wait_until(lambda: http.get("/ready").status_code == 200)
        assert complete(http) == alone and crowded.engine_pid != engine
        stack.close()
        wait_until(lambda: num_files(crowded.process.pid) <= before)
        with crowded.client() as other:
            assert complete(other) == alone


def test_who_does_not_read_holds_up_nobody(crowded):
    body = json.dumps(
        {"prompt": "the sum of", **FIELDS, "n": 8, "max_tokens": 200, "stream": True, "logprobs": 20}
    ).encode()
    with crowded.client() as http, ExitStack() as stack:
        alone = complete(http)
        for _ in range(3):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", crowded.port))
            connection.sendall(HEAD + b"%d\r\n\r\n" % len(body) + body)
        wait_until(lambda: gauge(http, "num_requests_running") > 0)
        assert complete(http) == alone
        wait_until(lambda: gauge(http, "num_requests_running") == 0)  # the engine does not wait for readers
        stack.close()
        wait_until(lambda: gauge(http, "kv_cache_usage_perc") == 0)
        wait_until(lambda: num_files(crowded.process.pid) < 40)
        assert complete(http) == alone
