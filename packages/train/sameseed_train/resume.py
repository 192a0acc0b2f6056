"""The record of a run's settings beside its checkpoint, so that a run is not resumed with another recipe."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Begun:
    """The start of a run: settings by dotted name, target layers that it reads, number of texts, and their digest."""

    settings: dict[str, Any]
    layers: list[int]
    num_texts: int
    seeds: str


def settle(recipe: Any, layers: Seq[int], checkpoint: Path, seeds: Seq[Seed]) -> Begun:
    """The record of a run's start, to store with `write_record`: that of the checkpoint if there is one.

    `recipe`: a frozen dataclass; `layers`: layers of the target that are read; `seeds` of the texts, which may be more
    than in the first run. Raises ConfigError where the checkpoint is of other settings or prompts, or of more texts.
    """
    settings = {name: value for name, value in flat(dataclasses.asdict(recipe)).items() if name not in EDITABLE}
    now = Begun(settings, list(layers), len(seeds), digest_of(list(seeds)))
    if not checkpoint.exists():
        return now
    begun = read_record(record_path(checkpoint))
    then, asked = ({**b.settings, "layers": b.layers} for b in (begun, now))
    changed = [f"{n} {then[n]} (now {asked[n]})" for n in asked if n in then and then[n] != asked[n]]
    if changed:
        raise ConfigError(
            f"{checkpoint} was trained with other settings: {', '.join(changed)}; restore them to go on, or train anew "
            f"with another --out (on a resume may change: {', '.join(sorted(EDITABLE))})"
        )
    if len(seeds) < begun.num_texts:
        raise ConfigError(
            f"{checkpoint} was trained on {begun.num_texts} texts; --num-texts may grow on a resume, not fall to "
            f"{len(seeds)}: leave it, or train anew with another --out"
        )
    if digest_of(list(seeds[: begun.num_texts])) != begun.seeds:
        raise ConfigError(
            f"{checkpoint} was trained on texts of other prompts; give the same --prompts or --data to go on, or train "
            "anew with another --out"
        )
    return begun


def record_path(checkpoint: Path) -> Path:
    """The path of the record of a checkpoint's run, beside the checkpoint."""
    return checkpoint.with_name(checkpoint.name.split(".")[0] + ".run.json")


def write_record(begun: Begun, checkpoint: Path) -> None:
    """Store the start of a run, before it has a checkpoint."""
    path = record_path(checkpoint)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write((json.dumps(dataclasses.asdict(begun), indent=2) + "\n").encode())


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings flattened to dotted names, with values as JSON reads them back."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        inner = isinstance(value, dict)
        found |= flat(value, f"{prefix}{name}.") if inner else {prefix + name: json.loads(json.dumps(value))}
    return found


def read_record(path: Path) -> Begun:
    """The record of a run. Raises ConfigError for a damaged one."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return Begun(dict(table["settings"]), list(table["layers"]), int(table["num_texts"]), str(table["seeds"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error!r}); train anew, with another --out") from None
