"""Texts of users: files as a whole, and JSON lines of prompts, conversations or texts, whose errors name the line."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sameseed.errors import ConfigError, RequestError, SameseedError

if TYPE_CHECKING:  # the tokenizer's own files are read by `read_text`
    from sameseed.tokenizer import Tokenizer

KINDS = {"messages": list, "prompt": str, "text": str}
FORMS = {"messages": '{"messages": [{"role", "content"}, ...]}', "prompt": '{"prompt": text}', "text": '{"text": text}'}


@dataclass(frozen=True)
class Line:
    """One line: where it is, its number, its kind (a key of KINDS), the value of that key, and the whole object."""

    where: str
    number: int
    kind: str
    value: Any
    row: Mapping[str, Any]

    def encode(self, tokenizer: Tokenizer, add_generation_prompt: bool = True) -> tuple[int, ...]:
        """The line's token ids; messages are rendered by the chat template. Raises ConfigError with the place."""
        try:
            chat = self.kind == "messages"
            return tuple(tokenizer.chat(self.value, add_generation_prompt) if chat else tokenizer.encode(self.value))
        except RequestError as error:
            raise ConfigError(f"{self.where}: {error}") from None


def read_text(path: Path, what: str, remedy: str, error: type[SameseedError] = ConfigError) -> str:
    """The text of a file in UTF-8. Raises `error`, which says what cannot be read, why, and the remedy."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as fault:
        why = fault.strerror if isinstance(fault, OSError) else f"it is no UTF-8 text: {fault}"
        raise error(f"cannot read {what} from {path} ({why}); {remedy}") from None


def objects(lines: Iterable[str], path: Path) -> Iterator[tuple[int, Any]]:
    """The number and the value of each non-empty line. Raises ConfigError for a line that is not JSON."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                raise ConfigError(f"{path}:{number} is no JSON ({error}); one object a line") from None


def read_lines(path: Path, *kinds: str) -> Iterator[Line]:
    """The lines of a file. Each line is of the first of `kinds` that it has. Raises ConfigError."""
    forms = " or ".join(FORMS[kind] for kind in kinds)
    try:
        # Lines end at "\n" only: strings may hold other characters that `splitlines` treats as line ends.
        with path.open(encoding="utf-8-sig", newline="\n") as opened:
            for number, row in objects(opened, path):
                keys = row if isinstance(row, dict) else {}
                kind = next((k for k in kinds if keys.get(k) and isinstance(keys[k], KINDS[k])), None)
                if kind is None:
                    wrong = [f"{k} {reprlib.repr(keys[k])}" for k in kinds if k in keys] or sorted(keys)
                    found = ", ".join(wrong) or type(row).__name__
                    raise ConfigError(f"{path}:{number}: found {found}; write {forms}, not empty")
                yield Line(f"{path}:{number}", number, kind, row[kind], row)
    except OSError as error:
        raise ConfigError(f"cannot read {path} ({error.strerror}); give lines like {forms}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8 text ({error}); convert it first") from None
