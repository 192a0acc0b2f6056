"""Outlook: the speed of rounds with drafts, from times of passes and chances of acceptance, with intervals.

Draft lengths are fixed, and a chance depends on the place in the draft alone. So means suffice, and no text is needed.
`simulate` walks rounds of real texts instead.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sameseed.errors import ConfigError
from sameseed.plan.cost import Floats
from sameseed.plan.times import Times
from sameseed.tuned import TABLE_END, TunedFigure

LONGEST = 16  # draft tokens of the longest draft considered
PAYS = 1.02  # speed-up over plain decoding from which a length is advised
ASSUMED = (0.5, 0.8)  # range of the chance that a draft token of a model or head is right, where unknown
ASSUMED_FOUND = (0.1, 0.6)  # the same for a draft token that was found in the text
# Seconds outside the models in a round, their spread, and seconds of a search in a text: overhead_ms_per_round and the
# n-gram's draft time in benchmarks/results/bench.jsonl (0.22 to 1.0 ms, median 0.35; 0.045 to 0.069 ms).
GAP, GAP_SPREAD, SEARCH = 0.35e-3, 0.5, 0.05e-3
DRAWS = 400
USUAL = 16  # rows at which the spread of long passes applies; it grows with the logarithm of rows


@dataclass(frozen=True)
class AcceptChances:
    """Chance, from `low` to `high`, that each place of a draft is right where all before were; the last chance repeats.

    `source`: where the chances come from, in words; `assumed`: they come from no file and no measurement.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    source: str
    assumed: bool = False

    def tokens(self, at: Floats) -> Floats:
        """Expected tokens of a round [n, LONGEST + 1] with 0, 1, ... draft tokens; `at` [n]: 0 is low, 1 is high."""
        places = np.minimum(np.arange(LONGEST), len(self.low) - 1)
        low, high = np.array(self.low)[places], np.array(self.high)[places]
        alive = np.cumprod(low + at[:, None] * (high - low), axis=1)
        return np.concatenate([np.ones((len(at), 1)), 1.0 + np.cumsum(alive, axis=1)], axis=1)


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
    """A draft: what a step of it costs (`times`; None: a search in the text), and what it takes in memory.

    `start_s`: seconds of a sequence's proposal beside its steps; `at_once`: a draft of any length is one pass.
    """

    text: str
    times: Times | None
    acceptance: AcceptChances
    weights: int = 0
    row: int = 0
    start_s: float = 0.0
    at_once: bool = False


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


class Rounds:
    """Random draws of what a round takes and brings; the first draw is the central estimate."""

    def __init__(self, target: Times, context: int, gap: float, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.target, self.context = target, context
        self.z = np.vstack([np.zeros(5), rng.standard_normal((DRAWS, 5))])
        self.at = np.concatenate([[0.5], rng.uniform(size=DRAWS)])
        self.gap = gap * np.exp(GAP_SPREAD * self.z[:, 4])

    def passes(self, batch: int, new_tokens: int) -> Floats:
        """Seconds of a pass of the target [n], one for each draw."""
        return self.scattered(self.target.seconds(batch, new_tokens, self.context), batch * new_tokens)

    def scattered(self, seconds: float, rows: int, spread: tuple[float, float] | None = None) -> Floats:
        """Seconds of a target pass over `rows` rows [n], varied by the spread of the target's times, or by `spread`."""
        level, shape = spread or self.target.spread
        found: Floats = seconds * np.exp(level * self.z[:, 0] + shape * self.z[:, 1] * math.log(rows) / math.log(USUAL))
        return found

    def steps(self, draft: DraftPlan, batch: int, new_tokens: int = 1) -> Floats:
        """Seconds of one pass of a draft [n]; half of the variance is shared with target times of the same grade."""
        if draft.times is None:
            return np.zeros(len(self.z))
        level, shape = draft.times.spread
        off = self.z[:, 2]
        if draft.times.grade == self.target.grade:
            off = (self.z[:, 0] + off) / math.sqrt(2.0)
        off = level * off + shape * self.z[:, 3] * math.log(batch) / math.log(USUAL)
        found: Floats = draft.times.seconds(batch, new_tokens, self.context) * np.exp(off)
        return found

    def _drafting(self, draft: DraftPlan, batch: int, length: int, decided: float) -> Floats:
        """Seconds of the passes for a draft of `length` tokens [n].

        `decided`: tokens of a round, which a draft that is one pass (`at_once`) reads first.
        """
        if length and draft.at_once:
            return self.steps(draft, batch, round(decided) + length - 1)
        return length * self.steps(draft, batch)

    def speedups(self, draft: DraftPlan, batch: int) -> tuple[Floats, Floats, Floats]:
        """Tokens of a round, speed-up, and the draft's share of the time, all [n, LONGEST + 1], by draft length."""
        tokens = draft.acceptance.tokens(self.at)
        plain = self.passes(batch, 1) + self.gap
        steps = np.stack([self._drafting(draft, batch, k, tokens[0, k]) for k in range(LONGEST + 1)], axis=1)
        start = batch * (SEARCH if draft.times is None else draft.start_s)
        drafting = steps + start * (np.arange(LONGEST + 1) > 0)
        whole = np.stack([self.passes(batch, 1 + k) for k in range(LONGEST + 1)], axis=1) + drafting
        whole += self.gap[:, None]
        return tokens, tokens * plain[:, None] / whole, drafting / whole

    def best(self, draft: DraftPlan, batch: int) -> int:
        """The length with the highest speed-up; 0 where none pays."""
        speed = self.speedups(draft, batch)[1][0]
        found = int(speed.argmax())
        return found if speed[found] > PAYS else 0


def figure(samples: Floats, grade: str) -> TunedFigure:
    """The first sample, with the interval that holds 80 % of the others."""
    low, high = np.quantile(samples[1:], (0.1, 0.9)) if len(samples) > 1 else (samples[0], samples[0])
    value = float(samples[0])
    return TunedFigure(value, min(value, float(low)), max(value, float(high)), grade)


def speeds(rounds: Rounds, drafts: Seq[DraftPlan], batches: Seq[int]) -> tuple[DraftSpeed, ...]:
    """Plain decoding, and each draft at its best length (most tokens/s), at each batch size."""
    found = []
    for batch in batches:
        grade = rounds.target.grade
        plain = batch / (rounds.passes(batch, 1) + rounds.gap)
        one = TunedFigure(1.0, 1.0, 1.0, grade)
        found.append(DraftSpeed("none", batch, 0, True, figure(plain, grade), one, one, 0.0))
        for draft in drafts:
            own = grade if draft.times is None or draft.times.grade == grade else "paper"
            tokens, speed, share = rounds.speedups(draft, batch)
            k = max(1, int(speed[0].argmax()))
            mean = figure(tokens[:, k], "assumed" if draft.acceptance.assumed else "measured")
            figures = figure(plain * speed[:, k], own), figure(speed[:, k], own)
            found.append(DraftSpeed(draft.text, batch, k, bool(speed[0, k] > PAYS), *figures, mean, float(share[0, k])))
    return tuple(found)


def table(rounds: Rounds, draft: DraftPlan, most: int) -> tuple[tuple[int, int, int], ...]:
    """Best lengths by number of sequences, as (first, last, length); the last row ends at TABLE_END."""
    lengths = [rounds.best(draft, b) for b in range(1, most + 1)]
    starts = [i for i in range(most) if i == 0 or lengths[i] != lengths[i - 1]]
    ends = [*starts[1:], TABLE_END]
    return tuple((i + 1, end, lengths[i]) for i, end in zip(starts, ends, strict=True))
