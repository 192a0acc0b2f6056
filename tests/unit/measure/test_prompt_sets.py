"""Published sets as prompts: every layout, missing files, and that all commands name a set in the same way."""

import gzip
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from fixtures_quality import problem, write_rows

from sameseed.config import SpecConfig
from sameseed.errors import ConfigError, RequestError
from sameseed.measure.bench import Bench
from sameseed.measure.load.prompts import PromptSource, Shape
from sameseed.measure.load.wire import Endpoint
from sameseed.measure.prompt_sets import ROW, SETS
from sameseed.measure.workload import arms, prompts_name, read_prompts
from sameseed.models.loader import load_tokenizer, resolve_model
from sameseed.request import SamplingParams

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
TALK = {"question_id": 81, "category": "writing", "turns": ["the sum of", "all parts"]}
TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")


@pytest.fixture
def folder(tmp_path):
    """Five sources in one folder, some compressed."""
    write_rows(tmp_path / "mt_bench.jsonl.gz", [TALK, {**TALK, "question_id": 82, "category": "math"}])
    single = [{"question_id": n, "category": t, "turns": [f"{t}?"]} for n, t in enumerate(TASKS)]
    write_rows(tmp_path / "spec_bench.jsonl", [TALK, *single])
    write_rows(tmp_path / "gsm8k-test.jsonl", [{"question": "1 + 1?", "answer": "#### 2"}])
    write_rows(tmp_path / "HumanEval.jsonl.gz", [problem(n) for n in range(4)])
    long, short = " word" * ROW, " word" * (ROW - 1)
    (tmp_path / "wikitext2-test.txt").write_text(f" = A = \n \n{long} \n{short} \n{long} two \n")
    return tmp_path


def asked(name, folder, limit=None):
    return read_prompts(Path(f"{name}:{folder}"), limit)


def test_two_turns_are_two_prompts(folder):
    first, second, third, fourth = asked("mt-bench", folder)
    assert [p.id for p in (first, second, third, fourth)] == ["81/1", "81/2", "82/1", "82/2"]
    assert first.messages == second.messages == ({"role": "user", "content": "the sum of"},)
    assert (first.then, second.then) == ((), ("all parts",))
    assert (first.domain, fourth.domain) == ("writing", "math")


def test_six_tasks(folder):
    found = asked("spec-bench", folder)
    assert {p.domain for p in found} == {"mt_bench", *TASKS} and len(found) == 7
    assert [p.domain for p in asked("spec-bench/qa", folder)] == ["qa"]
    with pytest.raises(ConfigError, match="no such task; there are math_reasoning, mt_bench, qa"):
        asked("spec-bench/chess", folder)


def test_rows_of_wikitext_are_long_and_cut(folder):
    found = asked("wikitext", folder)
    assert [p.id for p in found] == ["3", "5"]
    tokenizer = load_tokenizer(resolve_model("embedded"))
    assert [len(p.encode(tokenizer)) for p in found] == [ROW, ROW]
    assert found[0].encode(tokenizer) == tuple(tokenizer.encode(("word " * ROW).strip()))[:ROW]


def test_sums_are_asked_in_a_chat_or_as_text_and_functions_end_where_the_next_thing_begins(folder):
    (one,), found = asked("gsm8k", folder), asked("humaneval", folder, 2)
    tokenizer = load_tokenizer(resolve_model("embedded"))
    for template, text in ((TEMPLATE, "user: 1 + 1?\nassistant:"), (None, "Question: 1 + 1?\nAnswer:")):
        tokenizer.templates = {"default": template} if template else {}
        assert tokenizer.decode(one.encode(tokenizer)) == text
    assert one.stop == ("\nQuestion:",)
    assert [p.id for p in found] == ["Test/0", "Test/2"] and "\ndef" in found[0].stop
    assert found[0].text == problem(0)["prompt"]


def test_programs_are_written_or_edited(folder):
    code = "import re\r\ndef find(a):\r\n    return a"
    write_rows(folder / "mbpp-test.jsonl", [{"text": "Find it.", "code": code, "test_list": ["assert find(1) == 1"]}])
    (written,), (documented,) = asked("mbpp", folder), asked("mbpp-edits", folder)
    assert written.messages[0]["content"].startswith("Find it. ") and "assert find(1)" in written.said
    assert "docstring" in documented.said and "`find`" in documented.said
    assert "```python\nimport re\ndef find(a):\n    return a\n```" in documented.said
    renamed = asked("humaneval-edits", folder, 1)[0].said
    assert (problem(0)["prompt"] + problem(0)["canonical_solution"]).strip() in renamed and "`new_" in renamed


def test_a_file_of_any_name_the_hubs_folders_and_the_hub(folder, monkeypatch):
    packed = folder / "mt_bench.jsonl.gz"
    shutil.copy(packed, folder / "mine.jsonl.gz")
    (folder / "hub" / "raw").mkdir(parents=True)
    (folder / "hub" / "raw" / "question.jsonl").write_bytes(gzip.decompress(packed.read_bytes()))

    def download(repository, file, kind):
        assert (repository, kind) == ("HuggingFaceH4/mt_bench_prompts", "dataset")
        return packed

    monkeypatch.setattr("sameseed.hub.fetch", download)
    for place in (f"mt-bench:{folder}/mine.jsonl.gz", f"mt-bench:{folder}/hub", "mt-bench"):
        assert read_prompts(Path(place)) == asked("mt-bench", folder)
    with pytest.raises(ConfigError, match=r"github\.com/hemingkx/Spec-Bench and give it with --prompts spec-bench:DIR"):
        read_prompts(Path("spec-bench"))


def test_what_is_missing_or_odd_is_said(folder, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    for name in SETS:
        with pytest.raises(ConfigError, match=r"lacks .*the data of"):
            asked(name, empty)
        with pytest.raises(ConfigError, match=f"--prompts {name}:DIR"):
            asked(name, empty / "none")
    for turns in ([], [1]):
        write_rows(folder / "mt_bench.jsonl.gz", [{**TALK, "turns": turns}])
        with pytest.raises(ConfigError, match="row 1: 'turns' must be a list of texts"):
            asked("mt-bench", folder)
    (folder / "wikitext2-test.txt").write_text("short\n")
    with pytest.raises(ConfigError, match="long enough"):
        asked("wikitext", folder)


def test_names_in_records_hold_no_path(folder):
    for name in (*SETS, "spec-bench/qa"):
        assert prompts_name(Path(f"{name}:{folder}")) == prompts_name(Path(name)) == name
    assert prompts_name(folder / "mine.jsonl") == "mine.jsonl" and prompts_name(Path("text")) == "text"


def test_later_turns_follow_the_targets_own_answers(pair_folders, folder):
    """After these turns, every drafter gives the texts of plain decoding, up to the same natural ends."""
    bench = Bench(str(pair_folders[0]), arms([SpecConfig("ngram")], [3]), {"max_num_seqs": 2})
    tokenizer = bench.llm.tokenizer
    tokenizer.templates = {"default": TEMPLATE}
    prompts, params = asked("mt-bench", folder)[:2], SamplingParams(max_tokens=8, seed=1)
    prompts += [replace(p, stop=(tokenizer.decode([tokenizer.encode("of")[-1]]),)) for p in asked("humaneval", folder)]
    workload = bench.workload("sets", prompts, params, 2)
    first = tokenizer.render_chat(prompts[0].messages)
    (written,) = bench.llm.generate([{"prompt_token_ids": list(workload.prompts[0])}], params)
    whole = f"{first} {written.text}\nuser: all parts\nassistant:"
    assert workload.prompts[1] == tuple(tokenizer.encode(whole, add_special_tokens=False))
    jobs = [params for batch in workload.batches() for _, params in batch]
    assert [p.stop for p in jobs] == [p.stop for p in prompts]
    runs = bench.measure(workload, 1)
    plain, drafted = (runs[arm][0].texts for arm in bench.arms)
    assert plain == drafted and len(plain) == len(prompts)
    with pytest.raises(RequestError, match="prompt 81/1"):
        bench.workload("sets", [replace(prompts[0], messages=({"role": "user", "content": "a " * 10**4},))], params)


async def test_a_server_is_asked_for_the_first_turns_answer(folder, monkeypatch):
    told = []

    async def ask(source, route, **fields):
        told.append({"route": route, **fields})
        if route == "tokenize":
            return {"tokens": list(range(999))}
        return {"choices": [{"message": {"content": "a whole"}}]}

    monkeypatch.setattr(PromptSource, "ask", ask)
    chat, plain = Endpoint("s", "http://s", "m", True), Endpoint("s", "http://s", "m", False)

    async def made(name, endpoint, count):
        kind = f"{name}:{folder}"
        return await PromptSource(None, endpoint, kind).make(Shape(None, 7), count, "1")

    bodies = sorted(await made("mt-bench", chat, 4), key=lambda body: len(body["messages"]))
    assert [len(body["messages"]) for body in bodies] == [1, 1, 3, 3]
    assert bodies[3]["messages"][1:] == [
        {"role": "assistant", "content": "a whole"},
        {"role": "user", "content": "all parts"},
    ]
    assert {t["max_tokens"] for t in told} == {7}
    assert (await made("gsm8k", plain, 1))[0] == {"prompt": "Question: 1 + 1?\nAnswer:", "stop": ["\nQuestion:"]}
    assert len((await made("humaneval", plain, 1))[0]["stop"]) == 4
    assert (await made("wikitext", plain, 1))[0] == {"prompt": list(range(ROW))}
