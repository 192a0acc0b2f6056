"""A cell that measures the quality of a number format: perplexity of the prompts' texts, or HumanEval."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any

from sameseed.engine.build import check_parts
from sameseed.engine.llm import LLM
from sameseed.engine.settings import make_config
from sameseed.errors import ConfigError
from sameseed.measure.quality import data
from sameseed.measure.quality.perplexity import perplexity
from sameseed.measure.quality.show import Variant, make_record
from sameseed.measure.quality.suite import Quality
from sameseed.measure.quality.tasks import PERPLEXITY, EvalSettings, humaneval
from sameseed.measure.usage import Meter
from sameseed.measure.workload import stored
from sameseed.models.loader import resolve_model
from sameseed_lab.studies._setup import StudySetup
from sameseed_lab.studies._study import Records, Row, Tell, rows_of

HUMANEVAL = "humaneval"
SAMPLED = 0.7
FETCH = "HumanEval.jsonl.gz of https://github.com/openai/human-eval"


@dataclass(frozen=True)
class QualityCell:
    """The target in one format. `task`: "perplexity" or "humaneval"; the latter runs greedy and sampled."""

    name: str
    format: str
    task: str

    @property
    def weight(self) -> float:
        return 2.0

    def check(self, setup: StudySetup) -> None:
        """Raise SameseedError if a format does not fit, memory is short, or data are missing."""
        check_parts(resolve_model(setup.source("target")), make_config(None, format=self.format))
        setup.check_memory([("target", self.format)])
        if self.task == HUMANEVAL:
            if setup.data is None:
                raise ConfigError(f"it is read from --data DIR: fetch {FETCH}, and name its folder")
            data.locate(data.HUMANEVAL, setup.data)

    def measure(self, setup: StudySetup, tell: Tell) -> list[dict[str, Any]]:
        """One record; for humaneval two, greedy and sampled."""
        model = setup.model("target")
        settings: dict[str, Any] = {"format": self.format} | ({"threads": setup.threads} if setup.threads else {})
        llm = LLM(model, **settings)
        return [self._one(llm, model, setup, t) for t in ((0.0, SAMPLED) if self.task == HUMANEVAL else (0.0,))]

    def _one(self, llm: LLM, model: str, setup: StudySetup, temperature: float) -> dict[str, Any]:
        limit, top_p = setup.problems or setup.num_prompts, 0.95 if temperature else 1.0
        asked = EvalSettings(
            (self.task,), setup.data, limit, temperature=temperature, top_p=top_p, tokens=setup.text_tokens
        )
        meter, report = Meter(), partial(setup.progress, self.name)
        if self.task == PERPLEXITY:
            read = perplexity(llm, setup.text(), asked.window, asked.stride, asked.tokens, report)
            quality, num_tokens = Quality(read, setup.prompts_name, ()), read.tokens
        else:
            answers = humaneval(llm, asked, lambda stage, done, total: report(done, total))
            quality = Quality(None, None, (answers,))
            num_tokens = sum(len(llm.tokenizer.encode(a, add_special_tokens=False)) for a in answers.answers)
        runner = llm.engine.runner
        config = stored(runner.model, llm.config.format, runner.cache.format)
        made = make_record(Variant(model, self.format), asked, quality, config)
        return {**made, "usage": meter.read().as_dict(max(1, num_tokens))}


def quality_cells(formats: Seq[str]) -> list[QualityCell]:
    """Perplexity in each format, then HumanEval."""
    named = {PERPLEXITY: "perplexity", HUMANEVAL: "HumanEval"}
    return [QualityCell(f"{said} in {form}", form, task) for task, said in named.items() for form in formats]


def quality_rows(records: Records) -> list[Row]:
    """Rows of QualityCells; `lost`: perplexity over bf16's; `solved`: pass@1, with its 95 % interval."""
    rows = rows_of(records)
    base = next((r["perplexity"]["value"] for r in rows if r["perplexity"] and r["format"] == "bf16"), None)
    for row in rows:
        told = row["perplexity"] or row["tasks"][0]
        row |= {"task": row["tasks"][0]["task"] if row["tasks"] else PERPLEXITY, "value": told["value"]}
        row |= {"how": "sampled" if row["temperature"] else "greedy", "interval": told["interval"]}
        row["count"] = told["tokens"] if row["perplexity"] else told["num_questions"]
        if row["task"] == HUMANEVAL:
            row |= {"solved": told["value"], "solved_each": told["interval"], "whose": f"ours, {row['how']}"}
        elif base and told["value"] is not None:
            row |= {"lost": told["value"] / base, "whose": "ours"}
    return rows
