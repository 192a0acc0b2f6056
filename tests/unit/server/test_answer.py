"""Answers as responses: an error within a stream is sent in the stream, and no answer blocks the others."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from fixtures_server import DONE
from lawkit import Pair

from sameseed.request import FinishReason, SamplingParams
from sameseed.server.answer import INLINE, Answer
from sameseed.server.client import EngineClient, Stream
from sameseed.server.connection import Visit
from sameseed.server.errors import ApiError
from sameseed.server.frames import Add, Ended, Piece
from sameseed.server.gate import Gate
from sameseed.server.metrics import ServerMetrics
from sameseed.server.protocol import CompletionFields
from sameseed.server.replies import CompletionReply
from sameseed.server.text import TextCodec


class Recorded(CompletionReply):
    """Records which threads wrote it; fails at its second piece if `breaks` is set."""

    breaks = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.threads: set[int] = set()

    def body(self) -> dict[str, Any]:
        self.threads.add(threading.get_ident())
        return super().body()

    def events(self, piece: Piece) -> Iterator[bytes]:
        self.threads.add(threading.get_ident())
        if self.breaks and len(self.choices[0].text) > 1:
            raise ValueError("a fault of ours at 0x7fffdeadbeef")
        yield from super().events(piece)


async def answered(reply: Recorded, pieces: list[Piece], prepared: float = 0.0) -> tuple[int, bytes, Gate]:
    """Status and body of the answer made of these pieces, and the gate that admitted it.

    `prepared`: seconds between the arrival of the request and the answer's start.
    """
    gate = Gate(10)
    stream = Stream(Add("r", [[1]], SamplingParams()), lambda job_id: None)
    for piece in pieces:
        stream.push(piece)
    metrics = ServerMetrics(EngineClient("x", {}), gate, "x")
    answer = Answer(reply, stream, gate.enter("", 1, 1), metrics, 10)
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await answer({"type": "http", "sameseed": Visit("r", arrived=time.monotonic() - prepared)}, receive, send)  # type: ignore[arg-type]
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent), gate


Made = Callable[[], Recorded]


@pytest.fixture(params=[True, False], ids=["streamed", "whole"])
def job(pair: Pair, request: pytest.FixtureRequest) -> Made:
    text = TextCodec(pair.tokenizer.as_files(), 304, 256)
    fields = CompletionFields(prompt="x", logprobs=1, stream=request.param)
    return partial(Recorded, Add("1", [[1]], SamplingParams()), fields, text)


def piece(text: str, scores: int = 0, done: bool = False) -> Piece:
    entries = [[5, -1.0, []] for _ in range(scores)]
    return Piece(0, text, [5], [0], [[5, -1.0, []]], entries, DONE if done else None, [0])


async def test_a_fault_in_the_middle_is_said(job: Made) -> None:
    reply = job()
    reply.breaks = True
    status, body, gate = await answered(reply, [piece("a"), piece("b"), piece("c", done=True)])
    if reply.fields.stream:
        lines = [line[6:] for line in body.decode().split("\n\n") if line]
        assert status == 200 and lines[-1] == "[DONE]" and len(lines) == 3
        assert json.loads(lines[1])["error"]["type"] == "server_error" and "0x7f" not in body.decode()
    assert gate.num_inside == 0


async def test_many_log_probabilities_are_written_out_elsewhere(job: Made) -> None:
    """They are written in a thread, because the event loop has other requests to serve."""
    many, few = job(), job()
    await answered(many, [piece("a", scores=INLINE + 1), piece("b", done=True)])
    assert many.threads - {threading.get_ident()}
    await answered(few, [piece("a", done=True)])
    assert few.threads == {threading.get_ident()}


async def test_the_clock_has_run_while_the_request_was_prepared(job: Made) -> None:
    status, body, gate = await asyncio.wait_for(answered(job(), [], prepared=11.0), 5)
    assert status == 408 and b"longer than 10 s" in body and gate.num_inside == 0


@pytest.mark.parametrize(("ruled_out", "status"), [(True, 400), (False, 500)])
async def test_whose_fault_an_error_is(ruled_out: bool, status: int) -> None:
    """A failed pass is not the fault of a request, whatever biases and grammar the request has."""
    stream = Stream(Add("r", [[1]], SamplingParams(logit_bias={1: 1.0}), choice=["a"]), lambda job_id: None)
    done = Ended(FinishReason.ERROR, 1, DONE.metrics, ruled_out, "it broke")
    stream.push(Piece(0, "", [], [], [], [], done))
    with pytest.raises(ApiError) as caught:
        async for _ in stream.pieces():
            pass
    assert caught.value.status == status and caught.value.message.endswith("it broke")
