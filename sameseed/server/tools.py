"""Parsers of tool calls in generated text. They work as the text arrives; the result is the same streamed or not.

The chat template tells which marks open a call; what follows the mark tells how it is written: see the readers below.
A call is given out once it is whole; only long JSON arguments are passed on as they arrive. What is not a call of an
offered tool stays text. Nothing that a model writes is executed or evaluated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from sameseed.models.harmony import ARGUMENTS, CALL, END
from sameseed.server import limits, schemas
from sameseed.server.unions import KINDS, enumerated, said_types, target

OPEN, CLOSE, XML = "<tool_call>", "</tool_call>", "<function="
GEMMA, QUOTE = "<|tool_call>", '<|"|>'  # what opens a call of Gemma 4, and what stands around its strings
FENCES = {"```json": "```", "<tools>": "</tools>"}  # around calls of Qwen2.5-Coder, if nothing stands before
LONG = 256  # characters, a few lines of text: longer arguments begin to be given out before they are whole
_KEYS = ("arguments", "parameters")
_NAME = r"([A-Za-z0-9_-]{1,64})"
_HEAD = re.compile(rf'\s*\{{\s*"name"\s*:\s*"{_NAME}"\s*,\s*"(?:{"|".join(_KEYS)})"\s*:\s*(?=\{{)')
_OTHER = re.compile(r'[\[{\s]*"(?!(?:name|arguments|parameters|function|type|id)")[^"]*"')  # no call's first key
_NAMED = re.compile(rf"\s*{_NAME}\s*(?:\[CALL_ID\]\s*[\w-]{{0,64}}\s*)?(?:\[ARGS\]\s*)?(?=\{{)")
_PYTHON = re.compile(rf"\s*\[\s*{_NAME}\s*\(")
_CALLED = re.compile(rf"\s*call:\s*{_NAME}\s*(?=\{{)")
_QUOTED = re.compile(r'<\|"\|>(.*?)<\|"\|>|"(?:[^"\\]|\\.)*"|(?<=[{,])([^"{}\[\]:,<]+)(?=:)', re.DOTALL)
_BETWEEN = re.compile(rf"(?:[\s\[\],;}}]|{OPEN})*")  # around calls in JSON; models write a brace too many
# What may still become such a beginning, with single spaces.
_BEFORE_HEAD = re.compile(r"<?\[? ?[\w-]{0,64} ?(?:\[[A-Z_]{0,7}\]? ?[\w-]{0,64} ?){0,2}")
_GAP = re.compile(r"\s*(?:(?:[;,]|<\|\w+\|>)\s*)*")  # between calls without marks
_BEFORE_GAP = re.compile(r"<(?:\|\w*\|?)?")


@dataclass(frozen=True)
class Call:
    """A call, or its beginning: a function's name, and what is known of its arguments (JSON text)."""

    name: str
    arguments: str = ""


@dataclass(frozen=True)
class More:
    """More of the last call's arguments."""

    arguments: str


Found = str | Call | More
Tools = Mapping[str, Mapping[str, Any]]  # the schemas of the offered tools' arguments, by name
Reader = Callable[[str, Tools], list[Call]]  # the calls that a text consists of; none if it holds anything else


class CallFormat(NamedTuple):
    """How a model writes calls: the marks that open one, and the mark that closes it, if any.

    `begin`, `end`: around the arguments of a call that a grammar compels; `separator`: between two such calls.
    `bare`: the text itself may begin as a call without a mark; further calls may follow, perhaps after `;`.
    `python`: calls may also be a list in Python.
    `style`: how compelled arguments are written, as xgrammar names it; `character`: a pattern of one character of a
    string, for a style in which xgrammar knows no lengths.
    `signs`: texts of a chat template that tell this format; if there are none, its marks do.
    """

    marks: tuple[str, ...]
    begin: str
    end: str
    separator: str = ""
    close: str = ""
    bare: bool = False
    python: bool = False
    style: str = "json"
    character: str = ""
    signs: tuple[str, ...] = ()


FORMATS = {  # named as vLLM's parsers
    "qwen3_coder": CallFormat(
        (OPEN, XML), f"{OPEN}\n{XML}NAME>\n", f"\n</function>\n{CLOSE}", "\n", CLOSE, style="qwen_xml", signs=(XML,)
    ),
    "gemma4": CallFormat(
        (GEMMA,), f"{GEMMA}call:NAME", "<tool_call|>", close="<tool_call|>", style="gemma", character="[^<]"
    ),
    "granite": CallFormat(("<|tool_call|>",), '<|tool_call|>[{"name": "NAME", "arguments": ', "}]"),
    "openai": CallFormat(  # as models/harmony.py gives out calls
        (CALL,), "<|channel|>commentary to=functions.NAME<|message|>", "<|call|>", separator="<|start|>assistant"
    ),
    "hermes": CallFormat(
        (OPEN, *FENCES), OPEN + '\n{"name": "NAME", "arguments": ', "}\n" + CLOSE, "\n", CLOSE, True, signs=(OPEN,)
    ),
    "mistral": CallFormat(("[TOOL_CALLS]",), '[TOOL_CALLS][{"name": "NAME", "arguments": ', "}]"),
    "llama3": CallFormat(
        ("<|python_tag|>", "<|python_start|>", XML),
        '{"name": "NAME", "parameters": ',
        "}",
        separator="; ",
        bare=True,
        python=True,
        signs=("<|start_header_id|>", "<|header_start|>", "<|python_tag|>"),
    ),
    "lfm2": CallFormat(
        ("<|tool_call_start|>",),
        '<|tool_call_start|>[{"name": "NAME", "arguments": ',
        "}]<|tool_call_end|>",
        close="<|tool_call_end|>",
        python=True,
        signs=("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: "),
    ),
}


def parser_for(template: str | None) -> str | None:
    """The name of a chat template's format of calls; None if it has no tools, or another format."""
    if template is None or "tools" not in template:
        return None
    return next(
        (name for name, form in FORMATS.items() if any(text in template for text in form.signs or form.marks)), None
    )


class _Braces:
    """Finds the end of JSON in a text that grows. `at`: characters that were read."""

    def __init__(self) -> None:
        self.at = self._depth = 0
        self._quoted = self._escaped = False

    def find(self, text: str, close: str = "") -> int:
        """Where `close` begins, outside of strings; if it is empty, where the JSON ends. -1 if it has not come yet."""
        for at in range(self.at, len(text)):
            self.at, character = at, text[at]  # what ends the search is looked at again
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = character == "\\", character != '"'
            elif close and close.startswith(text[at : at + len(close)]):
                return at if text.startswith(close, at) else -1
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                if not close and self._depth == 1:
                    return at + 1
                self._depth -= 1
        self.at = len(text)
        return -1


class Parser:
    """Finds the calls in one text, as a state machine. Whitespace next to calls is dropped.

    A tail that may become a call is held back until that is certain. `checked`: calls between marks have arguments
    that match their schemas, as a grammar wrote them; others must match to be calls.
    """

    def __init__(self, tools: Tools, form: CallFormat, checked: bool = False) -> None:
        self._tools, self._form, self._checked = tools, form, checked
        self._buffer = self._mark = self._close = ""
        self._called = False  # was there a call yet?
        self._bare = True  # only whitespace since the last call, or since the beginning
        self._braces, self._inner = _Braces(), _Braces()  # of the calls that may have begun, of a call's arguments
        self._given: int | None = None  # up to where arguments were given out, if they are as they arrive
        self._step = self._inside if form.bare else self._outside
        self._last = self._cut = False

    def feed(self, text: str) -> list[Found]:
        """Add text; returns what is now certain: text and calls."""
        self._buffer += text
        found: list[Found] = []
        while self._step(found):
            pass
        return found

    def end(self, cut: bool = False) -> list[Found]:
        """What is left when no text follows. `cut`: the text was cut off, so its last call may be partial."""
        self._last, self._cut = True, cut
        return self.feed("")

    # The states. Each works on the buffer, and returns whether the next state can go on at once.

    def _outside(self, found: list[Found]) -> bool:
        """Give out text up to a mark, or up to what may become one."""
        buffer, marks = self._buffer, [m for m in self._form.marks if self._bare or m not in FENCES]
        places = (
            (at, m) for m in marks if (at := buffer.find(m)) >= 0 and (m not in FENCES or not buffer[:at].strip())
        )
        at, mark = min(places, default=(len(buffer), ""))
        if not mark and not self._last:
            ends = range(max(0, at - max(map(len, marks)) + 1), at)
            at = next((end for end in ends if any(m.startswith(buffer[end:]) for m in marks)), at)
        self._bare = self._bare and not buffer[:at].strip()
        if not mark and self._bare and (self._called or not self._last):  # space that may stand next to a call
            return False
        if not mark or not self._bare:
            found += filter(None, [buffer[:at]])
        if mark:
            self._begin(at, mark)
        else:
            self._buffer = buffer[at:]
        return bool(mark)

    def _begin(self, at: int, mark: str) -> None:
        """A call may begin with this mark, `at` characters from here."""
        self._mark = "" if mark == XML else mark  # that one is a part of the call
        self._close = END if mark == CALL else FENCES.get(mark, self._form.close if mark else "")
        self._buffer = self._buffer[at + len(self._mark) :]
        self._step, self._braces, self._inner, self._given = self._inside, _Braces(), _Braces(), None

    def _inside(self, found: list[Found]) -> bool:
        """Give out the calls that may have begun once they are whole, or their text once they are none.

        The arguments of a single call that are long are given out as they arrive.
        """
        buffer, region = self._buffer, self._region()
        if region is None:
            return False
        reader, end, size = region
        body = buffer[:end] if end >= 0 else buffer
        is_unchecked = self._checked and self._mark in ("", *FENCES)  # no grammar wrote it
        if not is_unchecked and (head := self._head(reader, body)) is not None:
            begin, self._inner.at = head.end(), max(self._inner.at, head.end())
            shut = self._inner.find(buffer)
            is_long = len(body) > begin + LONG and not 0 <= shut <= begin + LONG
            if self._given is None and (is_long or (self._cut and end < 0)):
                found.append(Call(head[1]))
                self._given = begin
            if self._given is not None:
                more = buffer[self._given : shut if shut >= 0 else None]
                found += [More(more)] if more else []
                self._given += len(more)
                end = end if shut >= 0 else -1
        if end < 0 and not self._last:
            return False
        if self._given is not None:
            self._leave(len(buffer) if end < 0 else max(size, self._given), True)
            return True
        calls: list[Call] = []
        if reader is not None:
            with suppress(ValueError, LookupError, TypeError, RecursionError):  # it is no call
                calls = reader(body, self._tools)
        if is_unchecked and not all(schemas.matches(json.loads(c.arguments), self._tools[c.name]) for c in calls):
            calls = []
        shown = 0 if reader is not _sent else body.find(ARGUMENTS) + len(ARGUMENTS)  # the rest is Harmony's header
        if end < 0:  # if this is no call, a later one may be
            at = -1 if calls or not self._close else buffer.find(self._close)
            size = len(buffer) if at < 0 else at + len(self._close)
        found += calls or filter(None, [body[shown:] if shown else self._mark + buffer[:size]])
        self._leave(size, bool(calls))
        return True

    def _region(self) -> tuple[Reader | None, int, int] | None:
        """How the calls that may have begun are read, where they end, and where the text goes on; None: not known yet.

        An end of -1: it has not come yet. Without a reader they are no calls.
        """
        buffer, form, braces = self._buffer, self._form, self._braces
        begin, none = buffer.lstrip(), (None, 0, 0)
        if form.python and (python := _PYTHON.match(begin)) is not None:
            end = buffer.find(self._close) if self._close else -1
            return (_python, end, end + len(self._close) if end >= 0 else -1) if python[1] in self._tools else none
        if self._close in ("", *FENCES.values()) and _OTHER.match(begin):
            return none
        if GEMMA in form.marks and begin.startswith("call:"):
            return self._quoted_region()
        if (sent := self._mark == CALL) or re.match(r"\{|\[\s*\{", begin):
            end = buffer.find(self._close) if sent else braces.find(buffer, self._close)
            return _sent if sent else _json, end, end if end < 0 else end + len(self._close)
        if XML in form.marks and begin.startswith(XML):
            return self._xml_region()
        if not (form.bare or form.close) and (head := _NAMED.match(buffer)) is not None:
            braces.at = max(braces.at, head.end())
            end = braces.find(buffer)
            return _named, end, end
        may = (self._mark or begin[:1] in ("[", "")) and _BEFORE_HEAD.fullmatch(" ".join(begin.split()))
        return none if self._last or not may else None

    def _xml_region(self) -> tuple[Reader | None, int, int] | None:
        """`_region` of calls in XML. Their closing mark may be missing only where the opening one is."""
        found = re.search(rf"</function>(\s*{CLOSE}){'' if self._mark else '?'}", self._buffer)
        if found is None:
            return _xml, -1, -1
        may = found[1] is None and CLOSE.startswith(self._buffer[found.end() :].lstrip())
        return None if may and not self._last else (_xml, found.end(), found.end())

    def _quoted_region(self) -> tuple[Reader, int, int]:
        """`_region` of a call of Gemma 4: its closing mark is none within a string."""
        at = 0
        for number, part in enumerate(self._buffer.split(QUOTE)):
            end = -1 if number % 2 else part.find(self._close)
            if end >= 0:
                return _quoted, at + end, at + end + len(self._close)
            at += len(part) + len(QUOTE)
        return _quoted, -1, -1

    def _head(self, reader: Reader | None, body: str) -> re.Match[str] | None:
        """The beginning of a single call of an offered tool, up to its arguments."""
        head = _HEAD.match(body) if reader is _json else _NAMED.match(body) if reader in (_named, _sent) else None
        return head if head is not None and head[1] in self._tools else None

    def _leave(self, size: int, called: bool) -> None:
        """Go on behind the buffer's first `size` characters, which were a call or text."""
        self._buffer = self._buffer[size:]
        self._called, self._bare = self._called or called, called or (not size and not self._mark and self._bare)
        self._step = self._between if called and self._form.bare else self._outside

    def _between(self, found: list[Found]) -> bool:
        """After a call without marks: another call, or text after all."""
        gap = _GAP.match(self._buffer)
        rest = self._buffer[gap.end() :] if gap else self._buffer
        if not self._last and (not rest or _BEFORE_GAP.fullmatch(rest)):
            return False
        if rest[:1] in ("{", "["):
            self._buffer = rest
            self._begin(0, "")
        else:
            self._buffer = "" if not rest else re.sub(r"\A\s*;", "", self._buffer)
            self._step = self._outside
        return True


# The readers. Each gives no call at all where a part is none of an offered tool, or where arguments would be lost; or
# it fails as the functions below do, which means the same.


def _json(body: str, tools: Tools) -> list[Call]:
    """Calls as JSON objects, one after the other or in a list (Hermes, Qwen, Llama 3, Granite, Mistral)."""
    calls: list[Call] = []
    at = 0
    while (gap := _BETWEEN.match(body, at)) and gap.end() < len(body):
        members, at = _members(body, gap.end())
        calls.append(_call(members, tools))
    return calls


def _named(body: str, tools: Tools) -> list[Call]:
    """A name before its arguments: `name[ARGS]{...}` (newer Mistral)."""
    return _with_head(_NAMED.match(body), body, tools)


def _sent(body: str, tools: Tools) -> list[Call]:
    """A message to a function, as models/harmony.py gives it out; one without text has no arguments."""
    return _named(body if body.partition(ARGUMENTS)[2].strip() else body + "{}", tools)


def _quoted(body: str, tools: Tools) -> list[Call]:
    """A call as Gemma 4 writes it: `call:name{key:<|"|>text<|"|>}`, rewritten as JSON."""
    body = _QUOTED.sub(_as_json, body)
    return _with_head(_CALLED.match(body), body, tools)


def _with_head(head: re.Match[str] | None, body: str, tools: Tools) -> list[Call]:
    if head is None or head[1] not in tools:
        return []
    arguments = body[head.end() :].strip()
    return [Call(head[1], _object(_loads(arguments), arguments))]


def _as_json(found: re.Match[str]) -> str:
    text, key = found.groups()
    if text is None and key is None:  # a string with JSON's quotes
        return found[0]
    return json.dumps(key.strip() if text is None else text, ensure_ascii=False)


def _xml(body: str, tools: Tools) -> list[Call]:
    """Calls as Qwen3-Coder writes them; the tools' schemas tell what a value is."""
    calls: list[Call] = []
    rest = re.sub(rf"{CLOSE}\s*\Z", "", body)
    while rest.strip():
        function = re.match(rf"\s*<function={_NAME}>(.*?)</function>(?=\s*(?:<function=|\Z))", rest, re.DOTALL)
        if function is None or function[1] not in tools:
            return []
        rest, arguments, inner = rest[function.end() :], {}, function[2]
        if called := _named(function[1] + inner, tools):  # as Llama 3.1 writes it
            calls, inner = calls + called, ""
            continue
        schema = tools[function[1]]
        named = schema.get("properties")
        listed = named if named and isinstance(named, dict) else set(re.findall(r"<parameter=\s*([^>\n]+?)\s*>", inner))
        begun = rf"(?<=\n)(?=<parameter=\s*(?:{'|'.join(map(re.escape, listed))})\s*>)"  # after a part without an end
        while inner.strip():
            part = re.match(
                rf"\s*<parameter=([^>\n]+)>(.*?)(?:</parameter>(?=\s*(?:<parameter=|\Z))|{begun}|\Z)", inner, re.DOTALL
            )
            if part is None or part[1].strip() in arguments:
                return []
            name, inner = part[1].strip(), inner[part.end() :]
            value = part[2].removeprefix("\n").removesuffix("\n")
            forms = _of_property(schema, name)
            if forms and all(form is False for form in forms):  # the schema forbids it: it may be text of the last one
                return []
            arguments[name] = _typed(value, {"anyOf": forms}, schema)
        members = (f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in arguments.items())
        calls.append(Call(function[1], "{" + ", ".join(members) + "}"))
    return calls


def _typed(text: str, schema: Any, root: Any) -> str:
    """A value in XML as JSON: as it is where its schema asks for something else than a string, and the text is that."""
    kinds, word = set[str](), text.strip()
    for form in _forms(schema, root):
        kinds |= said_types(form) | said_types({"type": form.get("type")})
    word = _WORDS.get(word, word)
    with suppress(ValueError, RecursionError):
        value = _loads(word)
        if isinstance(value, float) and value.is_integer() and "number" not in kinds:
            value, word = int(value), str(int(value))
        kind = KINDS[type(value)]
        if kind in kinds - {"string"} or (kind == "integer" and "number" in kinds):
            return _text_of(value, word)
    for form in _forms(schema, root):  # spaces around a listed value, or one of a format, are no part of it
        values = enumerated(form) or ()
        if text not in values and (text.strip() in values or str(form.get("format")) in schemas.FORMATS):
            return json.dumps(text.strip(), ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)


def _of_property(schema: Any, name: str) -> list[Any]:
    """The schemas that a property may have by the schema of its object."""
    found = list[Any]()
    for form in _forms(schema, schema):
        named, patterns = form.get("properties"), form.get("patternProperties")
        others = [form.get("additionalProperties"), *(patterns.values() if isinstance(patterns, dict) else ())]
        found += [named[name]] if isinstance(named, dict) and name in named else others
    return found


def _forms(schema: Any, root: Any) -> Iterator[dict[str, Any]]:
    """A schema and those in its unions and behind its references, each once."""
    seen, waiting = set[int](), [schema]
    while waiting:
        form = waiting.pop()
        if isinstance(form, dict) and id(form) not in seen:
            seen.add(id(form))
            yield form
            unions = [form.get(key) for key in ("anyOf", "oneOf", "allOf")]
            waiting += [part for union in unions if isinstance(union, list) for part in union]
            waiting.append(target(root, form.get("$ref")))


_TOKEN = re.compile(
    r"""(?P<text>(?P<triple>'{3}.*?'{3}|"{3}.*?"{3})|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
    r"|(?P<call>[A-Za-z_][\w-]*)\s*\(|(?P<key>[A-Za-z_]\w*)\s*=|(?P<word>[A-Za-z_]\w*)"
    r"|(?P<open>[(\[{])|(?P<shut>[)\]}])|(?P<last>,(?=\s*[)\]}]))|(?P<other>[-+]?[\d.][\w.+-]*|[,:\s])",
    re.DOTALL,
)
_CLOSERS = {"(": ")]", "[": "]]", "{": "}}", "call": ")}]"}  # what closes a bracket in Python, and then in JSON
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.))", re.DOTALL)
_ESCAPED = dict(zip("ntrbfav\n'\"\\", ["\n", "\t", "\r", "\b", "\f", "\a", "\v", "", "'", '"', "\\"], strict=True))


def _python(body: str, tools: Tools) -> list[Call]:
    """Calls as a list in Python, `[f(a=1), g()]`: rewritten as JSON word by word, and read as that."""
    body = re.sub(r"(?:\s*<\|\w+\|>)*\s*\Z", "", body)
    parts, closers, at = list[str](), list[str](), 0
    while at < len(body):
        found = _TOKEN.match(body, at)
        if found is None or (found["call"] and len(closers) != 1) or (found["key"] and closers[-1] != ")}]"):
            return []
        at, word = found.end(), found[0]
        if found["text"]:
            parts.append(json.dumps(_ESCAPE.sub(_unescaped, word[3:-3] if found["triple"] else word[1:-1])))
        elif found["call"]:
            parts.append(f'["{found["call"]}",{{')
            closers.append(_CLOSERS["call"])
        elif found["key"]:
            parts.append(f'"{found["key"]}":')
        elif found["open"]:
            parts.append("{" if word == "{" else "[")
            closers.append(_CLOSERS[word])
        elif found["shut"]:
            closer = closers.pop()
            if closer[0] != word:
                return []
            parts.append(closer[1:])
        elif not found["last"]:
            parts.append(_WORDS[word] if found["word"] else word)
    calls = _loads("".join(parts))
    whole = all(isinstance(c, list) and len(c) == 2 and c[0] in tools and isinstance(c[1], dict) for c in calls)
    return [Call(name, _object(arguments, _text_of(arguments))) for name, arguments in calls] if whole else []


def _unescaped(found: re.Match[str]) -> str:
    code = found[1] or found[2] or found[3]
    return chr(int(code, 16)) if code else chr(int(found[4], 8)) if found[4] else _ESCAPED.get(found[5], found[0])


# What the readers share. They raise ValueError, and RecursionError for JSON that nests too deeply.


_DECODER = json.JSONDecoder(object_pairs_hook=limits.unique, parse_constant=int)  # int("NaN") raises ValueError
_loads = _DECODER.decode


def _text_of(value: Any, text: str = "") -> str:
    """A value's JSON, or its own `text`. Raises ValueError for half of a surrogate pair, which is no text."""
    made = json.dumps(value, ensure_ascii=False, allow_nan=bool(text))  # a number may be beyond all floats
    made.encode()
    return text or made


def _members(text: str, at: int) -> tuple[dict[str, tuple[Any, str]], int]:
    """The members of the JSON object at `at`, each with its value and the text of that, and where the object ends."""
    whole, end = _DECODER.raw_decode(text, at)
    if not isinstance(whole, dict):
        raise ValueError("no object")
    raw = msgspec.json.decode(text[at:end], type=dict[str, msgspec.Raw])
    return {name: (value, bytes(raw[name]).decode()) for name, value in whole.items()}, end


def _call(members: dict[str, tuple[Any, str]], tools: Tools) -> Call:
    """The call in an object's members: its name, and its arguments under either key, or none."""
    inner, raw = members.get("function", (None, ""))
    if isinstance(inner, dict):  # as OpenAI's API writes it
        members = _members(raw, 0)[0]
        inner = None
    name = members["name"][0] if "name" in members else inner
    if not isinstance(name, str) or name not in tools:
        raise ValueError("no offered tool")
    texts = {_object(*members[key]) for key in _KEYS if key in members}
    texts = texts - {"{}"} or texts
    if len(texts) > 1 or (not texts and members.keys() - {"name", "function", "type", "id"}):
        raise ValueError("arguments would be lost")
    return Call(name, texts.pop() if texts else "{}")


def _object(value: Any, text: str) -> str:
    """Arguments as the text of a JSON object; they may be one, a text that holds one, or nothing."""
    while isinstance(value, str) and value.strip():
        value, text = _loads(value), value.strip()
    if value is None or isinstance(value, str) or value == {}:
        return "{}"
    if not isinstance(value, dict):
        raise ValueError("no object")
    return _text_of(value, text)
