from __future__ import annotations

import asyncio
import itertools
from statistics import mean, stdev

import pytest

from sameseed.errors import ConfigError
from sameseed.measure.load import bench
from sameseed.measure.load.bench import LoadLevel, arrivals, closed, opened


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 16.0])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    moments = arrivals(LoadLevel(rate=50.0, burstiness=burstiness), 20001, seed=3)
    gaps = [b - a for a, b in itertools.pairwise(moments)]
    assert moments[0] == 0 and min(gaps) >= 0
    assert mean(gaps) == pytest.approx(1 / 50, rel=0.06)
    # The coefficient of variation of a gamma distribution of shape b is 1 / sqrt(b); 1 for a Poisson process.
    assert stdev(gaps) / mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.06)
    assert moments == arrivals(LoadLevel(rate=50.0, burstiness=burstiness), 20001, seed=3)
    assert moments != arrivals(LoadLevel(rate=50.0, burstiness=burstiness), 20001, seed=4)


async def test_closed_keeps_so_many_inside_and_the_order() -> None:
    inside, most = 0, 0

    async def send(body: int) -> int:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.001 * (body % 3))
        inside -= 1
        return body * 10

    assert await closed(send, range(20), 4) == [10 * i for i in range(20)]
    assert most == 4
    assert await closed(send, range(2), 8) == [0, 10]


async def test_closed_ends_with_its_time() -> None:
    """Requests under way are waited for, and each client sends one; the answers are those of the first bodies."""
    now = 0.0

    async def send(body: int) -> int:
        nonlocal now
        await asyncio.sleep(0)
        now += 1.0
        return body

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.time, "perf_counter", lambda: now)  # type: ignore[attr-defined]
        assert await closed(send, range(20), 2, seconds=5.0) == list(range(6))
        now = 0.0
        assert await closed(send, range(20), 8, seconds=1e-9) == list(range(8))
        assert await closed(send, range(20), 8, seconds=1e9) == list(range(20))


def test_arrivals_end_with_their_time() -> None:
    level = LoadLevel(rate=10.0)
    whole = arrivals(level, 100, seed=3)
    cut = arrivals(level, 100, seed=3, seconds=2.0)
    assert cut == [moment for moment in whole if moment < 2.0] and 0 < len(cut) < 100
    assert arrivals(level, 100, seed=3, seconds=1e-9) == [0.0]


async def test_opened_sends_as_many_as_there_are_moments() -> None:
    async def send(body: int, due: float) -> int:
        return body

    assert (await opened(send, range(9), [0.0, 0.001]))[0] == [0, 1]


async def test_opened_waits_for_nobody() -> None:
    first = asyncio.Event()

    dues: list[float] = []

    async def send(body: int, due: float) -> int:
        dues.append(due)
        if body == 0:
            await first.wait()  # answered only because later requests are sent
        elif body == 2:
            first.set()
        return body

    answers, late = await asyncio.wait_for(opened(send, range(3), [0.0, 0.01, 0.02]), 10)
    assert answers == [0, 1, 2] and late >= 0
    assert [due - dues[0] for due in dues] == pytest.approx([0.0, 0.01, 0.02]), "not when they were sent"


@pytest.mark.parametrize("given", [{"concurrency": 0}, {"rate": 0.0}, {"rate": 1.0, "burstiness": 0.0}, {}])
def test_levels_are_checked(given: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        LoadLevel(**given)  # type: ignore[arg-type]
