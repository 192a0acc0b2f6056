"""LLM from a folder: generate, stream, chat, and what it refuses."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lawkit import SAMPLED, assert_nothing_left, write_model, write_tokenizer

from sameseed import LLM, SamplingParams, SpecConfig
from sameseed.config import CacheConfig, EngineConfig
from sameseed.engine.settings import make_config
from sameseed.errors import ConfigError, ModelLoadError, RequestError, VocabularyError
from sameseed.request import FinishReason

PROMPTS = ["def add(a, b):", "the sum of all", "für 你好 🙂", "x"]
ASKED = SamplingParams(max_tokens=20, seed=5, ignore_eos=True, **SAMPLED)


@pytest.fixture(scope="module")
def folders(pair_folders):
    return str(pair_folders[0]), str(pair_folders[1])


@pytest.fixture(scope="module")
def plain(folders):
    return LLM(folders[0])


@pytest.fixture(scope="module")
def drafted(folders):
    return LLM(folders[0], draft=folders[1], policy="fixed", num_draft_tokens=5)


def test_the_same_text_with_a_draft(plain, drafted):
    done = plain.generate(PROMPTS, ASKED)
    assert [c.prompt for c in done] == PROMPTS
    assert [c.text for c in done] == [plain.tokenizer.decode(c.token_ids) for c in done]
    assert all(c.finish_reason is FinishReason.LENGTH and len(c.token_ids) == 20 for c in done)
    again = drafted.generate(PROMPTS, ASKED)
    assert [(c.text, c.token_ids) for c in again] == [(c.text, c.token_ids) for c in done]
    assert_nothing_left(drafted.engine)
    assert any(any(c.accepted) for c in again)


def test_tokens_that_the_checkpoint_suppresses_are_never_written(folders, plain, tmp_path):
    written = plain.generate(PROMPTS[1], ASKED)[0].token_ids
    shutil.copytree(folders[0], tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"suppress_tokens": written[1:3]}))
    (done,) = LLM(str(tmp_path / "model"), draft="ngram").generate(PROMPTS[1], ASKED)
    (wanted,) = plain.generate(PROMPTS[1], replace(ASKED, banned_token_ids=written[1:3]))
    assert done.token_ids == wanted.token_ids != written


def test_prompts_are_text_or_tokens_one_or_many(plain):
    (text,) = plain.generate("the sum", ASKED)
    ids = plain.tokenizer.encode("the sum")
    for prompts in (ids, [ids], tuple(ids), ["the sum"], list(np.array(ids)), [list(np.array(ids))]):
        (done,) = plain.generate(prompts, ASKED)
        assert done.token_ids == text.token_ids
        assert done.prompt_token_ids == tuple(ids)
    assert plain.generate([], ASKED) == []


def test_parameters_for_each_prompt(plain):
    each = [SamplingParams(max_tokens=n, seed=n, ignore_eos=True, n=n) for n in (1, 2, 3)]
    done = plain.generate(PROMPTS[:3], each)
    wanted = [(PROMPTS[n - 1], i, n) for n in (1, 2, 3) for i in range(n)]
    assert [(c.prompt, c.index, len(c.token_ids)) for c in done] == wanted
    with pytest.raises(RequestError, match="3 prompts but 2 sampling parameters"):
        plain.generate(PROMPTS[:3], each[:2])


def test_a_drawn_seed_is_reported_and_reproduces_the_text(plain):
    free = SamplingParams(max_tokens=15, temperature=1.5, ignore_eos=True)
    first, second = plain.generate(["the", "the"], free)
    assert first.seed != second.seed
    assert first.token_ids != second.token_ids
    (again,) = plain.generate("the", SamplingParams(max_tokens=15, temperature=1.5, ignore_eos=True, seed=first.seed))
    assert again.token_ids == first.token_ids


def test_stream_joins_to_the_text(drafted, plain):
    """Each delta also has the text so far."""
    (whole,) = plain.generate(PROMPTS[2], ASKED)
    deltas = list(drafted.stream(PROMPTS[2], ASKED))
    text, ids = "", ()
    for delta in deltas:
        text, ids = text + delta.text, ids + delta.token_ids
        (so_far,) = delta.outputs
        assert (so_far.text, so_far.token_ids, delta.finished) == (text, ids, delta is deltas[-1])
    assert (text, ids, so_far.finish_reason) == (whole.text, whole.token_ids, "length")
    assert sum((d.accepted for d in deltas), ()) == deltas[-1].completion.accepted
    assert not any(d.completion for d in deltas[:-1])
    assert len(deltas) < 20, "some steps brought several tokens"


def test_two_streams_of_one_llm(drafted):
    """Each stream gets its own text, whichever of them drives the engine."""
    wanted = [drafted.generate(p, ASKED)[0].text for p in PROMPTS[:2]]
    streams = [drafted.stream(p, ASKED) for p in PROMPTS[:2]]
    texts = ["", ""]
    open_streams = {0, 1}
    while open_streams:
        for i in sorted(open_streams):
            delta = next(streams[i], None)
            if delta is None:
                open_streams.discard(i)
            else:
                texts[i] += delta.text
    assert texts == wanted
    slow = drafted.stream(PROMPTS[0], ASKED)
    first = next(slow).text
    assert drafted.generate(PROMPTS[1], ASKED)[0].text == wanted[1], "beside one that nobody reads"
    assert first + "".join(d.text for d in slow) == wanted[0]
    assert_nothing_left(drafted.engine)


def test_threads_share_one_llm(drafted):
    wanted = [drafted.generate(p, ASKED)[0].text for p in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        for _ in range(5):
            assert [done[0].text for done in threads.map(lambda p: drafted.generate(p, ASKED), PROMPTS)] == wanted
    assert_nothing_left(drafted.engine)
    with pytest.raises(RequestError, match="text or a list"):
        drafted.generate(b"x", ASKED)


def test_chat(drafted, plain):
    messages = [{"role": "user", "content": "the sum of a and b?"}]
    answer = plain.chat(messages, ASKED)
    (by_hand,) = plain.generate("user: the sum of a and b?\nassistant:", ASKED)
    assert answer.token_ids == by_hand.token_ids
    assert "".join(d.text for d in drafted.chat_stream(messages, ASKED)) == answer.text
    for bad, message in (([], "conversation is empty"), ([{"role": "user"}], "content")):
        with pytest.raises(RequestError, match=message):
            plain.chat(bad)


def test_a_draft_with_another_vocabulary(folders, tmp_path):
    other = tmp_path / "other"
    write_model(other)
    tokenizer = other / "tokenizer.json"
    text = tokenizer.read_text(encoding="utf-8")
    assert text.count('"<|end|>"') == 2
    tokenizer.write_text(text.replace('"<|end|>"', '"<|stop|>"'), encoding="utf-8")
    with pytest.raises(VocabularyError, match=r"<\|stop\|>.*<\|end\|>"):
        LLM(folders[0], draft=str(other))
    smaller = tmp_path / "smaller"
    write_model(smaller)
    write_tokenizer(smaller, size=280)
    with pytest.raises(VocabularyError, match="token 280 is missing"):
        LLM(folders[0], draft=str(smaller))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"draft": "ngram", "draft_options": {"max_ngrm": 3}}, ConfigError, "did you mean 'max_ngram'"),
        ({"draft": "ngram > embedded-draft > self_quant"}, ConfigError, r"'\(ngram > embedded-draft\) \+ self_quant'"),
        ({"template_date": ""}, ConfigError, "must be a date"),
        ({"draft": Path("ngramm")}, ModelLoadError, "no model at 'ngramm'"),
        ({"draft": "ngram", "draft_options": '{"max_ngram": 4}'}, ConfigError, "options' must be of type object"),
        ({"model": ""}, ModelLoadError, "no model at ''"),
        ({"blocksize": 4}, ConfigError, "did you mean 'block_size'"),
    ],
)
def test_bad_settings(folders, settings, error, message):
    with pytest.raises(error, match=message):
        LLM(**{"model": folders[0]} | settings)


def test_make_config():
    assert make_config() == EngineConfig()
    assert make_config("none").spec == SpecConfig()
    assert make_config("ngram", num_draft_tokens=7, policy="fixed").spec == SpecConfig("ngram", num_draft_tokens=7)
    for given in ({}, {"policy": "auto"}):
        made = make_config("ngram", **given).spec
        assert made == SpecConfig("ngram", num_draft_tokens=12, policy="goodput")
    assert make_config(SpecConfig("ngram")).spec == SpecConfig("ngram"), "what is given whole stays"
    turns = make_config("suffix + org/small", draft_format="int8").spec
    assert [b.format for b in turns.below] == ["auto", "int8"]
    made = make_config("org/small", confidence=0.3, draft_format="int8").spec
    assert made == SpecConfig("draft_model", "org/small", "int8", confidence=0.3)
    config = make_config(None, block_size=32, num_blocks=9, kv_format="int8", max_num_rows=64, threads=2)
    assert config == EngineConfig(max_num_rows=64, threads=2, cache=CacheConfig(32, 9, "int8"))
    assert make_config(prefix_cache=False).cache == CacheConfig(prefix_cache=False)
