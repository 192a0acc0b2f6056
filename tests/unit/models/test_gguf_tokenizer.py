"""Tokenizers rebuilt from GGUF files split and spell texts as their originals do."""

from itertools import pairwise

import pytest
from fixtures_gguf import LLAMA3, O200K, QWEN2, TEXTS, bpe_keys, trained, write_gguf
from fixtures_models import VARIANTS, random_tensors
from tokenizers import pre_tokenizers

from sameseed.errors import ModelLoadError
from sameseed.models.config import parse_config
from sameseed.models.gguf.tokenizer import PRE, SPACE
from sameseed.models.loader import load_tokenizer, named_tokens, read_config

RAW = {**VARIANTS["llama2"].raw, "num_hidden_layers": 1}


def write(folder, tokenizer, vocab_size=RAW["vocab_size"], arch="llama"):
    raw = {**RAW, "vocab_size": vocab_size}
    return write_gguf(folder / "model.gguf", raw, random_tensors(parse_config(raw)), arch=arch, tokenizer=tokenizer)


ORIGINALS = {
    "llama-bpe": LLAMA3,
    "smaug-bpe": LLAMA3,  # SmolLM3
    "dbrx": LLAMA3,  # Granite 4
    "gpt-4o": O200K,  # gpt-oss
    "qwen2": QWEN2,
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)],
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ],
}


@pytest.mark.parametrize("pre", ORIGINALS)
def test_byte_level_tokens_are_those_of_the_original(pre, tmp_path):
    original = trained(ORIGINALS[pre])
    if isinstance(ORIGINALS[pre], list):  # the library's own byte level already writes bytes as letters
        original.pre_tokenizer = pre_tokenizers.Sequence(ORIGINALS[pre])
    tokenizer = load_tokenizer(write(tmp_path, bpe_keys(original, pre, {})))
    for text in TEXTS:
        assert tokenizer.encode(text) == original.encode(text).ids, text
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("pre", PRE)
def test_every_way_of_cutting_loses_nothing(pre, tmp_path):
    tokenizer = load_tokenizer(write(tmp_path, bpe_keys(trained(QWEN2), pre, {})))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_template_and_ends(tmp_path):
    source = trained(QWEN2)
    size = source.get_vocab_size()
    special = {"<|begin|>": 3, "<|end|>": 3, "<|user|>": 3, "[USER]": 4, "<|eot_id|>": 3}
    keys = bpe_keys(
        source, "llama-bpe", special, bos_token_id=size, eos_token_id=size + 1, add_bos_token=True,
        chat_template="{{ bos_token }}{% for m in messages %}<|user|>{{ m.content }}{{ eos_token }}{% endfor %}",
    )  # fmt: skip
    path = write(tmp_path, keys, size + len(special))
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode("hello<|user|>there[USER]x")
    assert ids[0] == size and size + 2 in ids and size + 3 in ids
    assert tokenizer.decode(ids) == "hellothere[USER]x"  # control tokens are hidden, the user's token is shown
    chat = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert chat[:2] == [size, size + 2] and chat[-1] == size + 1
    assert read_config(path).eos_token_ids == (size + 1, size + 4)  # <|end|> by its key, <|eot_id|> by its spelling
    assert read_config(path).bos_token_id == size


@pytest.mark.parametrize(
    ("special", "keys", "ends"),
    [
        ({"<|x|>": 3, "<|y|>": 3}, {"eot_token_id": 0, "fim_sep_token_id": 1, "fim_pre_token_id": 1}, (0, 1)),
        ({"<|x|>": 3, "<|im_end|>": 3, "</s>": 4, "[EOS]": 3}, {"eos_token_id": 0, "eom_token_id": 0}, (0, 1, 3)),
        ({"<|return|>": 3, "<|end|>": 3, "<|call|>": 3}, {"eos_token_id": 0}, (0, 2)),  # a part ends with <|end|>
        ({"<|tool_response>": 3, "<turn|>": 3, "</s>": 3}, {}, (0, 1)),
        ({"<|tool_response>": 4, "<turn|>": 3, "<|im_start|>": 4}, {}, (0, 1)),  # as converters mark Gemma 4's
        ({"<|end|>": 3, "<eos>": 3}, {"eos_token_id": 10**6}, (0, 1)),
        ({"<eos>": 1, "<end_of_turn>": 1, "</s>": 1}, {}, (0, 1)),  # files of Gemma type them as words
    ],
)
def test_ends_are_named_by_keys_or_are_control_tokens(special, keys, ends, tmp_path):
    """As in llama.cpp, but for shown HTML. The ids are counted from the first special token on."""
    source = trained(QWEN2)
    size = source.get_vocab_size()
    found = bpe_keys(source, "qwen2", special, **{key: size + at for key, at in keys.items()})
    path = write(tmp_path, found, size + len(special))
    assert read_config(path).eos_token_ids == tuple(size + at for at in ends)
    named, roles = named_tokens(path)
    assert set(read_config(path).eos_token_ids) <= set(named)
    assert all(any(key in said for said in roles[size + at]) for key, at in keys.items())
    shown = load_tokenizer(path).decode([size + at for at in ends])
    assert shown == "".join(name for at, (name, kind) in enumerate(special.items()) if at in ends and kind == 4)


def test_named_templates_of_a_file(tmp_path):
    named = {"default": "x", "tool_use": "tools"}
    keys = bpe_keys(trained(QWEN2), "qwen2", {}, chat_template=[{"name": n, "template": t} for n, t in named.items()])
    assert load_tokenizer(write(tmp_path, keys)).templates == named


@pytest.mark.parametrize(
    ("pre", "said", "begins"),
    [("llama-bpe", None, True), ("gpt-2", None, False), ("gpt-2", True, True), ("gemma4", False, True)],
)
def test_a_text_begins_with_bos_where_the_file_or_its_family_says_so(pre, said, begins, tmp_path):
    """Files of Gemma 4 may deny it; such a model needs it all the same."""
    source = trained(QWEN2)
    more = {} if said is None else {"add_bos_token": said}
    more |= {"tokenizer_model": pre} if pre == "gemma4" else {}
    keys = bpe_keys(source, pre, {"<s>": 3}, bos_token_id=source.get_vocab_size(), **more)
    ids = load_tokenizer(write(tmp_path, keys)).encode("a")
    assert (ids[0] == source.get_vocab_size()) == begins


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
WORDS = {
    SPACE: -1000, "a": -1001, "b": -1002, "c": -1003, "é": -1004, "ab": -1, "bc": -2, "abc": -3, f"{SPACE}a": -4,
    f"{SPACE}ab": -5, "cc": -6, f"{SPACE}{SPACE}": -7,
}  # fmt: skip


def spm(writer):
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*PIECES, *WORDS, "[INST]"])
    writer.add_token_scores([0.0] * len(PIECES) + [float(s) for s in WORDS.values()] + [0.0])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(WORDS), 4])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def merged(text):
    """sentencepiece's rule: merge the two neighbours with the best score, the leftmost of equals, again and again."""
    parts = list(SPACE + text.replace(" ", SPACE))
    while True:
        pairs = [(WORDS[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in WORDS]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [q for p in parts for q in ([p] if p in WORDS else [f"<0x{b:02X}>" for b in p.encode()])]


@pytest.mark.parametrize("text", ["abc", "a b c", "abcabc cc", "ab  abc", "bcbc", "é", "x", "aé漢b", "ccc", " a", ""])
def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(text, tmp_path):
    tokenizer = load_tokenizer(write(tmp_path, spm))
    ids = tokenizer.encode(text)
    assert [tokenizer.token(i) for i in ids] == ["<s>", *(merged(text) if text else [])]
    assert tokenizer.decode(ids) == text


def test_sentencepiece_knows_its_special_tokens(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path, spm))
    assert tokenizer.special == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.token(tokenizer.encode("ab[INST]ab")[2]) == "[INST]"
    tokenizer = load_tokenizer(write(tmp_path, spm, arch="phi3"))  # its tokens take spaces along; no key says so
    assert tokenizer.encode("[INST] \n ab</s>\nab") == tokenizer.encode("[INST]ab</s>ab")
    assert tokenizer.encode("ab<s> ab") != tokenizer.encode("ab<s>ab")


def test_an_unknown_way_of_cutting_is_named_and_none_noticed(tmp_path, caplog):
    keys = bpe_keys(trained(QWEN2), "deepseek-llm", {})
    with pytest.raises(ModelLoadError) as caught:
        load_tokenizer(write(tmp_path, keys))
    for word in ("deepseek-llm", "llama-bpe", "qwen2", "Hugging Face folder"):
        assert word in str(caught.value)
    older = write(tmp_path, lambda writer: (keys(writer), writer.kv_data[0].pop("tokenizer.ggml.pre")))
    assert load_tokenizer(older).encode("ab") and "convert it again" in caplog.text


def broken(name, value):
    def keys(writer):
        writer.add_tokenizer_model("llama" if name == "scores" else "gpt2")
        writer.add_tokenizer_pre("gpt-2")
        values = {"token_list": ["a", "b", "ab"], "token_merges": ["a b"], "token_types": [1, 1, 1]} | {name: value}
        for key, entry in values.items():
            if entry is not None and key != "scores":
                getattr(writer, f"add_{key}")(entry)
        if name == "scores":
            writer.add_token_scores(value)
        if name == "bos_token_id":
            writer.add_bool("tokenizer.ggml.add_bos_token", True)

    return keys


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("token_merges", None, "needs merges"), ("token_merges", ["ab"], "not two pieces"),
        ("token_merges", ["a x"], "cannot be rebuilt"), ("token_types", [1, 1], "token_type does not fit"),
        ("token_list", None, "no token"), ("bos_token_id", 7, "bos token 7"), ("scores", [1.0], "scores does not fit"),
    ],
)  # fmt: skip
def test_tokenizers_that_contradict_themselves(name, value, word, tmp_path):
    with pytest.raises(ModelLoadError, match=word):
        load_tokenizer(write(tmp_path, broken(name, value)))


def test_spellings_that_occur_twice(tmp_path):
    """In texts the first token of a spelling is used; the others still have distinct names."""
    source = trained(QWEN2)
    keys = bpe_keys(source, "qwen2", {"[PAD]": 5})

    def twice(writer):
        keys(writer)
        tokens = writer.kv_data[0]["tokenizer.ggml.tokens"].value
        tokens[-1] = tokens[0]

    tokenizer = load_tokenizer(write(tmp_path, twice))
    assert tokenizer.vocab_size == source.get_vocab_size() + 1
    assert isinstance(tokenizer.token(source.get_vocab_size()), str)
