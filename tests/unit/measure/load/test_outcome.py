from __future__ import annotations

import json
from typing import Any

import pytest

from sameseed.measure.load.outcome import read
from sameseed.measure.load.wire import Exchange


def line(**event: Any) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def chunk(text: str, ids: list[int] | None = None, reason: str | None = None) -> bytes:
    return line(choices=[{"index": 0, "text": text, "token_ids": ids, "finish_reason": reason}])


USAGE = {"prompt_tokens": 7, "completion_tokens": 6}
SPECULATION = {"num_spec_steps": 2, "num_draft_tokens": 8, "num_accepted_draft_tokens": 4}


def test_tokens_moments_and_metrics() -> None:
    end = line(choices=[], usage=USAGE, metrics={"speculative_decoding": SPECULATION})
    parts = [(1.5, chunk("a", [1])), (2.5, chunk("bc", [2, 3, 4])), (3.0, chunk("d", [5, 6], "length"))]
    found = read(Exchange(1.0, [*parts, (9.0, end + b"data: [DONE]\n\n")], retries=2))
    assert (found.error, found.text, found.token_ids) == (None, "abcd", [1, 2, 3, 4, 5, 6])
    assert (found.num_output, found.counted, found.num_prompt, found.retries) == (6, "usage", 7, 2)
    assert (found.ttft, found.latency, found.tpot) == (0.5, 2.0, 1.5 / 5)
    assert found.gaps == [1.0, 0.5]
    assert found.token_gaps == pytest.approx([1 / 3] * 3 + [0.25] * 2)
    assert found.speculation == SPECULATION


def test_an_event_in_pieces_has_the_moment_of_its_last() -> None:
    whole = chunk("x", [1]) + chunk("y", [2], "stop")
    cut = len(chunk("x", [1])) - 4
    found = read(Exchange(0.0, [(1.0, whole[:cut]), (2.0, whole[cut:])]))
    assert found.arrivals == [2.0, 2.0] and found.text == "xy" and found.error is None


def test_without_usage_it_says_what_was_counted() -> None:
    ids = read(Exchange(0.0, [(1.0, chunk("a", [1, 2])), (2.0, chunk("b", [3], "stop"))]))
    assert (ids.num_output, ids.counted) == (3, "token ids")
    chunks = read(Exchange(0.0, [(1.0, chunk("a")), (2.0, chunk("b", None, "stop"))]))
    assert (chunks.num_output, chunks.counted, chunks.token_gaps) == (2, "chunks", None)


def test_sizes_that_do_not_add_up_are_not_believed() -> None:
    end = line(choices=[], usage={"completion_tokens": 9})
    found = read(Exchange(0.0, [(1.0, chunk("a", [1])), (2.0, chunk("b", [2], "stop")), (2.0, end)]))
    assert found.num_output == 9 and found.token_gaps is None


def test_chat_counts_from_the_first_text() -> None:
    role = line(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
    text = line(choices=[{"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop"}])
    found = read(Exchange(0.0, [(1.0, role), (2.0, text), (2.5, b"data: [DONE]\n\n")]))
    assert found.ttft == 2.0 and found.text == "hi"


@pytest.mark.parametrize(
    ("chunks", "kind"),
    [
        ([(1.0, chunk("a"))], "cut off"),
        ([(1.0, line(error={"message": "gone"}) + b"data: [DONE]\n\n")], "error in the stream"),
        ([(1.0, b"data: {nonsense\n\n")], "not the API's form"),
        ([(1.0, b"data: [DONE]\n\n")], "no token"),
        ([(1.0, b"data: 3\n\ndata: [DONE]\n\n")], "not the API's form"),
    ],
)
def test_what_goes_wrong_has_a_name(chunks: list[tuple[float, bytes]], kind: str) -> None:
    assert read(Exchange(0.0, chunks)).error == kind
    assert read(Exchange(0.0, chunks, error="timeout")).error == "timeout"
