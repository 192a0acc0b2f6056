"""Events, however they are split into chunks: passed on unchanged, but errors without internals of the server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sameseed.server.errors import ApiError
from sameseed_vllm import relay
from sameseed_vllm.relay import Events, without_places

SECRET = "no /srv/secret/x.py at http://10.0.0.1:80/a, tcp://node:5555 or 10.0.0.2:443, 0x7f00aabbccdd"


def data(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("line", [b"\n", b"\r\n"])
def test_whole_events_in_any_chunks(size: int, line: bytes) -> None:
    first = b"event: a" + line + b'data: {"text": "\\"error\\": x"}' + line * 2
    rest = b": still here" + line * 2 + b"data: [DONE]" + line * 2
    fault = b'data: {"choices": [], "error": {"message": "/srv/secret/x"}}' + line * 2
    every = first + fault + rest
    taker = Events()
    given = [taker.feed(every[at : at + size]) for at in range(0, len(every), size)]
    assert all(not g or g.endswith((b"\n\n", b"\n\r\n")) for g in given)
    made = b"".join(given) + taker.end()
    assert made.startswith(first) and made.endswith(rest)
    assert b"secret" not in made and taker.failed and json.loads(made[len(first) : -len(rest)][5:])["error"]


@pytest.mark.parametrize(
    "fault",
    [
        {"error": {"message": SECRET, "code": 500}},
        {"choices": [], "error": {"message": SECRET}},
        {"error": SECRET},
        {"type": "error", "message": SECRET, "code": SECRET, "param": None, "sequence_number": 3},
        {"type": "response.failed", "response": {"output": [], "error": {"code": "server_error", "message": SECRET}}},
    ],
)
def test_errors_hold_no_inside(fault: dict[str, Any]) -> None:
    taker = Events()
    made = taker.feed(b"event: error\n" + data(fault))
    for inside in (b"secret", b"10.0.0", b"node", b"0x7f"):
        assert inside not in made
    head, line = made.rstrip(b"\n").split(b"\n")
    told = json.loads(line[5:])
    assert taker.failed and head == b"event: error" and told.get("type") == fault.get("type")
    assert ("error" in told) == ("error" in fault) and told.get("sequence_number") == fault.get("sequence_number")


@pytest.mark.parametrize(
    "fine", [{"response": {"error": None, "output": []}}, {"error": None, "choices": []}, {"text": '{"error": 1}'}, [1]]
)
def test_what_tells_of_no_error_stays(fine: Any) -> None:
    taker = Events()
    assert taker.feed(data(fine)) == data(fine) and not taker.failed


def test_what_is_no_json_is_not_repeated() -> None:
    made = Events().feed(b'data: {"error": /srv/secret\n\n')
    assert b"secret" not in made and b"failed" in made
    taker = Events()
    assert taker.feed(b'data: {"error": "/srv/secret"}') == b"" and b"secret" not in taker.end() and taker.end() == b""


def test_an_event_without_end_is_not_held_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MAX_EVENT", 100)
    taker = Events()
    with pytest.raises(ApiError):
        for _ in range(20):
            assert taker.feed(b"data: xxxx") == b""


def test_places() -> None:
    assert without_places("max_tokens 5.5 of 1.2.3, [1:2] and 10:30 o'clock") == (
        "max_tokens 5.5 of 1.2.3, [1:2] and 10:30 o'clock"
    )
    assert without_places("at http://a/b?c=d. [::1]:80 localhost:8000 192.168.0.1") == "at ... ... ... ..."
