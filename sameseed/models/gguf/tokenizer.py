"""The tokenizer of a GGUF file, rebuilt for the tokenizers library.

Two kinds are supported: "gpt2" (byte-level BPE; `pre` names the expressions that split a text into words) and "llama"
(sentencepiece's BPE: two pieces may merge if the vocabulary has the result, the best score first; with byte fallback).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer as HFTokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from sameseed.errors import ModelLoadError, say_once
from sameseed.models.config import one_of
from sameseed.models.gguf.config import CONTROL, ENDS, HTML
from sameseed.models.gguf.header import GGUFFile
from sameseed.tokenizer import Tokenizer

# How a text is split before merging: expressions, each applied to the pieces of the previous one.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START, _SIGNS = r"[^\r\n\p{L}\p{N}]?", r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*|\p{{N}}|{_SIGNS}"
_GPT4O = rf"{_START}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_START}{_UPPER}+{_LOWER}*{_ENDINGS}?|\p{{N}}{{1,3}}|{_SIGNS}"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2.removesuffix(r"|\s+"), r"\p{N}+", r"[0-9][0-9][0-9]")
# With these, a word that is a token is not split further, and a text begins with bos unless the file says otherwise.
NO_MERGES = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken", "lfm2", "midm-2.0"})
PRE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("smaug-bpe", "dbrx", *sorted(NO_MERGES - {"tekken"})), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "hunyuan", "kormo", "f2llmv2"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "mellum", "a.x-4.0"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", _GPT2)),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), (_GPT4O,)),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    "seed-coder": (_QWEN2.replace(r"+[\r\n]*", "+"),),
    "default": _DEFAULT,
}
NORMAL, UNKNOWN, USER, UNUSED, BYTE = 1, 2, 4, 5, 6  # kinds of tokens, beside CONTROL
SPACE = "\u2581"
KEEPS_SPACES = {"<unk>", "<s>", "<|endoftext|>"}  # Phi-3's other special tokens take the spaces after them along
# Keys of tokens with a role, and the names that chat templates use.
SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "separator": "sep", "mask": "mask"}
MOST_SPLITS = 10_000_000  # ways to split all tokens in two that are tried: above any real vocabulary


def read_gguf_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file. Raises ModelLoadError for one that cannot be rebuilt."""
    file = GGUFFile(path)
    file.close()  # only the header is needed
    meta = file.metadata
    tokens = meta.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelLoadError(f"{file.path} holds no tokenizer; convert the model with its tokenizer")
    model = one_of(meta.get("tokenizer.ggml.model"), ("gpt2", "llama", "gemma4"), f"{file.path}: tokenizer")
    kinds = _array(file, "token_type", len(tokens), NORMAL).copy()
    kinds[[i for i, t in enumerate(tokens) if t in ENDS and t not in HTML and kinds[i] == NORMAL]] = CONTROL
    # Names must be unique: of tokens with equal spelling (mostly padding) only the first can occur in a text.
    first: dict[str, int] = {}
    names = [t if first.setdefault(t, i) == i else f"<duplicate of a token, {i}>" for i, t in enumerate(tokens)]
    strips = {*names} - KEEPS_SPACES if (model, meta.get("general.architecture")) == ("llama", "phi3") else set[str]()
    try:
        backend = _byte_level(file, names) if model == "gpt2" else _sentencepiece(file, names, kinds)
        backend.add_tokens(
            [
                AddedToken(names[i], special=bool(kinds[i] == CONTROL), normalized=False, rstrip=names[i] in strips)
                for i in np.flatnonzero((kinds == CONTROL) | (kinds == USER)).tolist()
                if names[i]
            ]
        )
    except (ModelLoadError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the library raises plain Exception, and a panic is not even an Exception
        raise ModelLoadError(f"{file.path}: its tokenizer cannot be rebuilt ({error})") from None
    named = {f"{name}_token": meta.get(f"tokenizer.ggml.{key}_token_id") for key, name in SPECIAL.items()}
    special = {name: names[i] for name, i in named.items() if type(i) is int and 0 <= i < len(names)}
    _add_ends(file, backend, names, model)
    key = "tokenizer.chat_template"
    found = {name.removeprefix(f"{key}."): text for name, text in meta.items() if name.startswith(f"{key}.")}
    return Tokenizer(backend, {**found, **({"default": meta[key]} if key in meta else {})}, special)


def _array(file: GGUFFile, key: str, length: int, default: int) -> np.ndarray[Any, np.dtype[Any]]:
    found = file.metadata.get(f"tokenizer.ggml.{key}")
    if found is None:
        return np.full(length, default)
    if not isinstance(found, np.ndarray) or len(found) != length:
        raise ModelLoadError(f"{file.path}: tokenizer.ggml.{key} does not fit the {length} tokens")
    return found


def _byte_level(file: GGUFFile, names: list[str]) -> HFTokenizer:
    if (pre := file.metadata.get("tokenizer.ggml.pre")) is None:  # files from before May 2024
        pre = "default"
        say_once(f"{file.path}: no key says how texts are cut into words, so some may be cut wrongly; convert it again")
    one_of(pre, PRE, f"{file.path}: cutting texts into words as", "use the model's Hugging Face folder")
    vocabulary = {name: i for i, name in enumerate(names)}
    backend = HFTokenizer(models.BPE(vocab=vocabulary, merges=_merges(file), ignore_merges=pre in NO_MERGES))
    if pre in ("qwen2", "qwen35"):
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(e), "isolated") for e in PRE[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _merges(file: GGUFFile) -> list[tuple[str, str]]:
    """The merges that the file lists."""
    merges = file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ModelLoadError(f"{file.path}: its tokenizer needs merges, and the file has none; convert it again")
    pairs = [(m[:at], m[at + 1 :]) for m in merges if (at := m.find(" ", 1)) > 0]  # a piece may begin with a space
    if len(pairs) != len(merges):
        raise ModelLoadError(f"{file.path}: one of its merges is not two pieces with a space between; convert it again")
    return pairs


def _sentencepiece(file: GGUFFile, names: list[str], kinds: np.ndarray[Any, np.dtype[Any]]) -> HFTokenizer:
    vocabulary = {name: i for i, name in enumerate(names)}
    listed = file.metadata.get("tokenizer.ggml.model") == "gemma4"
    merges = _merges(file) if listed else _merges_by_score(file, names, kinds, vocabulary)
    unknown = next((names[i] for i in np.flatnonzero(kinds == UNKNOWN).tolist()), None)
    backend = HFTokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=BYTE in kinds)
    )
    usual = file.metadata.get("general.architecture") != "gemma3"
    prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", usual) is not False
    first, last = ([normalizers.Prepend(SPACE)], [decoders.Strip(" ", 1, 0)]) if prefix else ([], [])
    backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", SPACE)])
    decoder = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    backend.decoder = decoders.Sequence(decoder)
    return backend


def _merges_by_score(
    file: GGUFFile, names: list[str], kinds: np.ndarray[Any, np.dtype[Any]], vocabulary: dict[str, int]
) -> list[tuple[str, str]]:
    """Pairs of pieces that are a token together: the result with the best score first, of equal ones the lowest id.

    Some files give all tokens one score. Their ids stand in the order of the merges.
    """
    scores = _array(file, "scores", len(names), 0)
    mergeable = [i for i, kind in enumerate(kinds.tolist()) if kind in (NORMAL, UNUSED)]
    if sum(len(names[i]) for i in mergeable) > MOST_SPLITS or max((len(names[i]) for i in mergeable), default=0) > 4096:
        raise ModelLoadError(f"{file.path}: its tokens are longer than those of any vocabulary; is it one?")
    found = []
    for i in mergeable:
        name = names[i]
        for at in range(1, len(name)):
            left, right = vocabulary.get(name[:at]), vocabulary.get(name[at:])
            if left is not None and right is not None:
                found.append((-float(scores[i]), i, left, right))
    found.sort()
    return [(names[left], names[right]) for *_, left, right in found]


def _add_ends(file: GGUFFile, backend: HFTokenizer, names: list[str], model: str) -> None:
    meta = file.metadata
    begins = model in ("llama", "gemma4") or meta.get("tokenizer.ggml.pre") in NO_MERGES
    single, special = ["$A"], []
    for key, wanted in (
        ("bos", model == "gemma4" or meta.get("tokenizer.ggml.add_bos_token", begins)),  # older files deny it
        ("eos", meta.get("tokenizer.ggml.add_eos_token")),
    ):
        token = meta.get(f"tokenizer.ggml.{key}_token_id")
        if wanted is not True or type(token) is not int:
            continue
        if not 0 <= token < len(names):
            raise ModelLoadError(f"{file.path}: its {key} token {token} is none of the {len(names)} tokens")
        special.append({"id": key, "ids": [token], "tokens": [names[token]]})
        single = [key, *single] if key == "bos" else [*single, key]
    if special:
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
