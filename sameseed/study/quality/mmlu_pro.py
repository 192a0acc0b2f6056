"""MMLU-Pro (Wang et al., 2024): exam questions with up to ten options, after five solved ones of the same subject.

`run` asks for reasoning and takes the letter from "the answer is (X)"; `run_likelihood` takes the letter that the model
finds likeliest after "Answer:", which small models can do too (its figures are not comparable with the former's).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence as Seq
from functools import partial

from sameseed.engine.llm import LLM
from sameseed.errors import ConfigError
from sameseed.study.quality import data
from sameseed.study.quality.data import MMLU_PRO, MMLU_PRO_SHOTS, Row
from sameseed.study.quality.likelihood import Scorer, log_likelihoods, split
from sameseed.study.quality.tasks import Report, Result, Settings, answer, few_shot, notes_on_shots, room, silent

SHOTS = 5
MAX_TOKENS = 2048
STOP = ("Question:",)
LETTERS = "ABCDEFGHIJ"
ANSWER = re.compile(r"answer is \(?([A-J])\)?")
THINK = "Let's think step by step."
HEAD = (
    "The following are multiple choice questions (with answers) about {subject}. Think step by step and then finish "
    'your answer with "the answer is (X)" where X is the correct letter choice.\n'
)
SHORT_HEAD = "The following are multiple choice questions (with answers) about {subject}.\n"


def options(row: Row) -> list[str]:
    """The options of a question; the raw data fill up to ten with "N/A"."""
    given = [str(o).strip() for o in row["options"]]
    while given and given[-1] == "N/A":
        given.pop()
    return given


def question(row: Row) -> str:
    """The question and its options."""
    lines = [f"{letter}. {option}" for letter, option in zip(LETTERS, options(row), strict=False)]
    return "\n".join(["Question:", row["question"], "Options:", *lines, "Answer:"])


def prompt(shots: Seq[Row], row: Row) -> str:
    """Solved examples with their reasoning, then the question."""
    solved = [f"{question(s)} {THINK} {_reasoning(s)}\n\n" for s in shots]
    return f"{HEAD.format(subject=row['category'])}{''.join(solved)}{question(row)} {THINK}"


def short_prompt(shots: Seq[Row], row: Row) -> str:
    """Solved examples with their letters only, then the question."""
    solved = [f"{question(s)} {s['answer']}\n\n" for s in shots]
    return f"{SHORT_HEAD.format(subject=row['category'])}{''.join(solved)}{question(row)}"


def _reasoning(shot: Row) -> str:
    return str(shot["cot_content"]).removeprefix("A:").strip().removeprefix(THINK).strip()


def extract(text: str) -> str | None:
    """The letter of the first "answer is (X)", None without one."""
    found = ANSWER.search(text)
    return None if found is None else found[1]


def read(settings: Settings) -> tuple[list[Row], dict[str, list[Row]]]:
    """Questions and, by subject, examples. Raises ConfigError for missing or odd data."""
    rows = data.take(data.rows(MMLU_PRO, settings.data), settings.limit)
    shots: dict[str, list[Row]] = defaultdict(list)
    for shot in data.rows(MMLU_PRO_SHOTS, settings.data):
        shots[shot["category"]].append(shot)
    for row in rows:
        if row["answer"] not in list(LETTERS[: len(options(row))]):  # as a text, it would hold "" and "AB" too
            raise ConfigError(f"mmlu_pro: question {row.get('question_id')} has no option {row['answer']!r}")
    return rows, {subject: its[:SHOTS] for subject, its in shots.items()}


def _result(task: str, rows: Seq[Row], letters: Seq[str | None], notes: tuple[str, ...], texts: Seq[str]) -> Result:
    right = [letter == row["answer"] for letter, row in zip(letters, rows, strict=True)]
    subjects: dict[str, list[bool]] = defaultdict(list)
    for ok, row in zip(right, rows, strict=True):
        subjects[row["category"]].append(ok)
    return Result(
        task,
        "accuracy",
        tuple(map(float, right)),
        {
            # The mean over questions weighs each subject by its size.
            "subjects": {s: {"value": sum(v) / len(v), "num_questions": len(v)} for s, v in sorted(subjects.items())},
            "without_letter": sum(letter is None for letter in letters),
            "chance": sum(1 / len(options(row)) for row in rows) / len(rows),
        },
        notes,
        tuple(texts),
    )


def run(llm: LLM, settings: Settings, report: Report = silent) -> Result:
    """Ask for reasoning and a letter. Raises ConfigError for missing data."""
    rows, shots = read(settings)
    params = settings.params(MAX_TOKENS, STOP)
    most = room(llm, params.max_tokens)
    fitted = [
        few_shot(llm, partial(prompt, row=row), shots.get(row["category"], []), most, settings.chat) for row in rows
    ]
    prompts = [tokens for tokens, _ in fitted]
    texts, _ = answer(llm, prompts, params, lambda done, total: report("mmlu_pro", done, total))
    notes = notes_on_shots([n for _, n in fitted], SHOTS, sum(not p for p in prompts))
    return _result("mmlu_pro", rows, [extract(text) for text in texts], notes, texts)


def run_likelihood(llm: LLM, settings: Settings, report: Report = silent) -> Result:
    """Score each letter after "Answer:", without reasoning (plain text, chat or not). Raises ConfigError."""
    rows, shots = read(settings)
    most = llm.engine.max_model_len - 8  # a letter is a token or two
    pairs: list[tuple[list[int], list[int]]] = []
    counts: list[int] = []
    used = []
    for row in rows:
        its = shots.get(row["category"], [])
        tokens, count = few_shot(llm, partial(short_prompt, row=row), its, most, False)
        used.append(count)
        letters = LETTERS[: len(options(row))] if tokens else ""
        counts.append(len(letters))
        pairs += [split(llm.tokenizer, short_prompt(its[:count], row), f" {letter}") for letter in letters]
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        report("mmlu_pro_likelihood", min(done, len(rows)), len(rows))

    scores = iter(log_likelihoods(Scorer(llm.engine), pairs, tick))
    chosen: list[str | None] = []
    for count in counts:
        values = [next(scores)[0] for _ in range(count)]
        chosen.append(LETTERS[max(range(count), key=values.__getitem__)] if values else None)
    notes = notes_on_shots(used, SHOTS, sum(not n for n in counts))
    return _result("mmlu_pro_likelihood", rows, chosen, notes, ())
