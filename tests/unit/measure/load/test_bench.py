"""A whole load test against a made-up server: what is sent in which order, and what the records and reports say."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from sameseed.errors import ConfigError
from sameseed.measure.load import show, wire
from sameseed.measure.load.bench import LoadBench, LoadLevel, LoadSettings
from sameseed.measure.load.prompts import Shape, parse_shape
from sameseed.measure.load.show import make_records
from sameseed.measure.load.wire import Endpoint
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
    num_cached: int = 0
    status: int = 200
    message: str = "no such thing"
    seen: list[dict[str, Any]] = field(default_factory=list)
    drafts: int = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
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

    def stream(self, body: dict[str, Any]) -> bytes:
        off = body.get("speculation") == "off"
        count = body["max_tokens"]
        text = "bad!" * count if off and self.wrong_when_off else "good" * count
        lines = []
        for i in range(count):
            ids = {"token_ids": [i]} if body.get("return_token_ids") else {}
            last = "length" if i == count - 1 else None
            lines.append({"choices": [{"index": 0, "text": text[i], "finish_reason": last, **ids}]})
        end: dict[str, Any] = {"choices": []}
        if self.tells_usage:
            end["usage"] = {"prompt_tokens": len(body.get("prompt", "x")), "completion_tokens": count}
            end["usage"]["prompt_tokens_details"] = {"cached_tokens": self.num_cached} if self.num_cached else None
        if self.reads_speculation:
            told = {"num_spec_steps": 1, "num_draft_tokens": 3, "num_accepted_draft_tokens": 2}
            end["metrics"] = {"speculative_decoding": None if off and not self.drafts_when_off else told}
        return b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in [*lines, end]) + b"data: [DONE]\n\n"


def tick(note: str) -> None:
    """Ignores progress."""


def arms(**on: Any) -> list[Endpoint]:
    return [Endpoint("off", "http://fake", fields={"speculation": "off"}), Endpoint("on", "http://fake", fields=on)]


async def measure(
    fake: Callable[[httpx.Request], httpx.Response], settings: LoadSettings, given: list[Endpoint]
) -> Any:
    """Measure all cells; returns the bench and the records."""
    found = []
    async with httpx.AsyncClient(transport=httpx.MockTransport(fake)) as client:
        bench = LoadBench(client, given, settings)
        await bench.prepare()
        for shape in settings.shapes:
            for level in settings.levels:
                found += make_records(bench, shape, level, await bench.measure(shape, level, tick), "r")
    return bench, found


async def test_arms_take_turns_over_the_same_prompts_and_seeds() -> None:
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


async def test_another_text_is_seen() -> None:
    _, records = await measure(Fake(wrong_when_off=True), SETTINGS, arms())
    assert records[1]["same_texts"] == [0, 6]


async def test_refusals_are_tried_again_and_counted() -> None:
    fake = Fake(busy=3)
    _, records = await measure(fake, replace(SETTINGS, warm_up=0), [Endpoint("server", "http://fake")])
    assert records[0]["retries"] == 3 and not records[0]["errors"]
    _, records = await measure(
        Fake(busy=99), replace(SETTINGS, warm_up=0, max_retries=1), [Endpoint("server", "http://fake")]
    )
    assert records[0]["errors"] == {"HTTP 503 after 1 retries": 6} and records[0]["retries"] == 6
    assert records[0]["output_tokens_per_s"] == 0


async def test_errors_stay_in_sight() -> None:
    _, records = await measure(Fake(status=500), SETTINGS, [Endpoint("server", "http://fake")])
    assert records[0]["errors"] == {"HTTP 500": 6}
    lines = show.notes(records)
    assert any("6 HTTP 500" in line and "no such thing" in line for line in lines)
    assert show.cells(records[0])["failed"] == "6"


async def test_a_server_that_refuses_every_request_ends_the_test() -> None:
    with pytest.raises(ConfigError, match=r"refuses every request, with HTTP 400.*no such thing"):
        await measure(Fake(status=400), SETTINGS, [Endpoint("server", "http://fake")])


async def test_a_server_that_loads_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, states, slept = Fake(), [503, 503, 200], []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    def loading(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/ready":
            return httpx.Response(states.pop(0) if states else 200)
        assert not states, "asked before it was ready"
        return fake(request)

    monkeypatch.setattr("sameseed.measure.load.wire.asyncio.sleep", sleep)
    _, records = await measure(loading, SETTINGS, [Endpoint("server", "http://fake")])
    assert not records[0]["errors"] and len(slept) == 2


async def test_lengths_that_nobody_asked_for_are_scaled_to_the_context(caplog: pytest.LogCaptureFixture) -> None:
    fake = Fake()
    async with httpx.AsyncClient(transport=httpx.MockTransport(fake)) as client:
        bench = LoadBench(client, arms(), replace(SETTINGS, shapes=(Shape(100, 20), Shape(600, 40)), fit=True))
        await bench.prepare()
    assert [s.label for s in bench.settings.shapes] == ["10-2", "59-4"] and "scaled by 0.098" in caplog.text


async def test_a_server_that_tells_less() -> None:
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
    with pytest.raises(ConfigError, match="no /tokenize"):
        await measure(fake, replace(SETTINGS, prompts="random"), [Endpoint("server", "http://fake")])


async def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ConfigError, match="--baseline-url"):
        await measure(Fake(drafts_when_off=True), SETTINGS, arms())
    with pytest.raises(ConfigError, match="leave --strict out"):
        await measure(Fake(), replace(SETTINGS, strict=True), arms())
    with pytest.raises(ConfigError, match="--baseline-url"):
        await measure(Fake(reads_speculation=False), SETTINGS, arms())
    with pytest.raises(ConfigError, match="--baseline-url"):
        await measure(Fake(status=400, message="'speculation' is not supported"), SETTINGS, arms())
    with pytest.raises(ConfigError, match="no such thing"):
        await measure(Fake(status=400), SETTINGS, arms())
    with pytest.raises(ConfigError, match=r"needs 70 tokens and the server's context is 64.*--scale 0\.89"):
        await measure(Fake(), replace(SETTINGS, shapes=(Shape(60, 10),)), arms())
    with pytest.raises(ConfigError, match="API key"):
        await measure(lambda r: httpx.Response(401), SETTINGS, arms())

    def nobody(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(ConfigError, match=r"no server at http://fake.*is it running"):
        await measure(nobody, SETTINGS, arms())


async def test_chat_random_tokens_and_files(tmp_path: Path) -> None:
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


async def test_an_open_level_is_recorded() -> None:
    level = LoadLevel(rate=500.0, burstiness=0.5)
    _, records = await measure(Fake(), replace(SETTINGS, levels=(level,)), arms())
    config = records[0]["config"]
    assert (config["concurrency"], config["rate"], config["burstiness"]) == (None, 500.0, 0.5)
    assert records[0]["repetitions"][0]["late_ms"] is not None
    assert show.cells(records[0])["load"] == "500/s"


async def test_a_run_ends_with_its_time() -> None:
    """All levels in one run, each limited by its time; the remarks say what this means for the figures."""
    levels = tuple(LoadLevel(concurrency=c) for c in (1, 2, 4, 8, 16, 32))
    settings = replace(SETTINGS, levels=levels, num_requests=None, max_seconds=1e-9)
    _, records = await measure(Fake(), settings, arms())
    assert [r["config"]["concurrency"] for r in records[1::2]] == [1, 2, 4, 8, 16, 32]
    for made in records:
        schemas.check(made)
        level = made["config"]["concurrency"]
        assert [r["num_requests"] for r in made["repetitions"]] == [level] * 2, "one a client"
        assert made["config"]["max_seconds"] == 1e-9
        assert any(f"after {level} of {max(8, 4 * level)} requests" in remark for remark in made["remarks"])
        assert any("this is a burst" in remark for remark in made["remarks"])
    assert records[-1]["same_texts"] == [64, 64]
    _, records = await measure(Fake(), replace(SETTINGS, max_seconds=1e9), arms())
    assert not any("--max-seconds" in remark for remark in records[0]["remarks"])
    with pytest.raises(ConfigError, match="--max-seconds must be above 0"):
        replace(SETTINGS, max_seconds=0.0)


@pytest.mark.parametrize("text", ["", "200", "a-b", "0-5", "5-0", "-3"])
def test_lengths_are_checked(text: str) -> None:
    with pytest.raises(ConfigError, match="IN-OUT"):
        parse_shape(text, 1.0)


@pytest.mark.parametrize("given", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_addresses(given: str) -> None:
    assert wire.base_url(given) == "http://h:1"
    with pytest.raises(ConfigError):
        wire.base_url("h:1")
