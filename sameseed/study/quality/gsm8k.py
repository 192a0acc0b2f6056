"""GSM8K (Cobbe et al., 2021): school arithmetic in words; right if the last number of the answer is the solution's."""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq
from decimal import Decimal, InvalidOperation
from functools import partial

from sameseed.engine.llm import LLM
from sameseed.errors import ConfigError
from sameseed.study.quality import data
from sameseed.study.quality.data import GSM8K, GSM8K_SHOTS, Row
from sameseed.study.quality.tasks import Report, Result, Settings, answer, few_shot, notes_on_shots, room, silent

SHOTS = 5
MAX_TOKENS = 256
STOP = ("Question:", "</s>", "<|im_end|>")
MARKED = re.compile(r"####\s*\$?\s*(-?\$?[0-9][0-9.,]*)")
NUMBER = re.compile(r"-?\$?\d[\d.,]*|-?\$?\.\d+")


def number(text: str) -> Decimal | None:
    """A number as people write it: "$1,234.50" is 1234.5; None for what is none."""
    try:
        return Decimal(text.replace("$", "").replace(",", "").rstrip("."))
    except InvalidOperation:
        return None


def marked(text: str) -> Decimal | None:
    """The number after the first `####`, None without."""
    found = MARKED.search(text)
    return None if found is None else number(found[1])


def extract(text: str) -> Decimal | None:
    """The number after `####`; where there is none, the last number of the text."""
    found = marked(text)
    if found is not None:
        return found
    numbers = NUMBER.findall(text)
    return number(numbers[-1]) if numbers else None


def prompt(shots: Seq[Row], question: str) -> str:
    """Solved examples, then the question."""
    solved = [f"Question: {s['question']}\nAnswer: {s['answer']}\n\n" for s in shots]
    return f"{''.join(solved)}Question: {question}\nAnswer:"


def run(llm: LLM, settings: Settings, report: Report = silent) -> Result:
    """Ask each question after five solved ones: the training set's first where it is at hand, else the test set's
    first, which then are no questions. Raises ConfigError for missing data.
    """
    rows = data.rows(GSM8K, settings.data)
    notes: tuple[str, ...] = ()
    if settings.data is None or data.find(settings.data, GSM8K_SHOTS) is not None:
        shots = data.rows(GSM8K_SHOTS, settings.data)[:SHOTS]
    else:
        shots, rows = rows[:SHOTS], rows[SHOTS:]
        notes = (f"no {GSM8K_SHOTS.files[0]}: the first {SHOTS} test questions serve as examples and are not asked",)
    rows = data.take(rows, settings.limit)
    if not rows:
        raise ConfigError(f"the test set holds no more than the {SHOTS} examples; give more rows")
    params = settings.params(MAX_TOKENS, STOP)
    most = room(llm, params.max_tokens)
    fitted = [few_shot(llm, partial(prompt, question=row["question"]), shots, most, settings.chat) for row in rows]
    prompts = [tokens for tokens, _ in fitted]
    texts, _ = answer(llm, prompts, params, lambda done, total: report("gsm8k", done, total))
    wanted = [extract(row["answer"]) for row in rows]
    found = [extract(text) for text in texts]
    strict = [marked(text) for text in texts]
    return Result(
        "gsm8k",
        "exact match",
        tuple(float(a is not None and a == b) for a, b in zip(found, wanted, strict=True)),
        {
            "strict": sum(a is not None and a == b for a, b in zip(strict, wanted, strict=True)) / len(rows),
            "without_number": sum(a is None for a in found),
        },
        notes + notes_on_shots([n for _, n in fitted], len(shots), sum(not p for p in prompts)),
        tuple(texts),
    )
