"""What `serve` prints for a user: a page to open and a line to paste."""

from __future__ import annotations

import json
import shlex

import pytest

from sameseed.server.run import greeting


@pytest.mark.parametrize("locked", [False, True])
def test_the_curl_line_is_one_that_a_shell_takes(locked: bool) -> None:
    said = greeting("http://127.0.0.1:8000", "it's mine", "suffix", locked)
    line = next(line for line in said.splitlines() if "curl" in line)
    words = shlex.split(line.partition("try")[2])
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "it's mine"
    assert ("Authorization: Bearer $SAMESEED_API_KEY" in words) is locked
    assert "drafter: suffix" in said and "http://127.0.0.1:8000/\n" in said
