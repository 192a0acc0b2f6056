"""Prompts: the built-in ones, or those of a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sameseed_verify import VerifyError

BUILT_IN = tuple(Path(__file__).with_name(name) for name in ("prompts.jsonl", "prompts_heldout.jsonl"))


@dataclass(frozen=True)
class Prompt:
    """A text, or the messages of a conversation."""

    id: str
    text: str | None = None
    messages: tuple[dict[str, str], ...] = ()

    @property
    def said(self) -> str:
        """The text; for a conversation, the contents of its messages, one per line."""
        return self.text if self.text is not None else "\n".join(m["content"] for m in self.messages)


def as_prompt(text: str, chat: bool) -> dict[str, Any]:
    """A text as fields of a request's body: a user message for chat, else a prompt."""
    return {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a .jsonl file ({"prompt"} or {"messages"}, optional "id"), or one per line. Raises VerifyError."""
    try:
        every = enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1)
    except (OSError, UnicodeDecodeError) as error:
        raise VerifyError(f"cannot read prompts from {path} ({error}); give a .jsonl or .txt file") from None
    if not (lines := [(n, line) for n, line in every if line.strip()]):
        raise VerifyError(f"{path} holds no prompts; write one a line")
    if path.suffix != ".jsonl":
        return [Prompt(str(n), line) for n, line in lines]
    return [_prompt(line, n, f"{path}, line {n}") for n, line in lines]


def _prompt(line: str, number: int, where: str) -> Prompt:
    try:
        row = json.loads(line)
        name = str(row.get("id", number))
        if isinstance(row.get("prompt"), str):
            return Prompt(name, row["prompt"])
        return Prompt(name, None, tuple({"role": m["role"], "content": str(m["content"])} for m in row["messages"]))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise VerifyError(f'{where}: write {{"prompt": text}} or {{"messages": [{{"role", "content"}}]}}') from None
