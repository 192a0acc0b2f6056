"""Tool calls: found however the text is cut, never lost, never run; the same streamed or not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from lawkit import Pair

from foretoken.server.errors import ApiError
from foretoken.server.protocol import ChatFields, read
from foretoken.server.replies import ChatReply
from foretoken.server.service import tool_parser
from foretoken.server.stream import Piece
from foretoken.server.text import Text
from foretoken.server.tools import Call, LlamaCalls, QwenCalls, parser_for

NAMES = {"get", "add"}
GET = '{"name": "get", "arguments": {"city": "Köln"}}'
ADD = '{"name": "add", "parameters": {"a": 1, "b": [2]}}'
HALF = '{"name": "get", "arguments": {"city": "\\ud800"}}'  # JSON, and no text
NAN = '{"name": "get", "arguments": {"city": NaN}}'
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
    "a < b <tool <tool_cal": ["a < b <tool <tool_cal"],
    "</tool_call>": ["</tool_call>"],
    "<tool_call>" + "[" * 5000 + "</tool_call>": ["<tool_call>" + "[" * 5000 + "</tool_call>"],
}
LLAMA = {
    "plain": ["plain"],
    ADD: [Call("add", '{"a": 1, "b": [2]}')],
    f" {ADD} ; {ADD}\n": [Call("add", '{"a": 1, "b": [2]}')] * 2,
    f"{ADD} and more": [f"{ADD} and more"],
    '{"name": "add"}': [Call("add", "{}")],
    '{"x": 1}': ['{"x": 1}'],
    f"{ADD};": [f"{ADD};"],
    '{"name": {}}': ['{"name": {}}'],
    "{": ["{"],
    "": [],
}
CASES = [(QwenCalls, t, f) for t, f in QWEN.items()] + [(LlamaCalls, t, f) for t, f in LLAMA.items()]


def joined(found: list[Any]) -> list[Any]:
    """Texts beside each other as one."""
    made: list[Any] = []
    for item in found:
        if isinstance(item, str) and made and isinstance(made[-1], str):
            made[-1] += item
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
def text(pair: Pair) -> Text:
    files = pair.tokenizer.as_files()
    config = json.loads(files["tokenizer_config.json"])
    return Text({**files, "tokenizer_config.json": json.dumps(config | {"chat_template": TEMPLATE})}, 304, 256)


async def test_conversations_with_tools_reach_the_template(text: Text) -> None:
    fields = read(ChatFields, {"messages": MESSAGES, "tools": TOOLS})
    ids = await text.chat([m.plain() for m in fields.messages], fields.offered)
    assert text.tokenizer.decode(ids) == (
        '<tool_call> {"name": "get", "parameters": {"type": "object"}}[user] weather?[assistant] get(Ulm)[tool] rain'
    )
    none = read(ChatFields, {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "none"})
    assert none.offered == []


def test_tools_that_cannot_be(pair: Pair) -> None:
    plain = Text(pair.tokenizer.as_files(), 304, 256)
    with pytest.raises(ApiError, match="template has no tools"):
        tool_parser(TOOLS, plain)
    assert tool_parser([], plain) is None
    user = {"messages": MESSAGES[:1]}
    bad = [
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"tools": TOOLS * 129},
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get"}}},
    ]
    for fields in bad:
        with pytest.raises(ApiError) as caught:
            read(ChatFields, user | fields)
        assert caught.value.status == 400
    broken = read(
        ChatFields,
        {
            "messages": [
                {
                    **MESSAGES[1],
                    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "get", "arguments": "{"}}],
                }
            ]
        },
    )
    assert broken.messages[0].plain()["tool_calls"][0]["function"]["arguments"] == "{", (
        "the template sees what was sent"
    )


def answer(text: Text, pieces: list[str], **more: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The body and the chunks of a reply to these pieces, the last of which ends it."""
    reply = ChatReply("chatcmpl-x", "m", text, 1, logprobs=False, parser=tool_parser(TOOLS, text), **more)
    done = {"finish_reason": "stop", "seed": 1, "metrics": METRICS}
    chunks = []
    for i, piece in enumerate(pieces):
        last = i == len(pieces) - 1
        made = Piece(0, piece, [i], [None], [], [], done if last else None)
        reply.take(made)
        chunks += [json.loads(e[6:])["choices"][0] for e in reply.events(made)]
    return reply.body()["choices"][0], chunks


METRICS: dict[str, Any] = {
    "num_rounds": 1, "num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0,
    "num_accepted_tokens_per_pos": [], "undrafted": {}, "num_preemptions": 0,
    "time_split_s": {"draft": 0.0, "target": 0.0, "verify": 0.0, "schedule": 0.0},
    "time_to_first_token_s": 0.0,
    "total_time_s": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("num_pieces", [1, 7, 40])
def test_one_answer_streamed_or_not(text: Text, num_pieces: int) -> None:
    whole = f"See: <tool_call>{GET}</tool_call><tool_call>{GET}</tool_call>"
    size = -(-len(whole) // num_pieces)
    pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
    body, chunks = answer(text, pieces)
    assert body["finish_reason"] == chunks[-1]["finish_reason"] == "tool_calls"
    assert body["message"]["content"] == "".join(c["delta"].get("content", "") for c in chunks) == "See: "
    calls = [t for c in chunks for t in c["delta"].get("tool_calls", [])]
    assert [t.pop("index") for t in calls] == [0, 1]
    assert calls == body["message"]["tool_calls"]
    assert len({t["id"] for t in calls}) == 2
    assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Köln"}
    one, _ = answer(text, pieces, one_call=True)
    assert len(one["message"]["tool_calls"]) == 1
    plain, _ = answer(text, ["no ", "call"])
    assert plain["message"]["content"] == "no call" and plain["finish_reason"] == "stop"
    assert "tool_calls" not in plain["message"]
