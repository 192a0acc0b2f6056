"""Trials: a chain's longest run tells what shorter chains bring, and rates are those of a run."""

from __future__ import annotations

import numpy as np
import pytest

from sameseed import LLM
from sameseed.cost.round import Drafted
from sameseed.measure.bench import Run, run_batch
from sameseed.measure.workload import DEFAULT_PROMPTS, read_prompts
from sameseed.plan.candidates import TargetBench
from sameseed.plan.grid import TuneRequest, draft_specs, lengths_of
from sameseed.plan.trials import Trial, TrialRun
from sameseed.request import SamplingParams


def test_by_hand() -> None:
    # Four rounds: one without a draft, three with drafts of 4, 4 and 2 tokens, of which 3, 0 and 2 were right.
    run = TrialRun(4, np.array([[4, 3], [4, 0], [2, 2]]), (0.75,))
    trial = Trial({4: run}, 8)
    assert trial.drafted(4) == Drafted(5 / 4, 10 / 4, ((0.75, 10 / 3),))
    assert trial.drafted(1) == Drafted(2 / 4, 3 / 4, ((0.75, 1.0),))
    rates = trial.rates(2)
    assert rates.marginal_accept_rates == (0.5, 0.5) and rates.conditional_accept_rates == (0.5, 1.0)
    assert (rates.mean_accept_length, rates.num_samples) == (2.0, 4)
    none = Trial({4: TrialRun(3, np.zeros((0, 2), np.int64), (0.0,))}, 8)
    assert none.drafted(4) == Drafted(0.0, 0.0, ((0.0, 0.0),)) and none.rates(4).mean_accept_length == 1.0


def test_each_size_of_a_tree_has_a_run_of_its_own() -> None:
    runs = {k: TrialRun(2, np.array([[k, 1], [k, k // 4]]), (1.0,)) for k in (4, 16)}
    trial = Trial(runs, 8)
    assert (trial.drafted(4).accepted, trial.drafted(16).accepted) == (1.0, 2.5)
    assert trial.drafted(16).rows == 16 and trial.drafted(16).levels == ((1.0, 8),), "no deeper than drafts are"


@pytest.mark.parametrize("draft", ["embedded-draft", "ngram", "suffix + embedded-head"])
def test_a_trial_tells_what_shorter_runs_count(draft: str) -> None:
    prompts, params = tuple(read_prompts(DEFAULT_PROMPTS, 6)), SamplingParams(max_tokens=32, seed=1)
    request = TuneRequest("embedded", prompts, params, (draft,), batches=(2,))
    spec = draft_specs(request)[-1]
    target = TargetBench(request, "auto", "auto", [spec], LLM)
    trial = target._trial(spec)
    assert target.mean_tokens <= 32 and all(sum(r.shares) <= 1.0 for r in trial.runs.values())
    for one in lengths_of(spec)[:-1]:
        run = Run()
        run_batch(target.engine(target._setting(one, None)), target.jobs, run)
        decided = run.metrics.num_rounds - len(run.completions)
        found = trial.drafted(one.num_draft_tokens)
        assert found.accepted == pytest.approx(run.metrics.num_accepted_tokens / decided, abs=0.5)
        assert found.rows == pytest.approx(run.metrics.num_draft_tokens / decided, abs=0.9)
