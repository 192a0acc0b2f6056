"""Prompts, and prompt sets of published data from local files or the hub: `--prompts NAME[/TASK][:FILE or FOLDER]`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sameseed.errors import ConfigError, RequestError
from sameseed.measure.quality import data
from sameseed.measure.quality.data import DataSet
from sameseed.tokenizer import Tokenizer

ROW = 128  # least words of a WikiText row that is used, and the tokens taken from it
TURNS: dict[str, type] = {"category": str, "turns": list}
MT_HUB = ("HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl")
MT_BENCH = DataSet("mt_bench", ("question.jsonl", "mt_bench.jsonl"), MT_HUB, TURNS)
SOURCE = "data/spec_bench/question.jsonl of https://github.com/hemingkx/Spec-Bench"
SPEC_BENCH = DataSet("spec_bench", ("question.jsonl", "spec_bench.jsonl"), None, TURNS, SOURCE)
TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")  # other categories are MT-Bench's


@dataclass(frozen=True)
class Prompt:
    """A text, or the messages of a conversation. With both, the text serves models without a template."""

    id: str
    domain: str
    text: str | None = None
    messages: tuple[dict[str, str], ...] = ()
    then: tuple[str, ...] = ()  # later turns of the user, each after an answer
    clip: int | None = None  # most tokens of the text to use
    stop: tuple[str, ...] = ()  # strings at which an answer ends
    where: str = ""  # FILE:LINE, for errors

    @property
    def said(self) -> str:
        """The text; for a conversation, the contents of its messages, one per line."""
        return self.text if self.text is not None else "\n".join(m["content"] for m in self.messages)

    @property
    def facts(self) -> tuple[object, ...]:
        """Everything that determines the prompt's tokens, for digests."""
        more = (self.then, self.clip, self.stop)
        return (self.text, self.messages, *(more if any(more) else ()))

    def encode(self, tokenizer: Tokenizer, answer: Callable[[list[int]], str] | None = None) -> tuple[int, ...]:
        """Token ids. `answer` writes the assistant's message before a later turn; None: empty. Raises ConfigError."""
        if self.text is not None and (not self.messages or tokenizer.chat_template is None):
            return tuple(tokenizer.encode(self.text))[: self.clip]
        messages = list(self.messages)
        for turn in self.then:
            said = "" if answer is None else answer(tokenizer.chat(messages))
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": turn}]
        try:
            return tuple(tokenizer.chat(messages))
        except RequestError as error:  # e.g. of a role that the template refuses
            raise ConfigError(f"{self.where or self.id}: {error}") from None


def _wikitext(path: Path) -> Iterator[Prompt]:
    """Rows of at least 128 words (hence at least 128 tokens in any vocabulary), cut to 128 tokens."""
    for number, line in enumerate(data.text_lines(path), 1):
        if len(line.split()) >= ROW:
            yield Prompt(str(number), "wikitext", line.strip(), clip=ROW)


def _turns(of: DataSet, path: Path) -> Iterator[Prompt]:
    """One prompt per turn; before a later turn stand the target's own answers to the earlier turns."""
    for number, row in enumerate(data.read_rows(path, of), 1):
        if not row["turns"] or not all(isinstance(turn, str) for turn in row["turns"]):
            raise ConfigError(f"row {number}: 'turns' must be a list of texts, not empty; fetch the file again")
        domain = row["category"] if of is MT_BENCH or row["category"] in TASKS else "mt_bench"
        name, first = str(row.get("question_id", number)), ({"role": "user", "content": row["turns"][0]},)
        for n in range(len(row["turns"])):
            yield Prompt(f"{name}/{n + 1}", domain, None, first, tuple(row["turns"][1 : n + 1]))


def _gsm8k(path: Path) -> Iterator[Prompt]:
    """Questions. For a model without a chat template: a text to continue, which stops at the next "Question:"."""
    for number, row in enumerate(data.read_rows(path, data.GSM8K), 1):
        asked = {"role": "user", "content": row["question"]}
        text = f"Question: {row['question']}\nAnswer:"
        yield Prompt(str(number), "gsm8k", text, (asked,), stop=("\nQuestion:",))


def _humaneval(path: Path) -> Iterator[Prompt]:
    """Functions to complete, with the stop strings of the HumanEval paper."""
    for row in data.read_rows(path, data.HUMANEVAL):
        yield Prompt(row["task_id"], "humaneval", row["prompt"], stop=data.HUMANEVAL_STOP)


def _mbpp(path: Path) -> Iterator[Prompt]:
    """Functions to write, in the words of the MBPP paper, with the tests that they must pass."""
    for number, row in enumerate(data.read_rows(path, data.MBPP), 1):
        asked = f"{row['text']} Your code should pass these tests:\n\n" + "\n".join(map(str, row["test_list"]))
        yield Prompt(str(number), "mbpp", None, ({"role": "user", "content": asked},))


def _edits(of: DataSet, path: Path) -> Iterator[Prompt]:
    """Edits that make the answer quote the prompt: a function of HumanEval renamed, one of MBPP with a docstring."""
    for number, row in enumerate(data.read_rows(path, of), 1):
        code = row["prompt"] + row["canonical_solution"] if of is data.HUMANEVAL else row["code"]
        if name := re.search(r"^def (\w+)", code := code.replace("\r\n", "\n").strip(), re.MULTILINE):
            edit = f"Rename the function `{name[1]}` to `new_{name[1]}`"
            edit = edit if of is data.HUMANEVAL else f"Add a docstring to the function `{name[1]}`"
            asked = f"{edit}. Answer with the whole program.\n\n```python\n{code}\n```"
            yield Prompt(str(number), "edits", None, ({"role": "user", "content": asked},))


SETS: dict[str, tuple[DataSet, Callable[[Path], Iterator[Prompt]]]] = {  # the data, and what reads prompts from it
    "wikitext": (data.TEXT, _wikitext),
    "spec-bench": (SPEC_BENCH, partial(_turns, SPEC_BENCH)),
    "mt-bench": (MT_BENCH, partial(_turns, MT_BENCH)),
    "gsm8k": (data.GSM8K, _gsm8k),
    "humaneval": (data.HUMANEVAL, _humaneval),
    "humaneval-edits": (data.HUMANEVAL, partial(_edits, data.HUMANEVAL)),
    "mbpp": (data.MBPP, _mbpp),
    "mbpp-edits": (data.MBPP, partial(_edits, data.MBPP)),
}


def parse(source: Path) -> tuple[str, str, str] | None:
    """Name, task and place of NAME[/TASK][:PLACE]; None for a file, or if there is no set of that name."""
    known, _, place = str(source).partition(":")
    name, _, task = known.partition("/")
    return (name, task, place) if name in SETS and not source.is_file() else None


def read(name: str, task: str = "", place: str = "") -> list[Prompt]:
    """The prompts of a set or one of its tasks. `place`: its file or folder; "": the hub. Raises ConfigError."""
    (source, reader), path = SETS[name], Path(place)
    if not path.is_file():
        path = data.locate(source, path if place else None, f"--prompts {name}:DIR")
    try:
        prompts = list(reader(path))
    except ConfigError as error:
        raise ConfigError(f"--prompts {name}: {error}") from None
    if not prompts:
        raise ConfigError(f"{path} holds no row of {name} that is long enough ({ROW} words); is it the right file?")
    tasks = sorted({p.domain for p in prompts})
    if task and task not in tasks:
        raise ConfigError(f"--prompts {name}/{task}: no such task; there are {', '.join(tasks)}")
    return [p for p in prompts if not task or p.domain == task]
