"""The record of a run's settings beside its checkpoint, so that a run is not resumed with another recipe."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from sameseed.errors import ConfigError
from sameseed.store import replacing
from sameseed_train.states import Seed, digest_of

# Settings that may change before a resume: duration, learning rates, threads and batch, and the text of the card.
# `texts.num_texts` may only grow. The path of the prompts may change, but not the prompts themselves.
EDITABLE = {
    *("name", "note", "store", "threads", "batch", "mixture", "source", "states_gb", "texts.num_texts", "train.steps"),
    *("train.checkpoint_minutes", "train.optim.matrix_lr", "train.optim.lr"),
}


# The record of a run's start: settings by dotted name, the target's layers, number of texts, digest of their seeds.
Record = dict[str, Any]
KINDS = {"settings": dict, "layers": list, "num_texts": int, "seeds": str}


def settle(recipe: Any, layers: Seq[int], checkpoint: Path, seeds: Seq[Seed]) -> Record:
    """The record of a run's start, to store with `write_record`: that of the checkpoint if there is one.

    `recipe`: a frozen dataclass; `layers`: layers of the target that are read; `seeds` of the texts, which may be more
    than in the first run. Raises ConfigError where the checkpoint is of other settings or prompts, or of more texts.
    """
    settings = {name: value for name, value in flat(dataclasses.asdict(recipe)).items() if name not in EDITABLE}
    now: Record = {
        "settings": settings,
        "layers": list(layers),
        "num_texts": len(seeds),
        "seeds": digest_of(list(seeds)),
    }
    if not checkpoint.exists():
        return now
    begun = read_record(record_path(checkpoint))
    then, asked = ({**b["settings"], "layers": b["layers"]} for b in (begun, now))
    changed = [f"{n} {then[n]} (now {asked[n]})" for n in asked if n in then and then[n] != asked[n]]
    first = begun["num_texts"]
    if changed:
        wrong = f"with other settings: {', '.join(changed)}; restore them (may change: {', '.join(sorted(EDITABLE))})"
    elif len(seeds) < first:
        wrong = f"on {first} texts; --num-texts may grow on a resume, not fall to {len(seeds)}: leave it"
    elif digest_of(list(seeds[:first])) != begun["seeds"]:
        wrong = "on texts of other prompts; give the same --prompts or --data to go on"
    else:
        return begun
    raise ConfigError(f"{checkpoint} was trained {wrong}, or train anew with another --out")


def record_path(checkpoint: Path) -> Path:
    """The path of the record of a checkpoint's run, beside the checkpoint."""
    return checkpoint.with_name(checkpoint.name.split(".")[0] + ".run.json")


def write_record(begun: Record, checkpoint: Path) -> None:
    """Store the start of a run, before it has a checkpoint."""
    path = record_path(checkpoint)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write((json.dumps(begun, indent=2) + "\n").encode())


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings flattened to dotted names, with values as JSON reads them back."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        inner = isinstance(value, dict)
        found |= flat(value, f"{prefix}{name}.") if inner else {prefix + name: json.loads(json.dumps(value))}
    return found


def read_record(path: Path) -> Record:
    """The record of a run. Raises ConfigError for a damaged one."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return {name: kind(table[name]) for name, kind in KINDS.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error!r}); train anew, with another --out") from None
