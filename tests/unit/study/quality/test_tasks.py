from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from fixtures_models import SHARED, need
from fixtures_quality import write_rows
from lawkit import write_model

from sameseed import LLM
from sameseed.errors import ConfigError
from sameseed.study.measure import Run
from sameseed.study.quality import data, gsm8k, humaneval, mmlu_pro, suite, tasks
from sameseed.study.quality.tasks import Result, Settings

Answers = dict[str, str]  # the end of a prompt -> what the "model" writes


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, max_position_embeddings=2048)
    return LLM(str(folder), max_num_seqs=8)


def answering(monkeypatch: pytest.MonkeyPatch, module: Any, answers: Answers) -> list[str]:
    """Have a task answered from a table instead of by a model; returns the prompts that were asked."""
    asked: list[str] = []

    def answer(llm: LLM, prompts: Seq[Seq[int]], *rest: object) -> tuple[list[str], Run]:
        texts = [llm.tokenizer.decode(p) for p in prompts]
        asked.extend(texts)
        return [next((a for end, a in answers.items() if text.endswith(end)), "") for text in texts], Run()

    monkeypatch.setattr(module, "answer", answer)
    return asked


# --- HumanEval ---


def test_humaneval_knows_right_from_wrong(data_folder: Path) -> None:
    rows = data.rows(data.HUMANEVAL, data_folder)
    good = [row["canonical_solution"] for row in rows]
    assert all(o.passed for o in humaneval.score(rows, good))
    assert not any(o.passed for o in humaneval.score(rows, ["    pass\n"] * len(rows)))
    assert not any(o.passed for o in humaneval.score(rows, ["    raise SystemExit(0)\n"] * len(rows)))


@pytest.mark.slow
def test_humaneval_itself() -> None:
    rows = data.read_rows(need(SHARED / "eval" / "humaneval.jsonl.gz"), data.HUMANEVAL)
    good = humaneval.score(rows, [row["canonical_solution"] for row in rows])
    assert [row["task_id"] for row, o in zip(rows, good, strict=True) if not o.passed] == []
    bad = humaneval.score(rows, ["    pass\n"] * len(rows))
    assert [row["task_id"] for row, o in zip(rows, bad, strict=True) if o.passed] == []


def test_humaneval_itself_in_part() -> None:
    rows = data.take(data.read_rows(need(SHARED / "eval" / "humaneval.jsonl.gz"), data.HUMANEVAL), 12)
    assert all(o.passed for o in humaneval.score(rows, [row["canonical_solution"] for row in rows]))
    assert not any(o.passed for o in humaneval.score(rows, ["    pass\n"] * len(rows)))


def test_humaneval_scores_what_the_model_wrote(llm: LLM, data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {f'Add {n} to x.\n    """\n': f"    return x + {n}\n" for n in (0, 2, 4)}
    answering(monkeypatch, humaneval, answers | {'Add 1 to x.\n    """\n': "    return x + 7\n"})
    result = humaneval.run(llm, Settings(data_folder))
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
    assert humaneval.score([row], [text], chat=True)[0].passed


# --- GSM8K ---


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (" 3 + 4 = 7\n#### 7", 7),
        ("#### 7 and then 9", 7),
        ("#### $1,234.50.", Decimal("1234.5")),
        ("She pays $18 for 3.", 3),
        ("so it is -12.", -12),
        ("half is .5", Decimal("0.5")),
        ("the total is 70,000", 70000),
        ("#### 7.00", 7),
        ("no number", None),
        ("", None),
        ("1.2.3", None),
    ],
)
def test_gsm8k_reads_numbers(text: str, value: Any) -> None:
    assert gsm8k.extract(text) == value


def test_gsm8k_scores_and_leaves_its_examples_out(llm: LLM, data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"the sum of 1003?\nAnswer:": "it is\n#### 1004", "the sum of 1005?\nAnswer:": "1005 + 1 = 1,006"}
    asked = answering(monkeypatch, gsm8k, answers)
    result = gsm8k.run(llm, Settings(data_folder))
    assert len(asked) == len(result.scores) == 9 and result.scores[0] == result.scores[2] == 1.0
    assert sum(result.scores) == 2 and result.extra["strict"] == pytest.approx(1 / 9)
    assert all(text.count("Question:") == 6 and "the sum of 998?" in text for text in asked)
    assert "serve as examples" in result.notes[0]


def test_gsm8k_takes_the_training_set_for_examples(
    llm: LLM, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = data.rows(data.GSM8K, data_folder)
    write_rows(tmp_path / "gsm8k-test.jsonl", rows)
    write_rows(tmp_path / "gsm8k-train.jsonl", [{"question": f"train {n}", "answer": "#### 1"} for n in range(9)])
    asked = answering(monkeypatch, gsm8k, {})
    result = gsm8k.run(llm, Settings(tmp_path, limit=4))
    assert len(asked) == 4 and result.notes == () and "train 4" in asked[0] and "train 5" not in asked[0]


def test_few_examples_where_the_context_is_short(
    pair_folders: tuple[Path, Path], data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = LLM(str(pair_folders[0]))
    asked = answering(monkeypatch, gsm8k, {})
    result = gsm8k.run(short, Settings(data_folder, limit=3))
    assert 0 < asked[0].count("Question:") < 6
    assert "fewer than 5 examples" in result.notes[1]


# --- MMLU-Pro ---


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("so the answer is (C).", "C"),
        ("the answer is D", "D"),
        ("The answer is (A). The answer is (B).", "A"),
        ("the answer is (K)", None),
        ("I think C", None),
    ],
)
def test_mmlu_pro_reads_letters(text: str, letter: str | None) -> None:
    assert mmlu_pro.extract(text) == letter


def test_mmlu_pro_asks_after_examples_of_its_subject(
    llm: LLM, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answering(monkeypatch, mmlu_pro, {f"option 3 of 1\nAnswer: {mmlu_pro.THINK}": "so the answer is (B)."})
    result = mmlu_pro.run(llm, Settings(data_folder))
    assert result.scores == (0, 1, 0, 0, 0, 0, 0, 0)
    assert result.extra["subjects"]["law"] == {"value": 0.25, "num_questions": 4}
    assert result.extra["without_letter"] == 7 and result.extra["chance"] == 0.25
    text = asked[1]
    assert "about law." in text and text.count("Question:") == 6 and "N/A" not in text
    assert text.count("It is so. The answer is (") == 5 and "A: Let's" not in text
    assert "option 3 of 101" in text and "of 100" not in text


def test_mmlu_pro_takes_the_likeliest_letter(llm: LLM, data_folder: Path) -> None:
    result = mmlu_pro.run_likelihood(llm, Settings(data_folder, limit=4))
    assert len(result.scores) == 4 and result.extra["without_letter"] == 0
    rows, shots = mmlu_pro.read(Settings(data_folder, limit=4))
    for row, score in zip(rows, result.scores, strict=True):
        prompt = mmlu_pro.short_prompt(shots[row["category"]], row)
        options = llm.tokenizer.encode(" A B C D")
        assert len(options) == 8, "in this vocabulary a letter is two tokens: a blank and itself"
        context = (*llm.tokenizer.encode(prompt), options[0])
        letters = options[1::2]
        out = llm.generate(
            [list(context)], tasks.SamplingParams(max_tokens=1, allowed_token_ids=tuple(letters), ignore_eos=True)
        )[0]
        assert score == float("ABCD"[letters.index(out.token_ids[0])] == row["answer"])


@pytest.mark.parametrize("letter", ["H", "", "AB", "a"])
def test_a_wrong_letter_in_the_data_is_refused(llm: LLM, data_folder: Path, tmp_path: Path, letter: str) -> None:
    rows = data.rows(data.MMLU_PRO, data_folder)
    write_rows(tmp_path / "mmlu_pro-test.jsonl", [{**rows[0], "answer": letter}])
    write_rows(tmp_path / "mmlu_pro-shots.jsonl", data.rows(data.MMLU_PRO_SHOTS, data_folder))
    with pytest.raises(ConfigError, match=f"no option '{letter}'"):
        mmlu_pro.run(llm, Settings(tmp_path))


# --- what they share ---


def test_all_tasks_run_on_a_model_and_report(llm: LLM, data_folder: Path) -> None:
    seen: dict[str, int] = {}
    settings = Settings(data_folder, limit=2, max_tokens=12, chat=True, temperature=0.7, seed=3)
    found = suite.evaluate(
        llm, suite.NAMES, settings, suite.Text(window=64, stride=32), lambda s, d, t: seen.update({s: d})
    )
    assert [r.task for r in found.results] == list(suite.TASKS)
    assert found.perplexity is not None and found.perplexity.perplexity > 1
    assert {"perplexity", "humaneval", "humaneval, tests", "gsm8k", "mmlu_pro"} <= set(seen)
    assert json.loads(json.dumps(found.as_dict(0)))["tasks"][1]["num_questions"] == 2
    assert llm.engine.runner.blocks.num_free == llm.engine.runner.blocks.num_blocks
    again = suite.evaluate(llm, ["gsm8k"], settings, suite.Text())
    assert again.results[0].answers == found.results[1].answers


def test_the_answer_to_a_question_does_not_depend_on_the_others(llm: LLM) -> None:
    params = tasks.SamplingParams(max_tokens=8, temperature=1.0, seed=5)
    prompts = [llm.tokenizer.encode(t) for t in ("the sum", "the list", "the loop")]
    texts, run = tasks.answer(llm, [prompts[0], [], *prompts[1:]], params, lambda done, total: None)
    assert texts[1] == "" and len(run.completions) == 3
    assert tasks.answer(llm, prompts[:1], params, lambda done, total: None)[0] == texts[:1]


def test_a_result_has_its_interval() -> None:
    result = Result("x", "accuracy", (1.0, 0.0, 1.0, 1.0))
    assert result.value == 0.75
    low, high = result.interval(0)
    assert 0 <= low < 0.75 < high <= 1
    assert Result("x", "accuracy", (1.0,)).as_dict(0)["interval"] is None


def test_unknown_tasks_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'humaneval'"):
        suite.check(["humanevol"], Settings(), suite.Text())
    with pytest.raises(ConfigError, match="no tasks"):
        suite.check([], Settings(), suite.Text())


def test_text_that_differs_from_the_protocol_is_said(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "wikitext2-test.txt").write_text("\n = <unk> = \n \n the sum of <unk> parts \n" * 8)
    found = suite.evaluate(llm, ["perplexity"], Settings(tmp_path), suite.Text(window=4096, stride=64, tokens=90))
    said = " ".join(found.notes)
    assert "clipped" in said and "<unk>" in said and "first 90 tokens" in said
