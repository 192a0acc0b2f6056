"""A cell that measures the quality of a number format: perplexity of the prompts' texts, or HumanEval."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sameseed.engine.build import check_parts
from sameseed.engine.llm import LLM
from sameseed.engine.settings import make_config
from sameseed.errors import ConfigError
from sameseed.measure.quality import data, humaneval, records
from sameseed.measure.quality.perplexity import perplexity
from sameseed.measure.quality.suite import PERPLEXITY, PerplexityText, Quality
from sameseed.measure.quality.tasks import TaskSettings
from sameseed.measure.quality.variant import Variant, stored
from sameseed.measure.usage import Meter
from sameseed.models.loader import resolve_model
from sameseed_lab.studies._setup import StudySetup
from sameseed_lab.studies._study import Panel, Plot, Published, Records, Report, Series, Table, Tell, figure, only

HUMANEVAL = "humaneval"
MODES = {0.0: "greedy", 0.7: "sampled"}
MOST = 32768  # most tokens of the text for perplexity
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
        return [self._one(llm, model, setup, t) for t in (MODES if self.task == HUMANEVAL else (0.0,))]

    def _one(self, llm: LLM, model: str, setup: StudySetup, temperature: float) -> dict[str, Any]:
        asked = TaskSettings(setup.data, setup.num_prompts, False, temperature, 0.95 if temperature else 1.0)
        text, meter = PerplexityText(tokens=MOST), Meter()
        report = partial(setup.progress, self.name)
        if self.task == PERPLEXITY:
            read = perplexity(llm, setup.text(), text.window, text.stride, MOST, report)
            quality, num_tokens = Quality(read, setup.prompts_name, ()), read.tokens
        else:
            answers = humaneval.run(llm, asked, lambda stage, done, total: report(done, total))
            quality = Quality(None, None, (answers,))
            num_tokens = sum(len(llm.tokenizer.encode(a, add_special_tokens=False)) for a in answers.answers)
        config = {"num_parameters": llm.engine.runner.model.config.num_parameters, **stored(llm)}
        made = records.make_record(Variant(model, self.format), [self.task], asked, text, quality, config)
        return {**made, "usage": meter.read().as_dict(max(1, num_tokens))}


def cells(formats: Mapping[str, str]) -> list[QualityCell]:
    """Perplexity in each format, then HumanEval."""
    named = {PERPLEXITY: "perplexity", HUMANEVAL: "HumanEval"}
    return [QualityCell(f"{said} in {form}", form, task) for task, said in named.items() for form in formats]


def perplexity_of(found: Records, form: str) -> float | None:
    """Perplexity in a format; None if it was not measured or is not finite."""
    r = only([r for r in found if r["perplexity"]], format=form)
    return None if r is None else r["perplexity"]["value"]


def over(found: Records, form: str) -> float | None:
    """Perplexity in a format divided by perplexity in bf16; None if either is missing."""
    mine, base = perplexity_of(found, form), perplexity_of(found, "bf16")
    return mine / base if mine and base else None


def passed(found: Records, form: str, temperature: float) -> float | None:
    """HumanEval pass@1 in a format at a temperature; None if it was not measured."""
    r = only([r for r in found if r["tasks"]], format=form, temperature=temperature)
    return None if r is None else float(r["tasks"][0]["value"])


Theirs = Mapping[str, tuple[float, float, float]]  # format -> perplexity, pass@1 greedy and sampled


def extended(report: Report, found: Records, formats: Mapping[str, str], theirs: Theirs) -> Report:
    """The study's report with quality results added, beside the published ones."""
    published = []
    for form, (loss, *solved) in theirs.items():
        if form != "bf16":
            ratio = loss / theirs["bf16"][0]
            published.append(Published(f"perplexity in {formats[form]} over bf16", ratio, over(found, form)))
        for (temperature, mode), share in zip(MODES.items(), solved):
            what = f"HumanEval pass@1 in {formats[form]}, {mode}"
            published.append(Published(what, share, passed(found, form, temperature)))
    report = replace(report, published=[*report.published, *published])
    if not found:
        return report
    plot = Plot("quality", "Quality by the target's format", panels(found, formats, theirs))
    return replace(report, plots=[*report.plots, plot], tables=[table(found, formats), *report.tables])


def panels(found: Records, formats: Mapping[str, str], theirs: Theirs) -> list[Panel]:
    """Panels with bars by format: our results beside the published ones."""
    made = []
    lost = {name: 100.0 * (v - 1.0) for form, name in formats.items() if form != "bf16" and (v := over(found, form))}
    if lost:
        base = theirs["bf16"][0]
        published = [(formats[form], 100.0 * (row[0] / base - 1.0)) for form, row in theirs.items() if form != "bf16"]
        series = [Series("perplexity", list(lost.items())), Series("perplexity", published, True)]
        made.append(Panel("perplexity: % above bf16's", "", series, "bars", level=0.0))
    solved = []
    for column, (temperature, mode) in enumerate(MODES.items(), 1):
        bars = [(name, v) for form, name in formats.items() if (v := passed(found, form, temperature)) is not None]
        if bars:
            solved.append(Series(mode, bars))
            solved.append(Series(mode, [(formats[form], row[column]) for form, row in theirs.items()], True))
    return [*made, *([Panel("HumanEval pass@1", "", solved, "bars")] if solved else [])]


def table(found: Records, formats: Mapping[str, str]) -> Table:
    """Table of the quality results by format."""
    rows = []
    for form, name in formats.items():
        read = only([r for r in found if r["perplexity"]], format=form)
        told = {} if read is None else read["perplexity"]
        interval = told.get("interval")
        tasks = [r for r in found if r["tasks"] and r["config"]["format"] == form]
        rows.append(
            [
                name,
                figure(told.get("value"), ".4g"),
                "" if interval is None else "{:.4g} to {:.4g}".format(*interval),
                figure(over(found, form), ".4f"),
                figure(told.get("tokens"), ","),
                *(figure(passed(found, form, temperature), ".1%") for temperature in MODES),
                str(tasks[0]["tasks"][0]["num_questions"]) if tasks else "",
            ]
        )
    heads = ("target", "perplexity", "95 %", "over bf16", "tokens", *(f"HumanEval {m}" for m in MODES.values()))
    return Table("Quality by format", (*heads, "problems"), rows)
