"""The text of output tokens is decode(prompt + output) without decode(prompt), by the tokenizers library."""

import json
from copy import copy
from functools import cache

import msgspec
import numpy as np
import pytest
from fixtures_server import DONE
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer as Backend, decoders, models, pre_tokenizers

from sameseed.engine.running import OutputText
from sameseed.grammar import Beginning, Choice
from sameseed.request import FinishReason, SamplingParams
from sameseed.server.frames import Add, Piece
from sameseed.server.protocol import CompletionFields
from sameseed.server.replies import CompletionReply
from sameseed.server.text import TextCodec, same_at_beginning, vocabulary
from sameseed.tokenizer import BROKEN, Tokenizer

SPACED = ["▁", "▁▁", "▁a", "a", "b", "▁bc", "é", "\n", ".", "x▁y"]
BYTES = [f"<0x{b:02X}>" for b in (0x41, 0x0A, 0x20, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0xFF)]
STRIP = decoders.Strip(" ", 1, 0)
FALLBACK = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
WORDS = ["hello", "##ing", "##s", ".", ",", "'", "do", "n't", "##é", "not", "world"]
DECODERS = {
    "byte-level": (decoders.ByteLevel(), [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġthe", "Ġ", "ĊĊ", "Ã©t"]),
    "prepended space": (decoders.Sequence([*FALLBACK, STRIP]), SPACED + BYTES),
    "no prepended space": (decoders.Sequence(FALLBACK), SPACED + BYTES),
    "two stripped": (decoders.Sequence([*FALLBACK, decoders.Strip(" ", 2, 0)]), SPACED + BYTES),
    "metaspace always": (decoders.Metaspace("▁", "always"), SPACED),
    "metaspace first": (decoders.Metaspace("▁", "first"), SPACED),
    "metaspace never": (decoders.Metaspace("▁", "never"), SPACED),
    "word pieces": (decoders.WordPiece("##", cleanup=False), WORDS),
    "word pieces, cleaned": (decoders.WordPiece("##", cleanup=True), WORDS),
    "word ends": (decoders.BPEDecoder("</w>"), ["a", "b</w>", "c", "d</w>", "."]),
    "none": (None, WORDS),
}


@cache
def tokenizer_of(kind):
    decoder, pieces = DECODERS[kind]
    backend = Backend(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token=pieces[0], byte_fallback=True))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["<s>", AddedToken("</s>", lstrip=True)])
    backend.add_tokens([AddedToken(" spaced ", rstrip=True), AddedToken("ünïcode", normalized=True), "tail ", "</w>"])
    return Tokenizer(backend)


def shared(one, other):
    return next((i for i in range(min(len(one), len(other))) if one[i] != other[i]), min(len(one), len(other)))


def right_text(tokenizer, prompt, output, skip):
    """What the output adds; where it completes the prompt's last character, that character too."""
    known, whole = (tokenizer.decode(ids, skip) for ids in (prompt, prompt + output))
    return whole[len(known) if whole.startswith(known) else shared(known, whole) :]


@pytest.mark.parametrize("kind", DECODERS)
@given(data=st.data(), skip=st.booleans(), length=st.integers(0, 60))
@settings(max_examples=200, deadline=None)
def test_the_text_continues_the_prompt(kind, data, skip, length):
    tokenizer = tokenizer_of(kind)
    ids = st.integers(0, tokenizer.vocab_size)  # one of them lies outside the vocabulary
    prompt = data.draw(st.lists(ids, max_size=length))
    output = data.draw(st.lists(ids, max_size=length))
    right = right_text(tokenizer, prompt, output, skip)
    decoder = tokenizer.stream(skip, prompt)
    pieces = []
    for n, token in enumerate(output, 1):
        pieces.append(decoder.push(token))
        begun = right_text(tokenizer, prompt, output[:n], skip)
        assert ("".join(pieces) + decoder.tail).startswith(begun.rstrip(BROKEN))
    assert "".join(pieces) + decoder.flush() == right
    text = OutputText(tokenizer, ("never",), skip, prompt)
    for token in output:
        assert not text.push(token)
    text.finish()
    assert text.text == right


@pytest.mark.parametrize("kind", DECODERS)
@given(data=st.data(), first=st.integers(0, 4))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_a_stop_string_ends_the_text_with_the_token_that_completes_it(kind, data, first):
    """As a search of the whole text after each token finds it, also in bytes whose run goes on; deltas join to it."""
    tokenizer = tokenizer_of(kind)
    ids = st.lists(st.integers(0, tokenizer.vocab_size), max_size=12)
    prompt, output = data.draw(ids), data.draw(ids)
    whole = right_text(tokenizer, prompt, output, True)
    assume(whole and BROKEN not in whole)
    spans = data.draw(st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(1, 4)), min_size=1, max_size=3))
    stops = tuple(whole[at : at + size] for at, size in spans)
    text, known, expected, given_out = OutputText(tokenizer, stops, True, prompt), "", whole, ""
    for n, token in enumerate(output, 1):
        said = right_text(tokenizer, prompt, output[:n], True).rstrip(BROKEN)
        found = [said.find(s, max(0, len(known) - len(s) + 1)) for s in stops if n > first and said.startswith(known)]
        stopped = text.push(token, may_stop=n > first)
        assert stopped == (max(found, default=-1) >= 0)
        if stopped:
            expected = said[: min(at for at in found if at >= 0)]
            break
        known = said
        given_out += text.delta()
        held = text.text[len(given_out) :]
        assert not held or any(s.startswith(held) for s in stops), "what begins no stop string goes out at once"
    text.finish()
    assert text.text == expected == given_out + text.delta()


@pytest.mark.parametrize("kind", sorted(DECODERS.keys() - {"word ends", "two stripped", "none"}))
@given(data=st.data(), begins=st.booleans())
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_a_grammar_sees_the_text(kind, data, begins):
    """What a grammar allows after a prompt, or at the beginning, has the text that the grammar names."""
    tokenizer = tokenizer_of(kind)
    end, prompt = tokenizer.vocabulary()["</s>"], [] if begins else [0]
    able = [t for t in range(tokenizer.vocab_size) if not tokenizer.is_silent(t)]
    output = data.draw(st.lists(st.sampled_from(able), min_size=1, max_size=6))
    said = right_text(tokenizer, prompt, output, True)
    assume(said and BROKEN not in tokenizer.decode(prompt + output))
    same = same_at_beginning(tokenizer, tokenizer.vocab_size)
    grammar = Choice([said], vocabulary(tokenizer, tokenizer.vocab_size, [end]))
    grammar = Beginning(grammar, same) if begins else grammar
    written = []
    while end not in written:
        allowed = np.flatnonzero(grammar.allowed(written, ()))
        if written == output[: len(written)] and len(written) < len(output) and (written or not begins):
            assert output[len(written)] in allowed
        if not len(allowed):
            return  # a token that begins the text cannot be continued: these vocabularies lack many tokens
        written.append(int(data.draw(st.sampled_from(allowed.tolist()))))
    assert right_text(tokenizer, prompt, written[:-1], True) == said


def echoed(tokenizer, prompt, output, skip=True):
    """An answer that repeats its prompt, with the text and the tokens' places that a stream of it gives."""
    text = TextCodec(tokenizer.as_files(), tokenizer.vocab_size, 64, None)
    fields, params = CompletionFields(prompt=prompt, logprobs=1), SamplingParams(skip_special_tokens=skip)
    add, echoes = Add("id", [prompt], params), [tokenizer.decode(prompt, skip)]
    replies = [CompletionReply(add, fields, text, echoes=echoes) for _ in range(2)]
    written, streamed, told = OutputText(tokenizer, (), skip, prompt), "", list[int]()
    for n, token in enumerate(output, 1):
        offset, ended = written.length, n == len(output)
        written.push(token)
        if ended:
            written.finish()
        done = msgspec.structs.replace(DONE, finish_reason=FinishReason.LENGTH) if ended else None
        scores = [[t, -1.0, []] for t in prompt[1:]] if n == 1 else []
        piece = Piece(0, written.delta(), [token], [None], [[token, -1.0, []]], scores, done, [offset])
        for reply in replies:
            reply.take(copy(piece))
        for event in replies[0].events(piece):
            choice = json.loads(event.removeprefix(b"data: "))["choices"][0]
            streamed += choice["text"]
            told += (choice["logprobs"] or {}).get("text_offset", [])
    return replies[1].whole_choice(0, replies[1].choices[0]), streamed, told


# Not of those where the text of a token depends on the next one, or on more than one before it.
@pytest.mark.parametrize("kind", sorted(DECODERS.keys() - {"word ends", "two stripped"}))
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=100, deadline=None)
def test_an_echo_with_its_tokens_is_the_whole_text(kind, data, skip):
    """Prompt and output as one text, streamed or not, and each token's text and place in it."""
    tokenizer = tokenizer_of(kind)
    ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=12)
    prompt, output = data.draw(ids), data.draw(ids)
    whole = tokenizer.decode(prompt + output, skip)
    made, streamed, told = echoed(tokenizer, prompt, output, skip)
    assert made["text"] == streamed == whole
    tokens, names, places = prompt + output, made["logprobs"]["tokens"], made["logprobs"]["text_offset"]
    assert len(names) == len(tokens) and places == told
    if BROKEN not in whole:  # else the end of a run of bytes decides over its beginning
        assert places == sorted(places)
        shown = [n for n, token in enumerate(tokens) if tokenizer.has_text([token], skip)]
        assert all(whole.startswith(names[n], places[n]) for n in shown if not names[n].startswith("bytes:"))
        pieces = [tokenizer.piece(tokens[n], begins=n == shown[0]) for n in shown]
        assert b"".join(pieces) == whole.encode()


@pytest.mark.parametrize(
    ("kind", "prompt", "output"),
    [
        ("byte-level", [115, 129, 160], [250, 229, 62, 216, 191]),
        ("no prepended space", [0, 9, 1, 13], [20, 15, 14]),
        ("prepended space", [23, 10], [12, 18, 2]),
    ],
)
def test_a_stream_and_a_body_place_tokens_alike_where_the_prompt_ends_within_a_character(kind, prompt, output):
    made, _, told = echoed(tokenizer_of(kind), prompt, output)
    assert made["logprobs"]["text_offset"] == told
