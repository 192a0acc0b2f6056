"""A 70B target that no machine here holds: costs of a few of its layers, and what a hierarchy of drafts would gain.

After SpecMQuant's HierSpec (Zhang et al., 2025, arXiv 2505.22179): head > 8B > 70B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sameseed.measure.costs import Profile
from sameseed.measure.grid import ProfileGrid
from sameseed.measure.profiler import Profiler
from sameseed.measure.usage import Meter
from sameseed_lab.studies._setup import StudySetup
from sameseed_lab.studies._study import Table, Tell, figure

LARGE, MIDDLE, FORM = "llama-3.1-70b", "llama-3.1-8b", "w4a8-g128"
LAYERS, LONGEST = (2, 6), 8  # layers of LARGE that are measured; most tokens that MIDDLE hands on


@dataclass(frozen=True)
class DepthCell:
    """Costs of passes of LARGE and of MIDDLE, interleaved. LARGE is measured at `LAYERS` layers and extended to all."""

    name: str = "70b by layers"
    weight: float = 4.0

    def _profiler(self, setup: StudySetup) -> Profiler:
        rows = tuple(range(1, LONGEST + 2))
        draft: dict[str, Any] = {"draft": MIDDLE, "draft_formats": (FORM,)}
        grid = ProfileGrid((FORM,), rows, (256,), "auto", 0, (), setup.threads, layers=LAYERS, **draft)
        return Profiler(grid, LARGE)

    def check(self, setup: StudySetup) -> None:
        """Raise ConfigError if memory is short."""
        self._profiler(setup)

    def measure(self, setup: StudySetup, tell: Tell) -> list[dict[str, Any]]:
        """One record: a profile of LARGE, with MIDDLE as its draft."""
        meter, profiler = Meter(), self._profiler(setup)

        def report(stage: str, done: float, total: float) -> None:
            setup.progress(f"{LARGE}: {stage}", int(1000 * done / total), 1000)

        found = profiler.run(report)
        if found.interrupted:
            raise KeyboardInterrupt
        config = {"model": LARGE, "draft_model": MIDDLE, "format": FORM, "layers": list(LAYERS)}
        return [
            {**found.as_dict(), "time": found.date, "config": config, "way": None, "usage": meter.read().as_dict(1)}
        ]


@dataclass(frozen=True)
class Hierarchy:
    """The speed of head > MIDDLE > LARGE by costs.

    `plain_ms`: a plain pass of LARGE. `token_ms`: a token of MIDDLE with its head, `alone_ms`: without. `checks[k]`:
    c(k + 1) of LARGE. `tokens[k]`: tokens per round with drafts of k.
    """

    plain_ms: float
    token_ms: float
    alone_ms: float
    checks: Mapping[int, float]
    tokens: Mapping[int, float]

    def gain(self, k: int, alone: bool = False) -> float:
        """Speed-up over plain decoding of LARGE. `alone`: MIDDLE drafts without a head."""
        step = self.alone_ms if alone else self.token_ms
        return self.tokens[k] / (self.checks[k] + k * step / self.plain_ms)

    @property
    def best(self) -> int:
        """The draft length of the highest gain."""
        return max(self.checks, key=self.gain)

    def finding(self) -> str:
        """The result in a sentence."""
        k = self.best
        return (
            f"A 70B target in {FORM}, by costs ({LAYERS[0]} and {LAYERS[1]} of its layers measured, acceptance of the "
            f"draft model above): {self.plain_ms:.0f} ms a token; with drafts of {k} by an 8B model that has a head, "
            f"{self.gain(k):.2f} times plain decoding, without the head {self.gain(k, alone=True):.2f} times."
        )

    def table(self) -> Table:
        """A row for each draft length."""
        heads = ("tokens of 8B", "T_v(n)/T_t", "d T_d/T_t, head > 8B", "8B alone", "tau", "head > 8B > 70B", "8B > 70B")
        rows = []
        for k, check in self.checks.items():
            shares = (k * step / self.plain_ms for step in (self.token_ms, self.alone_ms))
            gains = (self.gain(k), self.gain(k, alone=True))
            rows.append([str(k), *(figure(v) for v in (check, *shares, self.tokens[k], *gains))])
        return Table("A 70B target by costs: speed-up over plain decoding", heads, rows)


def hierarchy(deep: Mapping[str, Any], model: Mapping[str, Any], gain: float) -> Hierarchy:
    """`deep`: the record of a DepthCell. `model`: a draft model's record, for the acceptance. `gain`: of MIDDLE's head.

    Beyond the drafts of `model`, the share of accepted drafts falls as in the mean over its places.
    """
    costs = Profile.from_dict(deep)
    assert costs.draft is not None
    accepted = model["accepted_per_pos"]
    drafts = sum(accepted) / max(1e-9, model["mean_acceptance_length"] - 1.0)
    shares = [a / max(1.0, drafts) for a in accepted]  # of drafts whose tokens up to this one are right
    fall = (shares[-1] / shares[0]) ** (1 / max(1, len(shares) - 1)) if shares[0] else 0.0
    shares += [shares[-1] * fall**i for i in range(1, LONGEST)]
    alone, counts = costs.draft.ms(FORM, 1), range(1, LONGEST + 1)
    return Hierarchy(
        costs.ms(FORM, 1),
        alone / gain,
        alone,
        {k: costs.c(FORM, k + 1) for k in counts},
        {k: 1.0 + sum(shares[:k]) for k in counts},
    )
