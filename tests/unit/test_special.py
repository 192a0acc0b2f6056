"""End and special tokens: from every file that names them, as transformers reads them."""

import json
import logging

import pytest
from tokenizers import AddedToken, Tokenizer as Backend, decoders, models, pre_tokenizers

from sameseed.errors import ModelLoadError
from sameseed.special import end_tokens, special_tokens
from sameseed.tokenizer import Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCAB = ["<s>", "</s>", "<|im_end|>", "<|call|>", *ALPHABET]  # the last two: ordinary tokens of tokenizer.json
SIZE = len(VOCAB)


def write(folder, **files):
    """A folder with a tokenizer that marks <s> and </s>, and more JSON files by name."""
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(VOCAB)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in VOCAB[:2]])
    backend.add_tokens([AddedToken("<|call|>", special=False)])
    backend.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def token(content, **flags):
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True} | flags
    return {"content": content, **flags}


CALL = VOCAB.index("<|call|>")
OTHER_FLAGS = {  # than in tokenizer.json
    "0": token("<s>", special=False, lstrip=True), "1": token("</s>", rstrip=True, special=False),
    str(CALL): token("<|call|>", rstrip=True, normalized=True),
}  # fmt: skip
FOLDERS = {
    "a tokenizer alone": {},
    "config": {"tokenizer_config": {"bos_token": "<s>", "eos_token": "<|im_end|>", "model_max_length": 9}},
    "config as objects": {"tokenizer_config": {"eos_token": token("</s>") | {"__type": "AddedToken"}}},
    "map": {"tokenizer_config": {}, "special_tokens_map": {"bos_token": token("<s>"), "eos_token": "<|im_end|>"}},
    "map over config": {"tokenizer_config": {"eos_token": "</s>"}, "special_tokens_map": {"eos_token": "<|im_end|>"}},
    "config lists its tokens": {
        "tokenizer_config": {"eos_token": "</s>", "added_tokens_decoder": {str(SIZE): token("<|new|>")}},
        "special_tokens_map": {"eos_token": "<|im_end|>"},
        "added_tokens": {"<|older|>": SIZE},
    },
    "added": {"tokenizer_config": {"eos_token": "<|new|>"}, "added_tokens": {"<|more|>": SIZE + 1, "<|new|>": SIZE}},
    "added, no special": {"tokenizer_config": {"added_tokens_decoder": {str(SIZE): token("new", special=False)}}},
    "extra": {"tokenizer_config": {"extra_special_tokens": ["<|new|>", "<|im_end|>"], "image_token": "<|im_end|>"}},
    "additional": {"tokenizer_config": {"additional_special_tokens": ["<|im_end|>", "<|more|>", "<|new|>"]}},
    "extra by role": {"tokenizer_config": {"extra_special_tokens": {"boi_token": "<|im_end|>"}}},
    "other flags": {"tokenizer_config": {"eos_token": "</s>", "added_tokens_decoder": OTHER_FLAGS}},
    "no flags": {"added_tokens": {"<s>": 0, "<|call|>": CALL}},
    "special after all": {"tokenizer_config": {"eos_token": "<|call|>"}},
}


@pytest.mark.parametrize("name", FOLDERS)
def test_special_tokens_are_those_of_transformers(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = write(tmp_path, **FOLDERS[name])
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    ours = Tokenizer.from_folder(folder)
    assert ours.special == theirs.special_tokens_map
    text = "a <s> b </s> <|im_end|>c<|call|> <|new|>d<|more|> new<|older|>"
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == theirs.encode(text, add_special_tokens=False)
    for skip in (True, False):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    again = Tokenizer.from_files(ours.as_files())
    assert (again.special, again.encode(text)) == (ours.special, ours.encode(text))


@pytest.mark.parametrize(
    ("files", "config", "ends"),
    [
        ({}, {"eos_token_id": 7}, {7: ["config.json"]}),
        (
            {},
            {"eos_token_id": None, "text_config": {"eos_token_id": [7, 8]}},
            {7: ["config.json: text_config"], 8: ...},
        ),
        ({"generation_config": {"eos_token_id": [9, 1]}}, {"eos_token_id": 1}, {9: ["generation_config.json"], 1: ...}),
        (FOLDERS["config"], {"eos_token_id": 1}, {1: ["config.json"], 2: ["tokenizer_config.json"]}),
        (FOLDERS["map"], {}, {2: ["special_tokens_map.json"]}),
        (FOLDERS["config lists its tokens"], {}, {1: ["tokenizer_config.json"]}),
        ({"tokenizer_config": {"eos_token": "!"}}, {}, {VOCAB.index("!"): ["tokenizer_config.json"]}),
    ],
)
def test_ends_are_the_union_of_all_files(files, config, ends, tmp_path):
    found = end_tokens(write(tmp_path, **files), config)
    assert list(found) == list(ends)
    assert all(said is ... or found[t] == said for t, said in ends.items())


def test_tokens_that_do_not_exist_are_left_out_with_a_word(tmp_path, caplog):
    strange = {"tokenizer_config": {"eos_token": "<nowhere>"}, "added_tokens": {"<|far|>": SIZE + 7}}
    folder = write(tmp_path, **strange, generation_config={"eos_token_id": ["</s>", 1]})
    with caplog.at_level(logging.WARNING):
        assert list(end_tokens(folder, {})) == [1]
        assert Tokenizer.from_folder(folder).token(SIZE + 7) is None
    said = " ".join(record.getMessage() for record in caplog.records)
    assert all(word in said for word in ("<nowhere>", "<|far|>", "'</s>'"))
    assert special_tokens(folder) == {}
    (folder / "added_tokens.json").write_text('{"x": "y"}')
    with pytest.raises(ModelLoadError, match="added token"):
        Tokenizer.from_folder(folder)
