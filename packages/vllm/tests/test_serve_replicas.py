"""`sameseed serve --engine vllm --replicas 2` as clients see it, with stand-ins for vLLM."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fixtures_server import children, events, wait_until
from fixtures_vllm import Fronted, stream

COMMON = "All requests of this kind begin with the same words, of which there are quite a few. " * 4
OTHER = "And there is another kind of request, which begins with words of its own. " * 4


@pytest.fixture
def fronted(tmp_path: Path) -> Iterator[Fronted]:
    made = Fronted(tmp_path, "--replicas", "2", "--max-num-seqs", "8", "--drain-timeout", "60")
    try:
        with made.client() as http:
            wait_until(lambda: http.get("/health").json()["replicas"] == ["ready", "ready"])
        yield made
    finally:
        if made.process.poll() is None:
            assert made.stop() == 0
        assert not children(made.process.pid)


def pids(fronted: Fronted) -> list[int]:
    """PIDs of the stand-ins, in the order in which they were started."""
    return [entry["pid"] for entry in fronted.seen if "arguments" in entry]


def taken_by(fronted: Fronted, beginning: str) -> list[int]:
    """PIDs of the stand-ins that got requests whose prompt has this beginning."""
    found = [entry for entry in fronted.seen if "body" in entry]
    return [entry["pid"] for entry in found if str(entry["body"]["prompt"]).startswith(beginning)]


def restarts(http: httpx.Client) -> float:
    page = http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in page if line.startswith("sameseed:engine_restarts{"))


def text(pieces: list[dict[str, Any]]) -> str:
    return "".join(piece["choices"][0]["text"] for piece in pieces if "choices" in piece)


def test_equal_beginnings_go_to_one_and_not_into_a_crowd(fronted: Fronted) -> None:
    with fronted.client() as http:
        for i in range(4):
            for beginning in (COMMON, OTHER):
                assert http.post("/v1/completions", json={"prompt": f"{beginning}{i}"}).status_code == 200
        one, other = set(taken_by(fronted, COMMON)), set(taken_by(fronted, OTHER))
        assert len(one) == len(other) == 1 and one | other == set(pids(fronted))
        with ThreadPoolExecutor(3) as pool:
            held = [pool.submit(hold, fronted, f"{COMMON}hold {i}") for i in range(3)]
            wait_until(lambda: taken_by(fronted, COMMON + "hold") == [*one] * 3)
            assert http.post("/v1/completions", json={"prompt": COMMON + "now"}).status_code == 200
            assert taken_by(fronted, COMMON + "now") == [*other], "the one that knows it has three to work on"
            page = http.get("/metrics").text
            assert 'vllm:some_total{replica="0"} 3.0' in page and 'vllm:some_total{replica="1"} 3.0' in page
            assert 'sameseed:engine_up{replica="1"} 1.0' in page and "sameseed:num_requests_inside 3.0" in page
            assert page.count("# TYPE vllm:some_total") == 1
            for one_held in held:
                one_held.result()[1].close()
        wait_until(lambda: sum("left" in entry for entry in fronted.seen) == 3)  # each was cancelled there
        wait_until(lambda: "sameseed:num_requests_inside 0.0" in http.get("/metrics").text)
    starts = [entry for entry in fronted.seen if "arguments" in entry]
    assert {entry["gpus"] for entry in starts} == {"0", "1"}
    assert len({entry["arguments"][-1] for entry in starts}) == 2, "each has a socket of its own"


def hold(fronted: Fronted, prompt: str) -> tuple[httpx.Client, httpx.Response]:
    """Begin a stream that does not end by itself."""
    http = fronted.client()
    body = {"prompt": prompt, "stream": True, "max_tokens": 100_000}
    response = http.send(http.build_request("POST", "/v1/completions", json=body), stream=True)
    assert response.status_code == 200
    return http, response


def test_a_killed_one_takes_nobody_with_it(fronted: Fronted) -> None:
    begun: set[int] = set()

    def asked(i: int) -> tuple[int, list[dict[str, Any]]]:
        body = {"prompt": f"{i} of the streams", "stream": True, "max_tokens": 400}
        with fronted.client() as http, http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            begun.add(i)
            return i, events(response)

    with fronted.client() as http, ThreadPoolExecutor(8) as pool:
        running = [pool.submit(asked, i) for i in range(8)]
        wait_until(lambda: len(begun) == 8)
        took = Counter(entry["pid"] for entry in fronted.seen if "body" in entry)
        assert sorted(took.values()) == [4, 4]
        dead = pids(fronted)[0]
        of = {int(entry["body"]["prompt"].split()[0]): entry["pid"] for entry in fronted.seen if "body" in entry}
        os.kill(dead, signal.SIGKILL)
        told = dict(future.result() for i, future in enumerate(running) if of[i] == dead)
        assert len(told) == 4
        for pieces in told.values():
            assert pieces[-1]["error"]["type"] == "service_unavailable_error"
        for _ in range(10):  # the dead replica gets no more requests
            assert http.post("/v1/completions", json={"prompt": "next"}).status_code == 200
        others = dict(future.result() for future in running)
        for i, pieces in others.items():
            if i not in told:
                assert text(pieces) == "".join(f"{n} " for n in range(400)) and "error" not in pieces[-1]
        wait_until(lambda: http.get("/health").json()["replicas"] == ["ready", "ready"])
        assert restarts(http) == 1 and len(pids(fronted)) == 3
        for i in range(4):
            assert http.post("/v1/completions", json={"prompt": f"after {i}"}).status_code == 200
        assert pids(fronted)[2] in taken_by(fronted, "after"), "the new one is taken in"


def test_a_rolling_restart_loses_nothing(fronted: Fronted) -> None:
    before = pids(fronted)

    def asked(i: int) -> str:
        with fronted.client() as http:
            if i % 3:
                answer = http.post("/v1/completions", json={"prompt": f"request {i}"})
                return str(answer.json()["choices"][0]["text"]) if answer.status_code == 200 else answer.text
            return text(stream(http, f"stream {i}", max_tokens=60))

    with fronted.client() as http, ThreadPoolExecutor(6) as pool:
        first = [pool.submit(asked, i) for i in range(60)]
        wait_until(lambda: sum("body" in entry for entry in fronted.seen) >= 10)
        fronted.process.send_signal(signal.SIGHUP)
        made = [future.result() for future in first]
        more = 60
        while len(pids(fronted)) < 4 or http.get("/health").json()["replicas"] != ["ready", "ready"]:
            made.append(asked(more))  # until both replicas are new
            more += 1
            assert more < 100_000
        both = set(pids(fronted)[2:])
        while not both <= set(taken_by(fronted, "")) and more < 1000:  # the replica with fewer requests is chosen first
            made.append(asked(more))
            more += 1
    whole = "".join(f"{n} " for n in range(60))
    assert made == [f"REQUEST {i}" if i % 3 else whole for i in range(len(made))]
    new = pids(fronted)[2:]
    assert len(new) == 2 and not set(before) & set(children(fronted.process.pid))
    assert set(taken_by(fronted, "")) == {*before, *new}
    assert sum(line["message"] == "replaced" for line in fronted.log) == 2


def test_without_any_it_says_when_to_come_back(fronted: Fronted) -> None:
    with fronted.client() as http:
        sick = Path(f"{fronted.file}.sick")  # all replicas, also the replaced ones, report that they are not healthy
        sick.write_text("")
        wait_until(lambda: http.get("/ready").status_code == 503)
        refused = http.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["code"] == "unavailable" and http.get("/health").status_code == 503
        assert 'sameseed:engine_up{replica="0"} 0.0' in http.get("/metrics").text
        sick.unlink()
        wait_until(lambda: http.get("/health").json().get("replicas") == ["ready", "ready"])
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_a_drain_waits_for_all(fronted: Fronted) -> None:
    with fronted.client() as http, ThreadPoolExecutor(2) as pool:
        running = [pool.submit(stream, http, f"stream {i}", max_tokens=150) for i in range(2)]
        wait_until(lambda: sum("body" in entry for entry in fronted.seen) == 2)
        assert set(taken_by(fronted, "stream")) == set(pids(fronted))
        fronted.process.send_signal(signal.SIGTERM)
        wait_until(lambda: http.get("/ready").status_code == 503)
        assert [len(future.result()) for future in running] == [150, 150]
    assert fronted.process.wait(60) == 0
