"""Outlook: the speed of rounds with fixed draft lengths, from costs and chances by place, in 80 % intervals."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path

from sameseed.cost.round import NOTHING, PAYS, PlaceRates, Proposal, RoundCost, expected
from sameseed.errors import ConfigError
from sameseed.tuned import TunedFigure

LENGTHS = range(1, 17)  # draft tokens that are considered
ASSUMED = (0.5, 0.8)  # range of the chance that a draft token of a model or head is right, where unknown
ASSUMED_FOUND = (0.1, 0.6)  # the same for a draft token that was found in the text
SEARCH = 0.05e-3  # seconds of a search in a text: n-gram's draft time in benchmarks/results/bench.jsonl, 0.045 to 0.069
Z90 = 1.2816  # normal quantile: 80 % lie within so many standard deviations
UNIFORM = 0.4 / Z90  # standard deviations of a normal draw whose 80 % lie where those of a uniform one do, by its range
USUAL = 16  # rows at which a pass is off by a spread more than one row; it grows with the logarithm of rows


@dataclass(frozen=True)
class AcceptChances:
    """Chance that each place of a draft is right where all before were; the last one repeats."""

    low: tuple[float, ...]  # ends of their range
    high: tuple[float, ...]
    source: str  # in words
    assumed: bool = False  # they come from no file and no measurement

    def at(self, place: float) -> PlaceRates:
        """The chances at a place of their range: 0 is low, 1 is high."""
        return PlaceRates([low + place * (high - low) for low, high in zip(self.low, self.high, strict=True)])


def read_acceptance(text: str | None, usual: tuple[float, float] = ASSUMED) -> AcceptChances:
    """Chances from a number or a range ("0.7", "0.6,0.8"), or from a JSON file with `conditional_accept_rates`.

    `ReplayRates.as_dict()` and ModelOpt's speculation_profile.json have this form. None: `usual` is assumed. Raises
    ConfigError.
    """
    if text is None:
        return AcceptChances(usual[:1], usual[1:], f"assumed: {usual[0]} to {usual[1]} a token", True)
    try:
        given = [float(x) for x in text.split(",")]
    except ValueError:
        return _from_file(Path(text))
    if len(given) > 2 or not all(0.0 <= x <= 1.0 for x in given) or given != sorted(given):
        raise ConfigError(f"--acceptance takes a chance in 0..1, a range like 0.6,0.8, or a file, got {text!r}")
    return AcceptChances((given[0],), (given[-1],), f"given: {text} a token")


def _from_file(path: Path) -> AcceptChances:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        rates = [float(x) for x in data["conditional_accept_rates"]]
        count = float(data.get("num_rounds") or data.get("measurement_conditions", {}).get("num_samples") or 100)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} holds no acceptance ({error!r}): it wants a JSON object with conditional_accept_rates, as "
            "speculation_profile.json"
        ) from None
    if not rates or not all(0.0 <= x <= 1.0 for x in rates):
        raise ConfigError(f"{path}: conditional_accept_rates must be chances in 0..1, one at least")
    low, high, alive = [], [], max(1.0, count)
    for rate in rates:
        # A uniform draw over 1.6 standard errors to both sides has 80 % within 1.28.
        off = 1.6 * math.sqrt(max(rate * (1 - rate), 0.25 / alive) / alive)
        low.append(max(0.0, rate - off))
        high.append(min(1.0, rate + off))
        alive = max(1.0, alive * rate)
    return AcceptChances(tuple(low), tuple(high), f"{path}, {count:.0f} rounds or samples")


@dataclass(frozen=True)
class DraftPlan:
    """A draft: its proposals, and its acceptance."""

    text: str
    steps: Proposal
    acceptance: AcceptChances
    weights: int = 0  # bytes
    row: int = 0  # bytes of a row of its cache
    passing: int = 0  # bytes of a pass
    grade: str | None = None  # of the proposals' costs; None for a search in a text, which costs next to nothing
    spread: float = 0.0  # of these costs


@dataclass(frozen=True)
class DraftSpeed:
    """Predicted speed of a draft at a batch size, all sequences together, at its best length, which may not pay."""

    draft: str
    batch: int
    num_draft_tokens: int
    pays: bool
    tokens_per_s: TunedFigure
    speedup: TunedFigure
    tokens_per_round: TunedFigure
    draft_share: float


def figure(value: float, grade: str, *offs: float) -> TunedFigure:
    """A figure with its 80 % interval; `offs`: independent standard deviations of its logarithm."""
    off = math.exp(Z90 * math.hypot(*offs))
    return TunedFigure(value, value / off, value * off, grade)


def prompt_figure(cost: RoundCost, tokens: int) -> TunedFigure:
    """Seconds of the passes over a prompt."""
    return figure(cost.prompt(tokens), cost.grade, cost.spread, cost.spread * _long(tokens))


def _long(rows: float) -> float:
    return math.log(max(rows, 1.0)) / math.log(USUAL)


def speeds(cost: RoundCost, drafts: Seq[DraftPlan], batches: Seq[int], context: int) -> tuple[DraftSpeed, ...]:
    """Plain decoding, and each draft at its best length (most tokens/s), at each batch size."""
    found = []
    for batch in batches:
        plain = expected(cost, NOTHING, 0, batch, context).tokens_per_s
        level, one = (cost.spread, cost.spread * _long(batch)), TunedFigure(1.0, 1.0, 1.0, cost.grade)
        found.append(DraftSpeed("none", batch, 0, True, figure(plain, cost.grade, *level), one, one, 0.0))
        for draft in drafts:
            low, middle, high = (draft.acceptance.at(place) for place in (0.0, 0.5, 1.0))
            whole = replace(cost, levels=(draft.steps,))
            x = max((expected(whole, middle, k, batch, context) for k in LENGTHS), key=lambda x: x.speedup)
            ends = [expected(whole, rates, x.k, batch, context).tokens for rates in (low, high)]
            chance = UNIFORM * math.log(ends[1] / ends[0])
            # The target's longer pass and the draft's steps are off, each by its share of the round's time.
            offs = (cost.spread * _long(1 + x.k) * x.target / x.seconds, draft.spread * x.draft / x.seconds, chance)
            grade = cost.grade if draft.grade in (None, cost.grade) else "paper"
            speedup, tokens_per_s = figure(x.speedup, grade, *offs), figure(x.tokens_per_s, grade, *level, *offs)
            mean = figure(x.tokens, "assumed" if draft.acceptance.assumed else "measured", chance)
            share = x.draft / x.seconds
            found.append(DraftSpeed(draft.text, batch, x.k, x.speedup > PAYS, tokens_per_s, speedup, mean, share))
    return tuple(found)
