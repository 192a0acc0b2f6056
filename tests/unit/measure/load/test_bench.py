"""A whole load test against a made-up server: what is sent in which order, and what the records and reports say."""

import asyncio
import itertools
import json
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import mean, stdev
from typing import Any

import httpx
import pytest

from sameseed.errors import ConfigError
from sameseed.measure.load import show, wire
from sameseed.measure.load.bench import LoadBench, LoadLevel, LoadSettings, arrivals, closed, opened
from sameseed.measure.load.outcome import counters, read, same_texts, summarize
from sameseed.measure.load.prompts import Shape, parse_shape
from sameseed.measure.load.show import make_records
from sameseed.measure.load.wire import Endpoint, Exchange
from sameseed.report import schemas

SETTINGS = LoadSettings((Shape(12, 4),), (LoadLevel(concurrency=2),), num_requests=3, repeat=2, warm_up=1)


@dataclass
class Fake:
    """A server where a letter is a token and the text is a function of the prompt; first come `busy` refusals."""

    busy: int = 0
    reads_speculation: bool = True
    tokenizes: bool = True
    tells_usage: bool = True
    wrong_when_off: bool = False
    drafts_when_off: bool = False
    reads: int = 10**9
    status: int = 200
    message: str = "no such thing"
    seen: list[dict[str, Any]] = field(default_factory=list)
    drafts: int = 0

    def __call__(self, request):
        path = request.url.path
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "org/tiny", "max_model_len": 64}]})
        if path == "/metrics":
            names = ("drafts", "draft_tokens", "accepted_tokens")
            lines = [f"vllm:spec_decode_num_{n}_total {self.drafts * (i + 1)}" for i, n in enumerate(names)]
            return httpx.Response(200, text="\n".join(lines))
        if path in ("/ready", "/health"):
            return httpx.Response(404)
        body = json.loads(request.content)
        if path == "/tokenize" and self.tokenizes:
            special = [1] if body["add_special_tokens"] else []
            return httpx.Response(200, json={"tokens": special + [ord(c) for c in body["prompt"]]})
        if path == "/detokenize" and self.tokenizes:
            return httpx.Response(200, json={"prompt": "".join(map(chr, body["tokens"]))})
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return httpx.Response(404, json={})
        if self.busy:
            self.busy -= 1
            return httpx.Response(503, headers={"retry-after": "0"}, json={"error": {"message": "full"}})
        if self.status != 200:
            return httpx.Response(self.status, json={"error": {"message": self.message}})
        self.seen.append({"path": path, "auth": request.headers.get("authorization"), **body})
        self.drafts += 4
        return httpx.Response(200, stream=httpx.ByteStream(self.stream(body)))

    def stream(self, body):
        off = body.get("speculation") == "off"
        count = body["max_tokens"]
        text = "bad!" * count if off and self.wrong_when_off else "good" * count
        lines = []
        for i in range(count):
            ids = {"token_ids": [i]} if body.get("return_token_ids") else {}
            last = "length" if i == count - 1 else None
            lines.append({"choices": [{"index": 0, "text": text[i], "finish_reason": last, **ids}]})
        end = {"choices": []}
        if self.tells_usage:
            end["usage"] = {"prompt_tokens": min(self.reads, len(body.get("prompt", "x"))), "completion_tokens": count}
            end["usage"]["prompt_tokens_details"] = None
        if self.reads_speculation:
            told = {"num_spec_steps": 1, "num_draft_tokens": 3, "num_accepted_draft_tokens": 2}
            end["metrics"] = {"speculative_decoding": None if off and not self.drafts_when_off else told}
        return b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in [*lines, end]) + b"data: [DONE]\n\n"


def tick(note):
    """Ignores progress."""


def arms(**on):
    return [Endpoint("off", "http://fake", fields={"speculation": "off"}), Endpoint("on", "http://fake", fields=on)]


async def measure(fake, settings, given):
    """Measure all cells; returns the bench and the records."""
    found = []
    async with httpx.AsyncClient(transport=httpx.MockTransport(fake)) as client:
        bench = LoadBench(client, given, settings)
        await bench.prepare()
        for shape in settings.shapes:
            for level in settings.levels:
                found += make_records(bench, shape, level, await bench.measure(shape, level, tick), "r")
    return bench, found


async def test_arms_take_turns_over_the_same_prompts_and_seeds():
    fake = Fake()
    _, records = await measure(fake, SETTINGS, arms(speculation={"policy": "fixed"}))
    sent = fake.seen[2 + 2 :]  # without one probe per arm (does the server read the field?) and the warm-up
    labels = [b["speculation"] == "off" for b in sent]
    assert labels == [True] * 3 + [False] * 6 + [True] * 3  # the order changes with each repetition
    off, on = ([b for b in sent if (b["speculation"] == "off") is which] for which in (True, False))
    assert [b["prompt"] for b in off] == [b["prompt"] for b in on]
    assert [b["seed"] for b in off] == [b["seed"] for b in on] == [1, 2, 3] * 2
    assert len({str(b["prompt"]) for b in off}) >= 5  # such a short text may occur twice
    assert all(len(b["prompt"]) == 12 and b["prompt"][0] == 1 for b in sent)
    assert all("ignore_eos" not in b and b["stream_options"] == {"include_usage": True} for b in sent)
    assert not records[0]["config"]["ignore_eos"]
    assert len({b["cache_salt"] for b in sent}) == 12  # no request finds another's prefix in the cache
    for made in records:
        schemas.check(made)
        assert made["errors"] == {} and made["retries"] == 0 and made["config"]["model"] == "tiny"
        assert all(r["counted"] == {"usage": 3} and r["num_output_tokens"] == 12 for r in made["repetitions"])
    assert records[0]["acceptance"] is None and records[1]["acceptance"]["acceptance_rate"] == pytest.approx(2 / 3)
    assert records[1]["acceptance"]["mean_acceptance_length"] == 3.0
    assert records[1]["same_texts"] == [6, 6] and records[0]["same_texts"] is None
    assert records[1]["itl_token_ms"] is not None
    (a, b), (c, d) = ([r["output_tokens_per_s"] for r in made["repetitions"]] for made in records)
    assert records[1]["output_tokens_per_s"] == pytest.approx((a + b) / 2 * (c / a + d / b) / 2), "as the speed-up says"


async def test_what_a_server_does_is_seen():
    for reads in (6, 12):
        _, records = await measure(Fake(reads=reads), SETTINGS, [Endpoint("server", "http://fake")])
        assert any("num_ctx" in remark for remark in records[0]["remarks"]) == (reads == 6), "prompts that it cuts"
    _, records = await measure(Fake(wrong_when_off=True), SETTINGS, arms())
    assert records[1]["same_texts"] == [0, 6], "another text"


async def test_refusals_are_tried_again_and_counted():
    server, settings = [Endpoint("server", "http://fake")], replace(SETTINGS, warm_up=0)
    _, records = await measure(Fake(busy=3), settings, server)
    assert records[0]["retries"] == 3 and not records[0]["errors"]
    _, records = await measure(Fake(busy=99), replace(settings, max_retries=1), server)
    assert records[0]["errors"] == {"HTTP 503 after 1 retries": 6} and records[0]["retries"] == 6
    assert records[0]["output_tokens_per_s"] == 0


async def test_errors_stay_in_sight():
    server = [Endpoint("server", "http://fake")]
    _, records = await measure(Fake(status=500), SETTINGS, server)
    assert records[0]["errors"] == {"HTTP 500": 6} and show.cells(records[0])["failed"] == "6"
    assert any("6 HTTP 500" in line and "no such thing" in line for line in show.notes(records))
    with pytest.raises(ConfigError, match=r"refuses every request, with HTTP 400.*no such thing.*--strict"):
        await measure(Fake(status=400), SETTINGS, server)


async def test_the_client_takes_chunks_as_they_come():
    async with wire.open_client("key", 1, 1.0) as client:
        assert client.headers["accept-encoding"] == "identity" and client.headers["authorization"] == "Bearer key"


async def test_a_server_that_loads_is_waited_for(monkeypatch):
    fake, states, slept = Fake(), [503, 503, 200], []

    async def sleep(seconds):
        slept.append(seconds)

    def loading(request):
        if request.url.path == "/ready":
            return httpx.Response(states.pop(0) if states else 200)
        assert not states, "asked before it was ready"
        return fake(request)

    monkeypatch.setattr("sameseed.measure.load.wire.asyncio.sleep", sleep)
    _, records = await measure(loading, SETTINGS, [Endpoint("server", "http://fake")])
    assert not records[0]["errors"] and len(slept) == 2


async def test_lengths_that_nobody_asked_for_are_scaled_to_the_context(caplog):
    async with httpx.AsyncClient(transport=httpx.MockTransport(Fake())) as client:
        bench = LoadBench(client, arms(), replace(SETTINGS, shapes=(Shape(100, 20), Shape(600, 40)), fit=True))
        await bench.prepare()
    assert [s.label for s in bench.settings.shapes] == ["10-2", "59-4"] and "scaled by 0.098" in caplog.text


async def test_a_server_that_tells_less():
    fake = Fake(reads_speculation=False, tokenizes=False, tells_usage=False)
    bench, records = await measure(fake, replace(SETTINGS, strict=True), [Endpoint("server", "http://fake")])
    assert not bench.tokenized and isinstance(fake.seen[0]["prompt"], str)
    known = {"path", "auth", "model", "prompt", "max_tokens", "seed", "stream", "stream_options", "temperature"}
    assert fake.seen[0].keys() == known, "OpenAI's fields only"
    said = " ".join(records[0]["remarks"])
    assert "no usage" in said and "ITL by chunks only" in said and "no /tokenize" in said and "counters" in said
    assert records[0]["acceptance"]["source"] == "/metrics"
    assert records[0]["acceptance"]["mean_acceptance_length"] == 4.0
    assert records[0]["acceptance"]["num_drafts"] == 6 * 4, "what the counters gained, the warm-up left out"


def nobody(request):
    raise httpx.ConnectError("refused")


@pytest.mark.parametrize(
    ("fake", "changes", "says"),
    [
        (Fake(drafts_when_off=True), {}, "--baseline-url"), (Fake(), {"strict": True}, "leave --strict out"),
        (Fake(reads_speculation=False), {}, "--baseline-url"), (Fake(status=400), {}, "no such thing"),
        (Fake(status=400, message="'speculation' is not supported"), {}, "--baseline-url"),
        (Fake(), {"shapes": (Shape(60, 10),)}, r"needs 70 tokens and the server's context is 64.*--scale 0\.89"),
        (lambda r: httpx.Response(401), {}, "API key"), (nobody, {}, r"no server at http://fake.*is it running"),
        (Fake(tokenizes=False), {"prompts": "random"}, "no /tokenize"),
    ],
)  # fmt: skip
async def test_what_cannot_be_compared_is_refused(fake, changes, says):
    with pytest.raises(ConfigError, match=says):
        await measure(fake, replace(SETTINGS, **changes), arms())


async def test_chat_random_tokens_and_files(tmp_path):
    fake = Fake()
    endpoint = Endpoint("server", "http://fake", chat=True)
    await measure(fake, replace(SETTINGS, prompts="random", warm_up=0), [endpoint])
    contents = [b["messages"][0]["content"] for b in fake.seen]
    assert len(set(contents)) == 6 and all(len(c) == 11 for c in contents)  # the chat template adds the special token
    file = tmp_path / "some.jsonl"
    rows = [{"prompt": "one"}, {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "two"}]}]
    file.write_text("\n".join(json.dumps(r) for r in rows))
    fake.seen.clear()
    of_file = replace(SETTINGS, prompts=str(file), shapes=(Shape(None, 4),), warm_up=0)
    _, records = await measure(fake, of_file, [endpoint])
    assert {len(b["messages"]) for b in fake.seen} == {1, 2}
    assert records[0]["config"]["prompts"] == "some.jsonl" and records[0]["config"]["lengths"] == "file-4"


async def test_an_open_level_is_recorded():
    _, records = await measure(Fake(), replace(SETTINGS, levels=(LoadLevel(rate=500.0, burstiness=0.5),)), arms())
    config = records[0]["config"]
    assert (config["concurrency"], config["rate"], config["burstiness"]) == (None, 500.0, 0.5)
    assert records[0]["repetitions"][0]["late_ms"] is not None and show.cells(records[0])["load"] == "500/s"


async def test_a_run_ends_with_its_time():
    """All levels in one run, each limited by its time; the remarks say what this means for the figures."""
    levels = tuple(LoadLevel(concurrency=c) for c in (1, 4, 32))
    settings = replace(SETTINGS, levels=levels, num_requests=None, max_seconds=1e-9)
    _, records = await measure(Fake(), settings, arms())
    assert [r["config"]["concurrency"] for r in records[1::2]] == [1, 4, 32]
    for made in records:
        schemas.check(made)
        level = made["config"]["concurrency"]
        assert [r["num_requests"] for r in made["repetitions"]] == [level] * 2, "one a client"
        assert any(f"after {level} of {max(8, 4 * level)} requests" in remark for remark in made["remarks"])
        assert any("this is a burst" in remark for remark in made["remarks"])
    assert records[-1]["same_texts"] == [64, 64]
    _, records = await measure(Fake(), replace(SETTINGS, max_seconds=1e9), arms())
    assert not any("--max-seconds" in remark for remark in records[0]["remarks"])


@pytest.mark.parametrize("given", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_addresses(given):
    assert wire.base_url(given) == "http://h:1"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        *((partial(parse_shape, text, 1.0), "IN-OUT") for text in ("", "200", "a-b", "0-5", "5-0", "-3")),
        (partial(wire.base_url, "h:1"), "address"), (partial(LoadLevel, concurrency=0), "--concurrency must"),
        (partial(LoadLevel, rate=0.0), "--rates must"), (LoadLevel, "give one"),
        (partial(LoadLevel, rate=1.0, burstiness=0.0), r"--burstiness \(1 is a Poisson process\) must be above 0"),
        (partial(replace, SETTINGS, max_seconds=0.0), "--max-seconds must be above 0"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(wrong, says):
    with pytest.raises(ConfigError, match=says):
        wrong()


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 16.0])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness):
    moments = arrivals(LoadLevel(rate=50.0, burstiness=burstiness), 20001, seed=3)
    gaps = [b - a for a, b in itertools.pairwise(moments)]
    assert moments[0] == 0 and min(gaps) >= 0
    assert mean(gaps) == pytest.approx(1 / 50, rel=0.06)
    # The coefficient of variation of a gamma distribution of shape b is 1 / sqrt(b); 1 for a Poisson process.
    assert stdev(gaps) / mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.06)
    assert moments == arrivals(LoadLevel(rate=50.0, burstiness=burstiness), 20001, seed=3)
    assert moments != arrivals(LoadLevel(rate=50.0, burstiness=burstiness), 20001, seed=4)
    cut = arrivals(LoadLevel(rate=50.0, burstiness=burstiness), 20001, seed=3, seconds=2.0)
    assert cut == [moment for moment in moments if moment < 2.0] and 0 < len(cut) < 20001


async def test_closed_keeps_so_many_inside_and_the_order():
    inside, most = 0, 0

    async def send(body):
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.001 * (body % 3))
        inside -= 1
        return body * 10

    assert await closed(send, range(20), 4) == [10 * i for i in range(20)]
    assert most == 4
    assert await closed(send, range(2), 8) == [0, 10]


async def test_opened_waits_for_nobody():
    first = asyncio.Event()

    dues = []

    async def send(body, due):
        dues.append(due)
        if body == 0:
            await first.wait()  # answered only because later requests are sent
        elif body == 2:
            first.set()
        return body

    answers, late = await asyncio.wait_for(opened(send, range(3), [0.0, 0.01, 0.02]), 10)
    assert answers == [0, 1, 2] and late >= 0
    assert [due - dues[0] for due in dues] == pytest.approx([0.0, 0.01, 0.02]), "not when they were sent"


async def test_a_request_may_not_take_for_ever():
    async def never(request):
        await asyncio.Event().wait()

    async with httpx.AsyncClient(transport=httpx.MockTransport(never)) as client:
        made = await asyncio.wait_for(wire.exchange(client, Endpoint("server", "http://fake"), {}, 0.01, 0), 60)
    assert made.error == "timeout" and "0.01 s" in made.detail


def line(**event):
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def chunk(text, ids=None, reason=None):
    return line(choices=[{"index": 0, "text": text, "token_ids": ids, "finish_reason": reason}])


USAGE = {"prompt_tokens": 7, "completion_tokens": 6}
SPECULATION = {"num_spec_steps": 2, "num_draft_tokens": 8, "num_accepted_draft_tokens": 4}


def test_tokens_moments_and_metrics():
    end = line(choices=[], usage=USAGE, metrics={"speculative_decoding": SPECULATION})
    parts = [(1.5, chunk("a", [1])), (2.5, chunk("bc", [2, 3, 4])), (3.0, chunk("d", [5, 6], "length"))]
    found = read(Exchange(1.0, [*parts, (9.0, end + b"data: [DONE]\n\n")], retries=2))
    assert (found.error, found.text, found.token_ids) == (None, "abcd", [1, 2, 3, 4, 5, 6])
    assert (found.num_output, found.counted, found.num_prompt, found.retries) == (6, "usage", 7, 2)
    assert (found.ttft, found.latency, found.tpot) == (0.5, 2.0, 1.5 / 5)
    assert found.gaps == [1.0, 0.5]
    assert found.token_gaps == pytest.approx([1 / 3] * 3 + [0.25] * 2)
    assert found.speculation == SPECULATION


def test_an_event_in_pieces_has_the_moment_of_its_last():
    whole, cut = chunk("x", [1]) + chunk("y", [2], "stop"), len(chunk("x", [1])) - 4
    found = read(Exchange(0.0, [(1.0, whole[:cut]), (2.0, whole[cut:])]))
    assert found.arrivals == [2.0, 2.0] and found.text == "xy" and found.error is None


def test_without_usage_it_says_what_was_counted():
    ids = read(Exchange(0.0, [(1.0, chunk("a", [1, 2])), (2.0, chunk("b", [3], "stop"))]))
    chunks = read(Exchange(0.0, [(1.0, chunk("a")), (2.0, chunk("b", None, "stop"))]))
    assert (ids.num_output, ids.counted) == (3, "token ids")
    assert (chunks.num_output, chunks.counted, chunks.token_gaps) == (2, "chunks", None)


@pytest.mark.parametrize("name", ["content", "reasoning_content", "reasoning"])
def test_chat_counts_from_the_first_text(name):
    role = line(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
    text = line(choices=[{"index": 0, "delta": {name: "hi"}, "finish_reason": "stop"}])
    found = read(Exchange(0.0, [(1.0, role), (2.0, text), (2.5, b"data: [DONE]\n\n")]))
    assert found.ttft == 2.0 and found.text == "hi"


@pytest.mark.parametrize(
    ("chunks", "kind"),
    [
        ([(1.0, chunk("a"))], "cut off"),
        ([(1.0, line(error={"message": "gone"}) + b"data: [DONE]\n\n")], "error in the stream"),
        ([(1.0, b"data: {nonsense\n\n")], "not the API's form"),
        ([(1.0, b"data: [DONE]\n\n")], "no token"),
        ([(1.0, b"data: 3\n\ndata: [DONE]\n\n")], "not the API's form"),
    ],
)
def test_what_goes_wrong_has_a_name(chunks, kind):
    assert read(Exchange(0.0, chunks)).error == kind
    assert read(Exchange(0.0, chunks, error="timeout")).error == "timeout"


def test_summary_counts_only_what_was_completed():
    good = Exchange(10.0, arrivals=[10.1, 10.3, 10.5], sizes=[1, 2, 2], num_output=5, num_prompt=20)
    slow = Exchange(10.0, arrivals=[11.0, 12.0], sizes=[1, 1], num_output=2, num_prompt=30)
    lost = Exchange(9.0, arrivals=[9.5], sizes=[1], num_output=1, error="cut off", detail="why", retries=1)
    made = summarize([good, slow, lost], 0.5, 0.2)
    assert made["seconds"] == pytest.approx(3.0)  # from the first request sent, completed or not
    assert (made["num_requests"], made["num_completed"], made["num_good"]) == (3, 2, 1)
    assert made["output_tokens_per_s"] == pytest.approx(7 / 3)
    assert made["goodput_requests_per_s"] == pytest.approx(1 / 3)
    assert made["ttft_ms"]["mean"] == pytest.approx(550) and made["num_prompt_tokens"] == 50
    assert made["tpot_ms"]["p50"] == pytest.approx((100 + 1000) / 2)
    assert made["itl_chunk_ms"]["mean"] == pytest.approx((200 + 200 + 1000) / 3)
    assert made["itl_token_ms"]["mean"] == pytest.approx((4 * 100 + 1000) / 5)
    assert (made["errors"], made["error_details"], made["retries"]) == ({"cut off": 1}, ["why"], 1)


def test_texts_are_compared_where_both_have_one():
    a, b = Exchange(0.0, text="x", token_ids=[1]), Exchange(0.0, text="x", token_ids=[2])
    untold, failed = Exchange(0.0, text="x"), Exchange(0.0, text="y", error="timeout")
    assert same_texts([a, a, a, a], [a, b, untold, failed]) == (2, 3)
    assert same_texts([a, a, a], [a]) == (1, 1), "as far as both were sent"


def test_counters_of_a_metrics_page():
    """Those of several engines are added; counts by place, and the time of a counter's start, are others."""
    name = "vllm:spec_decode_num"
    lines = [f"# HELP {name}_drafts_total text", f'{name}_drafts_total{{engine="0"}} 10.0']
    lines += [f'{name}_drafts_total{{engine="1"}} 5.0', f'{name}_accepted_tokens_per_pos_total{{position="0"}} 12.0']
    lines += ["llamacpp:spec_decode_num_accepted_tokens_total 20", f'{name}_drafts_created{{model_name="m"}} 1.7e9']
    assert counters("\n".join(lines)) == {"spec_decode_num_drafts": 15, "spec_decode_num_accepted_tokens": 20}
