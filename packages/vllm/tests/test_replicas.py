"""Several vLLMs behind one server: which one gets a request, what is reported of each, and how they are replaced."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fixtures_server import until, visiting
from prometheus_client.parser import text_string_to_metric_families

from sameseed.cli.serve import run
from sameseed.errors import ConfigError
from sameseed.server.config import ServerConfig
from sameseed.server.errors import ApiError, unavailable
from sameseed_vllm import environments as vllm_replicas
from sameseed_vllm.draft import Spread
from sameseed_vllm.environments import BIND, GPUS, cores_of_replicas, environments
from sameseed_vllm.flags import Installed
from sameseed_vllm.link import Link, NotReachedError
from sameseed_vllm.proxy import create_proxy, joined
from sameseed_vllm.replicas import Replicas
from sameseed_vllm.routing import CUTS, LONGEST, Known, RoutedCall, Standing, beginnings, best

CHAT = "/v1/chat/completions"
FACTS = {"max_num_seqs": 4, "method": "none"}
TEXT = "All requests of this kind begin with the same words, of which there are quite a few. " * 4


def chat(*contents: str, **more: Any) -> tuple[bytes, ...]:
    return beginnings(CHAT, {"messages": [{"role": "user", "content": text} for text in contents], **more})


def test_beginnings_grow_with_the_text() -> None:
    first = chat(TEXT)
    longer = chat(TEXT, "and another turn " * 20)
    assert len(first) > 3 and longer[: len(first)] == first and len(longer) > len(first)
    assert chat(TEXT, temperature=1.0, model="m") == first, "what stands beside the text changes nothing"
    other = chat("x" + TEXT)
    assert not set(first) & set(other)
    assert not set(first) & set(chat(TEXT, cache_salt="another tenant's"))
    assert not set(first) & set(chat(TEXT, tools=[{"type": "function"}])), "tools stand before messages"
    assert len(beginnings("/v1/completions", {"prompt": "x" * (3 * LONGEST)})) == len(CUTS)
    assert len(beginnings("/v1/completions", {"prompt": list(range(100))})) > 3
    assert len(beginnings("/v1/responses", {"input": TEXT, "instructions": TEXT})) > len(first)
    assert beginnings("/v1/completions", {"prompt": "short"}) == () == beginnings("/tokenize", {"prompt": TEXT})
    assert beginnings("/v1/completions", {}) == () and beginnings("/v1/completions", {"prompt": "\ud800" * 80})


def test_what_is_known_is_bounded() -> None:
    known = Known(most=8)
    first, second = [b"%d" % i for i in range(4)], [b"x%d" % i for i in range(4)]
    known.add(first)
    known.add(second)
    assert known.length(first) == known.length(second) == 4 and known.length([*first, b"y"]) == 4
    known.add(first)  # used again, so kept longest
    known.add([b"z"])
    assert len(known) == 8 and known.length(first) == 4 and known.length(second[:1]) == 0


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        ([(0, 0, 0), (0, 0, 0)], 0),
        ([(0, 0, 3), (0, 0, 2)], 1),  # equal otherwise: the one with fewer requests so far
        ([(1, 0, 0), (0, 0, 9)], 1),  # the less busy one
        ([(2, 5, 0), (0, 3, 0)], 0),  # the longer known prefix, although busier
        ([(2, 5, 0), (1, 5, 0)], 1),  # equal prefixes: the less busy one
        ([(3, 5, 0), (0, 0, 0)], 1),  # much busier
        ([(7, 5, 0), (3, 0, 0)], 0),
        ([(8, 5, 0), (3, 0, 0)], 1),  # full, and the other is not
        ([(9, 5, 0), (8, 0, 0)], 0),  # both are full
        ([(3, 0, 0), (9, 9, 0), (0, 1, 0)], 2),
    ],
)
def test_which_one_takes_a_request(candidates: list[tuple[int, int, int]], chosen: int) -> None:
    assert best([Standing(*candidate) for candidate in candidates], room=8) == chosen


class Stub:
    """Stands in for a vLLM and its link. `fails`: the error of every request."""

    def __init__(self, number: int, on_failure: Any) -> None:
        self.number, self.on_failure = number, on_failure
        self.state, self.facts, self.num_restarts = "loading", dict(FACTS), 0
        self.pid: int | None = None
        self.open: set[Any] = set()
        self.fails: ApiError | None = None
        self.comes_back = True
        self.calls: list[RoutedCall | str] = []
        self.link, self.doubted = self, False

    def start(self) -> None:
        self.state = "ready" if self.comes_back else "failed"
        if not self.comes_back:
            self.on_failure("it does not start")

    async def close(self) -> None:
        self.state = "closed"

    async def wait_ready(self) -> None:
        if self.state != "ready":
            raise unavailable("no")

    def check(self) -> Stub:
        return self

    def end_all(self, error: ApiError) -> None:
        pass

    async def get(self, path: str, patience: float) -> bytes:
        if self.fails is not None:
            raise self.fails
        return b"# TYPE a counter\na_total %d\n" % self.number

    @asynccontextmanager
    async def post(self, path: str, body: bytes) -> AsyncIterator[int]:
        self.calls.append(path)
        if self.fails is not None:
            raise self.fails
        yield self.number


class Made(Replicas):
    """Replicas of stubs, which `made` lists in the order in which they were made."""

    def __init__(self, num: int) -> None:
        self.made: list[Stub] = []
        self.failures: list[str] = []

        def make(number: int, on_failure: Any) -> Any:
            self.made.append(Stub(number, on_failure))
            self.made[-1].comes_back = len(self.made) <= num or self.good
            return self.made[-1]

        self.good = True
        super().__init__(make, num, self.failures.append)
        for stub in self.made:
            stub.start()

    async def ask(self, text: str = TEXT) -> int:
        """Send a request; returns the number of the replica that took it."""
        made = RoutedCall(CHAT, b"{}", chat(text))
        async with self.post(object(), made) as number:  # type: ignore[arg-type]
            return number  # type: ignore[return-value]


async def test_one_that_cannot_be_reached_is_passed_over() -> None:
    replicas = Made(3)
    assert {await replicas.ask() for _ in range(5)} == {0}
    replicas.made[0].fails = NotReachedError()
    assert {await replicas.ask() for _ in range(5)} == {1}, "each asks the first one, for nothing, then this one"
    for stub in replicas.made:
        stub.fails = NotReachedError()
        stub.calls.clear()
    with pytest.raises(ApiError) as caught:
        await replicas.ask()
    assert caught.value.status == 503 and caught.value.retry_after
    assert [len(stub.calls) for stub in replicas.made] == [1, 1, 1]
    assert [r.load for r in replicas.all] == [0, 0, 0] and not any(stub.open for stub in replicas.made)


async def test_what_was_sent_is_not_sent_again() -> None:
    """The request may have been what killed the first replica."""
    replicas = Made(2)
    replicas.made[0].fails = unavailable("it died")
    with pytest.raises(ApiError, match="it died"):
        await replicas.ask()
    assert [len(stub.calls) for stub in replicas.made] == [1, 0]


async def test_one_whose_connection_broke_gets_nothing_until_it_is_well() -> None:
    """A killed process closes its connections one after another; requests sent meanwhile would be lost."""
    replicas = Made(2)
    assert await replicas.ask() == 0
    replicas.made[0].doubted = True
    assert [await replicas.ask() for _ in range(3)] == [1, 1, 1], "though the other knows the beginning"
    replicas.made[1].doubted = True
    assert await replicas.ask() in (0, 1), "better than nobody"
    replicas.made[0].doubted = False
    assert await replicas.ask() == 0


async def test_a_new_process_knows_no_beginning() -> None:
    replicas = Made(2)
    assert [await replicas.ask(), await replicas.ask("another " * 20), await replicas.ask()] == [0, 1, 0]
    replicas.made[0].pid = 7
    replicas.all[0].served = 9
    assert await replicas.ask() == 1, "to the one that had fewer requests"


async def test_a_rolling_restart_spares_the_last_that_serves() -> None:
    replicas = Made(2)
    replicas.made[1].state = "down"
    async with replicas.post(object(), RoutedCall(CHAT, b"")) as number:  # type: ignore[arg-type]
        assert number == 0  # type: ignore[comparison-overlap]
        replicas.renew()
        replicas.renew()  # while one restart is running: ignored
        await until(lambda: replicas.all[0].leaving)
        assert len(replicas.made) == 3 and replicas.made[2].number == 1, "who does not serve comes first"
        assert await replicas.ask() == 1, "who leaves gets nothing more"
        replicas.made[2].state = "down"
        assert await replicas.ask() == 0, "unless there is no other"
        replicas.made[2].state = "ready"
        assert replicas.made[0].state == "ready", "it stays until its last request has left"
    await until(lambda: len(replicas.made) == 4 and not replicas.all[0].leaving)
    assert replicas.states == ["ready", "ready"] and replicas.made[0].state == "closed"
    await replicas.close()
    assert replicas.state == "closed"


async def test_a_rolling_restart_ends_where_one_does_not_come_back() -> None:
    replicas = Made(2)
    replicas.good = False
    replicas.renew()
    await until(lambda: replicas.states == ["failed", "ready"] and not replicas.all[0].leaving)
    assert len(replicas.made) == 3 and not replicas.failures and replicas.state == "ready"
    assert await replicas.ask() == 1
    replicas.made[1].state = "failed"
    replicas.made[1].on_failure("died too often")
    assert replicas.failures == ["died too often"], "the last one's end is the server's"
    with pytest.raises(ApiError, match="has stopped"):
        await replicas.wait_ready()
    await replicas.close()


async def test_pages_of_those_that_answer() -> None:
    replicas = Made(3)
    replicas.made[0].fails = unavailable("no page")
    replicas.made[2].state = "down"
    app, gate = create_proxy(replicas, ServerConfig())
    assert gate.max_running == 12
    async with visiting(app) as client:
        page = (await client.get("/metrics")).text
        assert 'a_total{replica="1"} 1\n' in page and 'a_total{replica="0"}' not in page
        assert 'sameseed:engine_up{replica="0"} 1.0' in page and 'sameseed:engine_up{replica="2"} 0.0' in page
        told = (await client.get("/health")).json()
        assert told == {"status": "ok", "engine": "ready", "replicas": ["ready", "ready", "down"]}
        for stub in replicas.made:
            stub.state = "down"
        assert (await client.get("/health")).status_code == (await client.get("/ready")).status_code == 503
        refused = await client.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0


def test_pages_become_one() -> None:
    page = b'# HELP a_total of it\n# TYPE a_total counter\na_total{x="1 } 2",y=""} 3.0\na_total{} 1\n'
    page += b"# TYPE b gauge\nb %s\n"
    told = joined([(0, page % b"1.0"), (2, page % b"+Inf")]).decode()
    found = {family.name: family for family in text_string_to_metric_families(told)}
    assert list(found) == ["a", "b"] and told.count("# TYPE") == 2 and found["a"].documentation == "of it"
    assert [s.labels for s in found["a"].samples][:2] == [{"replica": "0", "x": "1 } 2", "y": ""}, {"replica": "0"}]
    assert [(s.labels["replica"], s.value) for s in found["b"].samples] == [("0", 1.0), ("2", float("inf"))]
    assert joined([]) == b""


async def test_nobody_there_is_told_apart_from_a_death(tmp_path: Path) -> None:
    link = Link(str(tmp_path / "none"), "key")
    with pytest.raises(NotReachedError):
        async with link.post("/v1/completions", b"{}"):
            pass
    await link.close()

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    server = await asyncio.start_unix_server(hang_up, str(tmp_path / "s"))
    link = Link(str(tmp_path / "s"), "key")
    with pytest.raises(ApiError, match="stopped while") as caught:
        async with link.post("/v1/completions", json.dumps({}).encode()):
            pass
    assert not isinstance(caught.value, NotReachedError)
    assert link.doubted
    server.close()
    assert await link.healthy(1.0) is None and link.doubted

    async def be_well(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    (tmp_path / "s").unlink(missing_ok=True)
    server = await asyncio.start_unix_server(be_well, str(tmp_path / "s"))
    assert await link.healthy(5.0) and not link.doubted
    await link.close()
    server.close()


GPU, CPU = Installed("0.33.0"), Installed("0.33.0", cpu=True)


def test_each_replica_has_devices_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GPUS, raising=False)
    monkeypatch.delenv(BIND, raising=False)
    monkeypatch.setattr(vllm_replicas, "cores_of_replicas", lambda replicas, workers: ["0|1", "2|3"])
    two = Spread(tensor_parallel_size=2)
    assert [made[GPUS] for made in environments({}, two, GPU, 2)] == ["0,1", "2,3"]
    assert environments({}, Spread(), GPU) == [{}]
    assert [made[BIND] for made in environments({}, two, CPU, 2)] == ["0|1", "2|3"]
    assert environments({"threads": 1}, two, CPU, 2) == [{"OMP_NUM_THREADS": "1", BIND: "nobind"}] * 2
    monkeypatch.setenv(GPUS, "3,5,GPU-7")
    assert [made[GPUS] for made in environments({}, Spread(), GPU, 3)] == ["3", "5", "GPU-7"]
    for settings, replicas, says in ((two, 2, "need 4, and"), (Spread(nodes=2), 2, "router"), (two, 0, "at least 1")):
        with pytest.raises(ConfigError, match=says):
            environments({}, settings, GPU, replicas)
    monkeypatch.setenv(BIND, "0-3")
    assert environments({}, Spread(), CPU, 2) == [{}, {}]


def test_cores_are_dealt_out_by_node(tmp_path: Path) -> None:
    for cpu in range(8):
        (tmp_path / f"node/node{cpu % 2}/cpu{cpu}").mkdir(parents=True)
    assert cores_of_replicas(2, 1, set(range(8)), tmp_path) == ["0,2,4,6", "1,3,5,7"]
    assert cores_of_replicas(2, 2, set(range(8)), tmp_path) == ["0,2|4,6", "1,3|5,7"]
    assert cores_of_replicas(3, 1, {4}, tmp_path) == ["4", "4", "4"]
    assert cores_of_replicas(1, 1, None)[0], "of this machine"


def test_replicas_want_vllm() -> None:
    with pytest.raises(ConfigError, match="for --engine vllm"):
        run(["--replicas", "2"], "sameseed serve")
