"""Reduced vocabularies: read from files, made from token counts, and used by drafters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lawkit import SAMPLED, Pair, make_engine, random_prompts, run, texts

from sameseed.cli import main
from sameseed.config import SpecConfig
from sameseed.drafters._vocabulary import frequent_tokens, read_vocabulary
from sameseed.errors import ConfigError
from sameseed.models.loader import load_tokenizer, resolve_model
from sameseed.models.vocabulary import with_tokens
from sameseed.request import SamplingParams

PROMPTS = random_prompts(4, seed=4)
GREEDY = SamplingParams(max_tokens=30, seed=6, ignore_eos=True)
ASKED = [GREEDY, SamplingParams(max_tokens=30, seed=6, ignore_eos=True, **SAMPLED)]
NGRAM = (SpecConfig("ngram", num_draft_tokens=3),)


def test_vocabularies_from_files(tmp_path: Path) -> None:
    path = tmp_path / "ids"
    assert read_vocabulary("7", 300).tolist() == list(range(7))
    path.write_text("[5, 2, 5]")
    assert read_vocabulary(str(path), 300).tolist() == [2, 5]
    path.write_text("9\n1 4\n")
    assert read_vocabulary(str(path), 300).tolist() == [1, 4, 9]
    for text, why in (("[400]", "token ids in 0..299"), ("[]", "must list"), ("five", "cannot be read")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=why):
            read_vocabulary(str(path), 300)
    none = [(name, "cannot be read") for name in (str(tmp_path / "none"), "\u00b2", "~no-such-user/ids")]
    for name, why in [("301", "1..300 tokens"), *none]:
        with pytest.raises(ConfigError, match=why):
            read_vocabulary(name, 300)


def test_frequent_tokens() -> None:
    found = [[5, 5, 7, 9], [7, 5, 2], [1]]
    assert frequent_tokens(found, 3) == [5, 7, 1]
    assert frequent_tokens(found, 3, always=[0, 7]) == [0, 7, 5]
    assert frequent_tokens(found, 99) == [5, 7, 1, 2, 9]
    for texts_, size in (([], 3), ([[1]], 0)):
        with pytest.raises(ConfigError, match="size of at least 1, and texts"):
            frequent_tokens(texts_, size)


@pytest.mark.parametrize("method", ["draft_model", "self_quant", "cascade"])
def test_the_text_stays_and_only_these_are_guessed(pair: Pair, tmp_path: Path, method: str) -> None:
    words = sorted({t for c in run(make_engine(pair), PROMPTS, ASKED[1]) for t in c.token_ids if t % 3})
    (tmp_path / "ids.json").write_text(json.dumps(words))
    chosen: dict[str, Any] = {"below": NGRAM} if method == "cascade" else {}
    for asked in ASKED:
        plain = texts(run(make_engine(pair), PROMPTS, asked))
        engine = make_engine(pair, method, k=4, options={"vocabulary": str(tmp_path / "ids.json")}, **chosen)
        guessed: set[int] = set()
        propose = engine.drafter.propose

        def watched(*args: Any, propose: Any = propose, guessed: set[int] = guessed) -> Any:
            draft = propose(*args)
            guessed.update(draft.tokens.tolist())
            return draft

        engine.drafter.propose = watched  # type: ignore[method-assign]
        assert texts(run(engine, PROMPTS, asked)) == plain
        assert guessed and guessed <= set(words)
        assert engine.metrics.num_accepted_tokens > 5
        model = engine.drafter.runner.model  # type: ignore[attr-defined]
        assert model.weights.lm_head.shape == (len(words), 32)


def test_logits_of_the_kept_are_the_models_own(pair: Pair) -> None:
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


def test_the_command_makes_such_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
