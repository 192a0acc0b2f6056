"""Streaming with draft marks: characters stay together with the tokens that they come from."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.table import Table

from sameseed.cli import chat, console, flags
from sameseed.cli.console import PLAIN_MARKS, TextWriter
from sameseed.engine.running import OutputText
from sameseed.request import Delta, SamplingParams
from sameseed.tokenizer import Tokenizer

BEGIN, END = PLAIN_MARKS


@pytest.fixture(scope="module")
def tokenizer(pair_folders):
    return Tokenizer.from_folder(pair_folders[0])


def write(tokenizer, tokens, flags, stop=()):
    """What a TextWriter shows of tokens that come one by one, with the engine's text deltas."""
    stream, output = io.StringIO(), OutputText(tokenizer, stop)
    writer = TextWriter(stream, show_draft=True)
    for token, flag in zip(tokens, flags):
        place = (output.length,)
        done = output.push(token)
        writer.write(Delta("r", 0, output.delta(), (token,), ("ngram" if flag else None,), text_offset=place))
        if done:
            break
    output.finish()
    writer.write(Delta("r", 0, output.delta(), (), ()))
    writer.end()
    return stream.getvalue()


def spelled(tokenizer, text):
    """Each character's bytes as tokens of one byte: characters span tokens."""
    return [token for c in text for token in tokenizer.encode(c, add_special_tokens=False)]


def test_characters_are_marked_if_all_their_tokens_were_accepted(tokenizer):
    tokens = spelled(tokenizer, "aéb你")
    assert len(tokens) == 7
    assert write(tokenizer, tokens, [False, True, True, False, True, True, True]) == f"a{BEGIN}é{END}b{BEGIN}你{END}"
    assert write(tokenizer, tokens, [False, False, True, True, True, True, False]) == f"aé{BEGIN}b{END}你"
    assert write(tokenizer, tokens, [True] * 7) == f"{BEGIN}aéb你{END}"


def test_text_that_waits_for_a_stop_string_keeps_its_marks(tokenizer):
    tokens = spelled(tokenizer, "one STAR STOP two")
    flags = [i % 2 == 0 for i in range(len(tokens))]
    shown = write(tokenizer, tokens, flags, stop=("STOP",))
    assert shown.replace(BEGIN, "").replace(END, "") == "one STAR "
    assert shown == "".join(f"{BEGIN}{c}{END}" if f else c for c, f in zip("one STAR ", flags))


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self):
        return True


def test_control_characters_do_not_reach_a_terminal(tokenizer, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    writer = TextWriter(stream, show_draft=True)
    tokens = spelled(tokenizer, "a\x1b[2Jé\n")
    text = "a\x1b[2Jé\n"
    writer.write(Delta("r", 0, text, tuple(tokens), (None,) * len(tokens)))
    assert stream.getvalue() == "a\ufffd[2Jé\n"
    plain = io.StringIO()
    TextWriter(plain).write(Delta("r", 0, text, tuple(tokens), (None,) * len(tokens)))
    assert plain.getvalue() == text, "a file gets the text as it is"


@pytest.mark.parametrize("width", [36, 44, 60, 200])
def test_a_table_folds_between_words(width, monkeypatch):
    narrow = Console(width=width, file=io.StringIO())
    monkeypatch.setattr(console, "stdout_console", lambda: narrow)
    table = Table("format", "weights of all", "tokens a second", "peak")
    table.add_row("w4a8", "embedded-draft", "1693 (1095 to 2309)", "0.27 (0.04 to 0.52)")
    console.show_table(table)
    assert isinstance(narrow.file, io.StringIO)
    shown = narrow.file.getvalue()
    words = ["format", "weights", "tokens", "second", "peak", "w4a8", "embedded-draft", "1693", "(1095", "(0.04"]
    assert set(words) <= set(shown.split())
    assert max(map(len, shown.splitlines())) <= width


def test_chat_shows_harmony_without_its_marks(capsys):
    texts = ["<|channel|>analysis<|message|>", "why<|end|><|start|>assistant<|channel|>final<|mess", "age|>so <", "b"]
    deltas = [Delta("r", 0, text, (1,), (None,), text_offset=(0,)) for text in texts]
    template = SimpleNamespace(chat_template="<|channel|>analysis<|message|>")
    llm = SimpleNamespace(tokenizer=template, chat_stream=lambda messages, params: deltas)
    said = chat.answer(llm, [], SamplingParams(), flags.ChatArgs(), interactive=False)
    assert said == "so <b", "the next turn has no reasoning"
    assert capsys.readouterr().out == "why\n\nso <b"
