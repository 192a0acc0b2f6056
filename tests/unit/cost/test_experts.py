"""Distinct experts: counted in a model's own texts; costs on paper are those of passes over verified drafts."""

from statistics import mean

import lawkit
import pytest

from sameseed import LLM, SamplingParams, cli
from sameseed.cost import experts
from sameseed.ops import reference
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
