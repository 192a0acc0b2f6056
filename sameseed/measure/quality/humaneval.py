"""HumanEval (Chen et al., 2021): complete functions from their docstrings; pass@1 with one sample per problem."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence as Seq
from functools import partial

from sameseed.engine.llm import LLM
from sameseed.measure.quality import data, sandbox
from sameseed.measure.quality.data import HUMANEVAL, Row
from sameseed.measure.quality.tasks import Report, TaskResult, TaskSettings, answer, counter, silent

MAX_TOKENS = 512
ASK = (
    "Complete this Python function. Answer with the whole function in one code block, and nothing after it.\n\n"
    "```python\n{prompt}\n```"
)
FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)


def program(row: Row, text: str, chat: bool = False) -> str:
    """The program to run: the prompt, the answer, the tests, and the call of the tests.

    With `chat`, the answer is the first code block; a block that does not define the function is used as its body.
    """
    if chat:
        block = FENCE.search(text)
        text = block[1] if block is not None else text
        if re.search(rf"^\s*def\s+{re.escape(row['entry_point'])}\b", text, re.MULTILINE):
            text = f"    pass\n\n{text}"  # keeps the prompt's imports and helpers; the answer redefines the function
    return f"{row['prompt']}{text}\n\n{row['test']}\n\ncheck({row['entry_point']})\n"


def score(
    rows: Seq[Row], texts: Seq[str], chat: bool = False, tick: Callable[[], None] = lambda: None
) -> list[sandbox.SandboxOutcome]:
    """Run each answer with its problem's tests in a sandbox; `tick` is called after each."""
    return sandbox.run_all([program(r, t, chat) for r, t in zip(rows, texts, strict=True)], tick)


def run(llm: LLM, settings: TaskSettings, report: Report = silent) -> TaskResult:
    """Generate and test a solution for each problem. Raises ConfigError for missing data."""
    problems = data.take(data.rows(HUMANEVAL, settings.data), settings.limit)
    params = settings.params(MAX_TOKENS, data.HUMANEVAL_STOP)
    room = llm.engine.max_model_len - min(params.max_tokens, llm.engine.max_model_len // 4)  # the rest is the answer's
    prompts = []
    for row in problems:
        message = {"role": "user", "content": ASK.format(prompt=row["prompt"].rstrip())}
        tokens = llm.tokenizer.chat([message]) if settings.chat else llm.tokenizer.encode(row["prompt"])
        prompts.append(tokens if len(tokens) <= room else [])
    long = prompts.count([])
    texts = answer(llm, prompts, [params] * len(prompts), partial(report, "humaneval"))
    tick = counter(partial(report, "humaneval, tests"), len(problems))
    outcomes = score(problems, texts, settings.chat, tick)
    errors = Counter(re.split(r"[:;]", o.error)[0] for o in outcomes if o.error)
    notes = (f"{long} of {len(problems)} prompts do not fit the model's context and count as failed",) if long else ()
    return TaskResult(
        "humaneval",
        "pass@1",
        tuple(float(o.passed) for o in outcomes),
        {"errors": dict(errors.most_common(6))},
        notes,
        tuple(texts),
    )
