"""Replies: vLLM's numbers for speculation, spellings of tokens, and counters that survive an engine."""

import json

import pytest
from prometheus_client import generate_latest

from sameseed.request import FinishReason, Metrics, SamplingParams, SpecMetrics, TimeSplit
from sameseed.server.chat import ChatReply
from sameseed.server.client import EngineClient
from sameseed.server.errors import ApiError
from sameseed.server.frames import Add, Ended, Piece
from sameseed.server.gate import Gate
from sameseed.server.metrics import ServerMetrics
from sameseed.server.protocol import ChatFields, CompletionFields
from sameseed.server.replies import CompletionReply, event, speculation_metrics as metrics
from sameseed.server.text import TextCodec


def completion(per_pos, drafts, drafted):
    spec = SpecMetrics(drafts + 1, drafts, drafted, sum(per_pos), per_pos, undrafted={"prompt": 1})
    first = 1.0 / drafts if drafts else 9.0
    return Ended(FinishReason.STOP, 5, Metrics(1, 1, spec, TimeSplit(0.5, 1.0, 0.25), first, 0.0, 2.0 + drafts))


def test_the_numbers_that_vllm_prints():
    """vLLM's documented example: 43 steps of 3 draft tokens; 39 accepted none, one accepted 1, three accepted 3."""
    made = metrics([completion([4, 3, 3], 43, 129)], 3)["speculative_decoding"]
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
    made = metrics([completion([2], 2, 4), completion([1, 1, 1, 1, 1], 1, 5), completion([], 0, 0)], 2)
    spec = made["speculative_decoding"]
    assert spec["acceptance_histogram"] == [0, 2, 0, 0, 0, 1]
    assert sum(spec["acceptance_histogram"]) == spec["num_spec_steps"] == 3
    assert made["sameseed"]["undrafted"] == {"prompt": 3}
    assert made["sameseed"]["time_split_s"]["target"] == 3.0
    assert (made["sameseed"]["time_to_first_token_s"], made["sameseed"]["total_time_s"]) == (0.5, 4.0)
    assert metrics([completion([], 0, 0)], 4)["speculative_decoding"] is None


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
    text = TextCodec(pair.tokenizer.as_files(), pair.target.config.vocab_size, 256)
    hostile = "a\u2028b\u2029c\x85d\x0b\x0c\x1c\x1d\x1e\r\n für 🙂"
    fields = ChatFields(messages=[{"role": "user", "content": "x"}])
    reply = ChatReply(Add("r", [[1]], SamplingParams()), fields, text, model=hostile)
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
    text = TextCodec(pair.tokenizer.as_files(), pair.target.config.vocab_size, 256)
    fields = CompletionFields(prompt=[5, 6], echo=True, logprobs=0, return_token_ids=True)
    reply = CompletionReply(Add("r", [[5, 6]], SamplingParams()), fields, text, echoes=["ab"])
    scores = Piece(0, "", [], [], [], [[6, -1.0, []]], None)
    tokens = [Piece(0, "c", [7], [None], [[7, -1.0, []]], [], None, [at]) for at in range(2)]
    told = []
    for piece in (scores, *tokens):
        reply.take(piece)
        if piece.token_ids:
            told += [json.loads(e.decode().removeprefix("data: "))["choices"][0] for e in reply.events(piece)]
    assert [choice.get("prompt_token_ids") for choice in told] == [[5, 6], None]
