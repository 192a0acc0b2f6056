"""Replicas: one or more vLLM processes behind one server. Each is supervised separately; a request goes to one of them.

A replica whose connection broke is avoided until a health check succeeds. If a replica dies, its requests end with an
error, and the others go on. A rolling restart replaces one replica after another, each after its last request ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from sameseed.server.answer import Answering
from sameseed.server.errors import ApiError
from sameseed.server.supervised import not_ready
from sameseed_vllm.client import VllmClient
from sameseed_vllm.link import NotReachedError, Response
from sameseed_vllm.routing import Known, RoutedCall, Standing, best

log = logging.getLogger("sameseed.server")
POLL = 0.05  # seconds between checks while waiting
PAGE = 5.0  # seconds for a replica's page: a replica that hangs must not delay the others' pages
OnFailure = Callable[[str], None]
Make = Callable[[int, OnFailure], VllmClient]


class Replica:
    """One replica. `load`: sequences in progress; `served`: requests so far; `leaving`: it is being replaced."""

    def __init__(self, number: int, client: VllmClient) -> None:
        self.number, self.client = number, client
        self.load = self.served = 0
        self.leaving = False
        self._past_restarts = 0
        self._known, self._known_by = Known(), client.pid

    @property
    def ready(self) -> bool:
        return self.client.state == "ready"

    @property
    def doubted(self) -> bool:
        """Whether a connection to it broke and no health check has succeeded since: it may be dying."""
        return self.client.link is not None and self.client.link.doubted

    @property
    def num_restarts(self) -> int:
        """The number of processes that replaced a dead one."""
        return self._past_restarts + self.client.num_restarts

    @property
    def known(self) -> Known:
        """Text beginnings that its process has seen; a new process has seen none."""
        if self._known_by != self.client.pid:
            self._known, self._known_by = Known(), self.client.pid
        return self._known

    @contextlib.contextmanager
    def works_on(self, request: Answering, call: RoutedCall) -> Iterator[None]:
        """Context of a request in progress: it counts as load, and ends with an error if the process dies."""
        client = self.client
        client.open.add(request)
        self.load += call.num_seqs
        self.served += 1
        self.known.add(call.beginnings)
        try:
            yield
        finally:
            client.open.discard(request)
            self.load -= call.num_seqs

    async def replace(self, client: VllmClient) -> None:
        """End the process, then start this client's. Raises ApiError 503 if the new one does not get ready."""
        await asyncio.shield(self.client.close())
        self._past_restarts = self.num_restarts
        self.client = client
        client.start()
        await client.wait_ready()


class Replicas:
    """Starts the replicas, chooses one for each request, replaces them. `state`: their best, see `Supervised`."""

    def __init__(self, make: Make, num: int = 1, on_failure: OnFailure = lambda message: None) -> None:
        """`make` makes a replica's client, by number. `on_failure` is called with the reason once all have failed."""
        self._make, self._on_failure = make, on_failure
        self.all = [Replica(i, make(i, self._given_up)) for i in range(num)]
        self._renewing: asyncio.Task[None] | None = None

    @property
    def state(self) -> str:
        states = self.states
        return next(state for state in ("ready", "down", "loading", "failed", "closed") if state in states)

    @property
    def states(self) -> list[str]:
        return [replica.client.state for replica in self.all]

    @property
    def told(self) -> dict[str, Any]:
        """The fields of /health: the best state and, if there are several replicas, each state."""
        return {"engine": self.state, **({"replicas": self.states} if len(self.all) > 1 else {})}

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of the replica that knows most: a loaded one also knows its model's context and vLLM's version."""
        return max((replica.client.facts for replica in self.all), key=len)

    @contextlib.asynccontextmanager
    async def living(self, app: Any) -> AsyncIterator[None]:
        """The application's lifespan: starts the processes, and ends them at its end."""
        for replica in self.all:
            replica.client.start()
        yield
        await self.close()

    async def close(self) -> None:
        """End all replicas; open requests end with an error."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        await asyncio.gather(*(replica.client.close() for replica in self.all))

    async def wait_ready(self) -> None:
        """Wait until one replica is ready. Raises ApiError 503 if none ever will be."""
        while self.state in ("loading", "down"):
            await asyncio.sleep(POLL)
        self.check_ready()

    def check_ready(self) -> None:
        """Raise ApiError 503 if no replica is ready."""
        if self.state != "ready":
            raise not_ready(self.state)

    def end_all(self, error: ApiError) -> None:
        """End every request with this error."""
        for replica in self.all:
            replica.client.end_all(error)

    @contextlib.asynccontextmanager
    async def post(self, request: Answering, call: RoutedCall) -> AsyncIterator[Response]:
        """Send a request to one replica; yields the answer, which the caller reads. Leaving early ends the request.

        A replica that cannot be reached has seen nothing of the request, so another is tried. A request that was sent
        is never sent again: it may be what killed the replica. Raises ApiError 503 if there is no replica, or if the
        connection breaks.
        """
        passed: set[int] = set()
        while True:
            replica = self._choose(call, passed)
            try:
                with replica.works_on(request, call):
                    async with replica.client.check().post(call.path, call.body) as response:
                        yield response
                        return
            except NotReachedError:
                passed.add(replica.number)

    def _choose(self, call: RoutedCall, passed: set[int]) -> Replica:
        """The replica that takes the request. Raises ApiError 503 if none is ready beside those in `passed`."""
        self.check_ready()
        ready = [r for r in self.all if r.ready and r.number not in passed]
        if not ready:
            raise not_ready("down")
        best_kind = min((r.doubted, r.leaving) for r in ready)
        ready = [r for r in ready if (r.doubted, r.leaving) == best_kind]
        found = [Standing(r.load, r.known.length(call.beginnings), r.served) for r in ready]
        return ready[best(found, ready[0].client.facts["max_num_seqs"])]

    async def pages(self, path: str) -> list[tuple[int, bytes]]:
        """The page of each ready replica that answers in time, with its number."""
        ready = [replica for replica in self.all if replica.ready]
        asked = (replica.client.check().get(path, PAGE) for replica in ready)
        told = await asyncio.gather(*asked, return_exceptions=True)
        return [(r.number, page) for r, page in zip(ready, told, strict=True) if isinstance(page, bytes)]

    def renew(self) -> None:
        """Start a rolling restart, unless one is under way."""
        if self._renewing is not None and not self._renewing.done():
            log.warning("a rolling restart is under way already; this one is left out")
            return
        self._renewing = asyncio.get_running_loop().create_task(self._renew())

    async def _renew(self) -> None:
        """Replace all replicas, first those that are not ready: no request runs there, and then they serve again."""
        log.info("rolling restart", extra={"replicas": len(self.all)})
        for replica in sorted(self.all, key=lambda r: r.ready):
            while replica.ready and not any(r.ready for r in self.all if r is not replica):
                await asyncio.sleep(POLL)
            replica.leaving = True
            try:
                while replica.client.open:
                    await asyncio.sleep(POLL)
                await replica.replace(self._make(replica.number, self._given_up))
            except ApiError:
                log.error("the rolling restart ends: replica %d does not come back; the others stay", replica.number)
                return
            finally:
                replica.leaving = False
            log.info("replaced", extra={"replica": replica.number})
        log.info("rolling restart done", extra={"replicas": len(self.all)})

    def _given_up(self, message: str) -> None:
        if all(state == "failed" for state in self.states):
            self._on_failure(message)
