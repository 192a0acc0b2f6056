"""Tool calls: found however the text is cut into pieces, never lost, never run, and the same with streaming."""

import json

import msgspec
import pytest
from fixtures_server import DONE, codec
from hypothesis import given, settings, strategies as st

from sameseed.request import FinishReason, SamplingParams
from sameseed.server.chat import ChatReply
from sameseed.server.errors import ApiError
from sameseed.server.frames import Add, Piece, Render
from sameseed.server.protocol import ChatFields, read
from sameseed.server.service import tool_parser
from sameseed.server.structured import GrammarSource
from sameseed.server.tools import FORMATS, Call, More, Parser, parser_for

TYPES = {"city": {"type": "string"}, "days": {"type": "integer"}, "near": {"type": "boolean"}}
TYPES |= {"at": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]}, "scale": {"type": ["number", "null"]}}
FREE = {"allOf": [{"properties": {"on": {"type": "boolean"}}}], "additionalProperties": {"type": "number"}}
FREE["properties"] = {"unit": {"enum": ["C", "F"]}}
SCHEMAS = {"get": {"properties": TYPES, "$defs": {"Place": {"type": "object"}}}, "add": {}, "my-tool-2": FREE}
SCHEMAS["shut"] = {"properties": {"text": {"type": "string"}, "n": {"type": "integer"}}, "additionalProperties": False}
GET = '{"name": "get", "arguments": {"city": "Köln"}}'
ADD = '{"name": "add", "parameters": {"a": 1, "b": [2]}}'
LONG = json.dumps({"text": "</tool_call> {[" * 40})
KOELN, PLUS = Call("get", '{"city": "Köln"}'), Call("add", '{"a": 1, "b": [2]}')
# What calls an offered tool, by format. Each format is as its publisher documents it.
CALLS = [
    ("hermes", f"<tool_call>\n{GET}\n</tool_call>", [KOELN]),
    (
        "hermes",
        f"Let me see. <tool_call>{GET}</tool_call><tool_call>{GET}</tool_call> Done",
        ["Let me see. ", KOELN, KOELN, " Done"],
    ),
    ("hermes", f"<tool_call>{GET}", [KOELN]),
    ("hermes", f" {GET}\n{ADD}\n<tool_call>{ADD}</tool_call>", [KOELN, PLUS, PLUS]),  # without marks, as it does too
    ("hermes", f"{GET} so", [KOELN, " so"]),
    ("hermes", f"\n<tool_call>\n{GET}\n</tool_call>\n<tool_call>\n{GET}\n</tool_call>\n", [KOELN, KOELN]),
    ("hermes", f"<tool_call>[{GET}, {ADD}]</tool_call>", [KOELN, PLUS]),
    ("hermes", f"```json\n{GET}\n```\n<tools>\n{ADD}\n</tools>", [KOELN, PLUS]),  # as Qwen2.5-Coder does
    ("hermes", f'```json\n{{"name": "add", "arguments": {LONG}}}\n``` so', [Call("add", LONG), " so"]),
    ("hermes", '<tool_call>{"arguments": {"a":1e6}, "name": "get"}</tool_call>', [Call("get", '{"a":1e6}')]),
    (
        "hermes",
        '<tool_call>{"name": "get", "arguments": {"a": "}</tool_call>", "b": [{}]}, "id": 7}</tool_call>',
        [Call("get", '{"a": "}</tool_call>", "b": [{}]}')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f}</tool_call>' + f"<tool_call>{GET}",
        ['<tool_call>{"name": "f}</tool_call>', KOELN],
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": %s}</tool_call><tool_call>%s</tool_call>' % (LONG, ADD),  # noqa: UP031
        [Call("add", LONG), PLUS],
    ),
    ("qwen3_coder", f"<tool_call>\n{GET}\n</tool_call>", [KOELN]),
    (
        "qwen3_coder",
        "Well.\n<tool_call>\n<function=get>\n<parameter=city>\nNew\nYork\n</parameter>\n<parameter=days>\n5\n</parameter>\n"
        '<parameter=near>\nTrue\n</parameter>\n<parameter=at>\n{"x": [1.0]}\n</parameter>\n<parameter=scale>\nnull\n'
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=add>\n</function>\n</tool_call>",
        [
            "Well.\n",
            Call("get", '{"city": "New\\nYork", "days": 5, "near": true, "at": {"x": [1.0]}, "scale": null}'),
            Call("add", "{}"),
        ],
    ),
    (
        "qwen3_coder",  # a string stays one, as does what is no number, and a tag within a value
        "<tool_call><function=get><parameter=city>\n5</parameter><a>\n</parameter><parameter=days>five</parameter></function>"
        "</tool_call>",
        [Call("get", '{"city": "5</parameter><a>", "days": "five"}')],
    ),
    (
        "qwen3_coder",  # numbers stay as they were written
        '<function=get><parameter=scale> 1e999</parameter><parameter=at>{"a": "\\ud800"}</parameter></function>',
        [Call("get", '{"scale": 1e999, "at": "{\\"a\\": \\"\\\\ud800\\"}"}')],
    ),
    (
        "qwen3_coder",
        "<function=my-tool-2><parameter=on>true</parameter><parameter=other>5</parameter>"
        "<parameter=unit> C\n</parameter></function>",
        [Call("my-tool-2", '{"on": true, "other": 5, "unit": "C"}')],
    ),
    (
        "qwen3_coder",  # models leave out the opening mark
        "<function=get>\n<parameter=city>\nBonn\n</parameter>\n</function>\n</tool_call>",
        [Call("get", '{"city": "Bonn"}')],
    ),
    (
        "qwen3_coder",  # names in a text are no arguments
        "<function=shut><parameter=text>\n<parameter=x> or <parameter=n>:\n<parameter=y>\n<parameter=n>5</function>",
        [Call("shut", '{"text": "<parameter=x> or <parameter=n>:\\n<parameter=y>", "n": 5}')],
    ),
    ("hermes", f"<tool_call>{GET}<tool_call>{GET}}}</tool_call><tool_call>{ADD}</tool_call>", [KOELN, KOELN, PLUS]),
    ("llama3", f"{ADD}, {GET}, and", [PLUS, KOELN, ", and"]),
    ("llama3", 'So <function=add>{"a": 1}</function><|eom_id|>', ["So ", Call("add", '{"a": 1}')]),
    ("llama3", ADD, [PLUS]),
    ("llama3", f"<|python_tag|>{ADD}<|eom_id|>", [PLUS]),
    ("llama3", f" {ADD} ; {GET}\n", [PLUS, KOELN]),
    ("llama3", f"{ADD} and more", [PLUS, " and more"]),
    ("llama3", f"{ADD}; x", [PLUS, " x"]),
    ("llama3", f"{ADD} ; \n ", [PLUS]),
    ("llama3", f"Look: <|python_tag|>{ADD}", ["Look: ", PLUS]),
    ("llama3", '{"type": "function", "name": "get"}', [Call("get", "{}")]),
    ("llama3", r"""[get(city='\101\0\v\d')]""", [Call("get", r'{"city": "A\u0000\u000b\\d"}')]),
    (
        "llama3",
        """[get(city='it\\'s "Ulm"', days=-2, near=True, at={"x": [1, 2.5e3,], 'y': None}), add()]""",
        [
            Call("get", '{"city": "it\'s \\"Ulm\\"", "days": -2, "near": true, "at": {"x": [1, 2500.0], "y": null}}'),
            Call("add", "{}"),
        ],
    ),
    ("llama3", '[get(from="a", in="b")]', [Call("get", '{"from": "a", "in": "b"}')]),  # Python's own words
    ("llama3", '[get(city="one\ntwo")]', [Call("get", '{"city": "one\\ntwo"}')]),
    ("llama3", r'[get(city="C:\users \x4")]', [Call("get", r'{"city": "C:\\users \\x4"}')]),
    ("llama3", "[my-tool-2(a=1)]", [Call("my-tool-2", '{"a": 1}')]),
    ("llama3", "<|python_start|>[add(a=(1, 2))]<|python_end|>", [Call("add", '{"a": [1, 2]}')]),
    ("mistral", f"[TOOL_CALLS] [{GET}, {ADD}]", [KOELN, PLUS]),
    (
        "mistral",
        'Hm. [TOOL_CALLS]get[ARGS]{"city": "]"}[TOOL_CALLS]add[CALL_ID]a1b2[ARGS]{}',
        ["Hm. ", Call("get", '{"city": "]"}'), Call("add", "{}")],
    ),
    ("mistral", f"[TOOL_CALLS]add{LONG} so", [Call("add", LONG), " so"]),
    ("gemma4", '<|tool_call>call:get{city:<|"|>Köln<|"|>}<tool_call|>', [Call("get", '{"city":"Köln"}')]),
    (
        "gemma4",  # strings hold anything, values are nested, numbers stay as they were written
        'So: <|tool_call>call:get{city:<|"|>a "b\\{,c:<tool_call|>\n<|"|>,days:1e999,near:true}<tool_call|>'
        '<|tool_call>call:add{ at : {x y:[1.0,null,"q,r:s"],<|"|>k<|"|>:{}} }<tool_call|> Done',
        [
            "So: ",
            Call("get", '{"city":"a \\"b\\\\{,c:<tool_call|>\\n","days":1e999,"near":true}'),
            Call("add", '{"at": {"x y":[1.0,null,"q,r:s"],"k":{}} }'),
            " Done",
        ],
    ),
    ("gemma4", "<|tool_call>call:my-tool-2{}", [Call("my-tool-2", "{}")]),
    ("gemma4", f"<|tool_call>{GET}<tool_call|>", [KOELN]),
    (
        "lfm2",  # two calls in a list, text behind them; a quotation mark in a string
        """Hm. <|tool_call_start|>[get(city='Ulm "]', near=True), add()]<|tool_call_end|>Looking.""",
        ["Hm. ", Call("get", '{"city": "Ulm \\"]", "near": true}'), Call("add", "{}"), "Looking."],
    ),
    ("lfm2", f"<|tool_call_start|>[{GET}, {ADD}]<|tool_call_end|>", [KOELN, PLUS]),
    ("lfm2", "<|tool_call_start|>[rm(a=1)]<|tool_call_end|>", ["<|tool_call_start|>[rm(a=1)]<|tool_call_end|>"]),
    ("lfm2", "[add()]", ["[add()]"]),
    ("granite", f"<|tool_call|>[{GET}]", [KOELN]),
    ("granite", r'<|tool_call|>{"name": "get", "arguments": "{\"a\": 1}"}', [Call("get", '{"a": 1}')]),
]
# Arguments in every spelling, and what they mean; None: the text is no call.
SPELLINGS = [
    ('"arguments": {"a": 1}', '{"a": 1}'), ('"parameters": {"a": 1}', '{"a": 1}'),
    (r'"arguments": "{\"a\": 1.0}"', '{"a": 1.0}'),
    (r'"parameters": "\"{\\\"a\\\": \\\"\\\\\\\"\\\"}\""', r'{"a": "\""}'),
    (r'"arguments": {"a": "say \"{hi}\""}', r'{"a": "say \"{hi}\""}'),
    (f'"arguments": {{"a": {2**70}, "b": -0.0, "c": 1e400}}', f'{{"a": {2**70}, "b": -0.0, "c": 1e400}}'),
    ('"arguments": {}', "{}"), ('"arguments": ""', "{}"), ('"arguments": null', "{}"), ('"id": 3', "{}"),
    ('"arguments": {}, "parameters": {"a": 1}', '{"a": 1}'), ('"arguments": {"b": 2}, "parameters": {"a": 1}', None),
    ('"args": {"a": 1}', None), ('"a": 1', None), ('"arguments": [1]', None), ('"arguments": 1', None),
    ('"arguments": "x"', None), ('"arguments": "[1]"', None), ('"arguments": {"a": 1, "a": 2}', None),
    ('"arguments": {"a": 1,}', None), ('"arguments": {"a": NaN}', None), ('"arguments": {"a": "\\ud800"}', None),
    ("\"arguments\": {'a': 1}", None),
]  # fmt: skip
CALLS += [
    ("hermes", text, [text if meant is None else Call("add", meant)])
    for spelling, meant in SPELLINGS
    for text in [f'<tool_call>{{"name": "add", {spelling}}}</tool_call>']
]
# Texts that are no calls stay as they are.
TEXTS = {
    "hermes": [
        "plain text",
        f"So ```json\n{GET}\n```",
        '```json\n{"a": {"name": "get"}}\n``` ` `` ```',
        "<tool_call>{not json}</tool_call>!",
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        '<tool_call>{"name": [], "arguments": {}}</tool_call>',
        '<tool_call>{"name": "get", "arguments": {"a": "',
        "the mark <tool_call> opens one",
        "a < b <tool <tool_cal",
        "</tool_call>",
        "<tool_call>" + "[" * 5000 + "</tool_call>",
        " \n",
    ],
    "qwen3_coder": [
        "<tool_call><function=rm></function></tool_call>",
        "<tool_call>\n<function=get>\n<parameter=city>\nBo",
        "<tool_call><function=get><parameter=city>a</parameter><parameter=city>b</parameter></function></tool_call>",
        "<tool_call><function=shut><parameter=text>a</parameter><parameter=x>b</parameter></function></tool_call>",
        "if (a <function) <tool_call",
    ],
    "llama3": [
        "plain", '{"name": "rm", "parameters": {}}', '{"x": 1}', '{"name": {}}', "{", "[1, 2]", "[rm(a=1)]", "",
        '[get("Bonn")]', "[get(city=open('x'))]", "[get(city=1, city=2)]", "[get(city=1)] is Python",
    ],
    "mistral": ["[TOOL_CALLS]rm[ARGS]{}", "[TOOL_CALLS]get what", "[TOOL_CALLS]get[ARGS]{'a': 1}", "[TOOL_C"],
    "granite": ["<|tool_call|>", "<|tool_call|>[]"],
    "gemma4": [
        "<|tool_call>call:rm{}<tool_call|>",
        '<|tool_call>call:get{city:<|"|>Bo<tool_call|>',
        "<|tool_call>call:get{city:Bonn}<tool_call|>",
        "<|tool_call>call:get{a:1,a:2}<tool_call|>!",
        "the mark <|tool_call> calls",
        "<|tool_call>call:add{" + ", " * 5000 + "}",
        "<|tool_c",
    ],
}  # fmt: skip
CASES = CALLS + [(form, text, [text] if text else []) for form, texts in TEXTS.items() for text in texts]


def joined(found):
    """Adjacent texts joined to one, and the parts of a call joined to a whole call."""
    made = []
    for item in found:
        if isinstance(item, str) and made and isinstance(made[-1], str):
            made[-1] += item
        elif isinstance(item, More):
            made[-1] = Call(made[-1].name, made[-1].arguments + item.arguments)
        else:
            made.append(item)
    return made


@pytest.mark.parametrize(("form", "text", "found"), CASES, ids=range(len(CASES)))
@given(data=st.data())
@settings(max_examples=10)
def test_calls_are_found_however_the_text_is_cut(form, text, found, data):
    some = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    for cuts in (some, range(len(text))):
        parser, got = Parser(SCHEMAS, FORMATS[form]), []
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            got += parser.feed(text[start:end])
        assert joined(got + parser.end()) == found


@given(st.sampled_from(CASES), st.data())
def test_a_text_that_was_cut_off_is_the_same_streamed_or_not(case, data):
    form, whole, _ = case
    text = whole[: data.draw(st.integers(0, len(whole)))]
    streamed, at_once = (Parser(SCHEMAS, FORMATS[form]) for _ in range(2))
    got = [item for character in text for item in streamed.feed(character)]
    assert joined(got + streamed.end(cut=True)) == joined(at_once.feed(text) + at_once.end(cut=True))


def test_text_is_not_held_back_without_need():
    parser = Parser(SCHEMAS, FORMATS["hermes"])
    assert [parser.feed(part) for part in ("a < b", "c <to", "p")] == [["a < b"], ["c "], ["<top"]]
    for form, text in (("llama3", "[1,"), ("llama3", "[see also"), ("hermes", "```json\n[1,")):
        assert joined(Parser(SCHEMAS, FORMATS[form]).feed(text)) == [text]


@pytest.mark.parametrize(
    ("sign", "name"),
    [
        ("<tool_call>", "hermes"), ("<tool_call><function=name>", "qwen3_coder"), ("<|start_header_id|>", "llama3"),
        ("[TOOL_CALLS]", "mistral"), ("List of tools: [", "lfm2"), ("<|tool_list_start|><|tool_call_start|>", "lfm2"),
        ("<|tool_call|>", "granite"), ("<|call|>", "openai"), ("<|tool_call>", "gemma4"), ("<calls>", None),
    ],
)  # fmt: skip
def test_parsers_by_template(sign, name):
    assert parser_for(f"{{% if tools %}}{sign}{{% endif %}}") == name
    assert parser_for(None) is None and parser_for("{{ messages }}") is None


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
def text(pair):
    return codec(pair, TEMPLATE)


async def test_conversations_with_tools_reach_the_template(text):
    fields = read(ChatFields, {"messages": MESSAGES, "tools": TOOLS})
    (ids,) = await text.prompts(Render([m.plain() for m in fields.messages], fields.offered, {}), False)
    assert text.tokenizer.decode(ids) == (
        '<tool_call> {"name": "get", "parameters": {"type": "object"}}[user] weather?[assistant] get(Ulm)[tool] rain'
    )
    assert read(ChatFields, {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "none"}).offered == []
    shown = f"```json\n{GET}"
    assert tool_parser(TOOLS, text, GrammarSource("json", "", "format"))().feed(shown) == [shown]  # a grammar's form


@pytest.mark.parametrize(("name", "shown"), [("lfm2", "List of tools: "), ("granite", "<|tool_call|>")])
async def test_calls_that_a_template_drops_are_written_as_the_model_writes_them(pair, name, shown):
    """They are read as they were called. A mark in their arguments is text."""
    mark = FORMATS[name].marks[0]
    text = codec(
        pair, "{% if tools %}" + shown + "{% endif %}{% for m in messages %}{{ m.content }}\n{% endfor %}", [mark]
    )
    arguments = json.dumps({"city": f"Ulm{mark}", "days": [1, None, True]})
    calls = [{**MESSAGES[1]["tool_calls"][0], "function": {"name": "get", "arguments": arguments}}] * 2
    said = [MESSAGES[0], {**MESSAGES[1], "tool_calls": calls}, MESSAGES[2]]
    (ids,) = await text.prompts(read(ChatFields, {"messages": said, "tools": TOOLS}).content(), False)
    _, answer, _ = text.tokenizer.decode(ids, skip_special_tokens=False).removeprefix(shown).splitlines()
    parser = tool_parser(TOOLS, text, None)()
    assert [json.loads(call.arguments) for call in parser.feed(answer) + parser.end()] == [json.loads(arguments)] * 2
    assert ids.count(text.tokenizer.vocabulary()[mark]) == 1 + (shown == mark)


def test_tools_that_cannot_be(pair):
    plain = codec(pair)
    with pytest.raises(ApiError, match="template has no tools"):
        tool_parser(TOOLS, plain, None)
    assert tool_parser([], plain, None) is None
    user = {"messages": MESSAGES[:1]}
    bad = [{"tool_choice": c} for c in ("always", {"type": "function", "function": {"name": 1}}, {"type": "function"})]
    for fields in (*bad, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, {"tools": TOOLS * 129}):
        with pytest.raises(ApiError) as caught:
            read(ChatFields, user | {"tools": TOOLS} | fields)
        assert caught.value.status == 400


def answer(text, pieces, done=DONE, params=None, **more):
    """The body and the chunks of a reply to these pieces, of which the last one ends the reply."""
    params = params or SamplingParams()
    fields = read(ChatFields, {"messages": MESSAGES[:1], "tools": TOOLS, **more})
    reply = ChatReply(Add("x", [[1]], params), fields, text, parser=tool_parser(TOOLS, text, None))
    chunks = []
    for i, piece in enumerate(pieces):
        last = i == len(pieces) - 1
        made = Piece(0, piece, [i], [None], [], [], done if last else None)
        reply.take(made)
        chunks += [json.loads(e[6:])["choices"][0] for e in reply.events(made)]
    return reply.body()["choices"][0], chunks


def gathered(chunks):
    """The calls of a stream, put together as a client does."""
    made = []
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
def test_one_answer_streamed_or_not(text, num_pieces):
    long = json.dumps({"city": "Köln" * 100}, ensure_ascii=False)
    whole = f'See: <tool_call>{GET}</tool_call><tool_call>{{"name": "get", "arguments": {long}}}</tool_call>'
    size = -(-len(whole) // num_pieces)
    pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
    body, chunks = answer(text, pieces)
    assert body["finish_reason"] == chunks[-1]["finish_reason"] == "tool_calls"
    assert body["message"]["content"] == "".join(c["delta"].get("content", "") for c in chunks) == "See: "
    calls = gathered(chunks)
    assert calls == body["message"]["tool_calls"] and len(calls) == 2
    if num_pieces == 40:
        parts = [t for c in chunks for t in c["delta"].get("tool_calls", [])]
        assert len(parts) > 8, "long arguments come as they are written"
        assert all(("id" in t) == ("name" in t["function"]) for t in parts)
    assert len({t["id"] for t in calls}) == 2
    assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Köln"}
    one, _ = answer(text, pieces, parallel_tool_calls=False)
    assert len(one["message"]["tool_calls"]) == 1
    plain, _ = answer(text, ["no ", "call"])
    assert plain["message"]["content"] == "no call" and plain["finish_reason"] == "stop"
    assert "tool_calls" not in plain["message"]


def test_a_named_tool_is_no_reason_to_end(text):
    body, _ = answer(
        text, [f"<tool_call>{GET}</tool_call>"], tool_choice={"type": "function", "function": {"name": "get"}}
    )
    assert body["finish_reason"] == "stop" and body["message"]["tool_calls"][0]["function"]["name"] == "get"


def test_arguments_that_were_cut_off(text):
    cut_off = msgspec.structs.replace(DONE, finish_reason=FinishReason.LENGTH)
    body, chunks = answer(text, ["<tool_call>", '{"name": "get", "arguments": {"ci', "ty"], done=cut_off)
    assert body["message"]["tool_calls"] == gathered(chunks)
    assert body["message"]["tool_calls"][0]["function"]["arguments"] == '{"city'
    stopped, _ = answer(text, ['<tool_call>{"name": "get", "arguments": {"city'], params=SamplingParams(stop="x"))
    assert stopped["message"] == body["message"] | {"tool_calls": stopped["message"]["tool_calls"]}, "no markup is text"


ARGUMENTS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
STRICT = [{"type": "function", "function": {"name": "get", "parameters": ARGUMENTS, "strict": True}}]


def test_what_compels_no_call():
    def source(**fields):
        return read(ChatFields, {"messages": MESSAGES[:1], "tools": TOOLS, **fields}).source("hermes")

    assert source() is None and source(tool_choice="none") is None
    with pytest.raises(ApiError, match="names a function"):
        source(tool_choice={"type": "function", "function": {"name": "rm"}})
    with pytest.raises(ApiError, match="no 'tools'"):
        source(tool_choice="required", tools=[])


def test_strict_tools_that_the_model_may_call(text):
    asked = read(ChatFields, {"messages": MESSAGES[:1], "tools": STRICT})
    assert "strict" not in asked.offered[0]["function"], "the template sees what it knows"
    made = asked.source("hermes")
    assert made is not None and json.loads(made.text)["format"]["triggers"] == ["<tool_call>"]
    with pytest.raises(ApiError, match="tool_choice 'required'"):
        asked.source("llama3")
    for arguments, matches in ({"city": "Köln"}, True), ({"city": 5}, False), ({}, False):
        for form in "<tools>%s</tools>", "```json\n%s\n```", "%s":
            said = form % json.dumps({"name": "get", "arguments": arguments}, ensure_ascii=False)
            parser = tool_parser(STRICT, text, made)()  # no grammar wrote these
            found = parser.feed(said) + parser.end()
            assert found == [KOELN] if matches else "".join(found) == said


@pytest.mark.parametrize(
    ("schema", "why"),
    [({"type": "array"}, "type object"), ({"type": "object", "patternProperties": {}}, "patternProperties")],
)
def test_arguments_that_cannot_be_enforced(schema, why):
    tool = {"type": "function", "function": {"name": "get", "parameters": schema}}
    asked = read(ChatFields, {"messages": MESSAGES[:1], "tools": [tool], "tool_choice": "required"})
    with pytest.raises(ApiError, match=why):
        asked.source("hermes")
    assert read(ChatFields, {"messages": MESSAGES[:1], "tools": [tool]}).source("hermes") is None
