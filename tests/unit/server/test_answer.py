"""Answers: errors within a stream, none that blocks the others; vLLM's numbers, spellings, and counters that last."""

import asyncio
import json
import threading
import time
from functools import partial

import pytest
from fixtures_server import DONE, codec
from prometheus_client import generate_latest

from sameseed.request import FinishReason, Metrics, SamplingParams, SpecMetrics, TimeSplit
from sameseed.server.answer import INLINE, Answer
from sameseed.server.chat import ChatReply
from sameseed.server.client import EngineClient, Stream
from sameseed.server.connection import Visit
from sameseed.server.errors import ApiError
from sameseed.server.frames import Add, Ended, Piece
from sameseed.server.gate import Gate
from sameseed.server.metrics import ServerMetrics
from sameseed.server.protocol import ChatFields, CompletionFields
from sameseed.server.replies import CompletionReply, event, speculation_metrics


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
    fields = CompletionFields(prompt="x", logprobs=1, stream=request.param)
    return partial(Recorded, Add("1", [[1]], SamplingParams()), fields, codec(pair))


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


async def test_a_silent_stream_sends_comments(job, monkeypatch):
    """Only writing shows that a client has left, e.g. while a tool call is held back."""
    monkeypatch.setattr("sameseed.server.answer.QUIET", 0.01)
    reply = job()
    _, body, _ = await answered(reply, [piece("a")], prepared=9.0)
    assert (b"\n\n:\n\n:\n\n" in body) == reply.fields.stream


async def test_the_clock_has_run_while_the_request_was_prepared(job):
    status, body, gate = await asyncio.wait_for(answered(job(), [], prepared=11.0), 5)
    assert status == 408 and b"longer --request-timeout" in body and gate.num_inside == 0


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


def completion(per_pos, drafts, drafted):
    spec = SpecMetrics(drafts + 1, drafts, drafted, sum(per_pos), per_pos, undrafted={"prompt": 1})
    first = 1.0 / drafts if drafts else 9.0
    return Ended(FinishReason.STOP, 5, Metrics(1, 1, spec, TimeSplit(0.5, 1.0, 0.25), first, 0.0, 2.0 + drafts))


def test_the_numbers_that_vllm_prints():
    """vLLM's documented example: 43 steps of 3 draft tokens; 39 accepted none, one accepted 1, three accepted 3."""
    made = speculation_metrics([completion([4, 3, 3], 43, 129)], 3)["speculative_decoding"]
    assert made == {
        "mean_acceptance_length": pytest.approx(1 + 10 / 43),
        "draft_acceptance_rate": pytest.approx(10 / 129),
        "acceptance_histogram": [39, 1, 0, 3],
        "num_spec_steps": 43,
        "num_accepted_draft_tokens": 10,
        "num_draft_tokens": 129,
        "num_spec_tokens": 3,
    }


def test_sums_and_longer_drafts_than_usual():
    made = speculation_metrics([completion([2], 2, 4), completion([1, 1, 1, 1, 1], 1, 5), completion([], 0, 0)], 2)
    spec = made["speculative_decoding"]
    assert spec["acceptance_histogram"] == [0, 2, 0, 0, 0, 1]
    assert sum(spec["acceptance_histogram"]) == spec["num_spec_steps"] == 3
    assert made["sameseed"]["undrafted"] == {"prompt": 3}
    assert made["sameseed"]["time_split_s"]["target"] == 3.0
    assert (made["sameseed"]["time_to_first_token_s"], made["sameseed"]["total_time_s"]) == (0.5, 4.0)
    assert speculation_metrics([completion([], 0, 0)], 4)["speculative_decoding"] is None


def test_counters_outlive_an_engine():
    client = EngineClient("embedded", {})
    old = {
        "drafts": 5,
        "draft_tokens": 20,
        "accepted_per_pos": {"0": 3, "1": 1},
        "undrafted": {"prompt": 2},
        "times": {"draft": 1.0},
        "passes": {"counts": [1, 4, *[0] * 11, 2], "tokens": 50_000},
    }
    client.past_stats = [{**old, "running": 0}]
    client.stats = {**old, "running": 3, "num_blocks": 10, "free_blocks": 4}
    page = generate_latest(ServerMetrics(client, Gate(1), "m").registry).decode()
    lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert lines['vllm:spec_decode_num_drafts_total{model_name="m"}'] == "10.0"
    assert lines['vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="1"}'] == "2.0"
    assert lines['vllm:num_requests_running{model_name="m"}'] == "3.0"
    name = "vllm:iteration_tokens_total"
    told = [lines[f'{name}_bucket{{le="{le}",model_name="m"}}'] for le in ("1.0", "8.0", "16384.0", "+Inf")]
    assert told == ["2.0", "10.0", "10.0", "14.0"]
    assert lines[f'{name}_sum{{model_name="m"}}'] == "100000.0"
    assert lines['vllm:kv_cache_usage_perc{model_name="m"}'] == "0.6"
    assert lines['vllm:engine_time_seconds_total{model_name="m",stage="draft"}'] == "2.0"
    assert json.dumps(client.stats)


def test_an_event_is_one_line_to_whoever_splits_lines(pair):
    """Python's clients split lines as Unicode does. Covers all three ways to write an event."""
    hostile = "a\u2028b\u2029c\x85d\x0b\x0c\x1c\x1d\x1e\r\n für 🙂"
    fields = ChatFields(messages=[{"role": "user", "content": "x"}])
    reply = ChatReply(Add("r", [[1]], SamplingParams()), fields, codec(pair), model=hostile)
    reply.take(Piece(0, hostile, [5], [None], [], [], None))
    events = [*reply.begin(), *reply.events(Piece(0, hostile, [5], [None], [], [], None))]
    events += [event({"text": hostile}, "x"), *reply.fail(ApiError(503, hostile), "id")]
    assert len(events) == 5
    for made in events:
        lines = made.decode().splitlines()
        assert len(lines) == 2 + made.startswith(b"event: ") and lines[-1] == "", made
    chunk = json.loads(events[1].decode().splitlines()[0].removeprefix("data: "))
    assert chunk["model"] == chunk["choices"][0]["delta"]["content"] == hostile


def test_a_stream_tells_the_prompt_once_also_after_its_scores(pair):
    """Scores of a long prompt come in pieces of their own, before the first token."""
    fields = CompletionFields(prompt=[5, 6], echo=True, logprobs=0, return_token_ids=True)
    reply = CompletionReply(Add("r", [[5, 6]], SamplingParams()), fields, codec(pair), echoes=["ab"])
    scores = Piece(0, "", [], [], [], [[6, -1.0, []]], None)
    tokens = [Piece(0, "c", [7], [None], [[7, -1.0, []]], [], None, [at]) for at in range(2)]
    told = []
    for piece in (scores, *tokens):
        reply.take(piece)
        if piece.token_ids:
            told += [json.loads(e.decode().removeprefix("data: "))["choices"][0] for e in reply.events(piece)]
    assert [choice.get("prompt_token_ids") for choice in told] == [[5, 6], None]
