"""Preparing requests: large ones are prepared in threads, and the gate counts them until the end."""

import asyncio
import dataclasses
import json
import threading

import pytest
from fixtures_server import codec, until, visiting

from sameseed.server import conversation, frames, gate as gates, limits, protocol, structured, text as texts
from sameseed.server.app import create_app
from sameseed.server.client import EngineClient
from sameseed.server.config import ServerConfig
from sameseed.server.connection import INLINE
from sameseed.server.errors import ApiError
from sameseed.server.protocol import ChatFields

HELLO = {"role": "user", "content": "hi"}
FACTS = {"max_num_seqs": 4, "method": "none", "num_draft_tokens": 0, "max_model_len": 256}


class Waiting:
    """A helper that answers at once, or waits until `go` is set."""

    def __init__(self):
        self.sizes: list[int] = []
        self.go = asyncio.Event()
        self.go.set()

    async def ask(self, frame, name, size):
        self.sizes.append(size)
        await self.go.wait()
        return "hi"


@pytest.fixture
async def served(pair):
    """An application whose engine accepts nothing: a prepared request gets a 503."""
    client, helper = EngineClient("embedded", {}), Waiting()
    client.state, client.facts, client._templates = "ready", dict(FACTS), helper
    client.text = texts.TextCodec(pair.tokenizer.as_files(), pair.target.config.vocab_size, 256, client.render)
    app, service = create_app(client, ServerConfig())
    client._over = True
    async with visiting(app) as http:
        yield http, service, helper


def calling(arguments, count=1):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call] * count}


def tools(count, letters):
    schema = {"type": "object", "properties": {"a": {"type": "string", "description": "x" * letters}}}
    return [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(count)]


async def test_large_bodies_are_no_work_of_the_event_loop(served, monkeypatch):
    http, service, helper = served
    threads = {}

    def watched(module, name, work):
        def watching(*args, **more):
            threads.setdefault(name, set()).add(threading.get_ident())
            return work(*args, **more)

        monkeypatch.setattr(module, name, watching)

    watched(structured, "of_tools", lambda *args: None)
    watched(protocol, "plain", conversation.plain)
    arguments = json.dumps({"a": "x" * INLINE})
    body = {"messages": [HELLO, calling(arguments)]}
    assert (await http.post("/v1/chat/completions", json=body)).status_code == 503
    assert set(threads) == {"plain", "of_tools"} and threading.get_ident() not in set.union(*threads.values())
    threads.clear()
    plain = await http.post("/v1/chat/completions", json={"messages": [HELLO]})
    assert plain.status_code == 503 and threads["plain"] == {threading.get_ident()}, "a thread costs more than this"
    assert (await http.post("/tokenize", json={"messages": body["messages"]})).status_code == 200
    assert helper.sizes[-1] > INLINE, "its frame is packed in a thread too"
    assert service.gate.num_inside == service.gate.size_inside == service.gate.size_arriving == 0


async def test_a_long_prompt_is_packed_while_the_event_loop_goes_on(served, monkeypatch):
    http, service, _ = served
    text = service.client.text
    text.max_model_len = 5000
    packing, go, pack = threading.Event(), threading.Event(), frames.pack
    threads = []

    def slow(*args):
        if not isinstance(args[0], frames.Add):
            return pack(*args)
        threads.append(threading.get_ident())
        packing.set()
        assert go.wait(30), "the event loop packs, and answers nobody meanwhile"
        return pack(*args)

    monkeypatch.setattr(frames, "pack", slow)
    long = asyncio.ensure_future(http.post("/v1/completions", json={"prompt": [5] * 4000}))
    await until(packing.is_set)
    assert (await http.get("/health")).status_code == 200
    go.set()
    assert (await long).status_code == 503
    assert (await http.post("/v1/completions", json={"prompt": [5] * 40})).status_code == 503
    assert [thread == threading.get_ident() for thread in threads] == [False, True], "threads cost more than the short"


async def test_prompts_are_bounded_in_sum(served, monkeypatch):
    http, service, _ = served
    monkeypatch.setattr(limits, "MAX_VALUES", 150)
    assert (await http.post("/v1/completions", json={"prompt": "9" * 200})).status_code == 503, (
        "one may be as long as any"
    )
    assert (await http.post("/v1/completions", json={"prompt": ["9" * 70] * 2})).status_code == 503
    refused = await http.post("/v1/completions", json={"prompt": ["9" * 70] * 3})
    assert refused.status_code == 400 and "150 tokens together" in refused.json()["error"]["message"]
    assert service.gate.num_inside == service.gate.size_inside == 0


async def test_arguments_and_schemas_are_bounded_in_sum():
    many = json.dumps({"a": [0] * (limits.MAX_VALUES // 4)})
    messages = protocol.read(ChatFields, {"messages": [calling(many, 3)]}).messages
    assert len(conversation.plain(messages)) == 1
    messages = protocol.read(ChatFields, {"messages": [calling(many, 5)]}).messages
    with pytest.raises(ApiError, match="arguments of tool calls hold more than"):
        conversation.plain(messages)
    fits, beyond = (limits.MAX_TOOL_SCHEMAS // 50_000, 1 + limits.MAX_TOOL_SCHEMAS // 50_000)
    for count in (fits, beyond):
        fields = protocol.read(
            ChatFields, {"messages": [HELLO], "tools": tools(count, 50_000), "tool_choice": "required"}
        )
        if count == fits:
            assert fields.source("hermes") is not None
        else:
            with pytest.raises(ApiError, match="characters in all"):
                fields.source("hermes")


async def test_who_wants_tokens_is_counted_by_size(served, monkeypatch):
    http, service, helper = served
    monkeypatch.setattr(gates, "MAX_TEXT", 1000)
    helper.go.clear()
    body = {"messages": [{"role": "user", "content": "x" * 600}]}
    first = asyncio.ensure_future(http.post("/tokenize", json=body))
    await until(lambda: helper.sizes)
    for path, other in (
        ("/tokenize", body),
        ("/tokenize", {"prompt": "x" * 600}),
        ("/detokenize", {"tokens": [5] * 300}),
    ):
        refused = await http.post(path, json=other)
        assert refused.status_code == 429 and refused.headers["retry-after"]
    helper.go.set()
    assert (await first).status_code == 200 and service.gate.size_inside == 0
    assert (await http.post("/tokenize", json={"prompt": "x" * 600, "return_token_strs": True})).status_code == 200


async def test_the_clock_of_a_request_starts_when_it_arrives(served):
    """A request that is prepared for too long gets an error, and its place is freed."""
    http, service, helper = served
    service.config = dataclasses.replace(service.config, request_timeout=0.2)
    helper.go.clear()
    late = await asyncio.wait_for(http.post("/v1/chat/completions", json={"messages": [HELLO]}), 10)
    assert late.status_code == 408 and late.json()["error"]["code"] == "timeout"
    assert late.headers["x-should-retry"] == "false", "OpenAI's clients send it again otherwise"
    assert service.gate.num_inside == 0


async def test_long_texts_are_cut_up_elsewhere(pair, monkeypatch):
    """Tokenizing and templating one request must not block the event loop for the others."""
    text = codec(pair)
    threads = []

    def noted(name):
        real = getattr(text.tokenizer, name)
        return lambda *a, **k: (threads.append(threading.current_thread().name), real(*a, **k))[1]

    for name in ("encode", "render_chat", "decode"):
        monkeypatch.setattr(text.tokenizer, name, noted(name))
    beats = 0

    async def beat():
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0)

    beating = asyncio.create_task(beat())
    await text.encode("the sum of " * texts.INLINE * 20, True)
    await text.encode(frames.Render([{"role": "user", "content": "x" * texts.INLINE}], [], {}))
    await text.spelt([[5] * (texts.INLINE + 1)])
    beating.cancel()
    assert len(threads) >= 3 and all(name.startswith("tokenizer") for name in threads) and beats > 3
