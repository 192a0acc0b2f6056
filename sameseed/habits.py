"""Names from vLLM, transformers and llama.cpp (assets/habits.toml): the name here, or why there is none."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sameseed import fields, registry
from sameseed.errors import ConfigError, NoSuchNameError, RequestError, SameseedError
from sameseed.fields import tomllib


@dataclass(frozen=True)
class Word:
    """A name in another library. An empty Word has no effect on texts: any value is dropped."""

    here: str = ""  # the name in sameseed
    values: Mapping[str, str] = field(default_factory=dict)  # the other library's values, and ours
    same: Collection[object] = ()  # values that ask for what sameseed does anyway
    why: str = ""  # what to do instead


def _words(table: Mapping[str, Mapping[str, Any]]) -> dict[str, Word]:
    """The words of a table whose keys list names."""
    words: dict[str, Word] = {}
    for names, entry in table.items():
        values, why = _TABLES.get(entry.get("values", ""), {}), entry.get("why", "")
        why = _TABLES["reasons"][why[1:]] if why.startswith("@") else why
        words |= dict.fromkeys(names.split(", "), Word(entry.get("here", ""), values, entry.get("same", ()), why))
    return words


_TABLES = tomllib.loads((Path(__file__).parent / "assets" / "habits.toml").read_text(encoding="utf-8"))
SETTINGS, SPECULATIVE = _words(_TABLES["settings"]), _words(_TABLES["speculative"])
SAMPLING, GENERATE, REQUEST = (_words(_TABLES[name]) for name in ("sampling", "generate", "request"))
OPTIONS: Mapping[str, Mapping[str, str]] = _TABLES["options"]  # by drafter: vLLM's option name, ours
ATTRIBUTES: Mapping[str, Mapping[str, str]] = {  # by class: the other library's attribute, what to write
    "AsyncLLM": _TABLES["attributes"]["LLM"],
    **_TABLES["attributes"],
}


def translate(
    given: Mapping[str, Any], words: Mapping[str, Word], error: type[SameseedError] = ConfigError
) -> dict[str, Any]:
    """The keywords with sameseed's names. Names that are not in `words` stay unchanged, for the receiver to check.

    Raises `error`, which says what to do instead, for what sameseed does not have.
    """
    made = {name: value for name, value in given.items() if name not in words}
    for name in given.keys() & words.keys():
        word, value = words[name], given[name]
        if value is None or value in word.same or word == Word():
            continue
        if not word.here:
            raise error(f"{name}={value!r}: {word.why}")
        if made.get(word.here) is not None:
            raise error(f"{name} is called {word.here} here, and both are given; leave {name} out")
        made[word.here] = word.values.get(str(value).removeprefix("torch."), value)
    return made


def sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of SamplingParams from those of other libraries. Raises RequestError."""
    made = translate({k: v for k, v in given.items() if k != "do_sample"}, SAMPLING, RequestError)
    if (asked := given.get("do_sample")) is not None and bool(asked) != (made.get("temperature") not in (None, 0)):
        raise RequestError(f"do_sample={asked!r}: temperature=0 is greedy, above 0 it samples")
    return made


def settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of LLM (including `model` and `draft`) from those of other libraries. Raises ConfigError."""
    own = {k: str(v) if hasattr(v, "__fspath__") else v for k, v in given.items() if k != "speculative_config"}
    made, config = translate(own, SETTINGS), given.get("speculative_config")
    for name, value in ({} if config is None else _speculation(config)).items():
        if made.get(name) is not None:
            raise ConfigError(f"speculative_config says {name} too; give one of them")
        made[name] = value
    return made


def _speculation(config: Any) -> dict[str, Any]:
    """vLLM's speculative_config as settings."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"speculative_config is a dict with 'method', 'model', ..., got {config!r}")
    method, model = config.get("method"), config.get("model")
    options = OPTIONS.get(str(method), {})
    fields.check_keys(config, ("method", "model", *options, *SPECULATIVE), "speculative_config")
    if method in (None, "draft_model", "eagle", "eagle3"):
        if not model:
            raise ConfigError("speculative_config names no 'model'; give one, or a 'method' like 'ngram'")
        made = {"draft": model}
    else:
        registry.load("drafters", method)
        made = {"draft": f"{method}:{model}" if model else method}
    if chosen := {ours: config[theirs] for theirs, ours in options.items() if config.get(theirs) is not None}:
        made["draft_options"] = chosen
    return made | translate({k: v for k, v in config.items() if k in SPECULATIVE}, SPECULATIVE)


class Hinted:
    """Base of classes whose error for another library's attribute names the attribute to use here."""

    if not TYPE_CHECKING:  # else type checkers would accept any attribute

        def __getattr__(self, name: str) -> object:
            raise _no_such(self, name, f"has no attribute {name!r}")

        def __call__(self, *given: object, **more: object) -> object:
            raise _no_such(self, "__call__", "is not callable")


def _no_such(of: object, name: str, why: str) -> NoSuchNameError:
    word = ATTRIBUTES.get(type(of).__name__, {}).get(name)
    return NoSuchNameError(f"{type(of).__name__!r} object {why}" + (f"; here it is .{word}" if word else ""))
