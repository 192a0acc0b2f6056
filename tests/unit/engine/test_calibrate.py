"""What an engine measures before it serves requests."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest

from sameseed.drafters.first import FirstDrafter
from sameseed.engine import calibrate
from sameseed.engine.calibrate import measure_engine, measure_rounds
from sameseed.engine.llm import LLM
from sameseed.request import Sequence
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Drafter


def test_a_looping_text_does_not_hide_what_the_model_behind_a_lookup_costs(
    pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = map(str, pair_folders)
    engine = LLM(target, draft=f"suffix + {draft}", policy="fixed").engine
    first = engine.drafter
    assert isinstance(first, FirstDrafter)
    asked: dict[Drafter, int] = dict.fromkeys((first, *first.below), 0)

    def watch(drafter: Drafter) -> None:
        propose = drafter.propose

        def watched(seqs: Seq[Sequence], num_draft: Seq[int]) -> Draft:
            asked[drafter] += sum(k > 0 for k in num_draft)
            return propose(seqs, num_draft)

        monkeypatch.setattr(drafter, "propose", watched)

    for drafter in asked:
        watch(drafter)
    monkeypatch.setattr(calibrate, "QUICK", math.inf)  # two rounds before the measured ones, on a slow machine too
    measure_rounds(engine.runner, first, seconds=60.0)
    assert min(asked.values()) >= 58, "two rounds before and ten with drafts, of one sequence and of four"


def test_an_engine_tells_what_lies_between_its_passes_and_counts_nothing_of_it(pair_folders: tuple[Path, Path]) -> None:
    target, draft = map(str, pair_folders)
    engine = LLM(target, draft=draft, policy="goodput", max_num_seqs=2).engine
    policy, alarm, before = engine.policy, engine.alarm, [vars(m.copy()) for _, m in engine.drafter.counted()]
    assert not measure_rounds(engine.runner, engine.drafter).gap.seen
    cost = measure_engine(engine, 1.0)
    assert cost.gap.seen > 50 and cost.gap.at(1, False) > 0.0
    assert max(cost.draft.terms(1)) > 0.0  # noise may move all of the cost to one of start and step
    assert engine.policy is policy and engine.alarm is alarm and not engine.has_work
    assert not engine.metrics.num_rounds and not engine.times.target
    assert [vars(m) for _, m in engine.drafter.counted()] == before


def test_an_engine_with_a_tiny_context_is_measured_too(pair_folders: tuple[Path, Path]) -> None:
    engine = LLM(str(pair_folders[0]), max_model_len=8, max_num_seqs=1).engine
    assert measure_engine(engine, 0.1).gap.seen
