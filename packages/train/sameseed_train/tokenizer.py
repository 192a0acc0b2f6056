"""The tokenizer stage: byte-level BPE with a chat template, written in the Hugging Face layout."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from sameseed.errors import ConfigError

BEGIN, END, USER, ASSISTANT, SYSTEM, PAD = "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|pad|>"
SPECIAL = (PAD, BEGIN, END, SYSTEM, USER, ASSISTANT)

# Every digit is a piece of its own, so that numbers have one spelling. A line break includes the indentation after it.
PIECES = r"'(?:[sdmt]|ll|re|ve)\b|[\r\n]+[ \t]*| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|[ \t]+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('roles are system, user and assistant, not ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'].strip() + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of `vocab_size` entries. It contains all 256 bytes, so every string round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, begin)]
    )
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a special token. Raises ConfigError where the tokenizer lacks it."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ConfigError(f"the tokenizer has no {token}; delete tokenizer.json and train it again")
    return int(found)


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_positions: int) -> None:
    """Write tokenizer.json and the small configuration files that `transformers` and sameseed read with it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": BEGIN, "eos_token": END, "pad_token": PAD}
    config = {
        "add_bos_token": True,
        "added_tokens_decoder": {i: t.__getstate__() for i, t in tokenizer.get_added_tokens_decoder().items()},
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "special_tokens_map.json").write_text(json.dumps(names, indent=2) + "\n", encoding="utf-8")
