"""Writes a tuned profile as TOML, with comments that say in words what each section means; `Tuned.read` reads it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sameseed.errors import ConfigError
from sameseed.store import replacing
from sameseed.tuned import TABLE_END, TUNED_SCHEMA, Tuned

WORDS = {
    "machine": "Measured on this machine. On another one the file is refused: costs differ (--force-profile takes it).",
    "model": "The target, and a digest of its weights. For other weights the file is refused.",
    "scope": "The texts and loads that this choice was measured for. Beyond them a warning is given, and the policy "
    '"goodput" decides how much is drafted.',
    "chosen": "What won. The names are those of `sameseed serve`'s flags; a flag that is given wins over its line.",
    "chosen.by_batch": "Draft tokens for each sequence, by sequences at once; 0 is plain decoding. For engines that "
    "want such a table; sameseed's own policy goodput decides by itself.",
    "predicted": "What costs and acceptance promised, with 80 % intervals. error: predicted over measured, "
    "less 1. grade: paper (bytes alone) or profiled (measured costs).",
    "measured": "What real runs gave, interleaved with plain decoding, with 80 % intervals.",
    "quality": "Perplexity of the chosen formats over that of the checkpoint's own weights, with a 95 % interval.",
    "acceptance": "How often the draft's token at each place is the target's own choice.",
    "rejected": "What else was tried. why: slower, first token, memory, late (a bound was missed), quality, dominated "
    "(worse by prediction), time (none was left), or impossible. "
    "speed: its tokens/s over those of what was chosen.",
}


def write(tuned: Tuned, path: Path) -> None:
    """Write the file at `path`, whole or not at all. Raises ConfigError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(text(tuned).encode())
    except OSError as error:
        raise ConfigError(f"cannot write the profile to {path} ({error.strerror}); choose another with -o") from None


def text(tuned: Tuned) -> str:
    """The profile as TOML text; unset and empty values are left out, because reading gives their defaults."""
    table, chosen = asdict(tuned), tuned.chosen
    lines = ["# What `sameseed tune` chose. Use it: sameseed serve --profile FILE, or LLM(profile=FILE)."]
    lines += _rows({"schema": TUNED_SCHEMA, "date": tuned.date, "commit": tuned.commit})
    del table["chosen"]["by_batch"]
    # Ranges of the table by batch, such as "3-8" = 2; the last one has no end.
    ranges = chosen.ranges() if chosen.by_batch else []
    table["chosen.by_batch"] = {f"{a}-{'' if b == TABLE_END else b}": k for a, b, k in ranges}
    for name in WORDS:
        rows = table[name] if name == "rejected" else [table[name]]
        for i, row in enumerate(rows):
            head = f"[[{name}]]" if name == "rejected" else f"[{name}]"
            if row or name in ("machine", "model", "scope", "chosen"):
                lines += ["", *([f"# {WORDS[name]}"] if i == 0 else []), head, *_rows(row)]
    return "\n".join(lines) + "\n"


def value(found: Any) -> str:
    """A value in TOML syntax. Raises ConfigError for a type that TOML does not have."""
    if isinstance(found, bool):
        return "true" if found else "false"
    if isinstance(found, int):
        return str(found)
    if isinstance(found, float):
        return repr(found) if math.isfinite(found) else {math.inf: "inf", -math.inf: "-inf"}.get(found, "nan")
    if isinstance(found, str | Path):
        return json.dumps(str(found), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(found, list | tuple):
        return "[" + ", ".join(map(value, found)) + "]"
    if isinstance(found, Mapping):
        rows = (f"{_key(k)} = {value(v)}" for k, v in found.items() if v is not None)
        return "{ " + ", ".join(rows) + " }"
    raise ConfigError(f"a profile holds plain data, got {found!r}")


def _rows(rows: Mapping[str, Any]) -> list[str]:
    return [f"{_key(k)} = {value(v)}" for k, v in rows.items() if v is not None and v != "" and v != () and v != {}]


def _key(name: str) -> str:
    bare = name and all(c.isascii() and (c.isalnum() or c in "-_") for c in name)
    return name if bare else value(name)
