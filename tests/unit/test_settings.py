"""Settings: fields of dataclasses, the configuration, and a request's parameters, with their ranges."""

import dataclasses
import math
import runpy
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest

from sameseed import fields
from sameseed.config import CacheConfig, EngineConfig, SpecConfig, parse_options
from sameseed.errors import ConfigError, RequestError, SameseedError
from sameseed.request import MAX_SEED, SamplingParams


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


def test_a_table_becomes_the_dataclass():
    data = {"part": {"steps": 3, "rate": 1}, "parts": [{"steps": 1}], "words": ["a"], "share": 1, "more": {"a": [1]}}
    whole = fields.parse(Whole, data)
    assert whole == Whole(Part(3, 1.0), parts=(Part(1),), words=("a",), share=1.0, more={"a": [1]})
    assert type(whole.part.rate) is type(whole.share) is float
    assert fields.parse(Whole, {"part": Part(1), "share": None, "name": 20}) == Whole(Part(1), "20"), "digits"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"prat": {}}, r"^unknown option 'prat'; did you mean 'part'\? \(there are: part, name, "),
        ({"part": {"steps": 1, "zzz": 1}}, r"^part: unknown option 'zzz' \(there are: steps, rate\)$"),
        ({"part": {}}, "^part: option 'steps' is missing; add it$"), ({}, "^option 'part' is missing"),
        ({"part": {"steps": "3"}}, "^part: option 'steps' must be of type int, got '3'$"),
        ({"part": {"steps": True}}, "of type int, got True"), ({"part": {"steps": 1.5}}, "of type int, got 1.5"),
        ({"part": {"steps": 1, "rate": False}}, "of type float, got False"),
        ({"part": Part(1), "name": True}, "'name' must be of type str, got True"),
        ({"part": Part(1), "fast": 1}, "of type bool, got 1"), ({"part": Part(1), "more": [1]}, "'more' must be of"),
        ({"part": Part(1), "share": "all"}, "option 'share' must be of type float or none, got 'all'"),
        ({"part": 3}, "^part: expected a table, got 3$"), ({"part": Part(1), "words": "ab"}, "of type list, got 'ab'"),
        ({"part": Part(1), "words": ["a", 1.5]}, r"option 'words\[1\]' must be of type str, got 1.5"),
        ({"part": Part(1), "parts": [{}]}, r"^parts\[0\]: option 'steps' is missing"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_its_place(data, message):
    with pytest.raises(ConfigError, match=message):
        fields.parse(Whole, data)
    with pytest.raises(ConfigError, match=r"^a\.toml: "):
        fields.parse(Whole, data, "a.toml")


def test_values_given_to_the_class_itself_are_checked():
    fields.check(Whole(Part(1), share=1))
    for wrong in (Whole(Part(1), name=3), Whole(Part(1), share="1"), Whole(None)):
        with pytest.raises(ConfigError):
            fields.check(wrong)


BAD = [
    (CacheConfig, "block_size", [0, 1025]), (CacheConfig, "num_blocks", [0]),
    (SpecConfig, "num_draft_tokens", [-1, 65, 2.0, True]), (SpecConfig, "confidence", [-0.1, math.nan]),
    (EngineConfig, "max_num_rows", [0, 1]), (EngineConfig, "max_num_seqs", [0, 10**6]),
    (EngineConfig, "threads", [0, 1025]), (EngineConfig, "max_model_len", [1, -5]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "values"), BAD)
def test_out_of_range(kind, name, values):
    for value in values:
        with pytest.raises(ConfigError, match=name):
            kind(**{name: value})


def test_options_from_json():
    assert parse_options('{"max_ngram": 4, "deep": {"a": [1]}}') == {"max_ngram": 4, "deep": {"a": [1]}}
    for text in ("", "{", "max_ngram=4", "{'a': 1}", "[1]", "3", "null"):
        with pytest.raises(ConfigError, match="JSON object"):
            parse_options(text)


WRONG = {
    "temperature": [-0.1, math.nan, math.inf, 10**400, "1", True], "top_p": [0.0, 1.01, math.nan], "min_p": [-0.1, 2],
    "top_k": [-2, 2.0], "repetition_penalty": [0, -math.inf], "presence_penalty": [2.5],
    "frequency_penalty": [math.nan], "max_tokens": [0, 1.5], "min_tokens": [-1, 129], "n": [0, 129],
    "seed": [-2, 2**63], "logprobs": [101], "logit_bias": [{-1: 1.0}, {"5": 1.0}, {5: math.inf}, {5: math.nan}],
    "banned_token_ids": [(-1,)], "stop_token_ids": [(1.0,)], "stop": [("",), (5,)],
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_out_of_range_of_request(name):
    for value in WRONG[name]:
        with pytest.raises(RequestError, match=name.split("_token_ids")[0]) as caught:
            SamplingParams(**{"max_tokens": 128, name: value})
        assert isinstance(caught.value, SameseedError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize("allowed", [(), (1, 2)])
def test_some_token_must_be_allowed(allowed):
    with pytest.raises(RequestError, match="no token"):
        SamplingParams(allowed_token_ids=allowed, banned_token_ids=(2, 1, 3))


def test_numbers_of_numpy():
    own = SamplingParams(stop_token_ids=[2], logit_bias={5: 1.0}, allowed_token_ids={5, 2}, temperature=0.5, seed=3)
    its = {"stop_token_ids": [np.int64(2)], "logit_bias": {np.int64(5): np.float32(1)}, "temperature": np.float32(0.5)}
    found = SamplingParams(**its, allowed_token_ids=np.array([5, 2])[::-1], seed=np.uint8(3))
    assert repr(found) == repr(own) and hash(found) == hash(own)


def test_edges_that_are_fine():
    CacheConfig(block_size=1, num_blocks=1)
    SpecConfig(num_draft_tokens=0, confidence=0)
    SpecConfig(num_draft_tokens=64, confidence=1.0)
    EngineConfig(max_num_rows=1, max_num_seqs=1, max_model_len=2, threads=1)
    SamplingParams(temperature=0, top_p=1, min_p=1, top_k=-1, seed=MAX_SEED, min_tokens=4, max_tokens=4, logprobs=0)
    SamplingParams(temperature=1e-300, seed=0, n=128, presence_penalty=-2, frequency_penalty=2.0)
    SamplingParams(logit_bias={5: -math.inf})


def test_what_is_given_loosely_is_kept_strictly():
    stops = ["a", "b"]
    given = {"stop_token_ids": np.array([1, 2]), "seed": np.int64(7), "top_p": np.float32(0.5)}
    params = SamplingParams(stop="END", allowed_token_ids=[3], logit_bias={1: 2}, **given)
    assert (type(params.seed), type(params.top_p)) == (int, float)
    assert params.stop == ("END",)
    assert params.stop_token_ids == (1, 2)
    assert params.allowed_token_ids == (3,)
    listed = SamplingParams(stop=stops)
    stops.append("c")
    assert listed.stop == ("a", "b"), "a copy"
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0
    assert dataclasses.replace(params, temperature=0.5).stop == ("END",)
    unset = dict.fromkeys(("stop", "stop_token_ids", "banned_token_ids", "allowed_token_ids", "logit_bias"))
    assert SamplingParams(**unset) == SamplingParams()
    for name in unset:
        with pytest.raises(RequestError, match=name):
            SamplingParams(**{name: 5})


def test_python_before_3_11_reads_toml_by_another_package(monkeypatch):
    monkeypatch.setattr(fields.sys, "version_info", (3, 10))
    monkeypatch.setitem(fields.sys.modules, "tomli", "tomli")
    assert runpy.run_path(fields.__file__)["tomllib"] == "tomli"
