"""Regret: on known speeds, and of the embedded model by its command."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sameseed.cli import main
from sameseed.config import SpecConfig
from sameseed.measure.bench import Run
from sameseed.measure.prompt_sets import Prompt
from sameseed.plan.grid import Setting, TuneRequest
from sameseed.plan.race import Contestant
from sameseed.request import SamplingParams
from sameseed_lab import regret

PROMPTS = tuple(Prompt(str(i), "text", f"Number {i} is") for i in range(8))


def asked(**given: Any) -> TuneRequest:
    return TuneRequest("embedded", PROMPTS, SamplingParams(max_tokens=8, seed=1), ("ngram",), **given)


def contestant(cls: type[Contestant], spec: SpecConfig) -> Contestant:
    value = 1.0 + 0.1 * spec.num_draft_tokens if spec.method != "none" else 1.0
    speeds = dict.fromkeys((1, 4), value)
    rounds: Any = {b: SimpleNamespace(tokens=1.0 + spec.num_draft_tokens / 2) for b in (1, 4)}
    none: Any = SimpleNamespace
    return cls(Setting("auto", "auto", spec), none, [none] * len(PROMPTS), speeds, rounds)


def test_regret_is_what_the_choice_lacks_of_the_best() -> None:
    speeds = {"plain": 1.0, **{f"ngram k={k}": 1.0 + 0.1 * k for k in range(6)}}
    specs = [SpecConfig(), *(SpecConfig("ngram", num_draft_tokens=k) for k in range(6))]
    lucky: set[tuple[int, ...]] = set()

    class Timed(Contestant):
        def warm(self, members: Seq[int]) -> None:
            pass

        def run(self, batch: int, members: Seq[int]) -> None:
            numbers = tuple(members)
            luck = self.label == "ngram k=1" and (batch, *numbers) not in lucky
            lucky.update({(batch, *numbers)} if luck else ())
            done: Any = SimpleNamespace(token_ids=(0,) * 100)
            seconds = 100 * len(members) / speeds[self.label] / (1 + luck)
            self.runs.setdefault(batch, []).append(Run(seconds, completions=[done] * len(members)))

    timed = [contestant(Timed, spec) for spec in specs]
    request = replace(asked(), prompts=PROMPTS[::2], held_out=PROMPTS[1::2])
    outcome: Any = SimpleNamespace(asked=request, held_out=timed, best=timed[3])
    found = regret.regret(outcome, lambda *_: None)
    assert not found.differing
    assert max(found.settings, key=lambda row: row["measured"]["1"]["value"])["setting"] == "ngram k=1", "once, by luck"
    assert (found.choice.setting, found.best) == ("ngram k=2", "ngram k=5")
    assert found.choice.share.value == pytest.approx(1 - 1.2 / 1.5)
    baselines = {"plain": "plain", "longest acceptance": "ngram k=5", "k = 4": "ngram k=4"}
    assert {name: x.setting for name, x in found.baselines.items()} == baselines
    lucky_ones = 2  # one at each batch size
    assert (found.errors.median, found.errors.worst) == (pytest.approx(0.0), pytest.approx(0.5))
    assert (found.errors.coverage, found.errors.count) == (1 - lucky_ones / 12, 12)
    assert found.as_record(request, 3.0)["schema"] == "sameseed.tune/1"


def test_the_command_runs_the_whole_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, records = tmp_path / "prompts.txt", tmp_path / "records.jsonl"
    prompts.write_text("\n".join(f"The {word} is" for word in ("cat", "sun", "house", "river")))
    argv = f"regret embedded --prompts {prompts} --max-tokens 4 --batch 1 --drafts ngram --records {records}"
    for flag, value, says in (("--plot", "p.png", "leave out --plot"), ("--batch", "4", "give at least 8")):
        assert main([*argv.split(), flag, value]) == 2 and says in capsys.readouterr().err
    assert main(argv.split()) == 0
    assert "best on the prompts held out" in capsys.readouterr().out
    assert json.loads(records.read_text())["errors"]["count"] == 7
