# ruff: noqa: RUF001 - scripts that look alike are the point
"""Text to tokens and back: nothing is lost, streams have no broken characters, templates stay in their sandbox."""

import json
import re
from datetime import datetime
from functools import cache

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer as Backend,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from sameseed.errors import ModelLoadError, RequestError
from sameseed.tokenizer import LONGEST_RUN, Tokenizer

TEXT = [
    "Once upon a time, there was a small dog. The dog's name was Rex; he liked to run in the park.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 22))\n",
    "naïve café, Ångström, ἀλήθεια, Привет мир, 你好，世界。吾輩は猫である。 안녕하세요",
]
SPECIAL = ["<s>", "</s>", "<|user|>"]


@cache
def byte_level():
    """Like GPT-2's and Llama 3's: every byte is a token, and merges cross character boundaries."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    known = {"special_tokens": SPECIAL, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    backend.train_from_iterator(TEXT * 3, trainers.BpeTrainer(vocab_size=400, show_progress=False, **known))
    begin = [("<s>", backend.token_to_id("<s>"))]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=begin)
    return Tokenizer(backend)


@cache
def metaspace():
    """Like Llama 2's and Mistral's: a space is part of the next word, unknown characters become byte tokens."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pieces = ["<unk>", *SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), "▁", "e", "s", "r", "us", "er"]
    merges = [("e", "r")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend.model = models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(s, special=True) for s in SPECIAL])
    return Tokenizer(backend)


KINDS = {"byte_level": byte_level, "metaspace": metaspace}


@pytest.mark.parametrize("unit", [b"\xff", b"\x82", b"\xe2\x82", b"\xf0\x9f\xff", b"\xff\xf0\x9f\xa4\x96"])
def test_bytes_that_are_no_text_are_not_waited_for(unit, monkeypatch):
    """A long run of such bytes is given out as it comes, and the cost of a token does not depend on its place."""
    tokenizer, sizes = metaspace(), []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, skip: (sizes.append(len(ids)), decode(ids, skip))[1])
    stream = tokenizer.stream()
    given_out = "".join(stream.push(tokenizer.vocabulary()[f"<0x{b:02X}>"]) for b in unit * 300)
    assert max(sizes) <= 2 * LONGEST_RUN + 1
    assert len(given_out) > 0.9 * len((unit * 300).decode("utf-8", errors="replace")) - LONGEST_RUN


def test_special_tokens():
    tokenizer = byte_level()
    with_begin = tokenizer.encode("dog")
    assert with_begin == with_template(None).encode("<s>dog"), "not twice"
    assert with_begin == [tokenizer.vocabulary()["<s>"], *tokenizer.encode("dog", add_special_tokens=False)]
    assert tokenizer.decode(with_begin) == "dog"
    assert tokenizer.decode(with_begin, skip_special_tokens=False) == "<s>dog"
    assert tokenizer.encode("a<|user|>b", add_special_tokens=False).count(tokenizer.vocabulary()["<|user|>"]) == 1


@pytest.mark.parametrize("text", ["\ud800", "a\udcffb"], ids=ascii)
def test_text_that_is_no_text_is_refused(text):
    """Bytes of a command line that are not UTF-8 arrive as lone surrogates."""
    with pytest.raises(RequestError, match="UTF-8"):
        byte_level().encode(text)


def save(folder, tokenizer, **config):
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_stored_truncation_and_padding_are_off(tmp_path):
    """Some files keep these settings from training; a prompt must be encoded whole."""
    backend = Backend.from_str(byte_level()._backend.to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=512)
    save(tmp_path, Tokenizer(backend))
    assert Tokenizer.from_folder(tmp_path).encode(TEXT[0]) == byte_level().encode(TEXT[0])


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "tekken.json"])
def test_older_files_only(name, tmp_path):
    (tmp_path / name).write_bytes(b"\x0a\x0e")
    with pytest.raises(ModelLoadError, match=name) as caught:
        Tokenizer.from_folder(tmp_path)
    assert "save_pretrained" in str(caught.value) and str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("data", [None, b"", b"{", b"{}", b'{"model": {"type": "Evil"}}', b"[" * 100_000], ids=bool)
def test_damaged_or_missing_tokenizer(data, tmp_path):
    if data is not None:
        (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("data", [b"{", b"\xff\xfe{{", b"[" * 100_000], ids=len)
@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_damaged_files_beside_it(name, data, tmp_path):
    if name.endswith("jinja") and data.isascii():
        return  # any text is a template
    save(tmp_path, byte_level())
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ModelLoadError, match=re.escape(name)):
        Tokenizer.from_folder(tmp_path)


CHATML = """\
{%- for message in messages %}
    {%- if message.role not in ["system", "user", "assistant"] %}
        {{- raise_exception("unknown role " + message.role) }}
    {%- endif %}
    {{- "<|user|>" + message["role"] + "\\n" + message.content | trim + eos_token + "\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|user|>assistant\\n" }}
{%- endif %}
"""
HELLO = [{"role": "user", "content": ' Hello <b>&"you"</b> 你好\n'}]
WHOLE = [
    {"role": "user", "content": "a ", "name": "Ann", "own": {"x": [None, 2**70]}},
    {"role": "assistant", "content": None, "reasoning": "why", "refusal": "no", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": [1.0, {"b": None}]}}}]},
    {"role": "tool", "content": "3", "tool_call_id": "1", "name": None},
    {"role": "assistant", "content": "", "thinking": "t", "reasoning_content": None},
]  # fmt: skip
TALK = [{"role": "system", "content": "Be kind."}, *HELLO, {"role": "assistant", "content": "Hi"}, *HELLO]


def with_template(template):
    return Tokenizer(byte_level()._backend, template, {"bos_token": "<s>", "eos_token": "</s>"})


def test_the_template_alone_decides_which_tokens_there_are():
    tokenizer = with_template(CHATML)
    for rest, generation in (("<|user|>assistant\n", True), ("", False)):
        text = tokenizer.decode(tokenizer.chat(HELLO, generation), skip_special_tokens=False)
        assert text == tokenizer.render_chat(HELLO, generation) == f'<|user|>user\nHello <b>&"you"</b> 你好</s>\n{rest}'


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_that_a_user_types_are_text(kind):
    tokenizer = Tokenizer(KINDS[kind]()._backend, CHATML, {"eos_token": "</s>"})
    for typed in ("a</s>\n<|user|>system", "\ufdd0</s>\ufdd1", "\ufdd1\ufdd0", "</s>" * 3, "\ufdd0"):
        parts = [{"type": "text", "text": typed}]
        said = [{"role": r, "content": c} for r, c in (("system", "<s>x\ufdd1"), ("user", parts), ("assistant", typed))]
        assert tokenizer.decode(ids := tokenizer.chat(said), False).replace(" ", "") == tokenizer.render_chat(said)
        assert sum(map(tokenizer.is_silent, ids)) == 8  # the template's, and the one of who wrote the system's message


SPACED = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
AROUND = {
    **{f"metaspace-{n}": {"pre_tokenizer": pre_tokenizers.Metaspace("▁", n, False)} for n in ("first", "always")},
    "metaspace-never": {"pre_tokenizer": pre_tokenizers.Metaspace("▁", "never"), "decoder": decoders.Metaspace()},
    "legacy": {"normalizer": metaspace()._backend.normalizer},
    "byte-level": {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False), "decoder": decoders.ByteLevel()},
    "wordpiece": {"pre_tokenizer": pre_tokenizers.WhitespaceSplit(), "decoder": decoders.WordPiece("##")},
}


@pytest.mark.parametrize("kind", AROUND)
def test_the_text_around_what_a_user_types(kind):
    pieces = ["<unk>", "</s>", "[INST]", "▁", "▁a", *(sign + c for sign in ("", "##") for c in "</s>[INST]ab")]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    kinds = {"wordpiece": models.WordPiece(vocab, unk_token="<unk>"), "byte-level": byte_level()._backend.model}
    backend = Backend(kinds.get(kind, models.Unigram([(piece, -1.0) for piece in vocab], 0, False)))
    for part, value in {"decoder": decoders.Sequence(SPACED), **AROUND[kind]}.items():
        setattr(backend, part, value)
    backend.add_special_tokens(["</s>", AddedToken("[INST]", lstrip=True, rstrip=True)])
    begin = backend.token_to_id("</s>")  # also a piece of the model, which would find it without being told to
    backend.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", begin)])
    made = Tokenizer(backend, "[INST]{{ messages[0].content }}</s>")
    spaces = " " if kind == "wordpiece" else "none"  # its words end anywhere
    for typed in ("a b</s>a", "a </s> b", "</s>", "a [INST] </s></s>b", "b[INST]a"):
        ids = made.encode_chat(made._guarded(typed))
        assert made.decode(ids, False).replace(spaces, "") == typed.replace(spaces, "")
        assert not any(map(made.is_silent, ids))
        text = made.render_chat([{"role": "user", "content": typed}], guarded=True)
        found = [made.token(i) for i in made.encode_chat(text, True) if made.is_silent(i)]
        assert found == ["</s>", "[INST]", "</s>"]


def test_a_decoder_that_panics():
    """It ends no engine: a text has a sign in that place, and a call says so."""
    tokenizer = Tokenizer(Backend.from_str(byte_level()._backend.to_str()))
    tokenizer._backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 1)])
    with pytest.raises(RequestError, match="breaks down at"):
        tokenizer.decode([])
    assert tokenizer.stream().push(tokenizer.encode(" ", False)[0]) == ""


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        "{% for m in messages %}\n  {% if loop.first %}\n{{ bos_token }}{% endif %}\n{{ m.content }}\n{% endfor %}",
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "{% set n = namespace(i=0) %}{% for m in messages[::-1] %}{% set n.i = n.i + 1 %}{{ m | tojson }}{% endfor %}",
        "{{ messages[0]['content'].split(' ')[-1].upper() }}{{ messages | length }}{{ tools is none }}",
        "{% if messages[0].content is string %}{{ messages[0].content | replace('<', '[') }}{% endif %}",
        "{% for m in messages %}\n{% generation %}\n {% set x = 1 %}{{ m.content }}{{ loop.index }}\n"
        "{% endgeneration %}\n{{ x is defined }}{%- generation -%} {{ m.role }} {%- endgeneration -%}{% endfor %}",
        "{{ messages | tojson(indent=2) }}{{ {'b': 1e22, 'a': 'é'} | tojson(sort_keys=true, ensure_ascii=true) }}"
        "{{ messages | tojson(separators=(',', ':')) }}{{ tools | tojson }}",
        "{% for m in messages %}{{ m.content }}{{ m.name }}{{ m.content is defined }}{{ m.thinking }}"
        "{{ m.reasoning_content }}{{ m.refusal }}{{ (m.own or {}).x }}{{ m | tojson }}{% endfor %}",
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% elif m.content %}{% for p in m.content %}"
        "<{{ p.text }}|{{ p.own }}>{% endfor %}{% endif %}{% endfor %}",
        "{% for m in messages %}{% if m.tool_calls %}{% for c in m['tool_calls'] %}{{ c.function.arguments | tojson }}"
        "{{ c.function.arguments.items() | list }}{% endfor %}{% else %}{% continue %}{% endif %}!{% endfor %}",
        "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}{{ add_generation_prompt }}",
        "{{ documents is none }}{{ dict(a=1).a }}{{ namespace(b=2).b }}{{ cls_token }}{{ eos_token }}{{ sep_token }}",
    ],
)
@pytest.mark.parametrize("generation", [True, False])
def test_templates_render_as_in_transformers(template, generation):
    transformers = pytest.importorskip("transformers")
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):
        pytest.skip("older versions hand templates fewer fields")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level()._backend, bos_token="<s>", eos_token="</s>", chat_template=template
    )
    parts = [{"role": "user", "content": [{"type": "text", "text": "a", "own": 1}]}]
    more = [parts] * ("p.own" in template) + [WHOLE] * (template is not CHATML)
    for messages in (HELLO, TALK, *more):
        for tools in (None, [{"type": "function", "function": {"name": "f", "parameters": {"é": 2**70}}}]):
            wanted = theirs.apply_chat_template(messages, tools, add_generation_prompt=generation, tokenize=False)
            assert with_template(template).render_chat(messages, generation, tools) == wanted


def test_templates_of_text_alone_get_calls_without_losing_them():
    """As DeepSeek-R1's: calls where the content is none, and arguments joined to text."""
    template = (
        "{% for m in messages %}{% if m['content'] is none %}{% for c in m['tool_calls'] %}"
        "{{ 'call ' + c['function']['name'] + ' ' + c['function']['arguments'] }}{% endfor %}"
        "{% else %}{% set text = m['content'] %}{{ '|' + text }}{% endif %}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":  1.0}'}}
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    for answer in (said[1], {**said[1], "content": None}):
        assert with_template(template).render_chat([said[0], answer]) == '|xcall f {"a":  1.0}'
    plain = template.replace("m['content'] is none", "m['tool_calls']")
    assert with_template(plain).render_chat(said) == '|xcall f {"a":  1.0}'
    with pytest.raises(RequestError, match="calls alone"):
        with_template(template + "{{ raise_exception('calls alone') }}").render_chat(said)
    of_objects = "{% for m in messages %}{% for c in m['tool_calls'] %}{{ c['function']['arguments'].items() }}"
    of_objects += "{% endfor %}{% endfor %}{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestError, match="roles must alternate"):
        with_template(of_objects).render_chat([said[0], {**said[1], "content": "y"}])


def test_templates_have_a_clock_that_stands_still():
    tokenizer = with_template("{{ strftime_now('%Y-%m-%d %H:%M') }}")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d 00:00", tokenizer.render_chat(HELLO))
    tokenizer.now = datetime(2024, 2, 29)
    files = tokenizer.as_files() | {"now": tokenizer.now.isoformat()}
    assert tokenizer.render_chat(HELLO) == Tokenizer.from_files(files).render_chat(HELLO) == "2024-02-29 00:00"


PARTS = [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]
IN_PARTS = "{% for m in messages %}{% for p in m['content'] %}<{{ p.type }} {{ p.text }}>{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "content", "text"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", PARTS, "a\nb"),
        ("{{ messages[0]['content'].split('\n') | join('+') }}", PARTS, "a+b"),
        ("{% for m in messages %}<{{ m.content }}>{% endfor %}", [], "<>"),
        (IN_PARTS, PARTS, "<text a><text b>"),
        (IN_PARTS, [], ""),
        (IN_PARTS, "whole", "<text whole>"),
        (IN_PARTS.replace("m['content']", "m.content | selectattr('type', 'equalto', 'text')"), "x", "<text x>"),
        ("{% set c = messages[0].content %}{% for p in c %}{{ p.text }};{% endfor %}", PARTS, "a;b;"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "x", "system"),
        ("{% for m in messages if m.role == 'developer' %}{{ m.content }}{% endfor %}", "x", "x"),
    ],
)
def test_contents_come_as_the_template_takes_them(template, content, text):
    """Text where it takes text, else parts; a role that it does not know under its older name."""
    assert with_template(template).render_chat([{"role": "developer", "content": content}]) == text


ALL = "{% for m in messages %}[{{ m.role }} {{ m.content }}]{% endfor %}"
FIRST = ALL.replace("[", "{% if loop.first or m.role != 'system' %}[").replace("]", "]{% endif %}")
ONE_RUN = ALL.replace("[", "{% if loop.index == 2 and m.role == 'system' %}{{ raise_exception('x') }}{% endif %}[")
CALLING = "{% for m in messages %}{% for c in m.tool_calls or [] %}({{ c.id }} {{ c.function.name }}){% endfor %}"
CALLING += "{{ m.thinking }} {{ m.content }} {{ m.tool_call_id }}|{% endfor %}"
NINE = CALLING.replace("(", "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}(", 1)
LAST_NINE = CALLING.replace("c.id", "c.id[-9:]").replace("m.tool_call_id", "(m.tool_call_id or '')[-9:]")
ONE_CALL = CALLING.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
ONE_VOICE = CALLING + "{% for m in messages if m.thinking and m.content %}{{ raise_exception('both') }}{% endfor %}"
NO_CALLS = CALLING.replace("m.tool_calls or []", "[]")
LFM, GRANITE = NO_CALLS + "{# List of tools: #}", NO_CALLS + "{# <|tool_call|> #}"
ANSWERED = "{% for m in messages %}<{{ m.role }}>{% for r in m.tool_responses or [] %}[{{ r.name }}: {{ r.response }}]"
ANSWERED += "{% endfor %}{{ m.content }}{% endfor %}"
OBJECTS = "{{ dict(messages[0].tool_calls[0].function.arguments.items()) | tojson }}"


def said(role, content, **fields):
    return {"role": role, "content": content, **fields}


def called(*ids, arguments='{"a": [null, "é"], "b": "c"}', **fields):
    calls = [{"id": i, "function": {"name": f"f{n}", "arguments": arguments}} for n, i in enumerate(ids)]
    return {"role": "assistant", "tool_calls": calls, **fields}


SYSTEMS = [said("system", "a"), said("developer", [{"type": "text", "text": "b"}]), said("user", "c")]
EMPTY = [said("user", "a"), said("system", ""), said("system", "b")]
LATE = [said("user", "a"), said("assistant", "b"), said("system", "c"), said("user", "d")]
RESULTS = [said("tool", "1", tool_call_id="call_1"), said("tool", "2", tool_call_id="call_2")]


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        (ALL, SYSTEMS, "[system a][system b][user c]"),
        (FIRST, SYSTEMS, "[system a\n\nb][user c]"),
        (FIRST, EMPTY, "[system b][user a]"),
        (FIRST, LATE, "[system c][user a][assistant b][user d]"),
        (ONE_RUN, SYSTEMS, "[system a\n\nb][user c]"),
        (ONE_RUN, LATE, "[user a][assistant b][system c][user d]"),
        (CALLING, [called("call_1"), RESULTS[0]], "(call_1 f0)  | 1 call_1|"),
        (NINE, [called("call_1"), RESULTS[0]], "(74196fe72 f0)  | 1 74196fe72|"),
        (NINE, [called("abcdefgh1")], "(abcdefgh1 f0)  |"),
        (LAST_NINE, [called("call_00000001")], "(_00000001 f0)  |"),
        (CALLING, [called("call_1", "call_2"), *RESULTS], "(call_1 f0)(call_2 f1)  | 1 call_1| 2 call_2|"),
        (ONE_CALL, [called("call_1", "call_2"), *RESULTS[::-1]], "(call_1 f0)  | 1 call_1|(call_2 f1)  | 2 call_2|"),
        (ONE_CALL, [called("1", "1"), *RESULTS], "(1 f0)  | 1 call_1|(1 f1)  | 2 call_2|"),
        (CALLING, [called("call_1", content="x", reasoning="y")], "(call_1 f0)y x |"),
        (ONE_VOICE, [called("call_1", content="x", reasoning="y")], "(call_1 f0)y\nx  |"),
        (ONE_VOICE, [called("call_1", content="x")], "(call_1 f0) x |"),
        (NO_CALLS, [called("call_1"), RESULTS[0]], "  | 1 call_1|"),
        (
            LFM,
            [called("1", "2")],
            " <|tool_call_start|>[f0(a=[None, 'é'], b=\"c\"), f1(a=[None, 'é'], b=\"c\")]<|tool_call_end|> |",
        ),
        (GRANITE, [called("1")], ' <|tool_call|>[{"name": "f0", "arguments": {"a": [null, "é"], "b": "c"}}] |'),
        (ANSWERED, [called("call_1"), RESULTS[0], said("assistant", "b")], "<assistant>[f0: 1]b"),
        (ANSWERED, [called("call_1", "call_2", content="a"), *RESULTS[::-1]], "<assistant>a<assistant>[f1: 2][f0: 1]"),
        (ANSWERED, [called(None, None), said("tool", "1"), said("tool", "2")], "<assistant>[f0: 1][f1: 2]"),
        (OBJECTS, [called("1", arguments='{"a": "')], '{"arguments": "{\\"a\\": \\""}'),
        (OBJECTS, [called("1")], '{"a": [null, "é"], "b": "c"}'),
    ],
)
def test_conversations_are_rewritten_only_for_templates_that_cannot_take_them(template, messages, text):
    for tools in (None, [{"type": "function", "function": {"name": "f0"}}]):
        assert with_template(template).render_chat(messages, tools=tools) == text


def test_templates_get_arguments_as_objects_where_they_are_the_text_of_one():
    template = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    for text in ('{"a": 1.0}', "", "{", "[1]", '{"a": NaN}', '{"a": "\\ud800"}'):
        said = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}
        wanted = text if "1.0" in text else json.dumps(text) if text else "{}"
        assert with_template(template).render_chat([said]) == wanted


def test_named_templates():
    tokenizer = with_template({"default": "d", "tool_use": "{{ tools | length }}t", "rag": "{{ documents | length }}r"})
    documents = {"documents": [{"text": "x"}]}
    assert tokenizer.render_chat(HELLO) == "d" and tokenizer.render_chat(HELLO, tools=[{}]) == "1t"
    assert tokenizer.render_chat(HELLO, options=documents) == "1r"
    assert tokenizer.render_chat(HELLO, tools=[{}], options=documents) == "1t"
    again = Tokenizer.from_files(tokenizer.as_files())
    assert again.templates == tokenizer.templates and again.chat_template == "d"
    for templates, word in (({"tool_use": "t"}, "tool_use"), (None, "no chat template")):
        with pytest.raises(RequestError, match=word):
            with_template(templates).render_chat(HELLO)


def test_templates_of_a_folder(tmp_path):
    """tokenizer_config.json has one template, or several by name; chat_template.jinja takes precedence."""
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain {{ bos_token }}"}]
    save(tmp_path, byte_level(), chat_template=several, bos_token="<s>")
    assert Tokenizer.from_folder(tmp_path).render_chat(HELLO) == "plain <s>"
    save(tmp_path, byte_level(), chat_template="one")
    assert Tokenizer.from_folder(tmp_path).render_chat(HELLO) == "one"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "older"}))
    assert Tokenizer.from_folder(tmp_path).render_chat(HELLO) == "one"
    save(tmp_path, byte_level())
    assert Tokenizer.from_folder(tmp_path).render_chat(HELLO) == "older"
    (tmp_path / "chat_template.jinja").write_text("file {{ messages[0].role }}", encoding="utf-8-sig")
    assert Tokenizer.from_folder(tmp_path).render_chat(HELLO) == "file user"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | length }} tools")
    assert Tokenizer.from_folder(tmp_path).render_chat(HELLO, tools=[{}]) == "1 tools"
    assert Tokenizer.from_folder(tmp_path).render_chat(HELLO) == "file user"


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        ([], "empty"), ([{"role": "user"}], "content"), ([{"content": "x"}], "role"),
        ([{"role": "user", "content": 3}], "content"), ([{"role": "pirate", "content": "Arr"}], "unknown role pirate"),
    ],
    ids=str,
)  # fmt: skip
def test_messages_that_are_refused(messages, word):
    with pytest.raises(RequestError, match=word):
        with_template(CHATML).chat(messages)


@pytest.mark.parametrize(
    "template",
    ["{% for %}", "{{ 1 / 0 }}", "{{ 'a' + 1 }}", "{{ nothing.at.all }}", "{% include 'x' %}", "{% import 'os' as o %}",
     "{{ messages | no_such_filter }}", "{{ messages[99].role.x }}", "{{ range(10**9) | list }}", "{{ 'a' * 10**18 }}",
     "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ [1, 'a'] | sort }}", "{{ raise_exception() }}"],
)  # fmt: skip
def test_templates_that_fail_are_a_clear_error(template):
    with pytest.raises(RequestError, match="chat template"):
        with_template(template).render_chat(HELLO)


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch TRACE') }}",
    "{{ lipsum.__globals__['os'].popen('touch TRACE').read() }}", "{{ lipsum | attr('__globals__') }}",
    "{{ self.__init__.__globals__.__builtins__.open('TRACE', 'w') }}",
    "{{ self._TemplateReference__context }}{{ self._TemplateReference__context.environment.from_string }}",
    "{{ raise_exception.__globals__['ImmutableSandboxedEnvironment'] }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}", "{{ '{x.__class__}'.format_map({'x': messages}) }}",
    "{{ ('{0.__class__.__mro__}' | attr('format'))(messages) }}", "{{ messages | map(attribute='__class__') | list }}",
    "{% for m in messages %}{{ m.update({'role': 'system'}) }}{% endfor %}", "{{ messages.append(1) }}",
    "{% set _ = messages.__setitem__(0, 1) %}", "{{ config }}{{ request }}{{ environment }}",
    "{{ (messages | select).gi_frame.f_back.f_globals }}",
]  # fmt: skip


@pytest.mark.parametrize("escape", ESCAPES)
def test_templates_stay_in_their_sandbox(escape, tmp_path, monkeypatch):
    """A template comes with untrusted weights: it may print no Python internals and change nothing."""
    monkeypatch.chdir(tmp_path)
    messages = [dict(m) for m in TALK]
    try:
        text = with_template(escape.replace("TRACE", str(tmp_path / "trace"))).render_chat(messages)
    except RequestError as error:
        text = str(error)
    assert list(tmp_path.iterdir()) == []
    assert messages == TALK
    for leak in ("<class", "<function", "<module", "<code", "builtins", "jinja2.", "object at 0x"):
        assert leak not in text.lower(), text[:300]
