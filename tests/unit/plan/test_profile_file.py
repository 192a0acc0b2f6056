"""A tuned profile survives writing and reading, is refused where it does not apply, and LLM and commands use it."""

import dataclasses
import json
import logging

import pytest

from sameseed import LLM, SamplingParams, store
from sameseed.cli import main, options
from sameseed.engine.learned import machine_here
from sameseed.errors import ConfigError
from sameseed.models.loader import resolve_model
from sameseed.plan.profile_file import text, write
from sameseed.tuned import AcceptRates, Chosen, Loser, Scope, Tuned, TunedFigure, TunedMachine, TunedModel


def made(**changes):
    """A profile for this machine and the embedded target."""
    tuned = Tuned(
        machine_here(),
        TunedModel("embedded", store.weights_key(resolve_model("embedded"))),
        Chosen(draft="ngram", num_draft_tokens=3, policy="fixed", max_num_seqs=8, by_batch=((1, 5), (3, 2), (9, 0))),
        Scope("ab12", 16, ("code", 'a "quoted" \\ name'), (3, 90), (8, 64), (0.0, 0.8), (1, 8), 512),
    )
    return dataclasses.replace(tuned, **changes)


BELOW = {"options": {"vocabulary": "9"}}
FULL = dataclasses.replace(
    made(),
    chosen=Chosen("w8a8", "kv8", "suffix + embedded-head", "w4a8", 4, {"k": 9, "below": [BELOW]}, "goodput"),
    predicted={"speedup": TunedFigure(1.9, 1.7, 2.1, "profiled", 0.03)},
    measured={"speedup": TunedFigure(1.84, 1.8, 1.9), "tokens per s": TunedFigure(41, 40, 42)},
    quality={"perplexity_ratio": TunedFigure(1.004, 1.001, 1.007)},
    acceptance=AcceptRates((0.8, 0.7), (0.8, 0.56), 2.36, 400),
    rejected=(Loser({"draft": "none"}, "slower", 0.5, 0.48, 0.52), Loser({"format": "bf16"}, "memory", note="9 GiB")),
    date="2026-11-22",
    commit="c0ffee",
)


@pytest.mark.parametrize("tuned", [made(), FULL, Tuned(TunedMachine("x\x7fé", 1), TunedModel("m"), Chosen())])
def test_a_file_reads_as_it_was_written(tuned, tmp_path):
    write(tuned, tmp_path / "new" / "p.toml")
    assert Tuned.read(tmp_path / "new" / "p.toml") == tuned
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["p.toml"]


def test_the_table_by_batch_has_no_gaps():
    assert made().chosen.ranges() == [(1, 2, 5), (3, 8, 2), (9, 4096, 0)]
    assert "1-2 = 5\n3-8 = 2\n9- = 0\n" in text(made())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("profile-file/1", "profile-file/9", "tune again"), ("[machine]", "[machine", "no TOML"),
        ("num_draft_tokens", "num_draft_token", "did you mean 'num_draft_tokens'"),
        ("3-8 = 2", "4-8 = 2", "without gaps"), ("3-8 = 2", "many = 2", "without gaps"),
        ("threads = ", "threads = true # ", "of type int"), ("[machine]", "quality = 3\n[machine]", "must be of type"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_with_the_remedy(old, new, message, tmp_path):
    assert old in text(made())
    (tmp_path / "p.toml").write_text(text(made()).replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        Tuned.read(tmp_path / "p.toml")
    for nowhere in (tmp_path / "none.toml", "~no-such-user/p.toml"):
        with pytest.raises(ConfigError, match="cannot read"):
            Tuned.read(nowhere)


def written(tuned, folder):
    write(tuned, folder / "p.toml")
    return str(folder / "p.toml")


@pytest.mark.parametrize(
    ("part", "name", "other"),
    [("machine", "cpu", "other"), ("machine", "isa", "sse9"), ("machine", "threads", 999), ("model", "digest", "0123")],
)
def test_a_profile_of_something_else_is_refused(part, name, other, tmp_path, caplog):
    here = made()
    path = written(made(**{part: dataclasses.replace(getattr(here, part), **{name: other})}), tmp_path)
    with pytest.raises(ConfigError, match=f"{other} there") as refused:
        LLM(profile=path)
    assert "--force-profile" in str(refused.value)
    with caplog.at_level(logging.WARNING):
        assert LLM(profile=path, force_profile=True).config.spec.num_draft_tokens == 3
    assert f"{other} there" in caplog.text


def test_llm_takes_what_was_chosen_where_nothing_is_said(tmp_path):
    path = written(made(), tmp_path)
    llm = LLM(profile=path)
    assert (llm.config.spec.method, llm.config.spec.num_draft_tokens, llm.config.max_num_seqs) == ("ngram", 3, 8)
    params = SamplingParams(max_tokens=8)
    assert llm.generate("a b a b a", params)[0].token_ids == LLM().generate("a b a b a", params)[0].token_ids
    other = LLM(profile=path, draft="none", max_num_seqs=4)
    assert (other.config.spec.method, other.config.max_num_seqs) == ("none", 4)


def test_goodput_decides_beyond_the_scope(tmp_path, caplog, capsys, monkeypatch):
    path, params = written(made(), tmp_path), SamplingParams(max_tokens=2, temperature=0.4, seed=1)
    assert LLM(profile=path).config.spec.policy == "fixed"
    with caplog.at_level(logging.WARNING):
        LLM(profile=path, max_num_seqs=9).generate("x", params)
        assert "up to 8 sequences, not 9" in caplog.text and "temperature" not in caplog.text
        LLM(profile=path).generate("x", dataclasses.replace(params, temperature=1.2))
        assert "temperature 1.2 lies outside" in caplog.text
        caplog.clear()
        LLM(profile=written(made(chosen=Chosen(draft="none")), tmp_path / "plain"))
        assert "goodput" not in caplog.text, "plain decoding has no scope"
    monkeypatch.setattr("sameseed.server.run.serve", lambda *_: 0)
    for more, said in ((), True), (("--max-num-seqs", "9"), False):
        assert main(["serve", "--profile", path, *more]) == 0
        assert ("at most 8 requests" in capsys.readouterr().err) is said


def test_flags_win_over_the_profile(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Own:
        """A command."""

    path = written(FULL, tmp_path)
    parsed = options.parse(Own, ["--profile", path], "test", engine=True).engine
    assert parsed.model == "embedded"
    assert parsed.settings["draft_options"] == FULL.chosen.draft_options
    assert [parsed.settings[k] for k in ("format", "kv_format", "policy")] == ["w8a8", "kv8", "goodput"]
    parsed = options.parse(Own, ["--profile", path, "--draft-vocabulary", "8"], "test", engine=True).engine
    assert parsed.settings["draft_options"] == {"k": 9, "below": [{"options": {}}]}, "in place of the profile's"
    argv = [f"--profile={path}", "--draft", "none", "--format", "bf16", "--draft-options", "{}", "--model", "m"]
    parsed = options.parse(Own, argv, "test", engine=True).engine
    assert (parsed.model, parsed.settings["draft"], parsed.settings["format"]) == ("m", None, "bf16")


def test_bench_measures_what_was_chosen(tmp_path, capsys):
    path = written(made(), tmp_path)
    assert main(["generate", "x", "--profile", str(tmp_path / "none.toml")]) == 2
    assert "sameseed tune" in capsys.readouterr().err
    (tmp_path / "prompts.txt").write_text("a b a b a b a b")
    argv = f"bench --profile {path} --prompts {tmp_path / 'prompts.txt'} --repeat 1 --max-tokens 6"
    assert main([*argv.split(), "--temperatures", "0", "--json", "--out", str(tmp_path / "out.jsonl")]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["config"]["draft"] for r in records] == ["none", "ngram"]
    assert [r["config"]["num_draft_tokens"] for r in records] == [0, 3]
