from __future__ import annotations

import json
from pathlib import Path

import pytest

from sameseed.config import SpecConfig
from sameseed.errors import ConfigError, RequestError
from sameseed.measure.bench_report import speculation
from sameseed.measure.workload import Arm, Workload, arms, read_prompts, spec_as_dict
from sameseed.request import SamplingParams


def test_prompts_of_both_kinds(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"id": "a", "domain": "d", "prompt": "x"}\n\n{"messages": [{"role": "user", "content": "y"}]}\n')
    first, second = read_prompts(file)
    assert (first.id, first.domain, first.text, first.messages) == ("a", "d", "x", ())
    assert second.text is None and second.messages == ({"role": "user", "content": "y"},)


def test_a_limit_takes_prompts_from_all_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("".join(f"{i}\n" for i in range(10)))
    assert [p.text for p in read_prompts(file, 3)] == ["0", "3", "6"]
    assert len(read_prompts(file, 99)) == 10
    with pytest.raises(ConfigError, match="at least 1"):
        read_prompts(file, 0)


def test_batches_give_each_prompt_its_own_seed() -> None:
    work = Workload("w", ((1,), (2,), (3,)), SamplingParams(seed=2**63 - 2), 2)
    batches = list(work.batches())
    assert [len(b) for b in batches] == [2, 1]
    assert [p.seed for b in batches for _, p in b] == [2**63 - 2, 2**63 - 1, 0]


def test_a_workload_without_a_seed_is_refused() -> None:
    with pytest.raises(RequestError, match="--seed"):
        Workload("w", ((1,),), SamplingParams())
    with pytest.raises(ConfigError, match="batch size"):
        Workload("w", ((1,),), SamplingParams(seed=1), 0)


def test_arms_begin_with_plain_decoding() -> None:
    made = arms([SpecConfig("none"), SpecConfig("ngram", confidence=0.5)], [2, 4])
    assert [a.label for a in made] == ["plain", "ngram k=2 p>=0.5", "ngram k=4 p>=0.5"]
    assert [a.plain for a in made] == [True, False, False]
    with pytest.raises(ConfigError, match=r"0\.\.64"):
        arms([SpecConfig("ngram")], [65])


def test_heads_are_named_as_what_they_are() -> None:
    """Labels and records name the drafter and include its options, with their defaults."""
    made = arms([SpecConfig("draft_model", "embedded-head", options={"depth": 3})], [4])[1]
    assert (made.label, made.spec.method) == ("eagle k=4", "eagle")
    held = spec_as_dict(made.spec)
    assert held["draft"] == "eagle"
    options = held["draft_options"]
    assert isinstance(options, dict)
    assert (options["depth"], options["top_k"]) == (3, 8)
    below = (SpecConfig("suffix"), SpecConfig("draft_model", "embedded-head"))
    assert arms([SpecConfig("first", below=below)], [4])[1].label == "suffix + eagle k=4"


def test_records_hold_no_path_on_any_level(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    below = (SpecConfig("suffix"), SpecConfig("draft_model", str(tmp_path / "small")))
    held = speculation(SpecConfig("first", below=below))
    assert str(tmp_path) not in json.dumps(held)
    assert '"small"' in json.dumps(held)


def test_arms_do_not_learn_from_one_another() -> None:
    """Arms write the same texts, so a drafter that remembers past requests must not remember those of another arm."""
    asked = SpecConfig("first", below=(SpecConfig("suffix"), SpecConfig("draft_model", model="small")))
    assert Arm("both", asked).spec.below[0].options == {"past": "none"}
    assert Arm("both", asked).spec.below[1] == asked.below[1]
    wanted = SpecConfig("suffix", options={"past": "all", "store": "texts"})
    assert Arm("all", wanted).spec == wanted
    assert Arm("ngram", SpecConfig("ngram")).spec == SpecConfig("ngram")
