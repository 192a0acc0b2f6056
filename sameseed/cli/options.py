"""Flags from dataclasses: fields of EngineConfig, SpecConfig, CacheConfig and SamplingParams, with their help texts.

Values are checked by the dataclass, as everywhere. This module does not import torch, so that help answers at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, fields, make_dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import arg

from sameseed import hub, registry
from sameseed.config import OWNS, CacheConfig, EngineConfig, SpecConfig, draft_text, owns, parse_draft, parse_options
from sameseed.errors import ConfigError, RegistryError, RequestError, nearest
from sameseed.fields import check_ranges, flag, hints
from sameseed.models.config import EMBEDDED, own_draft
from sameseed.request import SamplingParams

T = TypeVar("T")
Member = tuple[str, Any, Any, str]  # name, type, default, help


def annotated(kind: Any, *notes: Any) -> Any:
    """`Annotated[kind, *notes]`, for a type that is known only at run time."""
    made: Any = Annotated
    return made[(kind, *notes)]


def option(metavar: str | None = None) -> Any:
    """Help settings of a field that may stay unset: its metavar, and no "(default: None)"."""
    return arg(metavar=metavar, help_behavior_hint="")


# Flags that stand for no single field of a dataclass.
CHOICE_HELP = {
    "model": "the target: a GGUF file, a folder, a hub id like org/name, 'smollm2' or 'embedded'",
    "draft": "none, a drafter (`sameseed info`), a draft model or head (file, folder, hub id, coder-head), "
    "'suffix + MODEL' or 'ngram > MODEL'; auto: a draft made for the model, else suffix",
    "draft_vocabulary": "tokens that a draft's LM head may draft: a number of the target's most frequent, auto (as "
    "many as pay), a file of ids, or all; unset: all",
    "draft_options": "options of the drafter as JSON, e.g. '{\"max_ngram\": 4}'",
}
ALIASES = {"num_draft_tokens": ["--k"]}
METAVARS = {int: "N", float: "X", str: "TEXT", tuple[int, ...]: "ID", tuple[str, ...]: "TEXT"}
RENAMED = {(SpecConfig, "format"): "draft_format", (CacheConfig, "format"): "kv_format"}


def _flags(title: str, doc: str, members: Iterable[Member]) -> type[Any]:
    """A dataclass of flags from (name, type, default, help) each."""
    made = []
    for name, kind, default, text in members:
        metavar = next((METAVARS[k] for k in (kind, *get_args(kind)) if k in METAVARS), None)
        # A flag that may stay unset has no default to show; its help text says what happens then.
        hint = "(repeatable)" if isinstance(default, tuple) else "" if default in (None, False, "{}") else None
        note = arg(help=text, aliases=ALIASES.get(name, ()), metavar=metavar, help_behavior_hint=hint)
        marks: tuple[Any, ...] = (note, tyro.conf.UseAppendAction) if isinstance(default, tuple) else (note,)
        made.append((name, annotated(kind, *marks), field(default=default)))
    cls = make_dataclass(title, made, frozen=True)
    cls.__doc__ = doc
    return cls


def engine_flags(defaults: Mapping[str, Any], left_out: Seq[str] = ()) -> type[Any]:
    """The flags of CHOICE_HELP, and one for each field of SpecConfig, EngineConfig and CacheConfig that has a help."""
    given: dict[str, Any] = {"model": "embedded", "draft": "auto", "draft_options": "{}", "draft_vocabulary": ""}
    given |= {"policy": "auto", "num_draft_tokens": None, **defaults}
    left_out = (*left_out, "draft_vocabulary") if "draft" in left_out else left_out
    members: list[Member] = [(name, str, given[name], text) for name, text in CHOICE_HELP.items()]
    for cls in (SpecConfig, EngineConfig, CacheConfig):
        for f in (f for f in fields(cls) if "help" in f.metadata):
            name = RENAMED.get((cls, f.name), f.name)
            kind = int | None if name == "num_draft_tokens" else hints(cls)[f.name]
            members.append((name, kind, given.get(name, f.default), f.metadata["help"]))
    return _flags("Engine", "Models, speculation and limits.", (m for m in members if m[0] not in left_out))


def sampling_flags(defaults: Mapping[str, Any], left_out: Seq[str]) -> type[Any]:
    """A flag for each field of SamplingParams. Lists are given by repeating the flag."""
    kinds = {**hints(SamplingParams), "logit_bias": tuple[str, ...], "allowed_token_ids": tuple[int, ...]}
    given = {**defaults, "logit_bias": (), "allowed_token_ids": ()}
    named = (f for f in fields(SamplingParams) if f.name not in left_out)
    members = ((f.name, kinds[f.name], given.get(f.name, f.default), f.metadata["help"]) for f in named)
    return _flags("Sampling", "How tokens are chosen.", members)


@dataclass(frozen=True)
class EngineChoice:
    """The values of the engine's flags: `model`, and the keyword arguments of `make_config` (or LLM)."""

    model: str
    settings: dict[str, Any]


@dataclass(frozen=True)
class Parsed(Generic[T]):
    """A parsed command line: the command's own arguments, the engine's, and the sampling parameters."""

    args: T
    engine: EngineChoice
    params: SamplingParams


def parse(
    command: type[T],
    argv: Seq[str],
    prog: str,
    *,
    engine: bool = False,
    sampling: bool = False,
    defaults: Mapping[str, Any] | None = None,
    left_out: Seq[str] = (),
    axes: Mapping[str, str] | None = None,
) -> Parsed[T]:
    """Parse `argv` into `command`, a dataclass. `engine`, `sampling`: add the engine's flags, and those of sampling.

    `defaults` replaces defaults by flag name; `left_out` names flags that this command does not have; `axes` names its
    list flags that stand for one of the engine's. Bad usage prints what was wrong and exits with 2 (tyro); a bad value
    raises RequestError, ConfigError or RegistryError.
    """
    given = {**(defaults or {}), **(profile_defaults(argv) if engine else {})}
    given |= {name: (given[one],) for name, one in (axes or {}).items() if given.get(one) is not None}
    single = tyro.conf.FlagCreatePairsOff  # only the engine's flags have both forms, --x and --no-x
    own = {f.name: given[f.name] for f in fields(command) if f.name in given}  # type: ignore[arg-type]  # a dataclass
    first = ("command", annotated(command, arg(name=""), single))
    parts: list[Any] = [(*first, field(default=command(**own))) if own else first]
    if engine:
        parts.append(("engine", engine_flags(given, left_out)))
    if sampling:
        parts.append(("sampling", annotated(sampling_flags(given, left_out), single)))
    whole = make_dataclass("Arguments", parts, kw_only=True)
    text = _wrapped(inspect.cleandoc(command.__doc__ or ""))
    read: Any = tyro.cli(
        whole, args=_gathered(argv, command), prog=prog, description=text, config=(tyro.conf.OmitArgPrefixes,)
    )
    read = dataclasses.replace(read, command=at_home(read.command))
    check_ranges(read.command, flag)
    for f in fields(command):  # type: ignore[arg-type]  # a dataclass
        if f.default and getattr(read.command, f.name) == ():
            raise ConfigError(f"{flag(f.name)} is empty; give at least one value")
    flags = dataclasses.asdict(read.engine) if engine else {"model": "embedded"}
    params = _params(dataclasses.asdict(read.sampling)) if sampling else SamplingParams()
    return Parsed(read.command, _engine(flags, given.get("draft_options"), getattr(read.command, "engine", "")), params)


def at_home(args: T) -> T:
    """The same arguments, with the home folder for `~` in paths: no shell puts it there after `--out=`."""
    given = {f.name: getattr(args, f.name) for f in fields(args)}  # type: ignore[arg-type]  # a dataclass
    paths = {name: Path(os.path.expanduser(path)) for name, path in given.items() if isinstance(path, Path)}
    return dataclasses.replace(args, **paths)  # type: ignore[type-var]


def _gathered(argv: Seq[str], command: type) -> Seq[str]:
    """`argv`, with all values of a flag that takes several gathered after it: it may be given in parts."""
    lists = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name, hint in get_type_hints(command, include_extras=True).items():
        kind, *marks = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
        if tyro.conf.UseAppendAction not in marks and any(get_origin(k) is tuple for k in (kind, *get_args(kind))):
            others = [alias for mark in marks for alias in getattr(mark, "aliases", None) or ()]
            lists.add_argument(*{flag(name), f"--{name}", *others}, dest=name, nargs="*", action="extend")
    values, rest = lists.parse_known_args(argv)
    end = rest.index("--") if "--" in rest else len(rest)  # only positional words follow it
    rest[end:end] = [word for name, given in vars(values).items() for word in (flag(name), *given)]
    return rest


def _wrapped(text: str) -> str:
    """Paragraphs at most 80 columns wide, as the flags below them are. tyro keeps line breaks before a space."""
    width = min(80, shutil.get_terminal_size().columns)
    return "\n\n".join(textwrap.fill(part, width, subsequent_indent="  ") for part in re.split(r"\n\s*\n", text))


def profile_defaults(argv: Seq[str]) -> dict[str, Any]:
    """Defaults of the engine's flags from --profile, if given. Raises ConfigError for a file that is not a profile."""
    given = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    given.add_argument("--profile", nargs="?")  # without a value it is tyro that says so
    path = given.parse_known_args(argv)[0].profile
    if path is None:
        return {}
    from sameseed.tuned import Tuned

    tuned = Tuned.read(path)
    chosen = {"model": tuned.model.id, "draft": "none", **tuned.chosen.settings()}
    return {**chosen, "draft_options": json.dumps(chosen.get("draft_options", {}))}


def _engine(flags: dict[str, Any], profile_options: str | None, engine: str) -> EngineChoice:
    model = flags.pop("model")
    if "draft" in flags:
        text, vocabulary = flags["draft"], flags.pop("draft_vocabulary")
        if engine == "vllm" and text == "auto":  # a model of the hub is fetched by vLLM itself
            text = "none" if "/" in model and not os.path.exists(model) else shipped(model)[0]
            text = "none" if " + " in text else text  # vLLM drafts in one way at a time
        own = engine == "vllm" and text.partition(":")[0] in companion("vllm").OWN  # some methods only vLLM has
        flags["draft"] = _drafting_from(vocabulary, parse_draft(text) if own else draft_choice(text, model))
    if "draft_options" in flags:
        options = parse_options(given := flags["draft_options"])
        if "draft" in flags and vocabulary and '"vocabulary"' in given:
            if given != profile_options:
                raise ConfigError("--draft-options name a vocabulary beside --draft-vocabulary; give one of them")
            options = json.loads(given, object_hook=lambda level: {k: level[k] for k in level if k != "vocabulary"})
        flags["draft_options"] = options
    return EngineChoice(model, flags)


def _drafting_from(vocabulary: str, spec: SpecConfig | None) -> SpecConfig | None:
    """The same levels, with the option `vocabulary` for those with an LM head. Raises ConfigError if none has one."""
    if vocabulary in ("", "all"):
        return spec

    def reduced(level: SpecConfig) -> SpecConfig:
        has_head = level.model is not None or OWNS.get(level.method)
        return dataclasses.replace(level, options={"vocabulary": vocabulary}) if has_head else level

    if spec is None or (made := spec.with_each(reduced)) == spec:
        raise ConfigError(
            f"--draft-vocabulary {vocabulary}: draft {draft_text(spec or SpecConfig())!r} has no LM head; leave it "
            "out, or take a draft with one (--draft MODEL)"
        )
    return made


def companion(engine: str) -> ModuleType:
    """The module of another engine, as `--engine` names it. Raises ConfigError if its package is not installed."""
    if engine not in registry.names("engines"):
        raise ConfigError(f"--engine {engine} needs the package sameseed-{engine}: pip install sameseed-{engine}")
    return registry.load("engines", engine)


def _params(flags: dict[str, Any]) -> SamplingParams:
    flags["logit_bias"] = dict(map(_bias, flags["logit_bias"]))
    return SamplingParams(**flags | {"allowed_token_ids": flags["allowed_token_ids"] or None})


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise RequestError(f"--logit-bias takes TOKEN=BIAS, e.g. 42=-5, got {text!r}") from None


# Packaged head -> its target's --draft auto, and the models that drafters without a named one get, by what they own.
SHIPPED = {
    "embedded-head": ("embedded-draft", {"model": "embedded-draft", "head": "embedded-head"}),
    "smollm2-head": ("none", {"head": "smollm2-head"}),
    "coder-head": ("suffix + coder-head", {"head": "coder-head"}),
}
BY_NAME = {"embedded": "embedded-head", "embedded-target": "embedded-head", "smollm2": "smollm2-head"}


def draft_choice(draft: str, model: str) -> SpecConfig | None:
    """The value of --draft as `make_config` takes it; None: no draft. Raises RegistryError with the nearest name."""
    if draft == "auto" and (draft := shipped(model)[0]) == "none":
        draft = "suffix"  # needs no model, and goodput asks for it where that pays
    return None if draft == "none" else _checked(parse_draft(draft), model, draft)


@lru_cache
def shipped(model: str) -> tuple[str, dict[str, str]]:
    """What was made to draft for a target, as in SHIPPED. A model that is not packaged is known by its embedding."""
    own = BY_NAME.get(model) or own_draft(model)
    return SHIPPED.get(own, (own, {}))


def _checked(spec: SpecConfig, target: str, text: str) -> SpecConfig:
    """Check the models of all levels, and fill in those that the package has. Raises RegistryError for no such name."""
    name = spec.model
    if name is not None and name not in (*EMBEDDED, *hub.PACKAGED) and os.sep not in name and not os.path.exists(name):
        if name in ("none", "auto"):
            raise RegistryError(f"--draft {text!r}: 'none' and 'auto' stand alone")
        drafters, chain = registry.names("drafters"), f"{text!r}: " if name != text else ""
        hint = nearest(name, [*drafters, *EMBEDDED, "none", "auto"])
        hint += "; a path in a chain may not hold '+', '>' or brackets" if chain and os.sep in text else ""
        known = f"drafters: {', '.join(drafters)}"
        raise RegistryError(f"--draft {chain}{name!r} is no drafter, folder or hub id{hint} ({known})")
    below = tuple(_checked(b, target, text) for b in spec.below)
    if name is None and (kind := owns(spec.method)):
        name = shipped(target)[1].get(kind)
    return dataclasses.replace(spec, model=name, below=below)


def unread(args: Any, names: Collection[str], why: str) -> None:
    """Raise ConfigError for a flag among `names` that was given, though nothing reads it beside the others."""
    given = next((f.name for f in fields(args) if f.name in names and getattr(args, f.name) != f.default), None)
    if given is not None:
        raise ConfigError(f"leave out {flag(given)}: {why}")


def stdin_text(what: str) -> str:
    """All of standard input. Raises RequestError if it is a terminal, or not UTF-8. `what`: its name in the error."""
    if sys.stdin is None or sys.stdin.isatty():
        raise RequestError(f"no {what}; give it as an argument, with --file, or on standard input")
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is no UTF-8 text ({error}); convert it first") from None


def words(text: str) -> tuple[str, ...]:
    """The words of a comma-separated list."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def numbers(flag: str, text: str, kind: type[Any] = int) -> tuple[Any, ...]:
    """The numbers of a comma-separated list, the value of --`flag`. Raises ConfigError."""
    try:
        return tuple(kind(word) for word in words(text))
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise ConfigError(f"--{flag} takes {what} with commas between, e.g. 1,2,4, got {text!r}") from None
