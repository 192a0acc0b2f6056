import math

import numpy as np
import pytest
import torch
from fixtures_models import oracle
from lawkit import FAMILIES, write_model

from sameseed import LLM
from sameseed.errors import ConfigError, RequestError
from sameseed.measure.quality import perplexity as scoring
from sameseed.measure.quality.perplexity import Perplexity, forced, log_likelihoods, mean_interval, perplexity
from sameseed.request import SamplingParams, Sequence
from sameseed.spec.sampling import choose

TEXT = "the sum of all parts is a whole; the loop ends when the list is empty. über naïve café 你好 def add(a, b): " * 9


@pytest.fixture(scope="module")
def llm(pair_folders):
    return LLM(str(pair_folders[0]), max_num_rows=37, max_num_seqs=4)


@torch.inference_mode()
def published(folder, tokens, window, stride):
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
def test_agrees_with_transformers(tmp_path, window, stride):
    write_model(tmp_path, model_type="llama")
    llm = LLM(str(tmp_path), max_num_rows=37, max_num_seqs=4)
    tokens = llm.tokenizer.encode(TEXT)
    assert len(tokens) > 300
    expected = published(tmp_path, tokens, window, stride)
    found = perplexity(llm, TEXT, window, stride)
    assert found.perplexity == pytest.approx(expected, rel=1e-3)
    assert found.tokens == len(tokens) - 1
    assert found.bits_per_byte == pytest.approx(math.log2(expected) * found.tokens / len(TEXT.encode()), rel=1e-3)


def test_a_quantized_model_and_cache_are_what_is_measured(llm, pair_folders):
    plain = perplexity(llm, TEXT, 64, 32)
    for settings in ({"format": "nf4"}, {"kv_format": "fp8_e5m2"}):
        other = perplexity(LLM(str(pair_folders[0]), **settings), TEXT, 64, 32)
        value, (low, high) = scoring.ratio(other, plain, 0)
        assert value == pytest.approx(other.perplexity / plain.perplexity, rel=1e-6)
        assert value != 1.0 and low < value < high


def test_windows_are_clipped_to_the_context_and_overlap(llm):
    found = perplexity(llm, TEXT, 4096, 4096)
    assert found.window == llm.engine.max_model_len and found.stride == found.window - 1
    short = perplexity(llm, TEXT, max_tokens=50)
    assert short.tokens == 49 and not short.whole and short.num_bytes < len(TEXT.encode())


def test_the_paired_interval_is_narrower_and_needs_the_same_tokens():
    generator = np.random.default_rng(1)
    hard = np.repeat(generator.normal(3, 1, 40), 8)  # what makes a stretch hard is the same in both
    mine, its = (
        Perplexity((hard + generator.normal(shift, 0.05, 320)).astype(np.float32), 99, 64, 8, True, "x")
        for shift in (0.1, 0.0)
    )
    value, (low, high) = scoring.ratio(mine, its, 0)
    assert value == pytest.approx(math.exp(0.1), rel=0.02) and low < value < high
    alone = mine.interval(0)
    assert (high - low) / value < 0.2 * (alone[1] - alone[0]) / mine.perplexity
    with pytest.raises(ConfigError, match="different tokens"):
        scoring.ratio(mine, Perplexity(its.nll, 99, 64, 8, True, "y"), 0)


@pytest.mark.parametrize("logit_bytes", [1, 40_000, 1 << 26])
def test_logits_do_not_depend_on_how_passes_are_cut(llm, logit_bytes):
    tokens, runner = llm.tokenizer.encode(TEXT), llm.engine.runner
    texts = [(tokens[i : i + 5 + 20 * i], min(1 + 3 * i, 4 + 20 * i)) for i in range(6)]
    found = {}
    for index, targets, logits in forced(runner, texts, 256, 37, logit_bytes):
        assert len(targets) == len(logits)
        found.setdefault(index, []).append(logits)
    assert list(found) == list(range(6))
    for text, parts in zip(texts, found.values(), strict=True):
        alone = torch.cat([logits for *_, logits in forced(runner, [text], 256, 37)])
        assert len(alone) == len(text[0]) - text[1] and torch.equal(torch.cat(parts), alone)
    assert runner.blocks.num_free == runner.blocks.num_blocks


def test_the_logits_choose_the_models_own_text(llm):
    params = SamplingParams(max_tokens=80, temperature=0.9, top_p=0.9, seed=5, ignore_eos=True)
    prompt = llm.tokenizer.encode("the sum of")
    text = llm.generate("the sum of", params)[0].token_ids
    seq = Sequence(-1, prompt, params, 5)
    rows = torch.cat([x for *_, x in forced(llm.engine.runner, [((*prompt, *text), len(prompt))], 256, 37)]).numpy()
    assert [choose(row, seq, text[:i], ()) for i, row in enumerate(rows)] == list(text)


def test_a_model_with_recurrent_layers_is_scored_as_it_decodes(tmp_path):
    write_model(tmp_path, **FAMILIES["qwen3_5"])
    llm = LLM(str(tmp_path), max_num_seqs=2)
    prompt = llm.tokenizer.encode("the sum of")
    text = llm.generate("the sum of", SamplingParams(max_tokens=40, ignore_eos=True))[0].token_ids
    assert log_likelihoods(llm.engine, [(prompt, text), (prompt, text[:1])])[0][1]


def test_a_cache_of_one_sequence_serves_many(pair_folders):
    small = LLM(str(pair_folders[0]), num_blocks=16)
    tokens = small.tokenizer.encode(TEXT)
    found = [logits for *_, logits in forced(small.engine.runner, [(tokens[:200], 1)] * 3, 256, 256)]
    assert len(found) == 3 and torch.equal(found[0], found[2])


def test_an_abandoned_text_leaves_nothing(llm):
    parts = forced(llm.engine.runner, [(llm.tokenizer.encode(TEXT)[:100], 1)] * 4, 256, 37)
    next(parts)
    parts.close()
    assert llm.engine.runner.blocks.num_free == llm.engine.runner.blocks.num_blocks


@pytest.mark.parametrize("text", [([5, 6], 0), ([5, 9999], 1), ([5, 6], 2), ([5] * 300, 1)])
def test_refuses_what_cannot_be_scored(llm, text):
    with pytest.raises(RequestError):
        list(forced(llm.engine.runner, [text], 256, 37))
    with pytest.raises(RequestError):
        log_likelihoods(llm.engine, [([], [8])])
    for short in ({}, {"max_tokens": 1}):
        with pytest.raises(ConfigError, match="fewer than two"):
            perplexity(llm, TEXT if short else "", **short)


def test_options_share_a_pass_and_score_as_alone(llm):
    context = tuple(llm.tokenizer.encode("the list is"))
    pairs = [(context, (t,)) for t in (7, 50, 120)] + [(context[:2], (9,)), (context, (7, 50))]
    together = log_likelihoods(llm.engine, pairs)
    alone = [log_likelihoods(llm.engine, [pair])[0] for pair in pairs]
    assert [x for x, _ in together] == pytest.approx([x for x, _ in alone], abs=1e-5)
    assert [x for _, x in together] == [x for _, x in alone]
    greedy = llm.generate([list(context)])[0].token_ids
    assert log_likelihoods(llm.engine, [(context, greedy[:3])])[0][1]
    assert not log_likelihoods(llm.engine, [(context, (greedy[0] + 1,))])[0][1]


def test_a_long_context_loses_its_beginning(llm):
    tokens = llm.tokenizer.encode(TEXT)
    assert log_likelihoods(llm.engine, [(tokens[:400], [8])]) == log_likelihoods(llm.engine, [(tokens[144:400], [8])])


def test_an_interval_covers_the_truth_about_as_often_as_it_says():
    generator = np.random.default_rng(0)
    hits = 0
    for i in range(200):
        low, high = mean_interval(generator.exponential(2.0, 80).tolist(), i)
        hits += low <= 2.0 <= high
    assert 0.87 <= hits / 200 <= 0.99
    assert mean_interval([1.0], 0) is None and scoring.ratio_interval([0.0, 0.0], [0.0, 0.0], 0) is None
