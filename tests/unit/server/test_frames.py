"""Frames between server and engine: what goes in comes out, however the bytes are cut; what cannot be is refused."""

from __future__ import annotations

import dataclasses
import json
import struct

import pytest
from hypothesis import given, settings, strategies as st

from sameseed.config import SpecConfig, parse_draft
from sameseed.request import Delta, SamplingParams, Speculation, TokenLogprob
from sameseed.server import frames
from sameseed.server.stream import Job, Piece, Stream

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=30)
@given(st.lists(VALUES, max_size=5), st.integers(1, 40))
def test_frames_survive_any_cut(values: list[object], step: int) -> None:
    sent = [{"type": "x", "value": v} for v in values]
    data = b"".join(frames.pack(f) for f in sent)
    unpacker, got = frames.Unpacker(), []
    for at in range(0, len(data), step):
        got += unpacker.feed(data[at : at + step])
    assert got == sent


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", frames.MAX_FRAME + 1),
        struct.pack("<I", 2) + b"[]",
        struct.pack("<I", 2) + b"{}",
        struct.pack("<I", 3) + b"\xff{}",
        struct.pack("<I", 12) + b'{"type": 12}',
    ],
)
def test_no_frames(data: bytes) -> None:
    with pytest.raises(frames.FrameError):
        frames.Unpacker().feed(data)


@pytest.mark.parametrize("sizes", [(), (0,), (1, 0, 7), (4, 8, 9), (24,)])
def test_long_lists_are_packed_in_parts(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "PART", 4)
    written: list[int] = []
    encode = frames._encode

    def watching(value: object) -> str:
        if isinstance(value, list):  # not the frame, nor the name
            written.append(len(value))
        return encode(value)

    monkeypatch.setattr(frames, "_encode", watching)
    lists = [list(range(100, 100 + size)) for size in sizes]
    data = frames.pack_lists({"type": "x", "a": 1}, "lists", lists)
    assert sum(written) == sum(sizes)
    assert max(written, default=0) <= 4, "no more than a part at a time: the lock is let go of between"
    assert data == frames.pack({"type": "x", "a": 1, "lists": lists})
    assert frames.Unpacker().feed(data) == [{"type": "x", "a": 1, "lists": lists}]


def test_a_frame_beyond_all_bounds_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME", 100)
    assert frames.pack_lists({"type": "x"}, "lists", [[1] * 20])
    with pytest.raises(frames.FrameError):
        frames.pack_lists({"type": "x"}, "lists", [[1] * 60])


def test_numbers_that_json_has_not_are_not_sent() -> None:
    with pytest.raises(ValueError, match="JSON"):
        frames.pack({"type": "x", "value": float("nan")})
    token = TokenLogprob(1, float("-inf"), ((2, float("nan")), (3, -1.5)))
    data = frames.delta_to_data(Delta("r", 0, "t", (1,), ("ngram",), None, (token,)))
    assert data[5] == [[1, frames.LEAST_LOGPROB, [[2, frames.LEAST_LOGPROB], [3, -1.5]]]]
    assert frames.pack({"type": "deltas", "items": [data]})


def test_no_frame_grows_with_the_prompt() -> None:
    scores = tuple(TokenLogprob(i, -1.0, ((i, -1.0),)) for i in range(frames.MAX_SCORES * 2 + 5))
    delta = Delta("r", 3, "t", (1,), ("ngram",), None, (), scores)
    before, rest = frames.scores_first(delta)
    assert [len(f["items"]) for f in before] == [frames.MAX_SCORES, frames.MAX_SCORES, 5]
    assert not rest.prompt_logprobs and rest.text == "t"
    stream = Stream(Job("r", [[1]], SamplingParams(n=4)), lambda job_id: None)
    for frame in before:
        assert frame["id"] == "r"
        stream.hold(frame["index"], frame["items"])
    stream.push(piece := Piece(*frames.delta_to_data(rest)[1:]))
    assert [token for token, _, _ in piece.prompt_logprobs] == list(range(len(scores)))
    short = dataclasses.replace(delta, prompt_logprobs=scores[:5])
    assert frames.scores_first(short) == ([], short)


def test_pieces_name_who_guessed_their_tokens() -> None:
    delta = Delta("r", 1, "ab", (5, 6, 7), (None, "ngram", "cascade"))
    assert delta.accepted == (False, True, True)
    piece = Piece(*json.loads(json.dumps(frames.delta_to_data(delta)))[1:])
    assert (piece.index, piece.token_ids, piece.levels) == (1, [5, 6, 7], [None, "ngram", "cascade"])


def through_json(value: object) -> object:
    return json.loads(json.dumps(value))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(max_tokens=7, min_tokens=2, temperature=0.3, top_k=4, top_p=0.5, min_p=0.1, seed=2**63 - 1, n=3),
        SamplingParams(logit_bias={3: -1.5, 9: 2.0}, stop=("a", "ü"), stop_token_ids=(4,), ignore_eos=True, logprobs=0),
        SamplingParams(allowed_token_ids=(1, 2), banned_token_ids=(2,), repetition_penalty=1.2, presence_penalty=-1.0),
        SamplingParams(frequency_penalty=0.5),
    ],
)
def test_parameters_survive(params: SamplingParams) -> None:
    data = through_json(frames.params_to_data(params))
    assert isinstance(data, dict)
    assert frames.params_from_data(data) == params


@pytest.mark.parametrize("wish", [None, Speculation("off"), Speculation("fixed", 3), Speculation(None, 0)])
def test_wishes_survive(wish: Speculation | None) -> None:
    data = through_json(frames.wish_to_data(wish))
    assert data is None or isinstance(data, list)
    assert frames.wish_from_data(data) == wish


def test_settings_survive() -> None:
    nested = parse_draft("(ngram > a/b) + suffix")
    assert isinstance(nested, SpecConfig) and nested.below[0].below
    settings = {"draft": nested, "threads": 2, "policy": None, "draft_options": {"max_ngram": 4}, "kv_format": "auto"}
    data = through_json(frames.settings_to_data(settings))
    assert isinstance(data, dict)
    assert frames.settings_from_data(data) == settings
    assert frames.settings_from_data({"draft": None}) == {"draft": None}
