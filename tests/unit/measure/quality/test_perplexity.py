from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures_models import oracle
from lawkit import EOS, write_model

from sameseed import LLM
from sameseed.errors import ConfigError, RequestError
from sameseed.measure.quality.likelihood import Scorer, TextToScore, log_likelihoods, split
from sameseed.measure.quality.perplexity import Perplexity, mean_interval, perplexity, ratio, ratio_interval, windows

TEXT = "the sum of all parts is a whole; the loop ends when the list is empty. über naïve café 你好 def add(a, b): " * 9


@pytest.fixture(scope="module")
def llm(pair_folders: tuple[Path, Path]) -> LLM:
    return LLM(str(pair_folders[0]), max_num_rows=37, max_num_seqs=4)


@torch.inference_mode()
def published(folder: Path, tokens: list[int], window: int, stride: int) -> float:
    """The published protocol for `transformers`: labels of known tokens are masked, losses of the others are summed."""
    model = oracle(folder)
    total, count, previous = 0.0, 0, 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + window, len(tokens))
        ids = torch.tensor([tokens[begin:end]])
        labels = ids.clone()
        labels[:, : -(end - previous)] = -100
        valid = int((labels[:, 1:] != -100).sum())
        total += float(model(ids, labels=labels).loss) * valid
        count, previous = count + valid, end
        if end == len(tokens):
            break
    return math.exp(total / count)


@pytest.mark.parametrize(("window", "stride"), [(64, 16), (100, 99), (256, 100)])
def test_agrees_with_transformers(tmp_path: Path, window: int, stride: int) -> None:
    write_model(tmp_path, model_type="llama")
    llm = LLM(str(tmp_path), max_num_rows=37, max_num_seqs=4)
    tokens = llm.tokenizer.encode(TEXT)
    assert len(tokens) > 300
    expected = published(tmp_path, tokens, window, stride)
    found = perplexity(llm, TEXT, window, stride)
    assert found.perplexity == pytest.approx(expected, rel=1e-3)
    assert found.tokens == len(tokens) - 1
    assert found.bits_per_byte == pytest.approx(math.log2(expected) * found.tokens / len(TEXT.encode()), rel=1e-3)


def test_a_quantized_model_and_cache_are_what_is_measured(llm: LLM, pair_folders: tuple[Path, Path]) -> None:
    plain = perplexity(llm, TEXT, 64, 32)
    for settings in ({"format": "nf4"}, {"kv_format": "fp8_e5m2"}):
        other = perplexity(LLM(str(pair_folders[0]), **settings), TEXT, 64, 32)
        value, (low, high) = ratio(other, plain, 0)
        assert value == pytest.approx(other.perplexity / plain.perplexity, rel=1e-6)
        assert value != 1.0 and low < value < high


def test_every_token_counts_once() -> None:
    for total, window, stride in ((1000, 128, 32), (128, 128, 32), (5, 128, 32), (129, 128, 127), (2, 2, 1)):
        scored = [i for begin, end, first in windows(total, window, stride) for i in range(first, end)]
        assert scored == list(range(1, total))
        for begin, end, first in windows(total, window, stride):
            assert end - begin <= window and first > begin
            assert begin == 0 or first - begin >= window - stride


def test_windows_are_clipped_to_the_context_and_overlap(llm: LLM) -> None:
    found = perplexity(llm, TEXT, 4096, 4096)
    assert found.window == llm.engine.max_model_len and found.stride == found.window - 1
    short = perplexity(llm, TEXT, max_tokens=50)
    assert short.tokens == 49 and not short.whole and short.num_bytes < len(TEXT.encode())


@pytest.mark.parametrize(
    ("text", "settings", "match"),
    [("", {}, "fewer than two"), (TEXT, {"window": 1}, "--window"), (TEXT, {"max_tokens": 1}, "--tokens")],
)
def test_refuses_what_has_no_perplexity(llm: LLM, text: str, settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        perplexity(llm, text, **settings)


def test_the_paired_interval_is_narrower_and_needs_the_same_tokens() -> None:
    generator = np.random.default_rng(1)
    hard = np.repeat(generator.normal(3, 1, 40), 8)  # what makes a stretch hard is the same in both
    mine, its = (
        Perplexity((hard + generator.normal(shift, 0.05, 320)).astype(np.float32), 99, 64, 8, True, "x")
        for shift in (0.1, 0.0)
    )
    value, (low, high) = ratio(mine, its, 0)
    assert value == pytest.approx(math.exp(0.1), rel=0.02) and low < value < high
    alone = mine.interval(0)
    assert (high - low) / value < 0.2 * (alone[1] - alone[0]) / mine.perplexity
    with pytest.raises(ConfigError, match="different tokens"):
        ratio(mine, Perplexity(its.nll, 99, 64, 8, True, "y"), 0)


@pytest.mark.parametrize("logit_bytes", [1, 40_000, 1 << 26])
def test_scores_do_not_depend_on_how_passes_are_cut(llm: LLM, logit_bytes: int) -> None:
    tokens = llm.tokenizer.encode(TEXT)
    texts = [TextToScore(tokens[i : i + 5 + 20 * i], min(1 + 3 * i, 4 + 20 * i)) for i in range(6)]
    scorer = Scorer(llm.engine, logit_bytes)
    found = list(scorer.score(texts))
    alone = [next(iter(Scorer(llm.engine).score([text]))) for text in texts]
    for text, a, b in zip(texts, found, alone, strict=True):
        assert len(a.nll) == len(text.tokens) - text.start
        assert torch.equal(a.nll, b.nll) and torch.equal(a.greedy, b.greedy)
    assert llm.engine.runner.blocks.num_free == llm.engine.runner.blocks.num_blocks


def test_a_cache_of_one_sequence_serves_many(pair_folders: tuple[Path, Path]) -> None:
    small = LLM(str(pair_folders[0]), num_blocks=16)
    tokens = small.tokenizer.encode(TEXT)
    found = list(Scorer(small.engine).score([TextToScore(tokens[:200], 1)] * 3))
    assert len(found) == 3 and torch.equal(found[0].nll, found[2].nll)


def test_an_abandoned_scorer_leaves_nothing(llm: LLM) -> None:
    tokens = llm.tokenizer.encode(TEXT)
    scores = Scorer(llm.engine).score([TextToScore(tokens[:100], 1)] * 4)
    next(scores)
    scores.close()
    assert llm.engine.runner.blocks.num_free == llm.engine.runner.blocks.num_blocks


@pytest.mark.parametrize(
    "text", [TextToScore([5], 0), TextToScore([5, 9999], 1), TextToScore([5, 6], 3), TextToScore([5] * 300, 1)]
)
def test_refuses_what_cannot_be_scored(llm: LLM, text: TextToScore) -> None:
    with pytest.raises(RequestError):
        list(Scorer(llm.engine).score([text]))


def test_options_share_a_pass_and_score_as_alone(llm: LLM) -> None:
    context = tuple(llm.tokenizer.encode("the list is"))
    pairs = [(context, (t,)) for t in (7, 50, 120)] + [(context[:2], (9,)), (context, (7, 50))]
    scorer = Scorer(llm.engine)
    together = log_likelihoods(scorer, pairs)
    alone = [log_likelihoods(scorer, [pair])[0] for pair in pairs]
    assert [x for x, _ in together] == pytest.approx([x for x, _ in alone], abs=1e-5)
    assert [x for _, x in together] == [x for _, x in alone]
    greedy = llm.generate([list(context)])[0].token_ids
    assert log_likelihoods(scorer, [(context, greedy[:3])])[0][1]
    assert not log_likelihoods(scorer, [(context, (greedy[0] + 1,))])[0][1]


def test_a_long_context_loses_its_beginning(llm: LLM) -> None:
    tokens = llm.tokenizer.encode(TEXT)
    assert log_likelihoods(Scorer(llm.engine), [(tokens[:400], [8])]) == log_likelihoods(
        Scorer(llm.engine), [(tokens[144:400], [8])]
    )
    with pytest.raises(RequestError):
        log_likelihoods(Scorer(llm.engine), [([], [8])])


def test_a_continuation_is_cut_where_its_text_begins(llm: LLM) -> None:
    context, continuation = split(llm.tokenizer, "the list", " is empty")
    assert llm.tokenizer.decode(context + continuation) == "the list is empty"
    whole = llm.tokenizer.encode("the sum")
    context, continuation = split(llm.tokenizer, "the su", "m")
    assert context + continuation == whole and continuation
    assert EOS not in context


def test_the_interval_of_a_mean_is_near_the_normal_one() -> None:
    scores = [1.0] * 60 + [0.0] * 140
    low, high = mean_interval(scores, 3)
    half = 1.96 * math.sqrt(0.3 * 0.7 / 200)
    assert (low, high) == pytest.approx((0.3 - half, 0.3 + half), abs=0.012)


def test_it_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for i in range(200):
        low, high = ratio_interval(generator.exponential(2.0, 80).tolist(), [1.0] * 80, i, resamples=400)
        hits += low <= 2.0 <= high
    assert 0.87 <= hits / 200 <= 0.99


def test_without_units_there_is_none() -> None:
    assert mean_interval([1.0], 0) is None and ratio_interval([0.0, 0.0], [0.0, 0.0], 0) is None
