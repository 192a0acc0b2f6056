"""The record of a run's settings beside its checkpoint, so that a run is not resumed with another recipe."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sameseed.errors import ConfigError
from sameseed.store import replacing
from sameseed.train.states import Seed

log = logging.getLogger("sameseed.train")

# Settings that may change before a resume: duration, learning rates, threads and batch, and the text of the card.
# `texts.num_texts` may only grow. The path of the prompts may change, but not the prompts themselves.
EDITABLE = {
    *("name", "note", "threads", "batch", "mixture", "texts.num_texts", "train.steps", "train.checkpoint_minutes"),
    *("train.optim.matrix_lr", "train.optim.lr"),
}


@dataclass(frozen=True)
class Begun:
    """The start of a run: settings by dotted name, target layers that it reads, and each lot of texts (number, digest).

    `number`: the total `num_texts` of the run that added the lot.
    """

    settings: dict[str, Any]
    layers: list[int]
    texts: list[tuple[int, str]]


def settle_texts(
    recipe: Any, layers: Seq[int], checkpoint: Path, seeds_of: Callable[[int], list[Seed]]
) -> tuple[list[list[Seed]], Begun]:
    """The lots of texts that a run trains on, and the record to store with `write_record`.

    The first lot is from the first run; a resume with a higher `num_texts` adds another. `recipe`: a frozen dataclass
    with `texts.num_texts`; `layers`: layers of the target that are read; `seeds_of(n)`: the seeds of n texts. Raises
    ConfigError where the checkpoint is of other settings or texts, or of more texts.
    """
    settings = {name: value for name, value in flat(dataclasses.asdict(recipe)).items() if name not in EDITABLE}
    number = recipe.texts.num_texts
    seeds = seeds_of(number)
    now = Begun(settings, list(layers), [(number, digest_of(seeds))])
    if not record_path(checkpoint).exists():
        if checkpoint.exists():
            log.warning(
                "%s says nothing of the recipe that it was made by: going on with this one, unchecked; if layers, "
                "formats, sizes or prompts were others, the result is wrong: then train anew, with another --out",
                checkpoint,
            )
        return [seeds], now
    try:
        lots, texts = _go_on(now, seeds, seeds_of, checkpoint)
    except ConfigError:
        if checkpoint.exists():
            raise
        return [seeds], now  # nothing was trained yet
    return lots, dataclasses.replace(now, texts=texts)


def digest_of(settings: object) -> str:
    """A short digest of settings, so that an edited recipe runs its stage again."""
    return hashlib.sha256(repr(settings).encode()).hexdigest()[:16]


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
        return Begun(dict(table["settings"]), list(table["layers"]), [(int(n), str(d)) for n, d in table["texts"]])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error!r}); train anew, with another --out") from None


def _go_on(
    now: Begun, seeds: list[Seed], seeds_of: Callable[[int], list[Seed]], checkpoint: Path
) -> tuple[list[list[Seed]], list[tuple[int, str]]]:
    """The earlier lots, checked against the record, and a new lot if there are more seeds now. Raises ConfigError."""
    begun, number = read_record(record_path(checkpoint)), now.texts[0][0]
    then, asked = ({**b.settings, "layers": b.layers} for b in (begun, now))
    changed = [f"{n} {then[n]} (now {asked[n]})" for n in asked if n in then and then[n] != asked[n]]
    if changed:
        raise ConfigError(
            f"{checkpoint} was trained with other settings: {', '.join(changed)}; restore them to go on, or train anew "
            f"with another --out (on a resume may change: {', '.join(sorted(EDITABLE))})"
        )

    last = begun.texts[-1][0]
    if number < last:
        raise ConfigError(
            f"{checkpoint} was trained on {last} texts; --num-texts may grow on a resume, not fall to {number}: leave "
            "it, or train anew with another --out"
        )
    lots: list[list[Seed]] = []
    for size, digest in begun.texts:
        lots.append(added(lots, seeds if size == number else seeds_of(size)))
        if digest_of(lots[-1]) != digest:
            raise ConfigError(
                f"{checkpoint} was trained on texts of other prompts; give the same --prompts or --data to go on, or "
                "train anew with another --out"
            )
    more = added(lots, seeds)
    return ([*lots, more], [*begun.texts, (number, digest_of(more))]) if more else (lots, begun.texts)


def added(lots: Seq[Seq[Seed]], seeds: list[Seed]) -> list[Seed]:
    """The seeds that the lots do not contain, at most as many as `seeds` has more than the lots together."""
    have = Counter(seed.ids for lot in lots for seed in lot)
    new = list[Seed]()
    for seed in seeds:
        have[seed.ids] -= 1
        new += [seed] if have[seed.ids] < 0 else []
    return new[: max(0, len(seeds) - sum(map(len, lots)))]
