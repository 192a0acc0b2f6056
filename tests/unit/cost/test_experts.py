"""Distinct experts: counted in a model's own texts; costs on paper are those of passes over verified drafts."""

import math
from statistics import mean

import lawkit
import pytest

from sameseed import LLM, SamplingParams, cli
from sameseed.cost import experts
from sameseed.measure.prompt_sets import Prompt
from sameseed.ops import reference
from sameseed.plan.candidates import TargetBench
from sameseed.plan.grid import TuneRequest, draft_specs
from sameseed.plan.paper import sheet
from sameseed.request import Sequence


def test_costs_on_paper_are_those_of_verified_drafts(tmp_path, monkeypatch, capsys):
    lawkit.write_model(folder := tmp_path / "model", **lawkit.FAMILIES["qwen3_moe"] | {"num_experts": 12})
    llm, assumed = LLM(str(folder), backend="reference"), sheet(str(folder))
    done = llm.generate(lawkit.random_prompts(2, longest=20), SamplingParams(max_tokens=24, ignore_eos=True))
    experts.count(llm.engine.runner, folder, done)
    known, runner, seen, choose = sheet(str(folder)), llm.engine.runner, list[int](), reference.choose_experts
    watch = lambda *args: [found := choose(*args), seen.append(len(found[0].unique()))][0]  # noqa: E731
    monkeypatch.setattr(reference, "choose_experts", watch)

    def chosen(text, first, m):
        """Experts in a pass over row `first` of a text and m - 1 right tokens after it."""
        lawkit.advance(runner, seq := Sequence(0, [], SamplingParams(), 0), text, first, 0, 0)
        lawkit.advance(runner, seq, text, 1, m - 1, m - 1)
        runner.blocks.release(seq)
        return seen[-1]

    for m, distinct in ((int(m), n) for m, n in known.config.distinct):
        texts = [(len(c.prompt_token_ids), c.prompt_token_ids + c.token_ids) for c in done]
        found = mean(chosen(text, at, m) for n, text in texts for at in range(n, len(text) - m + 1))
        assert distinct == pytest.approx(found)
        unread = (12 - found) * 3 * 32 * 32 / (known.config.num_parameters - 304 * 32)  # in one of the two layers
        assert known.work(1, m, 0).num_bytes == pytest.approx(known.read * (1 - unread), rel=2e-5)
    shares = [known.config.read_share(m) for m in (*range(1, 40), 512)]
    assert shares == sorted(shares) and shares[7] < assumed.config.read_share(8) and shares[-1] <= 1.0
    assert "assumed" in experts.in_words(assumed.config)
    for command in (["info", "--model", str(folder)], ["estimate", str(folder), "--json"]):
        assert cli.main(command) == 0 and "counted" in capsys.readouterr().out


def test_tune_predicts_from_the_experts_that_texts_choose(tmp_path):
    lawkit.write_model(folder := tmp_path / "model", **lawkit.FAMILIES["qwen3_moe"] | {"num_experts": 12})
    prompts = tuple(Prompt(str(i), "", f"Number {i}") for i in range(2))
    params, backend = SamplingParams(max_tokens=24, ignore_eos=True, seed=0), {"backend": "reference"}
    asked = TuneRequest(str(folder), prompts, params, ("ngram",), batches=(1,), settings=backend)
    target = TargetBench(asked, "auto", "auto", draft_specs(asked), LLM)
    target.prospects(lambda *_: None, math.inf, [])
    cost, measured = next((cost, cost.passes.passes) for cost in target.costs.values())
    assert cost.passes.config.distinct == sheet(str(folder)).config.distinct != ()
    assert cost.target(8) < 0.99 * measured.cost(8), "rows of a text share experts"
    assert cost.target(8, 8) == pytest.approx(measured.cost(8, 8), rel=0.01), "rows of many texts do not"
