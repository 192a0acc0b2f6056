"""Assisted generation with a smaller model: lengths x confidence x sampling, and all mixes of 8 and 4 bits.

After the HPML study of Columbia University (2025): Llama-3.1-8B with Llama-3.2-1B and 3B, bitsandbytes, one L4.
"""

from __future__ import annotations

from collections import Counter
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
from sameseed.measure.quality.tasks import PERPLEXITY, EvalSettings, Quality, humaneval
from sameseed.measure.usage import Meter
from sameseed.measure.workload import stored
from sameseed.models.loader import resolve_model
from sameseed.report.plot import Panel, Series
from sameseed_lab.studies._bench import BenchCell, SpecSetting, bench_rows, beside
from sameseed_lab.studies._setup import StudySetup
from sameseed_lab.studies._study import Cell, Plot, Records, Row, Study, Table, Tell, matching, rows_of

KS, THRESHOLDS = (3, 5, 7), (1e-4, 0.2)
BITS = {"bf16": "bf16", "w8a8": "8 bit", "nf4": "4 bit (nf4)", "w4a8": "4 bit (w4a8)"}
STORED = "as stored"  # of a real model
WIDTH = 20  # tokens per bar in the histogram of prompt lengths
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


def cells(setup: StudySetup) -> list[Cell]:
    """Cells of draft lengths in bf16, greedy and sampled; of all format mixes at k = 3; of each format's quality."""
    made: list[Cell] = []
    forms = {**BITS, "auto": STORED} if setup.size == "real" else BITS
    base = "" if setup.size == "true" else "bf16"  # beside the largest twins it does not fit
    for role in (r for r in ("1b", "3b") if r in setup.names):
        draft, name = f"{{{role}}}", setup.names[role]
        ways = tuple(SpecSetting(draft, KS, "bf16", threshold) for threshold in THRESHOLDS)
        for how, temperature in (("greedy", 0.0), ("sampled", SAMPLED)):
            made.append(BenchCell(f"{name} lengths {how}", "bf16", ways, temperature))
        mixed = tuple(SpecSetting(draft, (3,), form, 0.2) for form in forms)
        made += [BenchCell(f"{name} mixes of {form}", form, mixed, base=base) for form in forms]
    tasks = {PERPLEXITY: "perplexity", HUMANEVAL: "HumanEval"}
    return made + [QualityCell(f"{said} in {form}", form, task) for task, said in tasks.items() for form in forms]


def derive(records: Records) -> list[Row]:
    """Rows of speed and of quality. `over_bf16`: over plain greedy decoding in bf16, the study's only baseline."""
    rows = bench_rows([r for r in records if "perplexity" not in r])
    plain = matching(rows, {"drafted": False, "format": "bf16", "how": "greedy"})
    beside(rows, next((r for r in plain if "mixes" in r["cell"]), next(iter(plain), None)), "over_bf16")
    rows += quality_rows([r for r in records if "perplexity" in r])
    for row in rows:
        row["bits"] = BITS.get(row["format"], STORED)
        if row.get("draft_format"):
            row["draft_bits"] = BITS.get(row["draft_format"], STORED) if row["draft_model"] else row["draft_name"]
        row["row"] = row["cell"] if row["drafted"] else f"{row['cell']}: plain"
    return rows


def findings(rows: list[Row]) -> list[str]:
    """The fastest setting, what speculation gains by format, the price of exactness, and quality by format."""
    said: list[str] = []
    if drafted := matching(rows, {"drafted": True}):
        best = max(drafted, key=lambda r: float(r["tokens_per_s"]))
        total = best.get("over_bf16")
        said.append(
            f"The fastest: target {best['bits']}, draft {best['draft_bits']}, k = {best['num_draft_tokens']}, "
            f"{best['how']}: {best['tokens_per_s']:.0f} tokens/s. That is {best['speedup']:.2f} times plain decoding "
            "in its own format"
            + (f", and {total:.2f} times one plain bf16 baseline (published best: 1.35 times)." if total else ".")
        )
        every = dict.fromkeys(str(row["bits"]) for row in drafted)
        gains = {bits: max(r["speedup"] for r in matching(drafted, {"bits": bits})) for bits in every}
        known = ", ".join(f"{gain:.2f} in {bits}" for bits, gain in gains.items())
        said.append(f"What speculation gains over its own format, at best: {known}.")
    for row in [r for r in drafted if r["coupled"] is not None and r["how"] == "sampled"][:1]:
        said.append(
            f"The price of exactness: sampled, coupled sampling accepts {row['coupled']:.1%} of "
            f"{row['price']['positions']} tokens; min(1, p/q), which does not keep the text, would accept "
            f"{row['min_pq']:.1%} on the same positions."
        )
    for how in ("greedy", "sampled"):
        solved = matching(rows, {"task": HUMANEVAL, "how": how})
        spans = [" ({:.0%} to {:.0%})".format(*r["solved_each"]) if r["solved_each"] else "" for r in solved]
        each = ", ".join(f"{r['bits']} {r['solved']:.0%}{span}" for r, span in zip(solved, spans))
        if any(r["solved"] for r in solved):
            said.append(f"{solved[0]['count']} problems of HumanEval, {how}, solved: {each}.")
    lost = ", ".join(f"{r['bits']} {r['lost']:.3f}" for r in rows if "lost" in r)
    return [*said, f"Perplexity over bf16's: {lost}."] if lost else said


def more(rows: list[Row]) -> tuple[list[Plot], list[Table]]:
    """The histogram of prompt lengths."""
    lengths: list[int] = next((row["prompt_tokens"] for row in reversed(rows) if "prompt_tokens" in row), [])
    counts = Counter(n // WIDTH * WIDTH for n in lengths)
    bars = [(f"{low}+", float(counts[low])) for low in sorted(counts)]
    panel = Panel(f"prompts by tokens, {WIDTH} a bar", "tokens", [Series("prompts", bars)], "bars")
    return [Plot("prompts", "Tokens of the prompts", [panel])], []


STUDY = Study(__file__, cells, derive, findings, more)
