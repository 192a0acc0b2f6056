"""Options from plain data: fitting values are taken, others are refused with the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from sameseed import fields
from sameseed.errors import ConfigError


@dataclass(frozen=True)
class Part:
    steps: int
    rate: float = 0.5


@dataclass(frozen=True)
class Whole:
    """`part` is required; everything else has a default."""

    part: Part
    name: str = "x"
    parts: tuple[Part, ...] = ()
    words: tuple[str, ...] = ()
    share: float | None = None
    fast: bool = False
    more: Mapping[str, object] = field(default_factory=dict)


def test_a_table_becomes_the_dataclass() -> None:
    data = {"part": {"steps": 3, "rate": 1}, "parts": [{"steps": 1}], "words": ["a"], "share": 1, "more": {"a": [1]}}
    whole = fields.parse(Whole, data)
    assert whole == Whole(Part(3, 1.0), parts=(Part(1),), words=("a",), share=1.0, more={"a": [1]})
    assert type(whole.part.rate) is type(whole.share) is float
    assert fields.parse(Whole, {"part": Part(1), "share": None}) == Whole(Part(1))


def test_a_whole_number_for_a_text_is_its_digits() -> None:
    assert fields.parse(Whole, {"part": {"steps": 1}, "name": 2048}).name == "2048"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"prat": {}}, r"^unknown option 'prat'; did you mean 'part'\? \(there are: part, name, "),
        ({"part": {"steps": 1, "zzz": 1}}, r"^part: unknown option 'zzz' \(there are: steps, rate\)$"),
        ({"part": {}}, "^part: option 'steps' is missing; add it$"),
        ({}, "^option 'part' is missing"),
        ({"part": 3}, "^part: expected a table, got 3$"),
        ({"part": {"steps": "3"}}, "^part: option 'steps' must be of type int, got '3'$"),
        ({"part": {"steps": True}}, "of type int, got True"),
        ({"part": {"steps": 1.5}}, "of type int, got 1.5"),
        ({"part": {"steps": 1, "rate": False}}, "of type float, got False"),
        ({"part": Part(1), "name": True}, "option 'name' must be of type str, got True"),
        ({"part": Part(1), "fast": 1}, "of type bool, got 1"),
        ({"part": Part(1), "share": "all"}, "option 'share' must be of type float or none, got 'all'"),
        ({"part": Part(1), "words": "ab"}, "option 'words' must be of type list, got 'ab'"),
        ({"part": Part(1), "words": ["a", 1.5]}, r"option 'words\[1\]' must be of type str, got 1.5"),
        ({"part": Part(1), "parts": [{}]}, r"^parts\[0\]: option 'steps' is missing"),
        ({"part": Part(1), "more": [1]}, "option 'more' must be of type object"),
    ],
)
def test_what_does_not_fit_is_refused(data: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fields.parse(Whole, data)


def test_an_error_says_where() -> None:
    with pytest.raises(ConfigError, match=r"^a\.toml: part: unknown option 'step'; did you mean 'steps'"):
        fields.parse(Whole, {"part": {"step": 1}}, "a.toml")
    with pytest.raises(ConfigError, match=r"^a\.toml: option 'name' must be"):
        fields.parse(Whole, {"part": Part(1), "name": None}, "a.toml")


def test_values_given_to_the_class_itself_are_checked() -> None:
    fields.check(Whole(Part(1), share=1))
    for wrong in (Whole(Part(1), name=3), Whole(Part(1), share="1"), Whole(None)):  # type: ignore[arg-type]
        with pytest.raises(ConfigError):
            fields.check(wrong)
