"""Tuning: the grid, who runs, who wins; the embedded pair from prompts to a profile that an engine reads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sameseed import LLM
from sameseed.cli import main
from sameseed.config import SpecConfig
from sameseed.errors import ConfigError
from sameseed.plan.candidates import Prospect, Setting, TuneRequest, draft_specs, lengths_of, survivors
from sameseed.plan.race import Contestant, race, ratio
from sameseed.plan.simulate import Interval
from sameseed.request import SamplingParams
from sameseed.study.workload import Prompt
from sameseed.tuned import Tuned

PROMPTS = tuple(Prompt(str(i), "text", f"Number {i} is") for i in range(8))
PARAMS = SamplingParams(max_tokens=8, seed=1)


def asked(**given: Any) -> TuneRequest:
    return TuneRequest(**{"model": "embedded", "prompts": PROMPTS, "params": PARAMS, "drafts": ("ngram",), **given})


def prospect(spec: SpecConfig, value: float, spread: float = 0.1) -> Prospect:
    speeds = {b: Interval(value, value * (1 - spread), value * (1 + spread)) for b in (1, 4)}
    return Prospect(Setting("auto", "auto", spec), speeds)


def test_bad_requests() -> None:
    for given, says in (
        ({"objective": "fast"}, "objective must be one of balanced, latency"),
        ({"prompts": PROMPTS[:1]}, "two or more"),
        ({"prompts": (Prompt("a", "", "same"), Prompt("b", "", "same"))}, "all alike"),
        ({"batches": (0,)}, "1 or more"),
        ({"seconds": 1.0}, "too few"),
    ):
        with pytest.raises(ConfigError, match=says):
            asked(**given)


def test_the_grid() -> None:
    found = draft_specs(asked(drafts=("ngram", "suffix + embedded-draft", "none"), draft_formats=("auto", "w8a8")))
    assert [(s.method, [b.format for b in s.below]) for s in found] == [
        ("ngram", []),
        ("first", ["auto", "auto"]),
        ("first", ["auto", "w8a8"]),
    ]
    lengths = lengths_of(found[0])
    assert [s.num_draft_tokens for s in lengths if s.policy == "fixed"] == [1, 2, 3, 4, 6, 8]
    assert lengths[-1].policy == "goodput"
    assert Setting("w4a8", "auto", found[2]).label == "suffix + embedded-draft k=4 w4a8 draft w8a8"


def test_who_runs() -> None:
    plain = prospect(SpecConfig(), 1.0)
    good = [prospect(s, 2.0) for s in lengths_of(SpecConfig("ngram"))]
    hopeless = [prospect(s, 0.5) for s in lengths_of(SpecConfig("suffix"))]
    found = survivors([plain, *good, *hopeless], asked())
    assert found[0] is plain and not any(p in hopeless for p in found)
    assert sum(p.candidate.draft == "ngram" for p in found) == 3, "two, and the one that adapts itself"


class Runs:
    """Contestants whose speed is known."""

    def __init__(self, spec: SpecConfig, speed: float, ttft: float = 0.01) -> None:
        self.ran = 0
        self.contestant = Contestant(prospect(spec, speed), lambda: SimpleNamespace(), lambda batch, members: [])
        self.contestant.run = self.run  # type: ignore[method-assign]
        self.speed, self.ttft = speed, ttft

    def run(self, batch: int, members: Any) -> None:
        self.ran += len(members)
        c, count = self.contestant, len(members)
        c.tokens.setdefault(batch, []).append(100 * count)
        c.seconds.setdefault(batch, []).append(100 * count / self.speed * (1.0 + 0.02 * (self.ran % 3)))
        c.ttft.setdefault(batch, []).extend([self.ttft] * count)


def test_the_race() -> None:
    runs = [Runs(SpecConfig(), 1.0), *(Runs(SpecConfig("ngram", num_draft_tokens=k), 1.0 + 0.1 * k) for k in range(6))]
    order = race([r.contestant for r in runs], 32, (1, 4), (1, 4), 60.0)
    assert order[0] is runs[-1].contestant
    assert runs[0].ran == runs[-1].ran > runs[1].ran, "plain runs to the end, the worst soon no more"
    assert ratio(order[0], runs[0].contestant, (1, 4)).value == pytest.approx(1.5, rel=0.05)
    late = [Runs(SpecConfig(), 1.0), Runs(SpecConfig("ngram"), 2.0, ttft=9.0)]
    assert race([r.contestant for r in late], 8, (1,), (1,), 60.0, max_ttft=1.0)[0] is late[0].contestant


def test_from_prompts_to_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"The {word} is" for word in ("cat", "sun", "house", "river")))
    out, plot = tmp_path / "tuned.toml", tmp_path / "tuned.png"
    argv = f"tune embedded --prompts {prompts} --max-tokens 12 --drafts ngram embedded-draft --batches 1 2 --seconds 8"
    assert main([*argv.split(), "-o", str(out), "--plot", str(plot)]) == 0
    assert "settings simulated" in capsys.readouterr().out
    assert plot.stat().st_size > 5000
    tuned = Tuned.read(out)
    assert tuned.scope.num_prompts == 4 and tuned.scope.batch == (1, 2)
    assert set(tuned.measured) >= {"speedup_batch_1", "speedup_batch_2"} and tuned.rejected
    assert all(f.low <= f.value <= f.high for f in tuned.measured.values())
    llm = LLM(profile=str(out))
    plain = LLM("embedded").generate(["The cat is"], SamplingParams(max_tokens=12))
    assert llm.generate(["The cat is"], SamplingParams(max_tokens=12))[0].text == plain[0].text
