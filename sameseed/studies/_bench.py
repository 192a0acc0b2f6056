"""A cell in which ways to guess take turns with plain decoding on one loaded target, as in `sameseed bench`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sameseed.config import SpecConfig
from sameseed.engine.build import check_parts
from sameseed.engine.levels import heeds_confidence, with_heads
from sameseed.engine.settings import make_config
from sameseed.models.loader import load_tokenizer, resolve_model
from sameseed.request import SamplingParams
from sameseed.studies._setup import Setup
from sameseed.studies._study import Tell
from sameseed.study import record
from sameseed.study.measure import Bench, Run, fitted
from sameseed.study.price import price
from sameseed.study.workload import Arm, Workload, arms

PRICED = 8  # texts of which the price of exactness is taken


@dataclass(frozen=True)
class Way:
    """A way to guess: `draft` as --draft takes it, with roles in braces ("{head} > {1b}")."""

    draft: str
    ks: tuple[int, ...]
    format: str = "auto"
    confidence: float | None = None
    options: tuple[tuple[str, object], ...] = ()

    def spec(self, models: Mapping[str, str]) -> SpecConfig:
        """Its speculation with these models. Raises ConfigError."""
        given: dict[str, Any] = {"policy": "fixed", "draft_options": dict(self.options) or None}
        spec = make_config(self.draft.format(**models), draft_format=self.format, **given).spec
        return replace(spec, confidence=self.confidence) if heeds_confidence(spec) else spec

    @property
    def roles(self) -> list[str]:
        return [part.split("}")[0] for part in self.draft.split("{")[1:]]


@dataclass(frozen=True)
class BenchCell:
    """The target in one format; all ways with one kind of sampling."""

    name: str
    format: str
    ways: tuple[Way, ...]
    temperature: float = 0.0
    kv_format: str = "auto"
    batch: int = 1

    @property
    def weight(self) -> float:
        return 1.0 + sum(len(way.ks) for way in self.ways)

    def check(self, setup: Setup) -> None:
        """Raise SameseedError where a format or a draft does not fit, or memory is short."""
        target = resolve_model(setup.source("target"))
        for way in self.ways:
            spec = with_heads(way.spec({role: setup.source(role) for role in way.roles}))
            check_parts(target, make_config(spec, format=self.format, kv_format=self.kv_format))
            setup.check_memory({"target": self.format, **dict.fromkeys(way.roles, way.format)})

    def measure(self, setup: Setup, tell: Tell) -> list[dict[str, Any]]:
        """A record each way and length, plain decoding first."""
        roles = dict.fromkeys(role for way in self.ways for role in way.roles)
        models, model = {role: setup.model(role) for role in roles}, setup.model("target")
        found = [(way, arm) for way in self.ways for arm in arms([way.spec(models)], way.ks)]
        ways = {arm: way for way, arm in found if not arm.plain}
        plain = next(arm for _, arm in found if arm.plain)
        tokenizer = load_tokenizer(resolve_model(model))
        prompts = setup.read()
        settings: dict[str, Any] = {"format": self.format, "kv_format": self.kv_format, "max_num_seqs": self.batch}
        settings |= {"threads": setup.threads} if setup.threads else {}
        bench = Bench(model, [plain, *ways], fitted(model, settings, prompts, setup.max_tokens))
        params = SamplingParams(
            max_tokens=setup.max_tokens, temperature=self.temperature, top_p=0.95 if self.temperature else 1.0, seed=1
        )
        name = Path(setup.prompts).name if setup.prompts else "packaged prompts"
        workload = Workload(name, tuple(p.encode(tokenizer) for p in prompts), params, self.batch)
        bench.check(workload)
        batches = -(-len(prompts) // self.batch)
        tell(f"about {max(1.0, bench.warm_up(workload) * batches * setup.repeat):.0f} s")
        done, total = 0, setup.repeat * batches * len(bench.arms)

        def tick(label: str) -> None:
            nonlocal done
            setup.progress(f"{self.name}: {label}", done := done + 1, total)

        runs = bench.measure(workload, setup.repeat, tick)
        made = record.make_records(bench, model, workload, runs, record.now(), record.machine())
        return [self._more(bench, arm, ways.get(arm), r, workload, runs[plain][0]) for arm, r in zip(bench.arms, made)]

    def _more(
        self, bench: Bench, arm: Arm, way: Way | None, made: dict[str, Any], workload: Workload, plain: Run
    ) -> dict[str, Any]:
        """The record with the way's own words, T_v(n) / T_t, and the price of exactness where a model drafts."""
        made["way"] = None if way is None else way.draft
        made["prompt_tokens"] = [len(prompt) for prompt in workload.prompts]
        if way is None:
            return made
        rows, curve = made["prediction"]["rows_per_round"], bench.target_curve()
        made["verify_cost"] = curve.at(rows) / curve.at(1)
        runner = getattr(bench.install(arm).drafter, "runner", None)
        if runner is not None and arm.spec.method == "draft_model":
            jobs = [job for batch in workload.batches() for job in batch][:PRICED]
            texts = [(prompt, text, params) for (prompt, params), text in zip(jobs, plain.texts)]
            found = price(bench.llm.engine.runner, runner, texts)
            made["price"] = None if found is None else found.as_dict()
        return made
