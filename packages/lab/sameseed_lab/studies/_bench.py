"""A cell that interleaves drafts with plain decoding on one loaded target, as in `sameseed bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sameseed.config import SpecConfig
from sameseed.engine.build import check_parts
from sameseed.engine.levels import resolve
from sameseed.engine.settings import make_config
from sameseed.errors import ConfigError
from sameseed.measure.bench import Bench, Run, fitted, fitting, interleave
from sameseed.measure.bench_report import make_records
from sameseed.measure.quality.perplexity import forced
from sameseed.measure.workload import Arm, Workload, arms
from sameseed.models.loader import resolve_model
from sameseed.models.runner import ModelRunner
from sameseed.report import record
from sameseed.request import SamplingParams, Sequence
from sameseed.spec.sampling import choose, survivors
from sameseed_lab.studies._setup import StudySetup
from sameseed_lab.studies._study import Records, Row, Tell, machine_use, rows_of

PRICED, WARM = 8, 0.7  # texts used for the price of exactness, and its temperature if the texts are greedy
Runs = Mapping[Arm, list[Run]]


@dataclass(frozen=True)
class SpecSetting:
    """A speculation setting. `draft`: as for --draft, with roles in braces ("{head} > {1b}"). `name`: for tables."""

    draft: str
    ks: tuple[int, ...]
    format: str = "auto"
    confidence: float | None = None
    options: tuple[tuple[str, object], ...] = ()
    name: str = ""
    policy: str = "fixed"

    def spec(self, models: Mapping[str, str]) -> SpecConfig:
        """The SpecConfig with these models; a format is for drafts that own a model. Raises ConfigError."""
        draft = self.draft.format(**models)
        given: dict[str, Any] = {"policy": self.policy, "draft_options": dict(self.options) or None}
        spec = make_config(draft, **given).spec
        if any(level.cls.owns for level in resolve(spec).every()):
            spec = make_config(draft, draft_format=self.format, **given).spec
        return replace(spec, confidence=self.confidence) if resolve(spec).heeds_confidence else spec

    @property
    def roles(self) -> list[str]:
        return [part.split("}")[0] for part in self.draft.split("{")[1:]]


@dataclass(frozen=True)
class BenchCell:
    """The target in one format, with several ways to speculate and one sampling setting."""

    name: str
    format: str
    ways: tuple[SpecSetting, ...]
    temperature: float = 0.0
    kv_format: str = "auto"
    batch: int = 1
    base: str = ""  # a format whose plain decoding is interleaved with them, one baseline for all formats; "": none

    @property
    def weight(self) -> float:
        return 1.0 + sum(len(way.ks) for way in self.ways)

    def check(self, setup: StudySetup) -> None:
        """Raise SameseedError if a format, a draft or a prompt does not fit, or memory is short."""
        target, loaded = resolve_model(setup.source("target")), [("target", self.format)]
        for way in self.ways:
            spec = way.spec({role: setup.source(role) for role in way.roles})
            check_parts(target, make_config(spec, format=self.format, kv_format=self.kv_format))
            loaded += [(role, way.format) for role in way.roles or (["target"] if way.draft == "self_quant" else [])]
        odd = list[str]()
        fitting(target, {}, setup.read(), odd.append)
        if odd:
            raise ConfigError(f"{odd[0]}; leave it out of --prompts")
        setup.check_memory(loaded)

    def measure(self, setup: StudySetup, tell: Tell) -> list[dict[str, Any]]:
        """One record per way and draft length, plain decoding first."""
        roles = dict.fromkeys(role for way in self.ways for role in way.roles)
        models, model = {role: setup.model(role) for role in roles}, setup.model("target")
        specs = {repr((spec, way.ks)): (way, spec) for way in reversed(self.ways) for spec in [way.spec(models)]}
        found = [(way, arm) for way, spec in reversed(specs.values()) for arm in arms([spec], way.ks)]
        ways = {arm: way for way, arm in found if not arm.plain}
        plain = next(arm for _, arm in found if arm.plain)
        prompts = setup.read()
        settings: dict[str, Any] = {"format": self.format, "kv_format": self.kv_format, "max_num_seqs": self.batch}
        settings |= {"threads": setup.threads} if setup.threads else {}
        bench = Bench(model, [plain, *ways], fitted(model, settings, prompts, setup.max_tokens))
        params = SamplingParams(
            max_tokens=setup.max_tokens, temperature=self.temperature, top_p=0.95 if self.temperature else 1.0, seed=1
        )
        workload = bench.workload(setup.prompts_name, prompts, params, self.batch)
        together = [(bench, workload)]
        if self.base not in ("", self.format):
            given = fitted(model, {**settings, "format": self.base}, prompts, setup.max_tokens)
            other = Bench(model, [Arm("base", SpecConfig())], given)
            together.append((other, other.workload(setup.prompts_name, prompts, params, self.batch)))
        batches = -(-len(prompts) // self.batch)
        seconds = sum(each.warm_up(its) for each, its in together) * batches * setup.repeat
        tell(f"about {max(1.0, seconds):.0f} s")
        done, total = 0, setup.repeat * batches * sum(len(each.arms) for each, _ in together)

        def tick(label: str) -> None:
            nonlocal done
            setup.progress(f"{self.name}: {label}", done := done + 1, total)

        runs = interleave(together, setup.repeat, tick)
        base = runs[together[-1][0].arms[0]] if self.base else []
        made = make_records(bench, model, workload, runs, record.now(), record.machine())
        for arm, r in zip(bench.arms, made):
            r["over_base"] = [m.tokens_per_s / b.tokens_per_s for m, b in zip(runs[arm], base)]
        return [self._more(bench, arm, ways.get(arm), r, workload, runs) for arm, r in zip(bench.arms, made)]

    def _more(
        self, bench: Bench, arm: Arm, way: SpecSetting | None, made: dict[str, Any], workload: Workload, runs: Runs
    ) -> dict[str, Any]:
        """The record with the way's name, costs of a round, and, for a draft model, the price of exactness added."""
        made["way"] = None if way is None else way.name or way.draft
        made["first_steps"] = [asdict(step) for step in runs[arm][0].first_steps]
        made["prompt_tokens"] = [len(prompt) for prompt in workload.prompts]
        if way is None:
            return made
        pairs = list(zip(runs[arm], runs[bench.arms[0]], strict=True))
        checked, drafted = zip(*(_costs(mine, plain) for mine, plain in pairs), strict=True)
        made |= {"verify_cost": median(checked), "draft_cost": median(drafted)}
        made |= {"verify_costs": list(checked), "draft_costs": list(drafted)}
        runner = getattr(bench.install(arm).drafter, "runner", None)
        if runner is not None and arm.spec.method == "draft_model":
            jobs = [job for batch in workload.batches() for job in batch][:PRICED]
            warm = self.temperature or WARM
            texts = [
                (p, text, replace(params, temperature=warm)) for (p, params), text in zip(jobs, runs[arm][0].texts)
            ]
            if found := price(bench.llm.engine.runner, runner, texts):
                made["price"] = {**found, "temperature": warm}
        return made


def _costs(mine: Run, plain: Run) -> tuple[float, float]:
    """Costs of verifying and drafting in a mean round over a plain step of the same turns, prefill left out."""
    steps, one = mine.counts.num_steps, max(1e-9, plain.times.target - plain.prefill) / plain.counts.num_steps
    return max(0.0, mine.times.target - mine.prefill) / steps / one, mine.times.draft / steps / one


def price(
    target: ModelRunner, draft: ModelRunner, texts: Seq[tuple[Seq[int], Seq[int], SamplingParams]]
) -> dict[str, float]:
    """The price of exactness: what coupled sampling accepts, and what min(1, p/q) would, on the same `positions`.

    `texts`: (prompt, the target's text, sampling parameters) each. `coupled`: how often both models choose the same
    token with the same noise. `min_pq`: mean of sum(min(p, q)), how often the usual rule accepts a draft from q
    (Leviathan et al., 2023, theorem 3.5). Empty without positions. Both runners must be idle.
    """
    alike, overlap = list[bool](), list[float]()
    for prompt, text, params in (job for job in texts if job[1]):
        whole = (*prompt, *text)
        its, mine = (
            torch.cat([logits.cpu() for *_, logits in forced(runner, [(whole, len(prompt))], len(whole), len(whole))])
            for runner in (target, draft)
        )
        seq = Sequence(-1, list(prompt), params, params.seed or 0)
        for place, (p, q) in enumerate(zip(its.numpy(), mine.numpy(), strict=True)):
            path = text[:place]
            alike.append(choose(p, seq, path, ()) == choose(q, seq, path, ()))
            overlap.append(_shared(p, q, params))
    if not alike:
        return {}
    return {"positions": len(alike), "coupled": float(np.mean(alike)), "min_pq": float(np.mean(overlap))}


def _shared(its: NDArray[np.float32], mine: NDArray[np.float32], params: SamplingParams) -> float:
    """sum(min(p, q)) of the two distributions after sampling settings were applied; 0 or 1 for greedy sampling."""
    if params.greedy:
        return float(its.argmax() == mine.argmax())
    p, q = np.zeros(len(its)), np.zeros(max(len(its), len(mine)))
    for into, row in ((p, its), (q, mine)):
        ids, kept = survivors(row.astype(np.float64), params)
        weights = np.exp(kept - kept.max())
        into[ids] = weights / weights.sum()
    return float(np.minimum(p, q[: len(p)]).sum())


def bench_rows(records: Records) -> list[Row]:
    """Rows of BenchCells. `FIELD_each`: the values of the repetitions, for the spread."""
    rows = rows_of(records)
    for row in rows:
        drafted, runs, price = row["drafted"], row["repetitions"], row.get("price") or {}
        speeds = [run["tokens_per_s"] for run in runs]
        counts = row.get("draft_lengths") or [0]
        row |= {
            **machine_use(row),
            "how": "sampled" if row["temperature"] else "greedy",
            "threshold": "" if row["confidence"] is None else f", p >= {row['confidence']:g}",
            "ms": 1e3 / row["tokens_per_s"],
            "tokens_per_s_each": speeds,
            "ms_each": [1e3 / speed for speed in speeds],
            "rollback_share": 100 * row["rollbacks"] / runs[0]["num_tokens"] if drafted else None,
            "mean_drafted": sum(n * c for n, c in enumerate(counts)) / max(1, sum(counts)) if drafted else None,
            "tau": row["prediction"]["tokens_per_round"] if drafted else None,
            "speedup": row["speedup"] if drafted else None,
            "speedup_each": [run["speedup"] for run in runs],
            "verify_cost_each": row.get("verify_costs"),
            "draft_cost_each": row.get("draft_costs"),
            "coupled": price.get("coupled"),
            "min_pq": price.get("min_pq"),
        }
        row["num_draft_tokens"] = row["config"]["num_draft_tokens"]  # asked for, not those of the run
        row |= {} if drafted else dict.fromkeys(("draft_format", "num_draft_tokens", "rollbacks"))
    return rows


def beside(rows: list[Row], base: Row | None, field: str) -> None:
    """Add `field` to each row: tokens/s over those of the baseline that was interleaved with it, or else of `base`."""
    for row in rows:
        if row.get("over_base"):
            row |= {field: median(row["over_base"]), f"{field}_each": row["over_base"]}
        elif base is not None:
            row[field] = row["tokens_per_s"] / base["tokens_per_s"]
            row[f"{field}_each"] = [speed / base["tokens_per_s"] for speed in row["tokens_per_s_each"]]
