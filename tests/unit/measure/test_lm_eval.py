"""sameseed as a model of lm-evaluation-harness; without the harness these tests are skipped."""

import json
import math
import sys
from types import SimpleNamespace

import pytest

from sameseed import LLM
from sameseed.errors import RequestError

lm_eval = pytest.importorskip("lm_eval")
from sameseed.measure.lm_eval import SameseedLM, main  # noqa: E402
from sameseed.measure.quality.perplexity import perplexity  # noqa: E402


@pytest.fixture(scope="module")
def model(pair_folders):
    return SameseedLM(str(pair_folders[0]), batch_size=8, max_num_seqs=4)


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory):
    """Three tiny local tasks, one of each kind of request."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"q": f"the sum of {n}", "options": [" is", " ends", " list"], "gold": n % 3} for n in range(6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test", "doc_to_text": "{{q}}",
    }  # fmt: skip
    kinds = {
        "tiny_choice": {
            "output_type": "multiple_choice",
            "doc_to_choice": "{{options}}",
            "doc_to_target": "{{gold}}",
            "metric_list": [{"metric": "acc"}],
        },
        "tiny_rolling": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{q}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
        "tiny_generate": {
            "output_type": "generate_until",
            "doc_to_target": "{{q}}",
            "generation_kwargs": {"until": ["."], "max_gen_toks": 5, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for name, kind in kinds.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **shared, **kind}))  # JSON is YAML
    return folder


def request(*args):
    return SimpleNamespace(args=args)


def test_the_harness_runs_it(model, task_folder, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(task_folder / "cache"))
    from lm_eval.tasks import TaskManager

    names = ["tiny_choice", "tiny_rolling", "tiny_generate"]
    manager = TaskManager(include_path=str(task_folder), include_defaults=False)
    found = lm_eval.simple_evaluate(model=model, tasks=names, task_manager=manager, bootstrap_iters=0, log_samples=True)
    results = found["results"]
    assert results["tiny_generate"]["exact_match,none"] == 0.0
    right = 0
    for sample in found["samples"]["tiny_choice"]:
        scores = [model.loglikelihood([request(sample["doc"]["q"], o)])[0][0] for o in sample["doc"]["options"]]
        right += scores.index(max(scores)) == sample["doc"]["gold"]
    assert results["tiny_choice"]["acc,none"] == pytest.approx(right / 6)
    assert results["tiny_rolling"]["word_perplexity,none"] > 1


def test_rolling_sums_every_token_once(model):
    text = "the sum of all parts is a whole; the loop ends when the list is empty. " * 9
    tokens = model.llm.tokenizer.encode(text)
    longest = model.llm.engine.max_model_len
    assert len(tokens) > longest
    short = model.llm.tokenizer.decode(tokens[:100])
    plain = perplexity(model.llm, short)
    first = model.loglikelihood([request("", model.llm.tokenizer.decode(tokens[:1]))])[0][0]
    # A prefix token comes before the text, and every later token attends to it.
    assert model.loglikelihood_rolling([request(short)])[0] != pytest.approx(first - plain.nats)
    whole, again = model.loglikelihood_rolling([request(text), request(text)])
    assert whole == again and math.isfinite(whole) and whole < 0
    assert model.loglikelihood_rolling([request("")]) == [0]


def test_a_likelihood_is_the_sum_of_what_the_words_add(model):
    whole = model.loglikelihood([request("the", " sum of")])[0][0]
    parts = model.loglikelihood([request("the", " sum"), request("the sum", " of")])
    assert whole == pytest.approx(sum(p for p, _ in parts), abs=1e-4)
    assert model.loglikelihood([request("the ", "sum of")])[0][0] == pytest.approx(whole, abs=1e-5)
    last = model.tok_encode("the sum")[-1:]
    assert model._encode_pair("the su", "m")[1] == last, "a token that spans both belongs to the continuation"


def test_an_empty_continuation_is_certain(model):
    alone = model.loglikelihood([request("the", " sum")])
    assert model.loglikelihood([request("the", " sum"), request("the sum", "")]) == [*alone, (0.0, True)]
    assert model.loglikelihood([request("the", "")]) == [(0.0, True)]


def test_generation_is_the_front_door_s_and_stops(model, pair_folders):
    expected = LLM(str(pair_folders[0])).generate("the sum", None)[0].text
    given = {"max_completion_tokens": 128, "do_sample": False, "temperature": 1.0, "num_beams": 1}
    full = model.generate_until([request("the sum", given)])[0]
    assert full == expected
    mark = full[10:12]
    cut = model.generate_until([request("the sum", {"until": mark, "max_gen_toks": 128})])[0]
    assert cut == full[: full.index(mark)]
    assert model.generate_until([request("the sum of " * 200, {"max_gen_toks": 6})])
    with pytest.raises(RequestError, match="num_beams"):
        model.generate_until([request("x", {"num_beams": 4})])


def test_an_answer_that_the_task_begins_is_continued(model):
    turns = [{"role": "user", "content": "Add."}, {"role": "assistant", "content": "def add(a, b):\n"}]
    assert model.apply_chat_template(turns, add_generation_prompt=False) == "user: Add.\nassistant: def add(a, b):\n"


def test_the_command_knows_the_model(pair_folders, task_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    command = ["lm_eval", "run", "--model", "sameseed", "--model_args", f"pretrained={pair_folders[0]},format=w8a8"]
    command += ["--tasks", "tiny_choice", "--include_path", str(task_folder), "--output_path", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    main()
    out = capsys.readouterr().out
    assert "tiny_choice" in out and "sameseed" in out
    assert list(tmp_path.rglob("results*.json"))


# fmt: skip
