"""Special and end tokens of a model's folder: what reads the files that name them, as transformers does."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from sameseed.errors import ModelLoadError, say_once
from sameseed.lines import read_text

CONFIG, TOKENIZER, GENERATION = "tokenizer_config.json", "tokenizer.json", "generation_config.json"
MAP, ADDED = "special_tokens_map.json", "added_tokens.json"
TEMPLATES = "additional_chat_templates"  # a folder of further templates, by name
EXTRA = ("extra_special_tokens", "additional_special_tokens")  # special tokens without a role
_read = partial(read_text, what="what a tokenizer needs", remedy="download it again", error=ModelLoadError)


class TokenizerFiles:
    """The files beside a folder's tokenizer.json. Methods and attributes raise ModelLoadError for a damaged file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_object(folder / CONFIG)
        # As in transformers: where tokenizer_config.json lists the added tokens, the two older files are not read.
        older = "added_tokens_decoder" not in self.config
        named = read_object(folder / MAP) if older else {}
        both = [(CONFIG, self.config), (MAP, named)]
        # By role ("eos_token"): the token's text, and the file that names it.
        self.names = {
            role: (text, file)
            for file, entries in both
            for role, value in [*_object(entries.get(EXTRA[0])).items(), *entries.items()]
            if (role.endswith("_token") or role not in entries) and (text := _content(value))
        }
        extra = [value for _, entries in both for key in EXTRA for value in _list(entries.get(key))]
        self.extra = list(dict.fromkeys(filter(None, map(_content, extra))))
        self.special = {text for text, _ in self.names.values()} | set(self.extra)
        self.added: list[tuple[int, str, Mapping[str, Any]]] = []  # declared beside tokenizer.json: id, text, its flags
        if older:
            found = [(i, text, dict[str, Any]()) for text, i in read_object(folder / ADDED).items()]
        else:
            found = [(i, _content(v), _object(v)) for i, v in _object(self.config["added_tokens_decoder"]).items()]
        for token, text, flags in found:
            try:
                self.added.append((int(token), text, flags))
            except (TypeError, ValueError):
                raise ModelLoadError(f"{folder}: the id {token!r} of an added token is no number") from None
        self.added.sort(key=lambda entry: entry[0])

    def templates(self) -> dict[str, str]:
        """The chat templates by name; the only one is "default"."""
        found = named_templates(self.config.get("chat_template"))
        found = found or named_templates(read_object(self.folder / "chat_template.json").get("chat_template"))  # older
        found |= {file.stem: _read(file) for file in sorted((self.folder / TEMPLATES).glob("*.jinja"))}
        if (whole := self.folder / "chat_template.jinja").exists():
            found["default"] = _read(whole)
        return found

    def token_id(self, text: str) -> int | None:
        """The id of a token, or None. Reads as little of tokenizer.json, often 10 MB, as will do."""
        listed, _, after = self._tokenizer.partition('"added_tokens"')
        try:
            start = after.index("[")
            entries = json.JSONDecoder().raw_decode(after, start)[0] if listed else []
            known = {e.get("content"): e.get("id") for e in entries if isinstance(e, dict)}
            known |= {name: i for i, name, _ in self.added if name not in known}
            if text not in known:
                model = json.loads(self._tokenizer).get("model") or {}
                vocabulary = model.get("vocab") or {}
                known = vocabulary if isinstance(vocabulary, dict) else {p[0]: i for i, p in enumerate(vocabulary)}
            found = known.get(text)
        except (ValueError, RecursionError, AttributeError, TypeError, LookupError):
            return None  # who loads the tokenizer says what is wrong with it
        return found if type(found) is int else None

    @cached_property
    def _tokenizer(self) -> str:
        path = self.folder / TOKENIZER
        return _read(path) if path.exists() else ""


def special_tokens(folder: Path) -> dict[int, list[str]]:
    """The ids of a folder's special tokens with a role, with the roles and the files that name them."""
    files, found = TokenizerFiles(folder), dict[int, list[str]]()
    for role, (text, file) in files.names.items():
        if (token := files.token_id(text)) is not None:
            found.setdefault(token, []).append(f"{role.removesuffix('_token')}, {file}")
    return found


def end_tokens(folder: Path, config: Mapping[str, Any]) -> dict[int, list[str]]:
    """The ids of a folder's end tokens, with the files that name them. `config`: its config.json.

    The union of generation_config.json, config.json (its text_config too) and the tokenizer's eos_token, as in vLLM,
    SGLang and mlx-lm. Raises ModelLoadError.
    """
    found: dict[int, list[str]] = {}
    text, size = config.get("text_config"), config.get("vocab_size")
    size = size if type(size) is int else sys.maxsize
    for source, value in (
        (GENERATION, read_object(folder / GENERATION).get("eos_token_id")),
        ("config.json", config.get("eos_token_id")),
        ("config.json: text_config", text.get("eos_token_id") if isinstance(text, dict) else None),
    ):
        given = [token for token in (value if isinstance(value, list) else [value]) if token is not None]
        known = [token for token in given if type(token) is int and 0 <= token < size]
        for token in known:
            found.setdefault(token, []).append(source)
        if left_out := [token for token in given if token not in known]:
            say_once(f"{folder}: left out the end tokens {left_out} of {source}, beyond the model's {size}")
    files = TokenizerFiles(folder)
    if "eos_token" in files.names:
        name, source = files.names["eos_token"]
        if (own := files.token_id(name)) is not None:
            found.setdefault(own, []).append(source)
        elif (folder / TOKENIZER).exists():
            say_once(f"{folder}: left out the end token {name!r} of {source}, which the tokenizer lacks")
    return found


def named_templates(value: object) -> dict[str, str]:
    """Chat templates by name: from one text, from a list of {"name", "template"}, or from an object."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        value = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
    pairs = value.items() if isinstance(value, dict) else ()
    return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object of a file; empty if there is no such file. Raises ModelLoadError."""
    if not path.exists():
        return {}
    try:
        return _object(json.loads(_read(path)))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON ({error}); download it again") from None


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else []


def _content(value: object) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""
