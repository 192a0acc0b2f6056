"""A 70B target that no machine here holds: costs of a few of its layers, and what a hierarchy of drafts would gain.

After SpecMQuant's HierSpec (Zhang et al., 2025, arXiv 2505.22179): head > 8B > 70B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sameseed.measure.costs import Profile
from sameseed.measure.passes import ProfileGrid
from sameseed.measure.profiler import Profiler
from sameseed.measure.shapes import get_shape, shape_as_dict
from sameseed.measure.usage import Meter
from sameseed_lab.studies._setup import StudySetup
from sameseed_lab.studies._study import Row, Tell

LARGE, MIDDLE, FORM = "llama-3.1-70b", "llama-3.1-8b", "w4a8-g128"
TIMES = ("ms", "p10", "p90", "memory_ms", "compute_ms")
LAYERS, LONGEST = (2, 6), 8  # layers of LARGE that are measured; most tokens that MIDDLE hands on


@dataclass(frozen=True)
class DepthCell:
    """Costs of passes of LARGE, with MIDDLE interleaved. LARGE is measured at `LAYERS` layers and extended to all."""

    name: str = "70b by layers"
    weight: float = 4.0

    def _profilers(self, setup: StudySetup) -> list[Profiler]:
        rows = tuple(range(1, LONGEST + 2))
        draft: dict[str, Any] = {"draft": MIDDLE, "draft_formats": (FORM,)}
        grid = ProfileGrid((FORM,), rows, (256,), "auto", 0, (), setup.threads, **draft)
        return [Profiler(replace(grid, layers=n), LARGE) for n in LAYERS]

    def check(self, setup: StudySetup) -> None:
        """Raise ConfigError if memory is short."""
        self._profilers(setup)

    def measure(self, setup: StudySetup, tell: Tell) -> list[dict[str, Any]]:
        """One record: a profile of LARGE, with MIDDLE as its draft."""
        meter = Meter()

        def report(stage: str, done: float, total: float) -> None:
            setup.progress(f"{LARGE}: {stage}", int(1000 * done / total), 1000)

        depths = [profiler.run(report) for profiler in self._profilers(setup)]
        if any(depth.interrupted for depth in depths):
            raise KeyboardInterrupt
        found = extended(*depths)
        config = {"model": LARGE, "draft_model": MIDDLE, "format": FORM, "layers": list(LAYERS)}
        return [
            {**found.as_dict(), "time": found.date, "config": config, "way": None, "usage": meter.read().as_dict(1)}
        ]


def extended(few: Profile, many: Profile) -> Profile:
    """The costs of all layers of LARGE from those of `LAYERS`: a pass takes as long for each byte that a token reads.

    Bytes lie on the line through both depths. Times do not, for a line would multiply their noise: the sum of both
    depths' times grows in proportion to the bytes.
    """
    config, (a, b) = get_shape(LARGE), LAYERS
    low, high = few.stored[0].bytes_per_token, many.stored[0].bytes_per_token
    grown = (low + (high - low) * (config.num_layers - a) / (b - a)) / (low + high)
    known = {x.rows: x for x in few.costs}
    one = known[1].ms + many.costs[0].ms
    costs = []
    for x in many.costs:
        times = {name: grown * (getattr(known[x.rows], name) + getattr(x, name)) for name in TIMES}
        costs.append(replace(x, **times, c=times["ms"] / (grown * one)))
    return replace(many, shape=shape_as_dict(LARGE, config), costs=tuple(costs), stored=())


def depth_rows(deep: Mapping[str, Any], model: Mapping[str, Any], gain: float) -> list[Row]:
    """A row for each draft length `k` of a hierarchy head > MIDDLE > LARGE: its speed by costs.

    `deep`: the record of a DepthCell. `model`: a draft model's record, for the acceptance. `gain`: of MIDDLE's head.
    Beyond the drafts of `model`, the share of accepted drafts falls as in the mean over its places. `check`: c(k + 1)
    of LARGE. `head_gain`, `alone_gain`: over plain decoding of LARGE, with MIDDLE's head and without. `best`: the most.
    """
    costs = Profile.from_dict(deep)
    assert costs.draft is not None
    accepted = model["accepted_per_pos"]
    drafts = sum(accepted) / max(1e-9, model["mean_acceptance_length"] - 1.0)
    shares = [a / max(1.0, drafts) for a in accepted]  # of drafts whose tokens up to this one are right
    fall = (shares[-1] / shares[0]) ** (1 / max(1, len(shares) - 1)) if shares[0] else 0.0
    shares += [shares[-1] * fall**i for i in range(1, LONGEST)]
    plain_ms, alone = costs.ms(FORM, 1), costs.draft.ms(FORM, 1)
    rows = []
    for k in range(1, LONGEST + 1):
        check, tokens = costs.c(FORM, k + 1), 1.0 + sum(shares[:k])
        row: Row = {"cell": DepthCell.name, "k": k, "check": check, "tokens": tokens, "plain_ms": plain_ms}
        for name, step in (("head", alone / gain), ("alone", alone)):
            row |= {f"{name}_share": k * step / plain_ms, f"{name}_gain": tokens / (check + k * step / plain_ms)}
        rows.append(row)
    most = max(row["head_gain"] for row in rows)
    return [{**row, "best": row["head_gain"] == most} for row in rows]
