"""Reasoning is split off however the text is cut into pieces, on each route, and never where a text cannot have any."""

import json
from types import SimpleNamespace

import pytest
from fixtures_server import DONE, codec

from sameseed.models.harmony import Harmony, is_harmony
from sameseed.request import SamplingParams
from sameseed.server.chat import ChatReply, ResponseReply
from sameseed.server.client import EngineClient
from sameseed.server.config import ServerConfig
from sameseed.server.errors import ApiError
from sameseed.server.frames import Add, Piece
from sameseed.server.protocol import ChatFields, ResponseFields, read
from sameseed.server.reasoning import PARSERS, Thoughts, marks_for
from sameseed.server.service import Service
from sameseed.server.tools import FORMATS, Call, Parser

GPT, ANALYSIS = "<|start|>assistant", "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
TEMPLATE = "{{ messages[0].content }}{% if enable_thinking is false %}<think></think>{% endif %}{{ reasoning_effort }}"


@pytest.mark.parametrize(
    ("parser", "prompt_end", "text", "split"),
    [
        ("qwen3", "assistant:", "<think>\nab</think>\n\nc", ("ab", "c")),
        ("qwen3", "assistant:", "a <think>b</think>", ("", "a <think>b</think>")),
        ("qwen3", "assistant:", "\n<thin", ("", "\n<thin")),
        ("qwen3", "<think>\n", "ab</think>c</think>", ("ab", "c</think>")),
        ("qwen3", "<think>\n\n</think>\n\n", "ab", ("", "ab")),
        ("qwen3", "<think>", "ab</thi", ("ab</thi", "")),
        ("qwen3", "assistant:", "a\n</think>\nb", ("", "a\n</think>\nb")),
        ("qwen3", None, "<think>a</think>", ("", "<think>a</think>")),
        ("mistral", "[/INST]", "[THINK]ab[/THINK]c", ("ab", "c")),
        ("deepseek_r1", "assistant:", "ab</think>c", ("ab", "c")),
        ("deepseek_r1", "assistant:", "<think>ab</think>c", ("ab", "c")),
        ("deepseek_r1", "</think>", "ab", ("", "ab")),
        ("deepseek_r1", None, '{"a": 1}', ("", '{"a": 1}')),
        ("harmony", GPT, f"{ANALYSIS}ab<|end|>{GPT}{FINAL}c < d<|return|>", ("ab", "c < d")),
        ("gemma4", "<|turn>model\n", "<|channel>thought\nab<channel|>c", ("ab", "c")),
        ("gemma4", "<|channel>thought\n<channel|>", "c <|channel>", ("", "c <|channel>")),
        ("harmony", GPT, f"{FINAL}c<|", ("", "c<|")),
        ("harmony", GPT, f"{ANALYSIS}ab<|end|>{GPT}<|channel|>fin", ("ab", "")),
        ("harmony", GPT, f"{ANALYSIS}a<|end|>{GPT}{ANALYSIS}b<|end|>{GPT}{FINAL}c", ("a\nb", "c")),
        ("harmony", GPT, f"{ANALYSIS}a<|start|>assistant to=python<|channel|>commentary<|message|>b", ("a\nb", "")),
        ("harmony", f"<|end|>{GPT}{FINAL}", "c", ("", "c")),
        ("harmony", "user<|message|>hi<|end|>", f"{GPT}{FINAL}c", ("", "c")),
        ("harmony", GPT, "no Harmony", ("", "no Harmony")),
        ("harmony", None, '{"a": 1}', ("", '{"a": 1}')),
    ],
)
def test_however_it_is_cut(parser, prompt_end, text, split):
    for size in range(1, len(text) + 1):
        thoughts = Harmony(prompt_end) if parser == "harmony" else Thoughts(PARSERS[parser], prompt_end)
        found = [thoughts.feed(text[at : at + size], at + size >= len(text)) for at in range(0, len(text), size)]
        assert ("".join(a for a, _ in found), "".join(b for _, b in found)) == split
    thought = thoughts.end if thoughts.end is not None else len(text)
    assert text[thought:].strip() == split[1].strip() or parser == "harmony"


def test_harmony_gives_out_calls():
    """The recipient may stand before the channel, perhaps bare; a preamble is text, as is what holds no arguments."""
    calls = f'<|channel|>analysis to=functions.get code<|message|>{{"city": "Köln"}}<|call|>{GPT}'
    text = f"{ANALYSIS}hm<|end|>{GPT}<|channel|>commentary<|message|>Look.<|end|>{GPT}{calls}"
    text += ' to=functions.add<|channel|>commentary <|constrain|>json<|message|>{"a": 1}<|call|>'
    text += (
        f"{GPT} to=add<|channel|>commentary<|message|><|call|>{GPT} to=get<|channel|>commentary<|message|>[x<|call|>"
    )
    for size in range(1, len(text) + 1):
        harmony, parser = Harmony(GPT), Parser({"get": {}, "add": {}}, FORMATS["openai"])
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        found = [x for i, p in enumerate(pieces) for x in parser.feed(harmony.feed(p, i + 1 == len(pieces))[1])]
        found += parser.end()
        assert "".join(x for x in found if isinstance(x, str)) == "Look.[x"
        made = [x for x in found if not isinstance(x, str)]
        assert made == [Call("get", '{"city": "Köln"}'), Call("add", '{"a": 1}'), Call("add", "{}")]


HARMONY = "{% if tools %}x{% endif %}<|start|>assistant{# <|channel|>analysis<|message|> <|call|> #}"
TOOLS, THOUGHT = "{% if tools %}x{% endif %}", "<|channel>thought\n"
CALLED = '<tool_call>{"name": "get", "arguments": '


@pytest.mark.parametrize(
    ("calls", "template", "thought", "texts"),
    [
        (
            "openai",
            HARMONY,
            "why",
            [ANALYSIS, "why<|end|>", f"{GPT} to=functions.get<|channel|>commentary<|message|>", '{"a":1}<|call|>'],
        ),
        (
            "gemma4",
            TOOLS + "<|turn>model\n{# <|tool_call> #}",
            "why",
            [THOUGHT, "why<channel|>", "<|tool_call>call:get", "{a:1}<tool_call|>"],
        ),
        (
            "hermes",
            TOOLS + "{# <tool_call> </think> #}assistant\n<think>\n",
            CALLED + "{}}</tool_call>?",  # only considered
            [CALLED, "{}}</tool_call>?</think>\n\n", CALLED, '{"a":1}}</tool_call>'],
        ),
        (
            "mistral",
            TOOLS + "{# [TOOL_CALLS] [/THINK] #}[/INST]",
            "why",
            ["[THINK]", "why[/THINK]", "[TOOL_CALLS]get[ARGS]", '{"a":1}'],
        ),
    ],
)
async def test_a_server_reads_marks_by_its_template(pair, calls, template, thought, texts):
    """Reasoning and calls between marks that are special tokens, without any setting."""
    text = codec(pair, template, ["<channel|>", "<|tool_call>", "</think>", "[THINK]"])
    assert text.calls == calls and is_harmony(template) == (calls == "openai")
    tool = {"type": "function", "function": {"name": "get"}}
    asked = {"messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    client = EngineClient("x", {})
    client.state, client.text = "ready", text
    client.facts = {"max_num_seqs": 4, "method": "none", "num_draft_tokens": 0, "max_model_len": 256}
    visit, fields = SimpleNamespace(size=0, id="0123456789", tenant=""), read(ChatFields, asked)
    service = Service(client, ServerConfig())
    reply, _ = await service._prepared(visit, fields, text, ChatReply)
    assert not fields.skip_special_tokens
    events = list(reply.begin())
    for at, said in enumerate(texts):
        piece = Piece(0, said, [5], [None], [], [], DONE if at == 3 else None, [sum(map(len, texts[:at]))])
        reply.take(piece)
        events += reply.events(piece)
    choice = reply.body()["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["reasoning"] == thought
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get", "arguments": '{"a":1}'}
    assert reply.usage()["completion_tokens_details"] == {"reasoning_tokens": 2}
    deltas = [json.loads(e.partition(b"data: ")[2])["choices"][0]["delta"] for e in events]
    assert all("".join(d.get(k, "") for d in deltas) == thought for k in ("reasoning", "reasoning_content"))
    assert [d["tool_calls"][0]["function"]["name"] for d in deltas if "tool_calls" in d] == ["get"]


@pytest.mark.parametrize(
    ("template", "calls", "setting", "parser"),
    [
        ("{{ text.split('</think>')[-1] }}", "hermes", None, "qwen3"),
        ("assistant\n<think>", None, "deepseek_r1", "deepseek_r1"),
        ("assistant\n<think>", None, "none", None),
        ("assistant\n<seed:think>", "qwen3_coder", None, "seed_oss"),
        ("assistant\n<think>", "gemma4", "none", "gemma4"),
        ("I think", None, None, None),
        (None, None, "qwen3", "qwen3"),
    ],
)
def test_marks_are_those_of_the_setting_or_the_template(template, calls, setting, parser):
    assert marks_for(template, calls, setting) == (parser and PARSERS[parser])


@pytest.fixture(scope="module")
def text(pair):
    return codec(pair, TEMPLATE)


PIECES = [("<thi", [0]), ("nk>why", [4]), ("</think>so", [10]), (" be it", [20])]


def replied(kind, fields, text):
    """The body of a reply, and its events."""
    thoughts = lambda: Thoughts(PARSERS["qwen3"], "")  # noqa: E731
    reply = kind(Add("0123456789", [[1]], SamplingParams()), fields, text, thoughts=thoughts)
    events = list(reply.begin())
    for i, (said, offset) in enumerate(PIECES):
        piece = Piece(0, said, [5], [None], [], [], DONE if i == 3 else None, offset)
        reply.take(piece)
        events += reply.events(piece)
    return reply.body(), [json.loads(e.partition(b"data: ")[2]) for e in events]


def test_reasoning_may_be_left_out(text):
    asked = {"messages": [{"role": "user", "content": "x"}], "include_reasoning": False}
    body, events = replied(ChatReply, read(ChatFields, asked), text)
    message = body["choices"][0]["message"]
    assert message["content"] == "so be it" and "reasoning" not in message
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    deltas = [e["choices"][0]["delta"] for e in events]
    assert "".join(d.get("content", "") for d in deltas) == "so be it" and not any("reasoning" in d for d in deltas)


def test_responses_have_an_item_of_their_own(text):
    body, events = replied(ResponseReply, read(ResponseFields, {"input": "x"}), text)
    assert [item["type"] for item in body["output"]] == ["reasoning", "message"]
    assert body["output"][0]["content"] == [{"type": "reasoning_text", "text": "why"}]
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}
    back = read(ResponseFields, {"input": [*body["output"], {"role": "user", "content": "and?"}]})
    part = {"type": "output_text", "text": "so be it", "annotations": [], "logprobs": []}
    said = {"role": "assistant", "content": [part], "reasoning_content": "why"}
    assert back.content().messages == [said, {"role": "user", "content": "and?"}], "it takes back what it gave"
    kinds = [e["type"].removeprefix("response.") for e in events]
    assert kinds.index("reasoning_text.done") < kinds.index("content_part.added") < kinds.index("output_text.delta")


async def test_templates_get_what_the_request_says(text):
    async def written(**fields):
        asked = read(ChatFields, {"messages": [{"role": "user", "content": "hi"}], **fields})
        (ids,) = await text.prompts(asked.content(), False)
        return text.tokenizer.decode(ids)

    assert await written() == "hi"
    options = {"enable_thinking": False}
    assert await written(chat_template_kwargs=options, reasoning_effort="low") == "hi<think></think>low"
    with pytest.raises(ApiError, match="may not set 'messages'"):
        await written(chat_template_kwargs={"messages": []})
    with pytest.raises(ApiError, match="knows no documents"):
        await written(documents=[{"text": "x"}])
    earlier = {"role": "assistant", "content": "b", "reasoning": "a"}
    assert read(ChatFields, {"messages": [earlier]}).messages[0].plain() == earlier
