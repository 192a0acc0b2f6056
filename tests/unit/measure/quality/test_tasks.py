import gzip
import textwrap

import pytest
from fixtures_models import SHARED, need
from fixtures_quality import write_rows
from lawkit import write_model

from sameseed import LLM
from sameseed.errors import ConfigError
from sameseed.measure.quality import data, tasks
from sameseed.measure.quality.data import GSM8K, HUMANEVAL, TEXT
from sameseed.measure.quality.tasks import EvalSettings


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, max_position_embeddings=4096)
    return LLM(str(folder), max_num_seqs=8)


def answering(monkeypatch, module, answers):
    """Answer a task from a table instead of by a model; returns the list of prompts, which grows."""
    asked = []

    def answer(llm, prompts, *rest):
        texts = [llm.tokenizer.decode(p) for p in prompts]
        asked.extend(texts)
        return [next((a for end, a in answers.items() if text.endswith(end)), "") for text in texts], ()

    monkeypatch.setattr(module, "answer", answer)
    return asked


def test_humaneval_knows_right_from_wrong(data_folder):
    rows = data.rows(data.HUMANEVAL, data_folder)
    good = [row["canonical_solution"] for row in rows]
    assert not any(tasks.score(rows, good))
    assert all(tasks.score(rows, ["    pass\n"] * len(rows)))
    assert all(tasks.score(rows, ["    raise SystemExit(0)\n"] * len(rows)))


@pytest.mark.parametrize("limit", [12, pytest.param(None, marks=pytest.mark.slow)])
def test_humaneval_itself(limit):
    rows = data.take(data.read_rows(need(SHARED / "eval" / "tasks.jsonl.gz"), data.HUMANEVAL), limit)
    good = tasks.score(rows, [row["canonical_solution"] for row in rows])
    assert [row["task_id"] for row, error in zip(rows, good, strict=True) if error] == []
    bad = tasks.score(rows, ["    pass\n"] * len(rows))
    assert [row["task_id"] for row, error in zip(rows, bad, strict=True) if not error] == []


def test_humaneval_scores_what_the_model_wrote(llm, data_folder, monkeypatch):
    answers = {f'Add {n} to x.\n    """\n': f"    return x + {n}\n" for n in (0, 2, 4)}
    answering(monkeypatch, tasks, answers | {'Add 1 to x.\n    """\n': "    return x + 7\n"})
    result = tasks.humaneval(llm, EvalSettings(data=data_folder))
    assert result.scores == (1.0, 0.0, 1.0, 0.0, 1.0, 0.0)
    assert result.extra["errors"]["AssertionError"] == 3


@pytest.mark.parametrize(("score", "want"), [(1.0, (0.7225, 1.0)), (0.0, (0.0, 0.2775)), (0.5, (0.5, 0.5))])
def test_ten_answers_that_score_alike_are_not_certain(score, want):
    assert tasks.TaskResult("humaneval", "pass@1", (score,) * 10).interval(0) == pytest.approx(want, abs=1e-4)


PLUS_3 = "def plus_3(x):\n    return x + 3"


@pytest.mark.parametrize(
    "text",
    [
        f"Sure, `plus_3`: ```python\n{PLUS_3}\n```\nThat is all.",
        "````\n    return x + 3\n````",
        "```python\nimport math\n\ndef helper(x):\n    return x + 3\n\ndef plus_3(x):\n    return helper(x)\n```",
        f"<think>\n```python\n{PLUS_3[:-4]}\n```\nNo.\n</think>\n```Python\n{PLUS_3}\n```",
        f'Install:\n```sh\npip install x\n```\nThen:\n``` python3 title="a.py"\n{PLUS_3}\n```'.replace("\n", "\r\n"),
        f"1. Code:\n   ```python\n{textwrap.indent(PLUS_3, '   ')}\n   ```\n2. Done.",
        f"- ```py\n{textwrap.indent(PLUS_3, '  ')}\n  ```\n- Done.",
        '```\ndef plus_3(x):\n    """\n    ```\n    plus_3(1)\n    ```\n    """\n    return x + 3\n```',
    ],
)
def test_humaneval_reads_code_blocks_of_a_chat(data_folder, text):
    row = data.rows(data.HUMANEVAL, data_folder)[3]
    assert tasks.score([row], [text], chat=True) == [None]


@pytest.fixture
def harness(monkeypatch):
    """The module that runs tasks through the harness; skips tests where that is not installed."""
    pytest.importorskip("lm_eval", reason="the harness is an extra: pip install '.[eval]'")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from sameseed.measure import lm_eval

    return lm_eval


def test_gsm8k_scores_and_leaves_its_examples_out(harness, llm, data_folder, monkeypatch):
    answers = {"the sum of 1003?\nAnswer:": "it is\n#### 1004", "the sum of 1005?\nAnswer:": "1005 + 1 = 1,006"}
    asked = answering(monkeypatch, harness, answers)
    result = harness.run_harness(llm, "gsm8k", EvalSettings(data=data_folder))
    assert len(asked) == len(result.scores) == 9 and result.scores[0] == result.scores[2] == 1.0
    assert sum(result.scores) == 2 and result.extra == {"strict": pytest.approx(1 / 9), "without_number": 7}
    assert all(text.count("Question:") == 6 and "the sum of 998?" in text for text in asked)
    assert "are examples" in result.notes[0]


def test_gsm8k_takes_the_training_set_for_examples(harness, llm, data_folder, tmp_path, monkeypatch):
    rows = data.rows(data.GSM8K, data_folder)
    write_rows(tmp_path / "gsm8k-test.jsonl", rows)
    write_rows(tmp_path / "gsm8k-train.jsonl", [{"question": f"train {n}", "answer": "#### 1"} for n in range(9)])
    asked = answering(monkeypatch, harness, {})
    result = harness.run_harness(llm, "gsm8k", EvalSettings(data=tmp_path, limit=4))
    assert len(asked) == 4 and result.notes == () and asked[0].count("train ") == 5
    assert "the sum of 998?" in asked[0] and "the sum of 1001?" in asked[1]  # spread over the whole set


def test_a_short_context_cuts_the_beginning(harness, pair_folders, data_folder, monkeypatch):
    asked = answering(monkeypatch, harness, {})
    result = harness.run_harness(LLM(str(pair_folders[0])), "gsm8k", EvalSettings(data=data_folder, limit=3))
    assert asked[0].count("Question:") < 6 and asked[0].endswith("the sum of 1003?\nAnswer:")
    assert "3 prompts lost their beginning" in result.notes[1]


def test_mmlu_pro_asks_after_examples_of_its_subject(harness, llm, data_folder, monkeypatch):
    answers = {"option 3 of 1\nAnswer: Let's think step by step.": "so the answer is (B)."}
    asked = answering(monkeypatch, harness, answers)
    result = harness.run_harness(llm, "mmlu_pro", EvalSettings(data=data_folder))
    assert result.scores == (1, 0, 0, 0, 0, 0, 0, 0)  # the questions of law, then those of math
    assert result.extra["subjects"]["law"] == {"value": 0.25, "num_questions": 4}
    assert result.extra["without_letter"] == 7 and result.extra["chance"] == 0.25
    text = asked[0]
    assert "about law." in text and text.count("Question:") == 6
    assert text.count("It is so. The answer is (") == 5 and "A: Let's" not in text
    assert "option 3 of 101" in text and "of 100" not in text


@pytest.mark.parametrize("letter", ["H", "", "AB", "a"])
def test_a_wrong_letter_in_the_data_is_refused(harness, data_folder, tmp_path, letter):
    rows = data.rows(data.MMLU_PRO, data_folder)
    write_rows(tmp_path / "mmlu_pro-test.jsonl", [{**rows[0], "answer": letter}])
    write_rows(tmp_path / "mmlu_pro-shots.jsonl", data.rows(data.MMLU_PRO_SHOTS, data_folder))
    with pytest.raises(ConfigError, match=f"no option '{letter}'"):
        tasks.read_rows("mmlu_pro", EvalSettings(data=tmp_path))


def test_without_the_harness_the_extra_is_named(data_folder, monkeypatch):
    monkeypatch.setattr("sameseed.measure.quality.tasks.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[eval\]'"):
        tasks.check(EvalSettings(("gsm8k",), data_folder))


def test_the_answer_to_a_question_does_not_depend_on_the_others(llm):
    params = tasks.SamplingParams(max_tokens=8, temperature=1.0, seed=5)
    prompts = [llm.tokenizer.encode(t) for t in ("the sum", "the list", "the loop")]
    done = []
    texts, notes = tasks.answer(llm, [prompts[0], [], *prompts[1:]], [params] * 4, lambda n, total: done.append(n))
    assert texts[1] == "" and done == [1, 2, 3] and "3 of 3 answers were cut" in notes[0]
    assert tasks.answer(llm, prompts[:1], [params], lambda done, total: None)[0] == texts[:1]


def test_text_that_differs_from_the_protocol_is_said(llm, tmp_path):
    (tmp_path / "wikitext2-test.txt").write_text("\n = <unk> = \n \n the sum of <unk> parts \n" * 8)
    found = tasks.evaluate(llm, EvalSettings(data=tmp_path, window=8192, stride=64, tokens=90))
    said = " ".join(found.notes)
    assert "clipped" in said and "<unk>" in said and "first 90 tokens" in said


ROW = {"question": "1?", "answer": "#### 1"}


def test_wikitext_is_joined_as_published(tmp_path):
    # The set's rows are lines with their line ends, blank lines are empty; published figures join rows by blank lines.
    (tmp_path / "wiki.test.raw").write_text(" \n = A = \n \n first \n second \n")
    text, name = data.wikitext(tmp_path)
    assert name == "wiki.test.raw"
    assert text == "\n\n".join(["", " = A = \n", "", " first \n", " second \n"])


def test_packed_and_plain_files_read_alike(tmp_path):
    (tmp_path / "wikitext2-test.txt.gz").write_bytes(gzip.compress("für\r\nüber\n".encode()))
    assert data.wikitext(tmp_path)[0] == "für\r\n\n\nüber\n"
    write_rows(tmp_path / "gsm8k-test.jsonl.gz", [ROW, {**ROW, "question": "a\u2028b"}])
    assert [r["question"] for r in data.rows(GSM8K, tmp_path)] == ["1?", "a\u2028b"]
    write_rows(tmp_path / "x.jsonl.gz", [{"text": "one\n"}, {"text": "two"}])
    assert data.text_of(tmp_path / "x.jsonl.gz") == "one\n\ntwo"


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "no rows"), (b"{", "no JSON"), (b"[1]\n", "no JSON object"),
        (b'{"question": 3, "answer": "x"}\n', "lacks 'question'"), (b'{"question": "x"}\n', "lacks 'answer'"),
        (b"\xff\xfe", "UTF-8"), (b"[" * 100_000, "no JSON"),
    ],
)  # fmt: skip
def test_odd_files_are_refused(tmp_path, content, match):
    (tmp_path / "gsm8k-test.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=match):
        data.rows(GSM8K, tmp_path)


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("no route to host\nat all")

    monkeypatch.setattr("sameseed.hub.fetch", unreachable)
    for folder, says in ((tmp_path, r"humaneval\.jsonl"), (None, r"no route to host; give a folder .* --data")):
        with pytest.raises(ConfigError, match=says):
            data.rows(HUMANEVAL, folder)
    with pytest.raises(ConfigError, match="no folder"):
        data.wikitext(tmp_path / "nowhere")


def test_the_hub_s_files_are_read(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    asked = []

    def download(repository, file, kind):
        asked.append((repository, file, kind))
        rows = [{"text": ""}, {"text": " = A = \n"}] if repository == "Salesforce/wikitext" else [ROW]
        path = tmp_path / f"{len(asked)}.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return path

    monkeypatch.setattr("sameseed.hub.fetch", download)
    assert data.rows(GSM8K, None) == [ROW]
    assert data.wikitext(None)[0] == "\n\n = A = \n"
    assert asked[0] == ("openai/gsm8k", "main/test-00000-of-00001.parquet", "dataset")
    assert TEXT.hub is not None and asked[1][:2] == TEXT.hub
