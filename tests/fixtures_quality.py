"""Small evaluation sets, as files."""

import gzip
import json


def write_rows(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)


def problem(number):
    """A problem in HumanEval's format: add a number to another."""
    return {
        "task_id": f"Test/{number}",
        "prompt": f'import math\n\n\ndef plus_{number}(x):\n    """Add {number} to x.\n    """\n',
        "entry_point": f"plus_{number}",
        "canonical_solution": f"    return x + {number}\n",
        "test": f"def check(it):\n    assert it(1) == {number + 1}\n    assert it(-2) == {number - 2}\n",
    }


def exam(number, category):
    names = [f"option {i} of {number}" for i in range(4)]
    return {
        "question_id": number, "category": category, "question": f"the sum of {number}?", "options": names,
        "answer": "ABCD"[number % 3], "answer_index": number % 3,
    }  # fmt: skip


def write_data(folder):
    """Write a small set of every kind, some compressed."""
    write_rows(folder / "humaneval.jsonl.gz", [problem(n) for n in range(6)])
    sums = [{"question": f"the sum of {n}?", "answer": f"It is {n} + 1.\n#### {n + 1:,}"} for n in range(998, 1012)]
    write_rows(folder / "gsm8k-test.jsonl", sums)
    subjects = ("math", "law")
    write_rows(folder / "mmlu_pro-test.jsonl.gz", [exam(n, subjects[n % 2]) for n in range(8)])
    shots = [exam(n, subjects[n % 2]) for n in range(100, 110)]
    for row in shots:
        row["options"] += ["N/A"] * 6  # the few-shot examples of MMLU-Pro have such options
        row["cot_content"] = f"A: Let's think step by step. It is so. The answer is ({row['answer']})."
    write_rows(folder / "mmlu_pro-shots.jsonl", shots)
    lines = [" \n", " = the whole = \n", " \n", " the sum of all parts is a whole ; the loop ends . \n", " \n"] * 12
    (folder / "wikitext2-test.txt").write_text("".join(lines))
    return folder
