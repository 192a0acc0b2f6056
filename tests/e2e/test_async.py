"""AsyncLLM: concurrent requests, streaming, cancellation; every stream ends."""

import asyncio
import itertools
import subprocess
import sys
import threading

import pytest
from lawkit import SAMPLED, assert_nothing_left

from sameseed import LLM, AsyncLLM, SamplingParams
from sameseed.errors import RequestError, SameseedError
from sameseed.request import FinishReason

PROMPTS = [f"{start} {end}" for start in ("the sum", "def add(", "für 你好", "🙂") for end in ("of", "is a, b")]
ASKED = SamplingParams(max_tokens=24, seed=7, ignore_eos=True, **SAMPLED)
LONG = SamplingParams(max_tokens=240, seed=7, ignore_eos=True)
FORGETS_TO_CLOSE = """
import asyncio, sys
from sameseed import AsyncLLM

async def main():
    llm = AsyncLLM(sys.argv[1])
    print((await llm.complete("the sum", max_tokens=2)).finish_reason)

asyncio.run(main())
"""
pytestmark = pytest.mark.asyncio


@pytest.fixture
async def llm(pair_folders):
    async with AsyncLLM(str(pair_folders[0]), draft=str(pair_folders[1]), policy="fixed", max_num_seqs=4) as made:
        yield made


async def collect(llm, prompt, params, **more):
    """The joined deltas and the completion of a request."""
    text, done = "", None
    async for delta in llm.generate(prompt, params, **more):
        text += delta.text
        done = delta.completion or done
    return text, done


async def until_idle(llm):
    """Wait up to 5 seconds until the engine has nothing to do."""
    for _ in range(500):
        if not llm.engine.has_work and not llm._inbox:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the engine still has work")


@pytest.fixture
def hold(monkeypatch):
    """A function that makes an engine stop after a few steps until the returned event is set."""

    def held(llm):
        go, step, number = threading.Event(), llm.engine.step, itertools.count()

        def waiting(*send):
            assert next(number) < 8 or go.wait(60)
            return step(*send)

        monkeypatch.setattr(llm.engine, "step", waiting)
        return go

    return held


async def test_eight_at_once_write_what_each_writes_alone(llm, pair_folders):
    sequential = [LLM(str(pair_folders[0])).generate(p, ASKED)[0] for p in PROMPTS]
    results = await asyncio.gather(*(collect(llm, p, ASKED) for p in PROMPTS))
    for (joined, done), alone in zip(results, sequential, strict=True):
        assert done.token_ids == alone.token_ids
        assert joined == done.text == alone.text
        assert done.metrics.spec.num_draft_tokens > 0
    await until_idle(llm)
    assert_nothing_left(llm.engine)


async def test_leaving_the_loop_frees_the_blocks(llm, hold):
    go = hold(llm)
    stream = llm.generate("the sum of", LONG)
    async for _ in stream:
        break
    assert llm.engine.has_work
    await stream.aclose()
    go.set()
    await until_idle(llm)
    assert llm.engine.metrics.num_rounds < 100, "it did not run to its end"
    assert_nothing_left(llm.engine)


async def test_cancelling_the_task_frees_the_blocks(llm, hold):
    go = hold(llm)
    other = asyncio.create_task(collect(llm, PROMPTS[0], ASKED))
    tasks = [asyncio.create_task(collect(llm, p, LONG)) for p in PROMPTS[:6]]
    while not llm.engine.metrics.num_rounds:
        await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    go.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(r, asyncio.CancelledError) for r in results)
    _, done = await other
    assert done.finish_reason is FinishReason.LENGTH, "the others go on"
    await until_idle(llm)
    assert_nothing_left(llm.engine)


async def test_abort_from_outside_ends_the_stream(llm, hold):
    deltas = []
    go = hold(llm)
    async for delta in llm.generate("the sum of", LONG, request_id="mine"):
        deltas.append(delta)
        llm.abort("mine")
        llm.abort("nobody's")
        go.set()
    last = deltas[-1].completion
    assert last.finish_reason is FinishReason.ABORT
    assert "".join(d.text for d in deltas) == last.text
    assert 0 < len(last.token_ids) < 240


async def test_an_abort_while_the_prompt_is_tokenized(llm):
    asked = asyncio.create_task(collect(llm, "the sum of", LONG, request_id="mine"))
    await asyncio.sleep(0)  # it begins
    llm.abort("mine")
    text, done = await asked
    assert text == done.text == "" and done.finish_reason is FinishReason.ABORT


async def test_an_id_that_is_used_again_gets_no_tokens_of_its_first_request(llm, hold):
    alone, _ = await collect(llm, PROMPTS[0], ASKED)
    before, go = llm.engine.metrics.num_rounds, hold(llm)
    first = asyncio.create_task(collect(llm, "the sum of", LONG, request_id="same"))
    while llm.engine.metrics.num_rounds < before + 8:
        await asyncio.sleep(0.01)
    first.cancel()
    again = asyncio.create_task(collect(llm, PROMPTS[0], ASKED, request_id="same"))
    await asyncio.wait([first])
    go.set()
    text, done = await again
    assert text == done.text == alone


async def test_a_taken_id_is_refused(llm):
    """Also when several requests with one id arrive at the same moment. Afterwards the id is free again."""
    results = await asyncio.gather(
        *(collect(llm, p, ASKED, request_id="same") for p in PROMPTS[:3]), return_exceptions=True
    )
    refused = [r for r in results if isinstance(r, RequestError)]
    assert len(refused) == 2
    assert "'same' is running already; choose another" in str(refused[0])
    _, done = await collect(llm, PROMPTS[0], ASKED, request_id="same")
    assert done.request_id == "same"


async def test_close_ends_open_streams(pair_folders, hold):
    llm = AsyncLLM(str(pair_folders[0]))
    go = hold(llm)
    tasks = [asyncio.create_task(collect(llm, p, LONG)) for p in PROMPTS]
    while not llm.engine.metrics.num_rounds:
        await asyncio.sleep(0.01)
    closing = asyncio.create_task(asyncio.to_thread(llm.close))
    while not llm._closing:
        await asyncio.sleep(0.01)
    go.set()
    await closing
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
    ended = [r for r in results if isinstance(r, SameseedError)]
    assert ended, "closed in mid-generation"
    assert all("closed" in str(r) for r in ended)
    assert all(isinstance(r, SameseedError | tuple) for r in results)
    assert_nothing_left(llm.engine)
    with pytest.raises(RequestError, match="engine is closed; make a new AsyncLLM"):
        await asyncio.wait_for(collect(llm, "the", ASKED), 10)
    llm.close()


async def test_a_failing_step_ends_its_streams_and_the_engine_goes_on(llm, monkeypatch):
    whole = await collect(llm, PROMPTS[0], ASKED)
    with monkeypatch.context() as patch:

        def broken(*args, **kwargs):
            raise MemoryError("no room")

        patch.setattr(llm.engine.runner, "commit", broken)
        results = await asyncio.wait_for(
            asyncio.gather(*(collect(llm, p, ASKED) for p in PROMPTS[:3]), return_exceptions=True), 10
        )
    assert all(isinstance(r, SameseedError) and "the engine failed" in str(r) for r in results)
    await until_idle(llm)
    assert_nothing_left(llm.engine)
    assert (await collect(llm, PROMPTS[0], ASKED))[0] == whole[0]


async def test_who_forgets_to_close_leaves_no_complaint_at_the_end(pair_folders):
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", FORGETS_TO_CLOSE, str(pair_folders[0])], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "length", "")
