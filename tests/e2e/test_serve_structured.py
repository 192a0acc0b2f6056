"""Structured output and tools over HTTP, by the official client, and requests that try to stop the server with them."""

import json
import os
import re
import shutil
import signal
from typing import Annotated, Literal

import pytest
from fixtures_server import children, events, program_of, serving
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

# A short template like Qwen's, with traps: some conversations make it hang, write too much or use too much memory.
TEMPLATE = (
    "{% if tools %}<tool_call> {% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if messages[0].content == 'hang' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}{% endif %}"
    "{% if messages[0].content == 'long' %}{% for i in range(99999) %}{{ 'twenty characters ok' }}{% endfor %}"
    "{% endif %}"
    "{% if messages[0].content == 'fat' %}{{ ('x' * 9999999999) | length }}{% endif %}"
)
CITIES = ["Ulm", "Köln", "the list"]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": CITIES}, "days": {"type": "integer", "minimum": 1, "maximum": 30}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]
USER = [{"role": "user", "content": "the sum"}]
HOT = {"temperature": 1.3, "max_tokens": 120}


@pytest.fixture(scope="module")
def server(pair_folders, tmp_path_factory):
    target = tmp_path_factory.mktemp("structured") / "target"
    shutil.copytree(pair_folders[0], target)
    config = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    with serving("--model", str(target), "--draft", str(pair_folders[1]), "--served-model-name", "tiny") as made:
        yield made


@pytest.fixture(scope="module")
def openai(server):
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=0) as client:
        yield client


def texts(http, **fields):
    response = http.post("/v1/completions", json={"prompt": "x", "n": 6, "seed": 3, **HOT, **fields})
    assert response.status_code == 200, response.text
    assert {c["finish_reason"] for c in response.json()["choices"]} == {"stop"}, response.text
    return [c["text"] for c in response.json()["choices"]]


class Cat(BaseModel):
    kind: Literal["cat"]


class Dog(BaseModel):
    kind: Literal["dog"]
    age: Annotated[int, Field(ge=0, le=30)]


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    mood: Literal["good", "bad"] | None
    age: Annotated[int, Field(ge=0, le=150)]
    tags: Annotated[list[Literal["für", "the"]], Field(max_length=3)]
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


def test_models_of_pydantic(openai):
    ages = set()
    for seed in range(4):
        done = openai.chat.completions.parse(
            model="tiny", messages=USER, response_format=Person, seed=seed, temperature=1.3, max_tokens=200
        )
        choice = done.choices[0]
        assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Person), choice
        ages.add(choice.message.parsed.age)
    assert len(ages) > 1
    asked = {"model": "tiny", "input": "the sum", "text_format": Person, "max_output_tokens": 200}
    assert isinstance(openai.responses.parse(**asked, extra_body={"seed": 2}).output_parsed, Person)


def test_languages(http):
    """Each form of constraint holds and allows several texts; drafts and streaming do not change the texts."""
    array = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3}
    forms = [
        ({"structured_outputs": {"regex": r"a{1,3}(b|für)"}}, re.compile(r"a{1,3}(b|für)").fullmatch),
        ({"structured_outputs": {"regex": "[ab]{3}"}}, re.compile("[ab]{3}").fullmatch),
        ({"structured_outputs": {"grammar": 'root ::= "yes" | "no" "!"*'}}, re.compile("yes|no!*").fullmatch),
        ({"structured_outputs": {"grammar": "start: /[0-9]{2}/"}}, re.compile("[0-9]{2}").fullmatch),
        ({"structured_outputs": {"json": array}}, lambda text: 0 < len(json.loads(text)) < 4),
        ({"structured_outputs": {"json": json.dumps(array)}}, lambda text: set(json.loads(text)) <= {"a", "b"}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": array}}},
            lambda text: isinstance(json.loads(text), list),
        ),
    ]
    num_varied = 0
    for fields, valid in forms:
        found = texts(http, **fields, speculation={"policy": "fixed", "num_draft_tokens": 5})
        assert all(valid(text) for text in found), (fields, found)
        num_varied += len(set(found)) > 1
        assert found == texts(http, **fields, speculation="off")
        body = {"prompt": "x", "n": 6, "seed": 3, **HOT, **fields, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            parts = [c for e in events(response) for c in e["choices"]]
        assert ["".join(c["text"] for c in parts if c["index"] == i) for i in range(6)] == found
    assert num_varied > 3


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_tools_that_must_be_called(openai, choice):
    """Calls have the right names and arguments. A stream, put together by the client, gives the same calls."""
    called = set()
    for seed in range(5):
        asked = {"model": "tiny", "messages": USER, "tools": TOOLS, "tool_choice": choice, "seed": seed}
        asked |= {"temperature": 1.3, "max_tokens": 130, "parallel_tool_calls": False}
        done = openai.chat.completions.create(**asked).choices[0]
        assert done.message.content is None and len(done.message.tool_calls or ()) == 1
        assert done.finish_reason == ("tool_calls" if choice == "required" else "stop")
        (call,) = done.message.tool_calls
        arguments = json.loads(call.function.arguments)
        called.add(call.function.name)
        assert arguments == {} or (call.function.name == "weather" and arguments["city"] in CITIES)
        assert 1 <= arguments.get("days", 1) <= 30
        with openai.chat.completions.stream(**asked) as stream:
            assert any(e.type == "tool_calls.function.arguments.delta" for e in stream)
            same = stream.get_final_completion().choices[0]
        assert [(c.function.name, c.function.arguments) for c in same.message.tool_calls or ()] == [
            (call.function.name, call.function.arguments)
        ]
        assert same.finish_reason == done.finish_reason
    assert called == ({"weather", "stop"} if choice == "required" else {"weather"})


FORMAT = {
    "type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False,
}  # fmt: skip


def test_a_format_beside_tools(http):
    """The answer is a call or has the format. What contradicts tools is refused by name."""
    asked = {"messages": USER, "tools": TOOLS, "temperature": 1.3, "max_tokens": 130}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": FORMAT}}
    kinds = set()
    for seed in range(8):
        body = {**asked, "response_format": form, "seed": seed}
        choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
        calls = choice["message"].get("tool_calls")
        kinds.add("call" if calls else "format")
        if choice["finish_reason"] != "length":
            found = [json.loads(c["function"]["arguments"]) for c in calls or ()] or json.loads(
                choice["message"]["content"]
            )
            assert calls or found.keys() == {"ok"}
    assert kinds == {"call", "format"}
    for name, more in {
        "response_format": {"response_format": form, "tool_choice": "required"},
        "structured_outputs.regex": {"structured_outputs": {"regex": "a+"}},
        "structured_outputs": {"structured_outputs": {"choice": ["a"]}},
    }.items():
        error = http.post("/v1/chat/completions", json=asked | more)
        assert error.status_code == 400 and error.json()["error"]["param"] == name


BOMBS = [
    {"structured_outputs": {"regex": "(" * 60 + "a" + "){1,999}" * 60}},
    {"structured_outputs": {"regex": "(a{1,9999}){1,9999}b{1,9999}"}},
    {"structured_outputs": {"json": {"type": "string", "minLength": 10**9}}},
    {
        "structured_outputs": {
            "json": {"type": "array", "items": {"type": "array", "maxItems": 9999, "minItems": 9999}, "minItems": 99999}
        }
    },
    {"structured_outputs": {"json": {"enum": [f"x{i}" for i in range(5000)]}}},
    {
        "structured_outputs": {
            "grammar": "\n".join(f'r{i} ::= r{i + 1} r{i + 1} | "a"' for i in range(60)) + '\nr60 ::= "b"\nroot ::= r0'
        }
    },
    {"structured_outputs": {"grammar": "root ::= " + "(" * 30000 + '"a"' + ")" * 30000}},
    {"structured_outputs": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}},
    {"structured_outputs": {"regex": "(?=a)"}},
    {"structured_outputs": {"json": {"not": {}}}},
]


def asked_again(http, bomb):
    """The answer to one bomb; asks again, as a client would, if the machine was too busy to judge the bomb."""
    for _ in range(5):
        response = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 4, **bomb})
        if response.status_code != 503:
            break
        assert "in time" in response.json()["error"]["message"] and int(response.headers["retry-after"]) > 0
    return response


def test_bombs_are_refused_or_harmless(server, http):
    """Whatever happens to the compiler, the answer comes in bounded time, and no other request is affected."""
    assert texts(http, structured_outputs={"regex": "[ab]{2}"}, n=1), "with this the compiler's process is there"
    engine, aside, statuses = server.engine_pid, program_of(server.process.pid, "aside"), []
    for bomb in BOMBS:
        response = asked_again(http, bomb)
        statuses.append(response.status_code)
        if response.status_code == 400:
            error = response.json()["error"]
            said = re.sub(r"#[/$\w]+|'/'", "", error["message"])  # no pointers into the schema: no file of the server
            assert error["param"].partition(".")[0] in bomb and "/" not in said, error
        assert server.engine_pid == engine and program_of(server.process.pid, "aside") == aside
        assert texts(http, structured_outputs={"regex": "[ab]{2}"}, n=1)
    assert set(statuses) <= {200, 400, 503} and statuses.count(400) >= 7, statuses


@pytest.mark.parametrize("content", ["hang", "long", "fat"])
def test_templates_cannot_hang_the_server(server, http, content):
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
    refused = http.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages", refused.text
    assert "template" in refused.json()["error"]["message"]
    assert http.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 2}).status_code == 200
    assert http.get("/health").status_code == 200


def test_a_dead_helper_is_replaced(server, http):
    assert texts(http, structured_outputs={"regex": "[ab]{2}"}, n=1)
    for pid in [p for p in children(server.process.pid) if p != server.engine_pid]:
        os.kill(pid, signal.SIGKILL)
    assert texts(http, structured_outputs={"regex": "[ab]{3}"}, n=1)
    assert http.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 2}).status_code == 200
