"""Reduced vocabularies: read from files, made by a command, and used by drafters."""

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from lawkit import MODEL_VOCAB, SAMPLED, make_engine, random_prompts, run, texts

from sameseed import LLM
from sameseed.cli import main
from sameseed.config import SpecConfig
from sameseed.drafters._choices import choices, likely, native_choices, native_likely, numpy_choices, numpy_likely
from sameseed.drafters._vocabulary import read_vocabulary
from sameseed.drafters.ngram import NgramDrafter
from sameseed.errors import ConfigError
from sameseed.models.inner import with_tokens
from sameseed.models.loader import load_tokenizer, resolve_model
from sameseed.request import SamplingParams, Sequence
from sameseed.spec import sampling

PROMPTS = random_prompts(4, seed=4)
GREEDY = SamplingParams(max_tokens=30, seed=6, ignore_eos=True)
ASKED = [GREEDY, SamplingParams(max_tokens=30, seed=6, ignore_eos=True, **SAMPLED)]
NGRAM = (SpecConfig("ngram", num_draft_tokens=3),)


def test_vocabularies_from_files(tmp_path):
    path = tmp_path / "ids"
    assert read_vocabulary("7", 300).tolist() == list(range(7))
    path.write_text("[5, 2, 5]")
    assert read_vocabulary(str(path), 300).tolist() == [2, 5]
    path.write_text("9\n1 4\n")
    assert read_vocabulary(str(path), 300).tolist() == [1, 4, 9]
    for text in ("[400]", "[]", "five"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="vocabulary"):
            read_vocabulary(str(path), 300)
    for name in ("301", str(tmp_path / "none"), "\u00b2", "~no-such-user/ids"):
        with pytest.raises(ConfigError, match="vocabulary"):
            read_vocabulary(name, 300)


def test_an_option_of_this_name_is_a_drafters_own_without_an_lm_head(pair_folders):
    class Own(NgramDrafter):
        @dataclass(frozen=True)
        class Options(NgramDrafter.Options):
            vocabulary: int = 8

    with LLM(str(pair_folders[0]), Own, max_num_seqs=1) as llm:
        assert llm.engine.drafter.options.vocabulary == 8


@pytest.mark.parametrize("method", ["draft_model", "self_quant", "cascade"])
def test_a_file_names_the_tokens_that_are_drafted(pair, tmp_path, method):
    words = sorted({t for c in run(make_engine(pair), PROMPTS, ASKED[1]) for t in c.token_ids if t % 3})
    (tmp_path / "ids.json").write_text(json.dumps(words))
    chosen = {"below": NGRAM} if method == "cascade" else {}
    engine = make_engine(pair, method, k=4, options={"vocabulary": str(tmp_path / "ids.json")}, **chosen)
    assert engine.drafter.runner.model.weights.lm_head.shape == (len(words), 32)
    done = run(engine, PROMPTS, ASKED[1])
    accepted = {t for c in done for t, level in zip(c.token_ids, c.accepted, strict=True) if level}
    assert accepted and accepted <= {*words}


@pytest.mark.parametrize("method", ["draft_model", "self_quant", "cascade", "eagle", "block"])
@pytest.mark.parametrize("asked", ASKED, ids=["greedy", "sampled"])
def test_what_may_be_drafted_changes_while_it_serves(pair, method, asked):
    engine = make_engine(pair, method, k=4, **({"below": NGRAM} if method == "cascade" else {}))
    propose, rounds = engine.drafter.propose, []
    cuts = (range(0, MODEL_VOCAB, 2), range(1, MODEL_VOCAB, 3), range(MODEL_VOCAB))

    def watched(*args):
        allowed = cuts[len(rounds) % 3]
        engine.drafter.draft_only(None if len(allowed) == MODEL_VOCAB else torch.tensor(allowed))
        draft = propose(*args)
        rounds.append({*draft.tokens.tolist()})
        assert rounds[-1] <= {*allowed}
        return draft

    engine.drafter.propose = watched
    assert texts(run(engine, PROMPTS, asked)) == texts(run(make_engine(pair), PROMPTS, asked))
    assert all(any(rounds[i::3]) for i in range(3))


def test_logits_of_the_kept_are_the_models_own(pair):
    from fixtures_models import all_logits

    model = pair.target
    few = with_tokens(model, torch.tensor([9, 3, 300, 3, model.config.vocab_size, 999]))
    full, some = all_logits(model, PROMPTS[2]), all_logits(few, PROMPTS[2])
    assert some.shape == full.shape
    torch.testing.assert_close(some[:, [3, 9, 300]], full[:, [3, 9, 300]])
    assert int((some > -torch.inf).sum()) == 3 * len(some)
    assert few.weights.layers is model.weights.layers, "all else is shared"
    with pytest.raises(ConfigError, match="none of the tokens"):
        with_tokens(model, torch.tensor([999]))


def test_the_command_makes_such_a_file(tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "ids.json"
    text.write_text("Once upon a time there was a cat. The cat was a good cat.\n" * 3)
    assert main(["vocabulary", str(text), "--size", "12", "-o", str(out)]) == 0
    ids = json.loads(out.read_text())
    assert len(ids) == len(set(ids)) == 12
    tokenizer = load_tokenizer(resolve_model("embedded"))
    begin, cat = tokenizer.encode(" cat")
    assert cat in ids
    assert begin not in ids, "what stands before a prompt is never written"
    assert set(read_vocabulary(str(out), 4096).tolist()) == set(ids)
    assert "12 tokens, " in capsys.readouterr().out
    for argv in ([], ["none.txt"], [str(text), "--size", "0"]):
        assert main(["vocabulary", *argv]) == 2


PARAMS = [
    SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_p=0.95), SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.5, top_k=40, min_p=0.01), SamplingParams(temperature=0.3, top_p=0.5, top_k=3),
]  # fmt: skip


def rows(count, size=1000):
    rng = np.random.default_rng(5)
    made = [(4.0 * rng.standard_normal(size)).astype(np.float32) for _ in range(count)]
    made[0][7:] = -np.inf  # fewer tokens than are asked for
    made[1][:] = 1.0  # all equal
    return made


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("count", [1, 3, 9])
def test_native_choices_are_the_specification_s(params, count):
    """The first of them is what the sampler chooses."""
    for at, row in enumerate(rows(40, 4097)):
        for values in (row, row.astype(np.float64)):
            expected = numpy_choices(values, params, 3, at, count)
            found = native_choices(values, params, 3, at, count)
            tokens, shares = zip(*expected, strict=True)
            assert tokens == tuple(t for t, _ in found) and tokens[0] == sampling.numpy_choice(values, params, 3, at)
            assert len(set(tokens)) == len(tokens) <= count
            assert list(shares) == sorted(shares, reverse=True) and 0.0 < sum(shares) <= 1.0 + 1e-9
            np.testing.assert_allclose([s for _, s in found], shares, rtol=1e-9)


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("size", [3, 4097])
def test_native_choices_of_rows_are_the_specification_s(params, count, size):
    table = np.stack(rows(20, size))
    ids = np.random.default_rng(2).permutation(9000)[:size].astype(np.int32)
    for values in (table, table.astype(np.float64)):
        for own in (None, ids):
            expected = numpy_likely(values, params, 3, 5, count, own)
            found = native_likely(values, params, 3, 5, count, own)
            np.testing.assert_array_equal(found[0], expected[0])
            np.testing.assert_allclose(found[1], expected[1], rtol=1e-9)


@pytest.mark.parametrize("params", [PARAMS[0], PARAMS[2]], ids=str)
def test_without_truncation_rows_give_the_choices(params):
    table = np.stack(rows(20))
    seq = Sequence(1, (1, 2), params, 7)
    tokens, log_shares = likely(table, seq, 0, 5)
    for row, own, shares in zip(table, tokens, log_shares, strict=True):
        found = choices(row, seq, [], (), 5)
        assert own.tolist() == [t for t, _ in found]
        np.testing.assert_allclose(np.exp(shares), [s for _, s in found], rtol=1e-9)


def test_what_truncation_leaves_out_comes_later():
    """Tokens 0 and 1 are in the nucleus. Token 2 is outside: lowered, but first if its noise is large."""
    table = np.array([[3.0, 2.9, 2.0, -np.inf]], np.float32)
    params = SamplingParams(temperature=1.0, top_p=0.8)
    firsts = []
    for seed in range(400):
        tokens, log_shares = likely(table, Sequence(0, (1,), params, seed), 0, 4)
        assert sorted(tokens[0, :3]) == [0, 1, 2] and log_shares[0, 3] == -np.inf
        firsts.append(tokens[0, 0])
    assert 0 < firsts.count(2) < 20


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("find", [numpy_likely, native_likely])
def test_a_row_that_is_no_numbers_gives_none_beside_others(find, bad):
    table = np.stack(rows(4, 50)[2:])
    table[0, 7] = bad
    for params in PARAMS:
        tokens, shares = find(table, params, 1, 1, 3, None)
        assert not tokens[0].any() and not shares[0].any() and shares[1].sum() > 0
