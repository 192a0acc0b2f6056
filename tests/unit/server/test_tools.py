"""Tool calls: found however the text is cut into pieces, never lost, never run, and the same with streaming."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fixtures_server import DONE
from hypothesis import given, settings, strategies as st
from lawkit import Pair

from sameseed.server.chat import ChatReply
from sameseed.server.errors import ApiError
from sameseed.server.frames import Piece, Render
from sameseed.server.limits import opened
from sameseed.server.protocol import ChatFields
from sameseed.server.reading import read
from sameseed.server.service import tool_parser
from sameseed.server.text import TextCodec
from sameseed.server.tools import Call, LlamaCalls, More, QwenCalls, parser_for

NAMES = {"get", "add"}
GET = '{"name": "get", "arguments": {"city": "Köln"}}'
ADD = '{"name": "add", "parameters": {"a": 1, "b": [2]}}'
HALF = '{"arguments": {"city": "\\ud800"}, "name": "get"}'  # JSON, but a lone surrogate is not text
NAN = '{"arguments": {"city": NaN}, "name": "get"}'
QWEN = {
    "plain text": ["plain text"],
    f"<tool_call>\n{GET}\n</tool_call>": [Call("get", '{"city": "Köln"}')],
    f"Let me see. <tool_call>{GET}</tool_call><tool_call>{GET}</tool_call> Done": [
        "Let me see. ",
        Call("get", '{"city": "Köln"}'),
        Call("get", '{"city": "Köln"}'),
        " Done",
    ],
    f"<tool_call>{GET}": [Call("get", '{"city": "Köln"}')],
    "<tool_call>{not json}</tool_call>!": ["<tool_call>{not json}</tool_call>!"],
    '<tool_call>{"name": "rm", "arguments": {}}</tool_call>': [
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
    ],
    '<tool_call>{"name": "get", "arguments": "x"}</tool_call>': [
        '<tool_call>{"name": "get", "arguments": "x"}</tool_call>'
    ],
    '<tool_call>{"name": [], "arguments": {}}</tool_call>': ['<tool_call>{"name": [], "arguments": {}}</tool_call>'],
    f"<tool_call>{HALF}</tool_call>": [f"<tool_call>{HALF}</tool_call>"],
    f"<tool_call>{NAN}</tool_call>": [f"<tool_call>{NAN}</tool_call>"],
    # arguments are streamed while they are written, so they stay as written
    '<tool_call>{"name": "get", "arguments": {"city": NaN}}</tool_call>': [Call("get", '{"city": NaN}')],
    f"\n<tool_call>\n{GET}\n</tool_call>\n<tool_call>\n{GET}\n</tool_call>\n": [Call("get", '{"city": "Köln"}')] * 2,
    '<tool_call>{"name": "get", "arguments": {"a": "}</tool_call>", "b": [{}]}, "id": 7}</tool_call>': [
        Call("get", '{"a": "}</tool_call>", "b": [{}]}')
    ],
    '<tool_call>{"arguments": {"a":1}, "name": "get"}</tool_call>': [Call("get", '{"a": 1}')],
    '<tool_call>{"name": "get", "arguments": {"a": "\\"': [Call("get", '{"a": "\\"')],
    " \n": [" \n"],
    "a < b <tool <tool_cal": ["a < b <tool <tool_cal"],
    "</tool_call>": ["</tool_call>"],
    "<tool_call>" + "[" * 5000 + "</tool_call>": ["<tool_call>" + "[" * 5000 + "</tool_call>"],
}
LLAMA = {
    "plain": ["plain"],
    ADD: [Call("add", '{"a": 1, "b": [2]}')],
    f" {ADD} ; {ADD}\n": [Call("add", '{"a": 1, "b": [2]}')] * 2,
    f"{ADD} and more": [Call("add", '{"a": 1, "b": [2]}'), " and more"],
    '{"name": "add", "parameters": {"a": {"b": "}"}}, "x": [{}]}; {"parameters": {}, "name": "get"}': [
        Call("add", '{"a": {"b": "}"}}'),
        Call("get", "{}"),
    ],
    '{"name": "rm", "parameters": {}}': ['{"name": "rm", "parameters": {}}'],
    '{"name": "add", "parameters": {"a": ': [Call("add", '{"a": ')],
    '{"name": "add"}': [Call("add", "{}")],
    '{"x": 1}': ['{"x": 1}'],
    f"{ADD};": [Call("add", '{"a": 1, "b": [2]}')],
    f"{ADD} ; \n ": [Call("add", '{"a": 1, "b": [2]}')],
    f"{ADD}; x": [Call("add", '{"a": 1, "b": [2]}'), " x"],
    '{"name": {}}': ['{"name": {}}'],
    "{": ["{"],
    "": [],
}
CASES = [(QwenCalls, t, f) for t, f in QWEN.items()] + [(LlamaCalls, t, f) for t, f in LLAMA.items()]


def joined(found: list[Any]) -> list[Any]:
    """Adjacent texts joined to one, and the parts of a call joined to a whole call."""
    made: list[Any] = []
    for item in found:
        if isinstance(item, str) and made and isinstance(made[-1], str):
            made[-1] += item
        elif isinstance(item, More):
            made[-1] = Call(made[-1].name, made[-1].arguments + item.arguments)
        else:
            made.append(item)
    return made


@pytest.mark.parametrize(("kind", "text", "found"), CASES, ids=range(len(CASES)))
@given(data=st.data())
@settings(max_examples=10)
def test_calls_are_found_however_the_text_is_cut(kind: Any, text: str, found: list[Any], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    parser, got = kind(NAMES), []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        got += parser.feed(text[start:end])
    assert joined(got + parser.end()) == found


def test_text_is_not_held_back_without_need() -> None:
    parser = QwenCalls(NAMES)
    assert parser.feed("a < b") == ["a < b"]
    assert parser.feed("c <to") == ["c "]
    assert parser.feed("p") == ["<top"]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, None),
        ("{{ messages }}", None),
        ("{% if tools %}<tool_call>{% endif %}", "qwen"),
        ("{% if tools %}<|start_header_id|>{% endif %}", "llama3"),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", None),
    ],
)
def test_parsers_by_template(template: str | None, name: str | None) -> None:
    assert parser_for(template) == name


TEMPLATE = (
    "{% if tools %}<tool_call> {% for t in tools %}{{ t.function | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.city }}){% endfor %}{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}]
MESSAGES = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"city": "Ulm"}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
]


@pytest.fixture
def text(pair: Pair) -> TextCodec:
    files = pair.tokenizer.as_files()
    config = json.loads(files["tokenizer_config.json"])
    return TextCodec({**files, "tokenizer_config.json": json.dumps(config | {"chat_template": TEMPLATE})}, 304, 256)


async def test_conversations_with_tools_reach_the_template(text: TextCodec) -> None:
    fields = read(ChatFields, {"messages": MESSAGES, "tools": TOOLS})
    ids = await text.chat(Render([m.plain() for m in fields.messages], fields.offered, {}))
    assert text.tokenizer.decode(ids) == (
        '<tool_call> {"name": "get", "parameters": {"type": "object"}}[user] weather?[assistant] get(Ulm)[tool] rain'
    )
    none = read(ChatFields, {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "none"})
    assert none.offered == []


def test_tools_that_cannot_be(pair: Pair) -> None:
    plain = TextCodec(pair.tokenizer.as_files(), 304, 256)
    with pytest.raises(ApiError, match="template has no tools"):
        tool_parser(TOOLS, plain)
    assert tool_parser([], plain) is None
    user = {"messages": MESSAGES[:1]}
    bad = [
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"tools": TOOLS * 129},
        {"tools": TOOLS, "tool_choice": "always"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": 1}}},
        {"tools": TOOLS, "tool_choice": {"type": "function"}},
    ]
    for fields in bad:
        with pytest.raises(ApiError) as caught:
            read(ChatFields, user | fields)
        assert caught.value.status == 400
    call = {"id": "c", "type": "function", "function": {"name": "get", "arguments": "{"}}
    broken = read(ChatFields, {"messages": [{**MESSAGES[1], "tool_calls": [call]}]})
    seen = opened([broken.messages[0].plain()])
    assert seen[0]["tool_calls"][0]["function"]["arguments"] == "{", "the template sees what was sent"


def answer(text: TextCodec, pieces: list[str], **more: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The body and the chunks of a reply to these pieces, of which the last one ends the reply."""
    reply = ChatReply("chatcmpl-x", "m", text, 1, logprobs=False, parser=tool_parser(TOOLS, text), **more)
    chunks = []
    for i, piece in enumerate(pieces):
        last = i == len(pieces) - 1
        made = Piece(0, piece, [i], [None], [], [], DONE if last else None)
        reply.take(made)
        chunks += [json.loads(e[6:])["choices"][0] for e in reply.events(made)]
    return reply.body()["choices"][0], chunks


def gathered(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls of a stream, put together as a client does."""
    made: list[dict[str, Any]] = []
    for chunk in chunks:
        for part in chunk["delta"].get("tool_calls", []):
            index = part.pop("index")
            if index == len(made):
                made.append(json.loads(json.dumps(part)))
            else:
                assert (
                    index == len(made) - 1 and part.keys() == {"function"} and part["function"].keys() == {"arguments"}
                )
                made[index]["function"]["arguments"] += part["function"]["arguments"]
    return made


@pytest.mark.parametrize("num_pieces", [1, 7, 40])
def test_one_answer_streamed_or_not(text: TextCodec, num_pieces: int) -> None:
    whole = f"See: <tool_call>{GET}</tool_call><tool_call>{GET}</tool_call>"
    size = -(-len(whole) // num_pieces)
    pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
    body, chunks = answer(text, pieces)
    assert body["finish_reason"] == chunks[-1]["finish_reason"] == "tool_calls"
    assert body["message"]["content"] == "".join(c["delta"].get("content", "") for c in chunks) == "See: "
    calls = gathered(chunks)
    assert calls == body["message"]["tool_calls"] and len(calls) == 2
    if num_pieces == 40:
        parts = [t for c in chunks for t in c["delta"].get("tool_calls", [])]
        assert len(parts) > 8, "arguments come as they are written"
        assert all(("id" in t) == ("name" in t["function"]) for t in parts)
    assert len({t["id"] for t in calls}) == 2
    assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Köln"}
    one, _ = answer(text, pieces, one_call=True)
    assert len(one["message"]["tool_calls"]) == 1
    plain, _ = answer(text, ["no ", "call"])
    assert plain["message"]["content"] == "no call" and plain["finish_reason"] == "stop"
    assert "tool_calls" not in plain["message"]


def test_a_named_tool_is_no_reason_to_end(text: TextCodec) -> None:
    body, _ = answer(text, [f"<tool_call>{GET}</tool_call>"], named=True)
    assert body["finish_reason"] == "stop" and body["message"]["tool_calls"][0]["function"]["name"] == "get"


def test_arguments_that_were_cut_off(text: TextCodec) -> None:
    body, chunks = answer(text, ["<tool_call>", '{"name": "get", "arguments": {"ci', "ty"])
    assert body["message"]["tool_calls"] == gathered(chunks)
    assert body["message"]["tool_calls"][0]["function"]["arguments"] == '{"city'


ARGUMENTS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
STRICT = [{"type": "function", "function": {"name": "get", "parameters": ARGUMENTS, "strict": True}}]


@pytest.mark.parametrize("parser", ["qwen", "llama3"])
def test_what_compels_a_call(parser: str) -> None:
    def source(**fields: Any) -> Any:
        asked = read(ChatFields, {"messages": MESSAGES[:1], "tools": [*TOOLS, ADDING], **fields})
        made = asked.compelled(parser)
        return None if made is None else json.loads(made.text)["format"]

    assert source() is None and source(tool_choice="none") is None
    several = source(tool_choice="required")
    assert len(several["tags"]) == 2 and several["at_least_one"] and not several["stop_after_first"]
    assert source(tool_choice="required", parallel_tool_calls=False)["stop_after_first"]
    named = source(tool_choice={"type": "function", "function": {"name": "add"}})
    assert len(named["tags"]) == 1 and '"add"' in named["tags"][0]["begin"] and named["stop_after_first"]
    with pytest.raises(ApiError, match="names 'rm'"):
        source(tool_choice={"type": "function", "function": {"name": "rm"}})
    with pytest.raises(ApiError, match="no 'tools'"):
        source(tool_choice="required", tools=[])


def test_strict_tools_that_the_model_may_call() -> None:
    asked = read(ChatFields, {"messages": MESSAGES[:1], "tools": STRICT})
    assert "strict" not in asked.offered[0]["function"], "the template sees what it knows"
    made = asked.compelled("qwen")
    assert made is not None and json.loads(made.text)["format"]["triggers"] == ["<tool_call>"]
    with pytest.raises(ApiError, match="tool_choice 'required'"):
        asked.compelled("llama3")


@pytest.mark.parametrize(
    ("schema", "why"),
    [({"type": "array"}, "must be an object"), ({"type": "object", "patternProperties": {}}, "patternProperties")],
)
def test_arguments_that_cannot_be_enforced(schema: Any, why: str) -> None:
    tool = {"type": "function", "function": {"name": "get", "parameters": schema}}
    asked = read(ChatFields, {"messages": MESSAGES[:1], "tools": [tool], "tool_choice": "required"})
    with pytest.raises(ApiError, match=why):
        asked.compelled("qwen")
    assert read(ChatFields, {"messages": MESSAGES[:1], "tools": [tool]}).compelled("qwen") is None


ADDING = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
