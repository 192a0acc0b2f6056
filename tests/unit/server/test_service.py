"""Preparing requests: large ones are prepared in threads, and the gate counts them until the end."""

import asyncio
import dataclasses
import json
import threading

import pytest
from fixtures_server import until, visiting

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

    async def ask(self, frame, name):
        self.sizes.append(len(frame.source))
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


async def test_large_requests_are_no_work_of_the_event_loop(served, monkeypatch):
    """They are parsed, prepared, tokenized and packed in threads; for small ones a thread costs more than the work."""
    http, service, helper = served
    service.client.text.max_model_len, here = 5000, {}  # by what worked: was it in this thread?

    def watch(owner, name):
        work = getattr(owner, name)

        def watched(*args, **more):
            here[name] = threading.current_thread() is threading.main_thread()
            return work(*args, **more)

        monkeypatch.setattr(owner, name, watched)

    watch(structured, "of_tools")
    watch(protocol, "plain")
    watch(frames, "pack")
    for name in ("encode", "decode"):
        watch(service.client.text.tokenizer, name)
    chat, long = "/v1/chat/completions", "xy " * INLINE
    for path, body, away in (
        (chat, {"messages": [HELLO, calling(json.dumps({"a": long}))]}, {"of_tools", "plain"}),
        ("/tokenize", {"messages": [HELLO, {"role": "user", "content": long}]}, {"plain"}),
        ("/tokenize", {"prompt": long}, {"encode"}),
        ("/detokenize", {"tokens": [5] * (texts.INLINE + 1)}, {"decode"}),
        ("/v1/completions", {"prompt": [5] * 4000}, {"pack"}),
    ):
        here.clear()
        assert (await http.post(path, json=body)).status_code == (503 if "/v1" in path else 200)
        assert {name for name, is_here in here.items() if not is_here} == away
    assert max(helper.sizes) > INLINE, "its frame is packed in a thread too"
    here.clear()
    assert (await http.post(chat, json={"messages": [HELLO]})).status_code == 503 and all(here.values())
    assert service.gate.num_inside == service.gate.size_inside == service.gate.size_arriving == 0


async def test_prompts_are_bounded_in_sum(served, monkeypatch):
    http, service, _ = served
    monkeypatch.setattr(limits, "MAX_VALUES", 150)
    assert (await http.post("/v1/completions", json={"prompt": "9" * 200})).status_code == 503  # one may be as long
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
    texts = [("/tokenize", body), ("/tokenize", {"prompt": "x" * 600}), ("/detokenize", {"tokens": [5] * 300})]
    for path, other in texts:
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


async def test_what_the_engine_is_asked_for(served, monkeypatch):
    """Fields that belong to no text reach it; prompts that no model can take do not."""
    http, service, _ = served
    size, added = service.client.text.vocab_size, []
    monkeypatch.setattr(frames, "pack", lambda frame: added.append(frame) or b"")
    body = {"prompt": [0, size - 1], "priority": 3, "cache_salt": "a", "speculation": "off"}
    assert (await http.post("/v1/completions", json=body)).status_code == 503
    (add,) = added
    assert (add.prompts, add.priority, add.speculation.of(64)) == ([[0, size - 1]], 3, 0) and add.tenant != add.owner
    for wrong in (
        *({"prompt": prompt} for prompt in ([size], [1] * 256)), {"best_of": 2}, {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": -1, "max_tokens": 257},
    ):  # fmt: skip
        refused = await http.post("/v1/completions", json={"prompt": "a", **wrong})
        assert refused.status_code == 400 and refused.json()["error"]["param"] in wrong
    assert (await http.post("/v1/completions", json={"prompt": "a", "model": "another"})).status_code == 404
    assert added == [add]
