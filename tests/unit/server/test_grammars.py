"""Compiled grammars in the server and the engine: bounded in memory, compiled once, passed on in order."""

import asyncio
import json
import random
import re
import signal
import sys

import msgspec
import numpy as np
import pytest
from fixtures_server import pretender
from lawkit import EOS, MODEL_VOCAB
from tokenizers import Tokenizer as HFTokenizer

from sameseed.errors import RequestError
from sameseed.grammar.matching import Matching
from sameseed.models.harmony import Harmony
from sameseed.request import SamplingParams
from sameseed.server import frames, helper as helpers, schemas
from sameseed.server.client import EngineClient
from sameseed.server.errors import ApiError, bad_request
from sameseed.server.frames import Render
from sameseed.server.helper import Grammars, Helper, HelperDiedError
from sameseed.server.protocol import ChatFields, read
from sameseed.server.structured import GrammarSource
from sameseed.server.text import vocabulary
from sameseed.server.tools import FORMATS, Call, More, Parser
from sameseed.server.worker import GrammarStore
from sameseed.tokenizer import Tokenizer


class Pretended:
    """A helper whose grammars are as long as their sources say; it can be made to die."""

    def __init__(self):
        self.asked: list[str] = []

    async def ask(self, frame, name):
        self.asked.append(frame.source)
        if frame.source == "bad":
            raise bad_request("bad", name)
        if frame.source == "late":
            raise HelperDiedError(spent=False)
        return "x" * int(frame.source)


async def test_bounded_by_bytes():
    helper, forgotten = Pretended(), []
    grammars = Grammars(helper, forgotten.append, max_bytes=350)
    keys = {text: GrammarSource("regex", text, "f").key for text in ("41", "42", "1000")}
    first = await grammars.compiled(GrammarSource("regex", "40", "f"))
    await grammars.compiled(GrammarSource("regex", "41", "f"))
    assert await grammars.compiled(GrammarSource("regex", "40", "other field")) == first
    third = await grammars.compiled(GrammarSource("regex", "42", "f"))
    assert forgotten == [keys["41"]] and keys["41"] not in grammars and keys["42"] in grammars
    assert grammars.num_bytes == len(first) + len(third) and helper.asked == ["40", "41", "42"]
    big = await grammars.compiled(GrammarSource("regex", "1000", "f"))
    assert len(forgotten) == 3 and keys["1000"] in grammars and grammars.num_bytes == len(big) > 1000
    assert GrammarSource("json", "40", "f").key != GrammarSource("regex", "40", "f").key


async def test_refusals_are_remembered_and_bounded(monkeypatch):
    helper = Pretended()
    grammars = Grammars(helper, lambda key: None, max_bytes=100)
    for name in ("tools", "structured_outputs.regex"):
        with pytest.raises(ApiError) as caught:
            await grammars.compiled(GrammarSource("regex", "bad", name))
        assert caught.value.param == name
    assert helper.asked == ["bad"]
    for _ in range(2):  # its death may have other causes, so it is not remembered
        with pytest.raises(ApiError, match="in time") as caught:
            await grammars.compiled(GrammarSource("regex", "late", "f"))
        assert caught.value.status == 503 and caught.value.retry_after
    assert helper.asked == ["bad", "late", "late"]
    for most in (4096, 3):  # by bytes, then by number
        monkeypatch.setattr(helpers, "MAX_KEPT", most)
        for i in range(80):
            with pytest.raises(ApiError):
                await grammars.compiled(GrammarSource(f"kind {i}", "bad", "f"))
        kept = [GrammarSource(f"kind {i}", "bad", "f").key in grammars for i in range(80)]
        assert kept.count(True) == min(33, most) and kept[-1] and grammars.num_bytes == 3 * kept.count(True)


async def test_who_asks_meanwhile_waits_for_the_same():
    """A schema sent by many clients is compiled once, also if one of them leaves; each error names its own field."""
    go = asyncio.Event()

    class Slow(Pretended):
        async def ask(self, frame, name):
            await go.wait()
            return await super().ask(frame, name)

    helper = Slow()
    grammars = Grammars(helper, lambda key: None)

    def ask(source, field):
        return asyncio.ensure_future(grammars.compiled(GrammarSource("regex", source, field)))

    good, bad = [ask("40", f"f{i}") for i in range(40)], [ask("bad", f"f{i}") for i in range(3)]
    await asyncio.sleep(0)
    good[0].cancel()
    go.set()
    made = await asyncio.gather(*good, return_exceptions=True)
    assert isinstance(made[0], asyncio.CancelledError) and len(set(map(repr, made[1:]))) == 1
    assert [e.param for e in await asyncio.gather(*bad, return_exceptions=True)] == ["f0", "f1", "f2"]
    assert helper.asked == ["40", "bad"] and grammars.num_bytes == len(made[1]) + len("bad")


DIES = """
import os, socket, sys
link = socket.socket(fileno=int(sys.argv[1]))
link.recv(65536)
if sys.argv[3] == "0":
    sys.exit()
link.sendall(bytes.fromhex(sys.argv[2]))
link.recv(65536)
os.kill(os.getpid(), int(sys.argv[3]))
"""


@pytest.mark.parametrize(
    ("number", "expected", "status"),
    [(signal.SIGPROF, True, 400), (signal.SIGKILL, False, 503), (signal.SIGSTOP, False, 503), (0, None, 503)],
)
async def test_too_much_work_is_told_from_a_death(number, expected, status):
    """A process that exceeds its own limit dies by a signal of its own; any other death may be the machine's fault."""
    answer = frames.pack(frames.HelperResult("")).hex()
    spawn = pretender(sys.executable, "-IS", "-c", DIES, "FD", answer, str(int(number)))
    made = Helper(lambda: frames.Setup(True, {}, 8, []), 0.5, 8, spawn)
    with pytest.raises((HelperDiedError, ApiError)) as caught:
        await made.ask(frames.Job("template", "[[], [], {}]"), "messages")
    assert getattr(caught.value, "spent", None) is expected
    client = EngineClient("x", {})
    client._templates = made
    with pytest.raises(ApiError) as told:
        await client.render(Render([], [], {}))
    assert told.value.status == status
    await made.close()


@pytest.fixture(scope="module")
def words(pair):
    return Matching(vocabulary(pair.tokenizer, MODEL_VOCAB, [EOS]))


def asked(grammar, choice=None):
    return frames.Add("1", [[1]], SamplingParams(), choice=choice, grammar=grammar)


def test_the_engine_loads_what_it_is_sent(words):
    """A grammar is that of its key when the request came; one that cannot be loaded fails only its request."""
    calls = []

    def make():
        calls.append(1)
        return words.vocabulary

    store = GrammarStore(make)
    assert store.maker(asked(None)) is None and not calls
    store.take(frames.Prepare())
    store.take(frames.LoadGrammar("k", words.compiled("regex", "[ab]{2}")))
    store.take(frames.LoadGrammar("broken", "json {"))
    made = store.maker(asked("k"))
    store.take(frames.Forget("k"))
    first, again = made(), made()
    assert first is not again and first.allowed((), ()).any()
    for key in ("k", "broken"):
        missing = store.maker(asked(key))
        with pytest.raises(KeyError):
            assert missing is not None and missing()
    choice = store.maker(asked(None, ["ab"]))
    assert choice is not None and choice().allowed((), ()).any() and len(calls) == 1


def test_a_request_whose_grammar_cannot_be_made_is_refused_later():
    """The reader of frames must not end with it: the request is refused when it is added."""

    def broken():
        raise MemoryError

    store = GrammarStore(broken)
    for _ in range(2):
        store.take(frames.Prepare())
        store.take(frames.LoadGrammar("k", "{}"))
        made = store.maker(asked(None, ["ab"]))
        with pytest.raises(MemoryError):
            assert made is not None and made()


WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]


def chat(**fields):
    return read(ChatFields, {"messages": [{"role": "user", "content": "x"}], **fields})


def walk(words, source, seed):
    """A random text of a grammar, which ends where the grammar first allows it."""
    matched, rng = words.matched(words.language(words.compiled(source.kind, source.text))), random.Random(seed)
    tokens = []
    for _ in range(400):
        allowed = np.flatnonzero(matched.allowed(tokens, ()))
        if EOS in allowed:
            break
        tokens.append(int(rng.choice(allowed)))
    return words.vocabulary.spell(tokens).decode()


@pytest.mark.parametrize("parser", FORMATS)
@pytest.mark.parametrize("seed", range(4))
def test_compelled_calls_are_read_back(words, parser, seed):
    """The parser reads what the grammar of calls allows as calls, with arguments that match their schema."""
    source = chat(tools=TOOLS, tool_choice="required").source(parser)
    text = walk(words, source, seed)
    tools = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}
    reader, rng, at, harmony = Parser(tools, FORMATS[parser]), random.Random(seed), 0, Harmony(None)
    found = []
    while at < len(text):
        size = rng.randint(1, 9)
        piece = text[at : at + size]
        found += reader.feed(harmony.feed(piece, False)[1] if parser == "openai" else piece)
        at += size
    found += reader.end()
    name, arguments = found[0].name, "".join(f.arguments for f in found[:] if isinstance(f, More | Call))
    assert sum(isinstance(f, Call) for f in found) == 1 and not any(isinstance(f, str) for f in found), text
    value = json.loads(arguments)
    if name == "weather":
        assert len(value["city"]) <= 6 and 1 <= value.get("days", 1) <= 9
        assert value.keys() <= WEATHER["properties"].keys()
    else:
        assert name == "stop" and isinstance(value, dict)


def test_special_tokens_open_compelled_calls(pair):
    """A call may hold the special tokens of its format, as may thoughts before it; JSON may hold none."""
    marks = ("<|tool_call>", "<tool_call|>", '<|"|>', "<channel|>")
    backend = HFTokenizer.from_str(pair.tokenizer.as_files()["tokenizer.json"])
    backend.add_special_tokens(list(marks))
    tokenizer = Tokenizer(backend, "{{ tools }}<|tool_call>")
    words = Matching(vocabulary(tokenizer, 304, [EOS]))
    source = chat(tools=TOOLS, tool_choice="required").source("gemma4")
    assert source is not None
    matched = words.matched(words.language(words.compiled(source.kind, source.text)))
    tokens = tokenizer.encode('<|tool_call>call:weather{city:<|"|>Ulm<|"|>}<tool_call|>')
    assert {backend.token_to_id(mark) for mark in marks[:3]} < set(tokens)
    assert matched.allowed(tokens[:-1], ())[tokens[-1]] and matched.allowed(tokens, ())[EOS]
    free = chat(tools=TOOLS).source("gemma4")
    assert free is not None and free.kind == "tag"
    thinking = words.matched(words.language(words.compiled(free.kind, free.text)))
    assert thinking.allowed(tokenizer.encode("<|channel>thought\nhm<channel|>so "), ())[tokens[0]]
    for kind, text in (("object", ""), ("regex", ".*")):
        other = words.matched(words.language(words.compiled(kind, text)))
        assert not other.allowed((), ())[[backend.token_to_id(mark) for mark in marks]].any()


PATTERNS = {
    "^https://": ["https://", "https://a", "http", " https://"], "[0-9]+$": ["a1", "12", "1a", ""],
    "^[ab]+$": ["ab", "abc", "cab"], "b": ["abc", "b", "ac"], "a|^b": ["xay", "bx", "xb", "x"],
    "^(a|b)$": ["a", "b", "ab", "xa"], "(?:^a|b$)": ["ax", "xb", "xa", "bx"], "^a|b$|^$": ["ax", "xb", "", "xa"],
    r"\^|[$]": ["x^y", "$", "x"], "^(a)(b)$": ["ab", "a", "xab"], "(?P<x>a)b$": ["xab", "a"],
    "^[(?P<]$": ["P", "(", "a"], "^1(0b{1,2})?$": ["1", "10b", "10bb", "1b"], "^((b*1)??a)?$": ["", "b1a", "b", "ba"],
    r"^[\u0061-\u0063\x2d]\u002E$": ["a.", "-.", "ax", "d."],
}  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_matches_a_part_of_the_text(words, pattern):
    """As JSON Schema says, and as `re.search` does."""
    for schema in ({"type": "string", "pattern": pattern}, {"type": "object", "propertyNames": {"pattern": pattern}}):
        source = schemas.check(schema, "response_format")
        matched = words.matched(words.language(words.compiled("json", source)))
        for text in PATTERNS[pattern]:
            written = json.dumps(text) if "pattern" in schema else f'{{{json.dumps(text)}:"x"}}'
            tokens = [words.vocabulary.pieces.index(bytes([byte])) for byte in written.encode()]
            assert matched.allowed(tokens, ())[EOS] == bool(re.search(pattern, text)), (text, source)


def arm(key, part, *required, **other):
    return {"type": "object", "properties": {key: part}, "required": [*required], **other}


CLOSED = {"additionalProperties": False}
NAMED = {"type": "object", "additionalProperties": {"type": "integer"}}
DAY = {"type": "string", "format": "date"}
# Schemas as generators write them, texts that match, and texts that do not.
WRITTEN = [
    ({"type": "array", "maxItems": 2}, ["[]", '[1,"a"]'], ["[1,2,3]"]),
    ({"type": "array", "minItems": 1}, ["[1]"], ["[]"]),
    ({"minItems": 1}, ["[1]"], ["[]"]),
    ({"type": "array", "prefixItems": [{"type": "integer"}], "minItems": 2}, ['[1,"a"]'], ["[1]", '["a",1]']),
    ({"type": "array", "items": {"$ref": "#/$defs/any"}, "$defs": {"any": {"type": "array"}}}, ["[[1]]"], ["[1]"]),
    ({"type": "object", "maxProperties": 1}, ["{}", '{"a":1}'], ['{"a":1,"b":2}']),
    ({"title": "T", "x-a": 3, "anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}, ["1", "null"], [""]),
    ({"const": 3, "type": "number"}, ["3"], ["4"]),
    ({"type": ["string", "null"], "minLength": 1}, ['"a"', "null"], ['""']),
    ({"type": "number", "maximum": 2**70, "default": 2**70}, ["1.5"], ["a"]),
    (NAMED | {"minProperties": 1}, ['{"a":1}'], ["{}", '{"a":"x"}']),
    ({"type": "object", "required": []}, ["{}", '{"a":[1]}'], ["[]"]),
    ({"type": ["string", "object"], "maxLength": 1}, ['"a"', '{"a":"bc"}'], ['"ab"']),
    ({"type": "integer", "format": "int32", "minimum": 0.0}, ["5"], ["-1", "1.5"]),
    (DAY, ['"2024-02-29"', '"2023-12-31"'], ['"2023-02-29"', '"2024-04-31"', '"2024-13-01"']),
    (DAY | {"format": "date-time"}, ['"2024-02-29T12:00:00.5+01:00"'], ['"2024-02-30T12:00:00Z"', '"2024-02-29"']),
    (DAY | {"format": "ipv4"}, ['"10.0.0.255"'], ['"10.0.0.256"', '"10.0.0.01"']),
    (DAY | {"format": "uuid4"}, ['"123e4567-e89b-42d3-a456-426614174000"'], ['"123e4567-e89b-12d3-a456-426614174000"']),
    (DAY | {"pattern": r"^\d{4}$"}, ['"2024"'], ['"2024-02-29"']),
    ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 2}, ['"a"', '"ab"'], ['""', '"abc"', '"A"']),
    ({"type": "string", "pattern": "^https://", "minLength": 1}, ['"https://a"'], ['""']),
    (NAMED | {"propertyNames": {"type": "string"}}, ['{"a":1}'], ['{"a":"x"}']),
    (
        NAMED | {"propertyNames": {"enum": ["a", "b"]}, "required": ["b"]},
        ['{"a":1,"b":2}', '{"b":2}'],
        ['{"a":1}', '{"b":2,"c":3}', '{"b":"x"}'],
    ),
    (NAMED | {"propertyNames": {"pattern": "^a|b$"}}, ['{"ax":1,"xb":2}', "{}"], ['{"xa":1}', '{"a":"x"}']),
    (NAMED | {"propertyNames": {"enum": ["a"]}} | CLOSED, ["{}"], ['{"a":1}']),
    (NAMED | {"propertyNames": {"maxLength": 1}}, ['{"a":1}'], ['{"ab":1}', '{"a":"x"}']),
    ({"type": "object", "patternProperties": {"^[0-9]+$": {"const": 0}}}, ['{"12":0}'], ['{"a":0}', '{"1":1}']),
    ({"type": "array", "items": [{"type": "integer"}], "additionalItems": False}, ["[1]"], ["[1,1]", '["a"]']),
    ({"type": "array", "items": [{"const": 1}, True], "additionalItems": {"const": 0}}, ["[1,2,0]"], ["[1,2,3]"]),
    ({"type": "integer", "minimum": 1, "exclusiveMinimum": True}, ["2"], ["1"]),
    ({"type": "integer", "format": "int32", "enum": [1, 3], "maximum": 3}, ["3"], ["2"]),
    ({"type": "number", "multipleOf": 5}, ["10", "0"], ["7", "0.5"]),
    ({"type": "string", "contentEncoding": "base64"}, ['"YQ=="'], ['"a b"']),
    ({"type": "string", "anyOf": [{"format": "ipv4"}, {"maxLength": 1}]}, ['"1.1.1.1"', '"a"'], ['"ab"', "1"]),
    (NAMED | {"required": ["a"]}, ['{"a":1}', '{"a":1,"b":2}'], ["{}", '{"a":"x"}']),
    (
        {
            "allOf": [{"$ref": "#/$defs/pet"}, {"description": "says nothing"}],
            "properties": {"age": {"$ref": "#/$defs/pet/allOf/0/properties/id"}},
            "required": ["age"],
            "$defs": {"pet": {"allOf": [arm("id", {"type": "integer"}, "id"), arm("tag", DAY | {"pattern": "^a"})]}},
        },
        ['{"id":1,"tag":"ab","age":2}', '{"id":1,"age":2}'],
        ['{"id":1}', '{"id":"x","age":2}', '{"id":1,"tag":"ba","age":2}', '{"id":1,"age":"x"}'],
    ),
    (
        {
            "oneOf": [arm("is", {"const": "A"}, "is") | {"$ref": "#/$defs/a"}, arm("is", {"const": "B"}, "is", "c")],
            "properties": {"c": {"type": "integer"}},
            "$defs": {"a": arm("x", {"const": 1}, "x")},
        },
        ['{"c":1,"is":"A","x":1}', '{"is":"A","x":1}', '{"c":1,"is":"B"}'],
        ['{"is":"A"}', '{"is":"B"}', '{"c":"x","is":"B"}'],
    ),
    (arm("a", {}) | {"anyOf": [{"required": ["a"]}, arm("b", DAY, "b")]}, ['{"a":1}', '{"b":"2024-01-01"}'], ["{}"]),
    ({"allOf": [arm("a", {}, **CLOSED), arm("a", {})], "unevaluatedProperties": False}, ['{"a":1}', "{}"], ['{"b":1}']),
    (
        arm("a", {"allOf": [{"$ref": "#"}, {"properties": {"b": {"const": 1}}}]}),  # it holds itself
        ['{"a":{"a":{"b":1},"b":1}}', "{}"],
        ['{"a":{"a":{"b":2}}}', '{"b":1}'],
    ),
    ({"prefixItems": [{"$ref": "#/prefixItems/1"}, {"const": 2}]}, ["[2,2]"], ["[1]"]),
    ({"items": [{"$ref": "#/items/1"}, {"const": 2}]}, ["[2,2]"], ["[1]"]),
    ({"type": "string", "nullable": True}, ['"a"', "null"], ["1"]),
    ({"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": arm("b", DAY)}}, ["{}", "null"], ["1"]),
    ({"enum": ["a", "b"], "type": "string"}, ['"a"'], ['"c"']),
    ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, ["[1]"], ["[1,1]"]),
    ({"type": "string", "minLength": 1.0, "maxLength": 3.0}, ['"abc"'], ['""', '"abcd"']),
    ({"type": "string", "minLength": 2}, [r'"\n\""', r'"ab\u00e4\\"', '"abc"'], ['""', '"a"', r'"\n"', '"ab']),
    ({"anyOf": [{"not": {}}, {"const": "a", "enum": ["a"], "type": "string"}]}, ['"a"'], ['"b"']),
    (
        {"oneOf": [{"enum": ["A", "B"]}, arm("C", {"type": "string"}, "C", **CLOSED), arm("D", {}, "D", **CLOSED)]},
        ['"B"', '{"C":"x"}', '{"D":1}'],
        ['"C"', '{"C":1}', '{"C":"x","D":1}'],
    ),
    (
        {
            "oneOf": [{"$ref": "#/$defs/a"}, {"oneOf": [arm("k", {"const": False}, "k"), arm("k", {"const": 1}, "k")]}],
            "$defs": {"a": arm("k", {"$ref": "#/$defs/kind"}, "k"), "kind": {"const": True}},
        },
        ['{"k":true}', '{"k":false}', '{"k":1}'],
        ['{"k":2}', "{}"],
    ),
    (
        {"anyOf": [{"$ref": "#/$defs/a%20~1b"}, {"$ref": "#/anyOf/2"}, {"const": 3}], "$defs": {"a /b": {"const": 2}}},
        ["2", "3"],
        ["1"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "taken", "refused"), WRITTEN)
def test_schemas_mean_what_they_say(words, schema, taken, refused):
    before = json.dumps(schema)
    matched = words.matched(words.language(words.compiled("json", schemas.check(schema, "response_format"))))
    assert json.dumps(schema) == before, "the template sees the schema as it came"
    for text in (*taken, *refused):
        tokens = [words.vocabulary.pieces.index(bytes([byte])) for byte in text.encode()]
        assert matched.allowed(tokens, ())[EOS] == (text in taken), text


@pytest.mark.parametrize(
    "arms",
    [
        [arm("a", {}, "a"), arm("b", {}, "b", **CLOSED)], [arm("a", {}, "a", **CLOSED)] * 2,
        [arm("k", {"const": 1}, "k"), arm("k", {"const": 1.0}, "k")],
        [arm("k", {"const": 1}), arm("k", {"const": 2}, "k")],
        [arm("a", {}, "a", **CLOSED), {"type": "object", "patternProperties": {"^a": {}}, **CLOSED}],
        [{"minItems": 1}, {"type": "object"}],
        [{"allOf": [{"required": ["a"]}, {"properties": {"a": {}}}]}, {"const": 1}],
        [{"enum": ["a", 1]}, {"type": "number"}], [{"type": "integer"}, {"type": ["string", "integer"]}],
        [{"type": "string", "nullable": True}, {"type": "null"}],
    ],
)  # fmt: skip
def test_one_of_what_could_match_twice_is_refused(words, arms):
    with pytest.raises(RequestError, match="oneOf"):
        words.compiled("json", schemas.check({"oneOf": arms}, "response_format"))


def test_a_group_of_an_unknown_kind_is_no_text(words):
    with pytest.raises(RequestError, match="Group"):
        words.compiled("json", schemas.check({"type": "string", "pattern": "(?>a)"}, "response_format"))


def test_strict_calls_amid_free_text(words):
    """The model writes freely until it opens a call; then the grammar allows only a call that matches its schema."""
    schema = {**WEATHER, "properties": WEATHER["properties"] | {"why": {"type": "string", "minLength": 1}}}
    tool = {"type": "function", "function": {**TOOLS[0]["function"], "parameters": schema}}
    source = chat(tools=[tool]).source("hermes")
    matched = words.matched(words.language(words.compiled(source.kind, source.text)))

    def goes(text):
        tokens = [words.vocabulary.pieces.index(bytes([b])) for b in text.encode()]
        return bool(matched.allowed(tokens, ()).any())

    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm", "days": 3, "why": "\\"\\n"}}\n</tool_call>'
    assert all(map(goes, ("hello <b>", f"See: {call}", f"{call} and {call}", "<tool_calm>")))
    wrong = ("<tool_call>x", call.replace("weather", "rm"), call.replace("3", "10"), call[:-14] + "x")
    assert not any(map(goes, wrong))


async def test_a_new_engine_gets_its_grammars_again(monkeypatch):
    """A grammar is sent once per engine, and what one side forgets, the other forgets too."""
    client, sent = EngineClient("x", {}), []
    monkeypatch.setattr(client, "_write", lambda data: sent.append(msgspec.msgpack.decode(data[4:])["type"]))
    client.state = "ready"
    client.grammars = Grammars(Pretended(), client._forget_grammar, max_bytes=250)

    async def submit(source):
        asked = GrammarSource("regex", source, "f")
        grammar = await client.grammars.compiled(asked)
        await client.submit(frames.Add("r", [[1]], SamplingParams(), grammar=asked.key), grammar)

    for source in ("40", "40", "41"):
        await submit(source)
    assert sent == ["LoadGrammar", "Add", "Add", "Forget", "LoadGrammar", "Add"]
    sent.clear()
    client._sent.clear()  # as after an engine was started
    await submit("41")
    assert sent == ["LoadGrammar", "Add"]
