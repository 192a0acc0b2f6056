"""Answers as responses: an error within a stream is sent in the stream, and no answer blocks the others."""

import asyncio
import json
import threading
import time
from functools import partial

import pytest
from fixtures_server import DONE

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

    def __post_init__(self):
        super().__post_init__()
        self.threads: set[int] = set()

    def body(self):
        self.threads.add(threading.get_ident())
        return super().body()

    def events(self, piece):
        self.threads.add(threading.get_ident())
        if self.breaks and len(self.choices[0].text) > 1:
            raise ValueError("a fault of ours at 0x7fffdeadbeef")
        yield from super().events(piece)


async def answered(reply, pieces, prepared=0.0):
    """Status and body of the answer made of these pieces, and the gate that admitted it.

    `prepared`: seconds between the arrival of the request and the answer's start.
    """
    gate = Gate(10)
    stream = Stream(Add("r", [[1]], SamplingParams()), lambda job_id: None)
    for piece in pieces:
        stream.push(piece)
    metrics = ServerMetrics(EngineClient("x", {}), gate, "x")
    answer = Answer(reply, stream, gate.enter("", 1, 1), metrics, 10)
    sent = []

    async def receive():
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    await answer({"type": "http", "sameseed": Visit("r", arrived=time.monotonic() - prepared)}, receive, send)
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent), gate


@pytest.fixture(params=[True, False], ids=["streamed", "whole"])
def job(pair, request):
    text = TextCodec(pair.tokenizer.as_files(), 304, 256)
    fields = CompletionFields(prompt="x", logprobs=1, stream=request.param)
    return partial(Recorded, Add("1", [[1]], SamplingParams()), fields, text)


def piece(text, scores=0, done=False):
    entries = [[5, -1.0, []] for _ in range(scores)]
    return Piece(0, text, [5], [0], [[5, -1.0, []]], entries, DONE if done else None, [0])


async def test_a_fault_in_the_middle_is_said(job):
    reply = job()
    reply.breaks = True
    status, body, gate = await answered(reply, [piece("a"), piece("b"), piece("c", done=True)])
    if reply.fields.stream:
        lines = [line[6:] for line in body.decode().split("\n\n") if line]
        assert status == 200 and lines[-1] == "[DONE]" and len(lines) == 3
        assert json.loads(lines[1])["error"]["type"] == "server_error" and "0x7f" not in body.decode()
    assert gate.num_inside == 0


async def test_many_log_probabilities_are_written_out_elsewhere(job):
    """They are written in a thread, because the event loop has other requests to serve."""
    many, few = job(), job()
    await answered(many, [piece("a", scores=INLINE + 1), piece("b", done=True)])
    assert many.threads - {threading.get_ident()}
    await answered(few, [piece("a", done=True)])
    assert few.threads == {threading.get_ident()}


async def test_the_clock_has_run_while_the_request_was_prepared(job):
    status, body, gate = await asyncio.wait_for(answered(job(), [], prepared=11.0), 5)
    assert status == 408 and b"longer than 10 s" in body and gate.num_inside == 0


@pytest.mark.parametrize(("ruled_out", "status"), [(True, 400), (False, 500)])
async def test_whose_fault_an_error_is(ruled_out, status):
    """A failed pass is not the fault of a request, whatever biases and grammar the request has."""
    stream = Stream(Add("r", [[1]], SamplingParams(logit_bias={1: 1.0}), choice=["a"]), lambda job_id: None)
    done = Ended(FinishReason.ERROR, 1, DONE.metrics, ruled_out, "it broke")
    stream.push(Piece(0, "", [], [], [], [], done))
    with pytest.raises(ApiError) as caught:
        async for _ in stream.pieces():
            pass
    assert caught.value.status == status and caught.value.message.endswith("it broke")
