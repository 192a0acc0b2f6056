"""Frames between server and engine: decoded as sent, however the bytes are split; invalid frames are refused."""

import asyncio
import io

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from sameseed.config import parse_draft
from sameseed.request import Delta, SamplingParams, TokenLogprob
from sameseed.server import frames

UNPACKER = frames.Unpacker(frames.ToEngine)
SETTINGS = {"threads": 2, "policy": None, "draft_options": {"max_ngram": 4}, "kv_format": "auto"}
LOADS = [frames.Load("embedded", draft, SETTINGS) for draft in (parse_draft("(ngram > a/b) + suffix"), "ngram", None)]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@settings(max_examples=30)
@given(
    st.lists(st.tuples(TEXTS, st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=9))), max_size=5),
    st.integers(1, 40),
)
def test_frames_survive_any_cut(values, step):
    sent = [*LOADS, *(frames.Add(text, prompts, SamplingParams()) for text, prompts in values)]
    data = b"".join(frames.pack(f) for f in sent)
    assert list(UNPACKER.each(io.BytesIO(data))) == sent
    assert list(UNPACKER.each(io.BytesIO(data + frames.pack(frames.Abort("x"))[:-1]))) == sent, "half a frame is none"

    async def streamed():
        stream, got = asyncio.StreamReader(), []
        for at in range(0, len(data), step):
            stream.feed_data(data[at : at + step])
        stream.feed_eof()
        with pytest.raises(asyncio.IncompleteReadError):
            while True:
                got.append(await UNPACKER.next(stream))
        return got

    assert asyncio.run(streamed()) == sent


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", msgspec.msgpack.encode([]), msgspec.msgpack.encode({}),
        msgspec.msgpack.encode({"type": 12, "id": "x"}), msgspec.msgpack.encode({"type": "Abort", "id": 3}),
        msgspec.msgpack.encode({"type": "Abort"}),
        msgspec.msgpack.encode({"type": "Failed", "message": "from the other side"}),
        msgspec.msgpack.encode({"type": "Add", "id": "x", "prompts": [["x"]], "params": {}}),
        msgspec.msgpack.encode({"type": "Add", "id": "x", "prompts": [], "params": {"top_p": 7}}),
        msgspec.msgpack.encode({"type": "Abort", "id": "x"}) + b"1", b"\x81\xa4type\xa1\xff",
    ],
)  # fmt: skip
def test_no_frames(body):
    with pytest.raises(frames.FrameError):
        list(UNPACKER.each(io.BytesIO(len(body).to_bytes(4, "little") + body)))


def test_a_frame_beyond_all_bounds_is_neither_sent_nor_taken(monkeypatch):
    monkeypatch.setattr(frames, "MAX_FRAME", 100)
    assert frames.pack(frames.Failed("x" * 50))
    with pytest.raises(frames.FrameError):
        frames.pack(frames.Failed("x" * 100))
    with pytest.raises(frames.FrameError):
        list(UNPACKER.each(io.BytesIO((101).to_bytes(4, "little"))))


def test_numbers_that_json_has_not_are_not_sent():
    token = TokenLogprob(1, float("-inf"), ((2, float("nan")), (3, -1.5)))
    sent = frames.piece(Delta("r", 0, "t", (1,), ("ngram",), None, (token,)))
    assert sent.logprobs == [[1, frames.LEAST_LOGPROB, [[2, frames.LEAST_LOGPROB], [3, -1.5]]]]
