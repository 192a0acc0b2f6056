"""The alarm: a learned drafter that is hardly ever right is reported once; other drafters are not."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fixtures_eagle import random_head, raw_config, write_head
from lawkit import MODEL_VOCAB, make_engine, random_prompts, run, texts

from sameseed import ops
from sameseed.config import SpecConfig
from sameseed.engine.alarm import Alarm
from sameseed.models.eagle_loader import load_head
from sameseed.models.head_config import parse_head_config
from sameseed.request import SamplingParams

GREEDY = SamplingParams(max_tokens=60, seed=6, ignore_eos=True)
PROMPTS = random_prompts(4, seed=4)


@pytest.mark.parametrize(
    ("num_drafts", "k", "accepted", "useless"),
    [
        (50, 4, 1, True),
        (49, 4, 1, False),  # too few drafts to tell
        (19, 20, 0, False),
        (20, 2, 0, True),  # none accepted: 20 drafts are enough
        (50, 4, 2, False),  # 1 % accepted: bad, but not useless
        (100, 20, 4, True),
        (100, 20, 5, False),  # most nodes of a large tree are rejected anyway
    ],
)
def test_when_a_draft_is_no_use(num_drafts, k, accepted, useless):
    alarm, num_accepted = Alarm(), [int(i < accepted) for i in range(num_drafts)]
    for _ in range(2):  # the second drafter may get the address of the first
        alarm.update(SimpleNamespace(name="mine", owns=True, counted=list), [k] * num_drafts, num_accepted)
    assert len(alarm.texts) == 2 * useless


def foreign_head(folder, pair):
    raw = raw_config("eagle", MODEL_VOCAB)
    write_head(folder, raw, random_head(parse_head_config(raw), 7, "layers.0"))
    return replace(pair, head=load_head(folder, pair.target, ops.resolve()))


@pytest.mark.parametrize("method", ["eagle", "first"])
def test_a_head_of_another_target(pair, tmp_path, method, caplog):
    foreign = foreign_head(tmp_path, pair)
    below = (SpecConfig("ngram", num_draft_tokens=8), SpecConfig("eagle", num_draft_tokens=8, options={"top_k": 1}))
    chosen = {"options": {"top_k": 1}}
    if method == "first":
        chosen = {"below": below, "options": {"min_tokens": 1, "min_expected": 0.0}}
    engine = make_engine(foreign, method, k=8, **chosen)
    plain = texts(run(make_engine(pair), PROMPTS, GREEDY))
    with caplog.at_level(logging.WARNING, logger="sameseed"):
        assert texts(run(engine, PROMPTS, GREEDY)) == plain
    said = [r.message for r in caplog.records if "drafted tokens accepted" in r.message]
    assert said == engine.alarm.texts
    assert len(said) == 1 and said[0].startswith("drafter 'eagle'")
