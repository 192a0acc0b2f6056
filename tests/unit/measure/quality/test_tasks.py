from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
from fixtures_models import SHARED, need
from fixtures_quality import write_rows
from lawkit import write_model

from sameseed import LLM
from sameseed.errors import ConfigError
from sameseed.measure.quality import data, suite, tasks
from sameseed.measure.quality.tasks import TaskSettings

Answers = dict[str, str]  # the end of a prompt -> what the "model" writes


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, max_position_embeddings=4096)
    return LLM(str(folder), max_num_seqs=8)


def answering(monkeypatch: pytest.MonkeyPatch, module: Any, answers: Answers) -> list[str]:
    """Answer a task from a table instead of by a model; returns the list of prompts, which grows."""
    asked: list[str] = []

    def answer(llm: LLM, prompts: Seq[Seq[int]], *rest: object) -> list[str]:
        texts = [llm.tokenizer.decode(p) for p in prompts]
        asked.extend(texts)
        return [next((a for end, a in answers.items() if text.endswith(end)), "") for text in texts]

    monkeypatch.setattr(module, "answer", answer)
    return asked


# --- HumanEval ---


def test_humaneval_knows_right_from_wrong(data_folder: Path) -> None:
    rows = data.rows(data.HUMANEVAL, data_folder)
    good = [row["canonical_solution"] for row in rows]
    assert all(o.passed for o in tasks.score(rows, good))
    assert not any(o.passed for o in tasks.score(rows, ["    pass\n"] * len(rows)))
    assert not any(o.passed for o in tasks.score(rows, ["    raise SystemExit(0)\n"] * len(rows)))


@pytest.mark.parametrize("limit", [12, pytest.param(None, marks=pytest.mark.slow)])
def test_humaneval_itself(limit: int | None) -> None:
    rows = data.take(data.read_rows(need(SHARED / "eval" / "tasks.jsonl.gz"), data.HUMANEVAL), limit)
    good = tasks.score(rows, [row["canonical_solution"] for row in rows])
    assert [row["task_id"] for row, o in zip(rows, good, strict=True) if not o.passed] == []
    bad = tasks.score(rows, ["    pass\n"] * len(rows))
    assert [row["task_id"] for row, o in zip(rows, bad, strict=True) if o.passed] == []


def test_humaneval_scores_what_the_model_wrote(llm: LLM, data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {f'Add {n} to x.\n    """\n': f"    return x + {n}\n" for n in (0, 2, 4)}
    answering(monkeypatch, tasks, answers | {'Add 1 to x.\n    """\n': "    return x + 7\n"})
    result = tasks.humaneval(llm, TaskSettings(data_folder))
    assert result.scores == (1.0, 0.0, 1.0, 0.0, 1.0, 0.0)
    assert result.extra["errors"]["AssertionError"] == 3


@pytest.mark.parametrize(
    "text",
    [
        "Sure:\n```python\ndef plus_3(x):\n    return x + 3\n```\nThat is all.",
        "```\n    return x + 3\n```",
        "```python\nimport math\n\ndef helper(x):\n    return x + 3\n\ndef plus_3(x):\n    return helper(x)\n```",
    ],
)
def test_humaneval_reads_code_blocks_of_a_chat(data_folder: Path, text: str) -> None:
    row = data.rows(data.HUMANEVAL, data_folder)[3]
    assert tasks.score([row], [text], chat=True)[0].passed


# --- GSM8K and MMLU-Pro, by lm-evaluation-harness ---


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips tests of tasks that run through the harness where it is not installed."""
    pytest.importorskip("lm_eval", reason="the harness is an extra: pip install '.[eval]'")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def harness_answers(monkeypatch: pytest.MonkeyPatch, answers: Answers) -> list[str]:
    """The same as `answering`, behind the suite."""
    from sameseed.measure import lm_eval

    return answering(monkeypatch, lm_eval, answers)


def test_gsm8k_scores_and_leaves_its_examples_out(
    harness: None, llm: LLM, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"the sum of 1003?\nAnswer:": "it is\n#### 1004", "the sum of 1005?\nAnswer:": "1005 + 1 = 1,006"}
    asked = harness_answers(monkeypatch, answers)
    result = suite.run_harness(llm, "gsm8k", TaskSettings(data_folder))
    assert len(asked) == len(result.scores) == 9 and result.scores[0] == result.scores[2] == 1.0
    assert sum(result.scores) == 2 and result.extra == {"strict": pytest.approx(1 / 9), "without_number": 7}
    assert all(text.count("Question:") == 6 and "the sum of 998?" in text for text in asked)
    assert "are examples" in result.notes[0]


def test_gsm8k_takes_the_training_set_for_examples(
    harness: None, llm: LLM, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = data.rows(data.GSM8K, data_folder)
    write_rows(tmp_path / "gsm8k-test.jsonl", rows)
    write_rows(tmp_path / "gsm8k-train.jsonl", [{"question": f"train {n}", "answer": "#### 1"} for n in range(9)])
    asked = harness_answers(monkeypatch, {})
    result = suite.run_harness(llm, "gsm8k", TaskSettings(tmp_path, limit=4))
    assert len(asked) == 4 and result.notes == () and asked[0].count("train ") == 5
    assert "the sum of 998?" in asked[0] and "the sum of 1001?" in asked[1]  # spread over the whole set


def test_a_short_context_cuts_the_beginning(
    harness: None, pair_folders: tuple[Path, Path], data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = harness_answers(monkeypatch, {})
    result = suite.run_harness(LLM(str(pair_folders[0])), "gsm8k", TaskSettings(data_folder, limit=3))
    assert asked[0].count("Question:") < 6 and asked[0].endswith("the sum of 1003?\nAnswer:")
    assert "3 prompts lost their beginning" in result.notes[1]


def test_mmlu_pro_asks_after_examples_of_its_subject(
    harness: None, llm: LLM, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"option 3 of 1\nAnswer: Let's think step by step.": "so the answer is (B)."}
    asked = harness_answers(monkeypatch, answers)
    result = suite.run_harness(llm, "mmlu_pro", TaskSettings(data_folder))
    assert result.scores == (1, 0, 0, 0, 0, 0, 0, 0)  # the questions of law, then those of math
    assert result.extra["subjects"]["law"] == {"value": 0.25, "num_questions": 4}
    assert result.extra["without_letter"] == 7 and result.extra["chance"] == 0.25
    text = asked[0]
    assert "about law." in text and text.count("Question:") == 6
    assert text.count("It is so. The answer is (") == 5 and "A: Let's" not in text
    assert "option 3 of 101" in text and "of 100" not in text


@pytest.mark.parametrize("letter", ["H", "", "AB", "a"])
def test_a_wrong_letter_in_the_data_is_refused(harness: None, data_folder: Path, tmp_path: Path, letter: str) -> None:
    rows = data.rows(data.MMLU_PRO, data_folder)
    write_rows(tmp_path / "mmlu_pro-test.jsonl", [{**rows[0], "answer": letter}])
    write_rows(tmp_path / "mmlu_pro-shots.jsonl", data.rows(data.MMLU_PRO_SHOTS, data_folder))
    with pytest.raises(ConfigError, match=f"no option '{letter}'"):
        suite.read_rows("mmlu_pro", TaskSettings(tmp_path))


def test_a_subject_that_the_harness_lacks_is_refused(
    harness: None, llm: LLM, data_folder: Path, tmp_path: Path
) -> None:
    for kind, name in ((data.MMLU_PRO, "test"), (data.MMLU_PRO_SHOTS, "shots")):
        rows = [{**row, "category": "astrology"} for row in data.rows(kind, data_folder)]
        write_rows(tmp_path / f"mmlu_pro-{name}.jsonl", rows)
    with pytest.raises(ConfigError, match="mmlu_pro_astrology"):
        suite.run_harness(llm, "mmlu_pro", TaskSettings(tmp_path))


def test_without_the_harness_the_extra_is_named(data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sameseed.measure.quality.suite.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[eval\]'"):
        suite.check(["gsm8k"], TaskSettings(data_folder), suite.PerplexityText())


# --- what they share ---


def test_all_tasks_run_on_a_model_and_report(harness: None, llm: LLM, data_folder: Path) -> None:
    seen: dict[str, int] = {}
    settings = TaskSettings(data_folder, limit=2, max_tokens=12, chat=True, temperature=0.7, seed=3)
    found = suite.evaluate(
        llm, suite.NAMES, settings, suite.PerplexityText(window=64, stride=32), lambda s, d, t: seen.update({s: d})
    )
    assert [r.task for r in found.results] == [*suite.TASKS]
    assert found.perplexity is not None and found.perplexity.perplexity > 1
    assert {"perplexity", "humaneval", "humaneval, tests", "gsm8k", "mmlu_pro"} <= set(seen)
    assert json.loads(json.dumps(found.as_dict(0)))["tasks"][1]["num_questions"] == 2
    assert llm.engine.runner.blocks.num_free == llm.engine.runner.blocks.num_blocks
    again = suite.evaluate(llm, ["gsm8k"], settings, suite.PerplexityText())
    assert again.results[0].answers == found.results[1].answers


def test_the_answer_to_a_question_does_not_depend_on_the_others(llm: LLM) -> None:
    params = tasks.SamplingParams(max_tokens=8, temperature=1.0, seed=5)
    prompts = [llm.tokenizer.encode(t) for t in ("the sum", "the list", "the loop")]
    done: list[int] = []
    texts = tasks.answer(llm, [prompts[0], [], *prompts[1:]], [params] * 4, lambda n, total: done.append(n))
    assert texts[1] == "" and done == [1, 2, 3]
    assert tasks.answer(llm, prompts[:1], [params], lambda done, total: None) == texts[:1]


def test_text_that_differs_from_the_protocol_is_said(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "wikitext2-test.txt").write_text("\n = <unk> = \n \n the sum of <unk> parts \n" * 8)
    found = suite.evaluate(
        llm, ["perplexity"], TaskSettings(tmp_path), suite.PerplexityText(window=8192, stride=64, tokens=90)
    )
    said = " ".join(found.notes)
    assert "clipped" in said and "<unk>" in said and "first 90 tokens" in said
