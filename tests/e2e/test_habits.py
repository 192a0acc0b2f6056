"""Names from other libraries: every row of the page's tables is run, and every name in the code has a row."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import pytest
from lawkit import assert_nothing_left

import sameseed
from sameseed import LLM, AsyncEngineArgs, SamplingParams, habits
from sameseed.config import CacheConfig, EngineConfig, SpecConfig
from sameseed.engine import llm as door
from sameseed.engine.settings import Settings
from sameseed.errors import RequestError, SameseedError
from sameseed.fields import hints

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "coming-from.md").read_text()
ROWS = [
    (there, here)
    for cells in re.findall(r"^\| (`.*) \| (.*) \|$", PAGE, re.MULTILINE)
    for there in re.findall(r"`([^`]+)`", cells[0])
    for here in [cells[1]]
]
MESSAGES = [{"role": "user", "content": "the sum"}]


@pytest.fixture(scope="module")
def llm(pair_folders):
    return LLM(str(pair_folders[0]))


@pytest.mark.parametrize(("there", "here"), ROWS)
def test_a_row_of_the_page(there, here, llm, monkeypatch):
    monkeypatch.setattr(door, "build_engine", lambda *asked: SimpleNamespace(asked=asked, tokenizer=None))

    def made(*given, **more):
        return LLM(*given, **more).engine.asked

    made.from_pretrained = lambda *given, **more: LLM.from_pretrained(*given, **more).engine.asked
    names = {
        "LLM": made,
        "AsyncLLM": SimpleNamespace(from_engine_args=lambda args: LLM.from_engine_args(args).engine.asked),
        "AsyncEngineArgs": AsyncEngineArgs,
        "SamplingParams": SamplingParams,
        "llm": llm,
        "params": SamplingParams(max_tokens=5),
        "messages": MESSAGES,
    }
    if here.startswith("`"):
        assert eval(there, names) == eval(here.strip("`"), names)
        return
    with pytest.raises(SameseedError) as refused:
        eval(there, names)
    for word in re.findall(r"`([^`]+)`", here):
        assert word in str(refused.value), f"{there}: {refused.value}"


def test_every_word_is_on_the_page():
    words = {*habits.SETTINGS, *habits.SAMPLING, *habits.GENERATE, *habits.SPECULATIVE}
    words |= {name for names in (*habits.ATTRIBUTES.values(), *habits.OPTIONS.values()) for name in names}
    code = " ".join(there for there, _ in ROWS)
    assert not {w for w in words if not re.search(rf"\b{w}\b", code)}


def test_settings_are_those_of_the_dataclasses():
    known, spec = hints(EngineConfig) | hints(CacheConfig), hints(SpecConfig)
    known |= {"format": hints(EngineConfig)["format"], "kv_format": hints(CacheConfig)["format"]}
    known |= {name: spec[name] | None for name in ("num_draft_tokens", "confidence", "policy", "overlap")}
    known |= {"draft_options": dict[str, object] | None, "draft_format": spec["format"] | None}
    assert get_type_hints(Settings) == {name: kind for name, kind in known.items() if name not in ("cache", "spec")}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LLM(num_draft_token=3), "did you mean 'num_draft_tokens'"),
        (lambda: LLM(threads="2"), "must be of type int or none"),
        (lambda: LLM(dtype="half", format="bf16"), "both are given"),
        (lambda: LLM(draft="ngram", speculative_config={"model": "org/m"}), "says draft too"),
        (lambda: LLM(speculative_config={"method": "ngram", "prompt_lookup_mx": 1}), "mean 'prompt_lookup_max'"),
        (lambda: SamplingParams(temprature=1), "did you mean 'temperature'"),
    ],
)  # fmt: skip
def test_words_that_are_nearly_right(make, message):
    with pytest.raises(SameseedError, match=message):
        make()


@pytest.mark.parametrize("name", sameseed._ELSEWHERE)
def test_a_name_to_import(name):
    with pytest.raises(ImportError, match="here it is"):
        exec(f"from sameseed import {name}")


def test_public_names_are_listed():
    assert dir(sameseed) == sorted(sameseed.__all__)
    assert all(getattr(sameseed, name) is not None for name in dir(sameseed))
    with pytest.raises(AttributeError, match="did you mean 'SamplingParams'"):
        sameseed.SamplingParam  # noqa: B018


def test_a_seed_of_the_llm_repeats_its_run(pair_folders):
    def run(seed):
        with LLM(str(pair_folders[0]), seed=seed) as made:
            return [c.seed for _ in range(2) for c in made.generate(["a", "b"], max_tokens=1)]

    assert run(7) == run(7) != run(None)
    assert len(set(run(7))) == 4, "every request has its own"


def test_a_closed_llm(pair_folders):
    with LLM(str(pair_folders[0])) as made:
        wanted = made.generate("a", max_tokens=9)[0].text
        stream, engine = made.stream("a", max_tokens=9), made.engine
        first = next(stream)
    made.close()
    with pytest.raises(RequestError, match="is closed; make a new one"):
        made.generate("a")
    assert first.text + "".join(d.text for d in stream) == wanted
    assert_nothing_left(engine)


def test_one_answer_or_a_list(llm):
    with pytest.raises(RequestError, match=r"chat\(\[messages\]\)"):
        llm.chat(MESSAGES, n=2)
    assert len(llm.chat([MESSAGES], n=2, max_tokens=2)) == 2
    with pytest.raises(RequestError, match="are given"):
        llm.generate("a", SamplingParams(), max_tokens=4)
