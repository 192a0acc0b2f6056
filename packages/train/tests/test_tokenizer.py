"""Every string survives the tokenizer, and the files it writes are what `transformers` reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer

from sameseed_train.data import Document, encode
from sameseed_train.tokenizer import BEGIN, SPECIAL, save_tokenizer, train_tokenizer


def test_round_trip_of_any_text() -> None:
    tokenizer = train_tokenizer(["a small text, 12 words or fewer\n\n    indented"] * 3, 300)

    @settings(max_examples=300)
    @given(st.text())
    def holds(text: str) -> None:
        if any(token in text for token in SPECIAL):
            return
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text

    holds()


def test_plain_encoding_opens_with_the_begin_token_and_digits_stand_alone(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("12345").tokens == [BEGIN, *"12345"]


def test_chat_template_agrees_with_training(tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_tokenizer(tokenizer, tmp_path, 512)
    loaded = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    messages = [{"role": "user", "content": "What is 1 plus 2? "}]
    text = loaded.apply_chat_template(messages, tokenize=False)
    document = Document("d", "s", "", (("user", "What is 1 plus 2?"),))
    assert loaded.encode(text, add_special_tokens=False) == encode(tokenizer, document)
    assert loaded.eos_token == "<|end|>"
