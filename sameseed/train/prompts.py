"""Held-out prompts: JSON lines with `id`, `domain` and either `prompt` or chat `messages`."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sameseed.train.data import Document
from sameseed.train.tokenizer import ASSISTANT, BEGIN, END, USER, token_id

TEXT_CHARACTERS = (160, 400)  # of a plain-text prompt, cut at a line or word end
CHAT_CHARACTERS = 900  # a longer question would leave too little of the trained context for its answer


def prompt_record(document: Document, number: int, rng: random.Random) -> dict[str, Any] | None:
    """A prompt of one held-out document, or None where it is too long."""
    record = {"id": f"{document.domain}-{number:03}", "domain": document.domain}
    if document.turns:
        if len(document.turns[0][1]) > CHAT_CHARACTERS:
            return None
        return {**record, "messages": [{"role": "user", "content": document.turns[0][1]}]}
    length = rng.randrange(*TEXT_CHARACTERS)
    starts = [i + 2 for i in range(len(document.text) - 2000) if document.text[i : i + 2] == "\n\n"]
    start = rng.choice([0, *starts])
    text = document.text[start : start + length]
    for mark in ("\n", " "):
        cut = text.rfind(mark)
        if cut > length // 2:
            return {**record, "prompt": text[:cut]}
    return {**record, "prompt": text}


def held_out_prompts(documents: list[Document], per_domain: dict[str, int], seed: int) -> list[dict[str, Any]]:
    """At most `per_domain` prompts of each domain; plain documents may give several, at different places."""
    rng = random.Random(seed)
    by_domain: dict[str, list[Document]] = defaultdict(list)
    for document in documents:
        by_domain[document.domain].append(document)
    records: list[dict[str, Any]] = []
    for domain, wanted in per_domain.items():
        pool = by_domain[domain]
        rng.shuffle(pool)
        seen: dict[str, dict[str, Any]] = {}
        for attempt in range(3 * wanted):
            if len(seen) == wanted or (attempt >= len(pool) and pool and pool[0].turns) or not pool:
                break
            record = prompt_record(pool[attempt % len(pool)], len(seen), rng)
            if record is not None:
                seen.setdefault(str(record.get("prompt") or record["messages"]), record)
        records += seen.values()
    return records


def write_prompts(records: list[dict[str, Any]], path: Path) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The inverse of `write_prompts`."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def encode_prompt(tokenizer: Tokenizer, record: dict[str, Any]) -> list[int]:
    """Token ids of a prompt record, as the chat template (or the begin token and the text) gives them."""
    ids = [token_id(tokenizer, BEGIN)]
    if "prompt" in record:
        return ids + list(tokenizer.encode(record["prompt"], add_special_tokens=False).ids)
    for message in record["messages"]:
        ids.append(token_id(tokenizer, USER if message["role"] == "user" else ASSISTANT))
        ids += tokenizer.encode(message["content"].strip(), add_special_tokens=False).ids
        ids.append(token_id(tokenizer, END))
    return [*ids, token_id(tokenizer, ASSISTANT)]
