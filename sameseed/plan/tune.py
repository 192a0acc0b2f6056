"""Tuning: what to draft with, in which formats and how far, for one model, machine and workload.

Every setting of the grid is simulated (`candidates.py`). The best of them, and plain decoding always, run in turns on
real prompts (`race.py`). What wins there is chosen, and written down with what it promised and what it gave.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from sameseed import store
from sameseed.engine.scope import machine_here
from sameseed.models.loader import resolve_model
from sameseed.plan.acceptance import Replay
from sameseed.plan.candidates import Prospect, TargetBench, Tell, TuneRequest, load_targets, survivors
from sameseed.plan.race import Contestant, race, ranked, ratio
from sameseed.plan.simulate import Interval
from sameseed.study import record
from sameseed.tuned import AcceptRates, Chosen, Loser, Scope, Tuned, TunedFigure, TunedModel, weights_digest

RACE_SHARE = 0.9  # of the time that is left after measuring


@dataclass(frozen=True)
class TuneOutcome:
    """What tuning found. `order`: the settings that ran, the best first; `plain`: plain decoding in the first format.

    `prospects`: all that were simulated; `lost`: what could not be tried, and why; `differing`: labels of settings
    whose texts were not those of plain decoding in their format (none, or something is broken).
    """

    asked: TuneRequest
    order: list[Contestant]
    plain: Contestant
    prospects: list[Prospect]
    replays: Mapping[str, Replay]
    lost: list[tuple[str, str]]
    differing: list[str]
    seconds: float

    @property
    def best(self) -> Contestant:
        return self.order[0]

    def speedup(self, contestant: Contestant, batch: int | None = None) -> Interval:
        """Measured, over plain decoding in the first format; at one batch size, or over those that are looked at."""
        return ratio(contestant, self.plain, self.asked.looked_at if batch is None else (batch,))

    def predicted(self, prospect: Prospect, batch: int) -> Interval:
        """DraftSpeed-up that was promised at a batch size, over plain decoding in the first format."""
        plain = self.plain.prospect.tokens_per_s[batch].value
        own = prospect.tokens_per_s[batch]
        return Interval(own.value / plain, own.low / plain, own.high / plain)

    def error(self, contestant: Contestant, batch: int) -> float:
        """Predicted over measured speed-up, less 1."""
        return self.predicted(contestant.prospect, batch).value / self.speedup(contestant, batch).value - 1.0


def tune(asked: TuneRequest, load: Callable[..., Any], tell: Tell = lambda stage, done, total: None) -> TuneOutcome:
    """Measure, simulate, race. `load` makes an LLM, as for a Bench. Raises ConfigError for what can never be tried."""
    start = time.perf_counter()
    lost: list[tuple[str, str]] = []
    targets = load_targets(asked, load, tell, lost)
    prospects = [(stable, p) for stable in targets for p in stable.prospects(tell)]
    chosen = survivors([p for _, p in prospects], asked)
    runners = [_contestant(stable, p) for stable, p in prospects if p in chosen]
    plain = next(c for c in runners if c.plain)
    for c in runners:  # caches, pages and threads are then in place
        c.run(min(asked.batches), range(min(min(asked.batches), len(asked.prompts))))
        c.tokens, c.seconds, c.ttft, c.texts = {}, {}, {}, {}
    left = RACE_SHARE * (asked.seconds - (time.perf_counter() - start))
    order = race(
        runners, len(asked.prompts), asked.batches, asked.looked_at, left, tell, asked.max_ttft, _by_ttft(asked)
    )
    ahead = ranked([order[0], plain], asked.looked_at, asked.max_ttft, _by_ttft(asked))
    order = [ahead[0], *(c for c in order if c is not ahead[0])]
    replays = {name: found for stable in targets for name, found in stable.replays.items()}
    return TuneOutcome(
        asked,
        order,
        plain,
        [p for _, p in prospects],
        replays,
        lost,
        _differing(runners),
        time.perf_counter() - start,
    )


def _by_ttft(asked: TuneRequest) -> bool:
    return asked.objective == "ttft"


def _contestant(stable: TargetBench, prospect: Prospect) -> Contestant:
    params, seed = stable.asked.params, stable.asked.params.seed or 0

    def jobs(batch: int, members: Any) -> list[Any]:
        return [(stable.prompts[i], replace(params, seed=seed + i)) for i in members]

    return Contestant(prospect, lambda: stable.engine(prospect.candidate), jobs)


def _differing(runners: list[Contestant]) -> list[str]:
    found = []
    for c in runners:
        plain = next(p for p in runners if p.plain and _formats(p) == _formats(c))
        if any(plain.texts.get(key, text) != text for key, text in c.texts.items()):
            found.append(c.prospect.candidate.label)
    return found


def _formats(c: Contestant) -> tuple[str, str]:
    return c.prospect.candidate.format, c.prospect.candidate.kv_format


def as_tuned(found: TuneOutcome) -> Tuned:
    """What `serve --profile` reads."""
    asked, best = found.asked, found.best
    candidate = best.prospect.candidate
    spec, drafting = candidate.spec, candidate.spec.method != "none"
    batches = sorted(asked.batches)
    name = "speedup_batch_{}"
    predicted = {
        name.format(b): _figure(found.predicted(best.prospect, b), "profiled", found.error(best, b)) for b in batches
    }
    measured = {name.format(b): _figure(found.speedup(best, b)) for b in batches}
    measured |= {f"tokens_per_s_batch_{b}": TunedFigure(*(3 * (best.tokens_per_s(b),))) for b in batches}
    replay = found.replays.get(candidate.draft + candidate.draft_format)
    prompts, tokens = _lengths(found)
    return Tuned(
        machine=machine_here(),
        model=TunedModel(asked.model, weights_digest(resolve_model(asked.model))),
        chosen=Chosen(
            format=candidate.format,
            kv_format=candidate.kv_format,
            draft=candidate.draft,
            draft_format=candidate.draft_format if drafting else None,
            num_draft_tokens=spec.num_draft_tokens if drafting else None,
            policy=spec.policy if drafting else None,
            max_num_seqs=max(batches),
            threads=asked.settings.get("threads"),
            by_batch=_by_batch(found) if drafting else (),
        ),
        scope=Scope(
            store.digest({"prompts": [(p.text, p.messages) for p in asked.prompts]}),
            len(asked.prompts),
            tuple(sorted({p.domain for p in asked.prompts if p.domain})),
            (min(prompts), max(prompts)),
            (min(tokens), max(tokens)),
            (asked.params.temperature,),
            tuple(batches),
            max(prompts) + max(tokens),
        ),
        predicted=predicted,
        measured=measured,
        acceptance=AcceptRates() if replay is None else _rates(replay, spec.num_draft_tokens),
        rejected=tuple(_losers(found)),
        date=record.now(),
        commit=record.commit(),
    )


def _figure(x: Interval, grade: str = "measured", error: float | None = None) -> TunedFigure:
    return TunedFigure(x.value, x.low, x.high, grade, error)


def _lengths(found: TuneOutcome) -> tuple[list[int], list[int]]:
    """Tokens of prompts and of answers."""
    batch = min(found.asked.batches)
    jobs = found.plain.jobs(batch, range(len(found.asked.prompts)))
    return [len(prompt) for prompt, _ in jobs], [len(text) for text in found.plain.texts.values()]


def _by_batch(found: TuneOutcome) -> tuple[tuple[int, int], ...]:
    """(first, length): by the simulated table of the chosen draft at the largest batch size."""
    table = found.best.prospect.simulations[max(found.asked.batches)].lengths
    return tuple((i + 1, k) for i, k in enumerate(table) if i == 0 or table[i - 1] != k)


def _rates(replay: Replay, num_draft_tokens: int) -> AcceptRates:
    rates = replay.rates(min(num_draft_tokens, max(replay.sizes)))
    given = rates.conditional_accept_rates, rates.marginal_accept_rates, rates.mean_accept_length
    return AcceptRates(*given, num_samples=rates.num_rounds)


def _losers(found: TuneOutcome) -> list[Loser]:
    """Those that ran and lost, then those that were not worth a run, then those that could not."""
    best, made = found.best, []
    for c in found.order[1:]:
        x = ratio(c, best, found.asked.looked_at)
        made.append(Loser({"setting": c.prospect.candidate.label}, "slower", x.value, x.low, x.high))
    ran = {c.prospect.candidate.label for c in found.order}
    batches = found.asked.looked_at
    for p in found.prospects:
        if p.candidate.label not in ran:
            share = mean(p.tokens_per_s[b].value / best.prospect.tokens_per_s[b].value for b in batches)
            made.append(Loser({"setting": p.candidate.label}, "dominated", share, note="by prediction; it did not run"))
    return made + [Loser({"setting": what}, "impossible", note=why) for what, why in found.lost]
