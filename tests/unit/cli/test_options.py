"""Flags are derived from the dataclasses; each flag has its own help text."""

import dataclasses
from typing import Annotated

import pytest
from tyro.conf import UseAppendAction, arg

from sameseed import cli
from sameseed.cli import flags, options
from sameseed.config import CacheConfig, EngineConfig, SpecConfig
from sameseed.errors import RegistryError
from sameseed.request import SamplingParams


@dataclasses.dataclass(frozen=True)
class Nothing:
    """A command without flags of its own."""


@dataclasses.dataclass(frozen=True)
class Lists:
    names: tuple[str, ...] = ()
    sizes: Annotated[tuple[int, ...] | None, arg(metavar="N")] = None
    repeated: UseAppendAction[tuple[str, ...]] = ()
    switch: bool = False


def parse(*argv):
    return options.parse(Nothing, argv, "test", engine=True, sampling=True)


def test_every_field_has_a_flag_with_help():
    own = {"method", "model", "options", "below", "drafter", "cache", "spec"}
    fields = [f for cls in (EngineConfig, CacheConfig, SpecConfig, SamplingParams) for f in dataclasses.fields(cls)]
    assert {f.name for f in fields if not f.metadata.get("help")} == own


def test_defaults_are_those_of_the_dataclasses():
    parsed = parse()
    assert parsed.params == SamplingParams()
    settings = parsed.engine.settings
    assert settings["block_size"] == CacheConfig().block_size
    assert (settings["policy"], settings["num_draft_tokens"]) == ("auto", None)
    assert settings["overlap"] == SpecConfig().overlap
    assert settings["max_num_rows"] == EngineConfig().max_num_rows


def test_what_is_on_can_be_turned_off_and_what_is_off_on():
    chosen = [parse(*argv).engine.settings["prefix_cache"] for argv in ([], ["--no-prefix-cache"], ["--prefix-cache"])]
    assert chosen == [CacheConfig().prefix_cache, False, True] == [True, False, True]
    assert parse("--ignore-eos").params.ignore_eos
    with pytest.raises(SystemExit):
        parse("--no-ignore-eos")


def test_values_arrive():
    argv = "--k 7 --kv-format fp32 --draft-format bf16 --format fp16 --temperature 0.5 --stop a --stop b --seed 3"
    argv += " --logit-bias 4=-2.5 --logit-bias 5=1 --allowed-token-ids 4 --banned-token-ids 6 --ignore-eos --draft none"
    parsed = parse(*argv.split())
    p = parsed.params
    assert (p.temperature, p.stop, p.seed, p.ignore_eos) == (0.5, ("a", "b"), 3, True)
    assert (p.logit_bias, p.allowed_token_ids, p.banned_token_ids) == ({4: -2.5, 5: 1.0}, (4,), (6,))
    s = parsed.engine.settings
    assert (s["num_draft_tokens"], s["kv_format"], s["draft_format"], s["format"]) == (7, "fp32", "bf16", "fp16")
    assert s["draft"] is None


def test_a_path_may_begin_at_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    args = options.parse(flags.TuneArgs, ["m", "--out=~/a.toml", "--plot", "~/b.png", "--prompts=c~d.txt"], "test").args
    assert [str(p) for p in (args.out, args.plot, args.prompts)] == ["/home/me/a.toml", "/home/me/b.png", "c~d.txt"]
    assert args.check is None


def test_the_embedded_model_brings_its_draft():
    assert options.draft_choice("auto", "embedded") == SpecConfig("draft_model", "embedded-draft")
    assert options.draft_choice("auto", "org/name") == SpecConfig("suffix")  # which needs no model
    chosen = options.draft_choice("draft_model", "embedded")
    assert isinstance(chosen, SpecConfig) and chosen.model == "embedded-draft"
    assert options.draft_choice("org/name", "embedded") == SpecConfig("draft_model", "org/name")
    both = options.draft_choice("suffix + draft_model", "embedded")
    assert both is not None and [b.model for b in both.below] == [None, "embedded-draft"]
    cascade = options.draft_choice("ngram > draft_model", "embedded")
    assert cascade is not None and (cascade.method, cascade.model) == ("cascade", "embedded-draft")
    assert options.draft_choice("embedded-head", "embedded") == SpecConfig("draft_model", "embedded-head")
    assert options.draft_choice("embedded-target", "org/name") == SpecConfig("draft_model", "embedded-target")
    assert options.draft_choice("eagle", "embedded") == SpecConfig("eagle", "embedded-head")
    wrong = {"sufix + eagle": "did you mean 'suffix'", "embeded-draft": "did you mean 'embedded-draft'"}
    wrong |= {"none + suffix": "'none' and 'auto' stand alone", "ngram + a > b/c": "path in a chain may not hold"}
    for text, message in wrong.items():
        with pytest.raises(RegistryError, match=message):
            options.draft_choice(text, "embedded")


def test_a_target_that_the_package_has_a_draft_for(monkeypatch):
    monkeypatch.setattr(options, "own_draft", {"mine.gguf": "smollm2-head", "coder": "coder-head", "x": "none"}.get)
    options.shipped.cache_clear()
    for target in ("smollm2", "mine.gguf"):
        assert options.draft_choice("auto", target) == SpecConfig("suffix")
        assert options.draft_choice("eagle", target) == SpecConfig("eagle", "smollm2-head")
    assert options.draft_choice("auto", "coder") == options.draft_choice("suffix + coder-head", "coder")
    assert options.draft_choice("auto", "x") == SpecConfig("suffix")
    assert options.draft_choice("eagle", "x") == SpecConfig("eagle")
    options.shipped.cache_clear()


def test_a_checkout_without_what_the_command_line_needs(monkeypatch, capsys):
    """If dependencies are not installed, the error names the missing package and what works without it."""
    from sameseed import cli

    def missing(name):
        raise ModuleNotFoundError("No module named 'tyro'", name="tyro")

    monkeypatch.setattr(cli.importlib, "import_module", missing)
    assert cli.main(["info"]) == cli.EXIT_USAGE
    assert "needs tyro" in (said := capsys.readouterr().err) and "from sameseed import LLM" in said


def test_a_list_may_be_given_in_parts():
    def read(text):
        return options.parse(Lists, text.split(), "test").args

    assert read("--names a b") == read("--names a --names b") == Lists(("a", "b"))
    assert read("--names=a --switch --names=b") == Lists(("a", "b"), switch=True)
    assert read("--sizes 1 -2 --switch --names a --sizes 3 --names b") == Lists(("a", "b"), (1, -2, 3), switch=True)
    assert read("--repeated a --names x --repeated b") == Lists(("x",), repeated=("a", "b"))
    asked = options.parse(flags.TuneArgs, ["--drafts", "ngram", "suffix", "--", "M"], "test").args
    assert (asked.model, asked.drafts) == ("M", ("ngram", "suffix"))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("bench serve --concurrency ,", ["concurrency is empty"]),
        ("bench serve --lengths ,", ["lengths is empty"]),
        ('bench serve --extra-body {"a":1,}', ["top_k", "line 1"]),
        ('generate a --draft-options {"a":1,}', ["max_ngram", "line 1"]),
        ("bench serve --max-tokens 64", ["leave out --max-tokens", "--lengths"]),
        ("bench serve --prompts p.txt --scale 0.5", ["leave out --scale"]),
        ("bench serve --concurrency 2 --rates 1", ["leave out --concurrency"]),
        ("bench serve --burstiness 2", ["leave out --burstiness", "--rates"]),
        ("eval smollm2 --model org/name", ["leave out --model", "smollm2"]),
        ("eval --compare a b --model org/name", ["leave out --model", "--compare"]),
        ("quantize -o q --original org/name", ["leave out --original", "--head-for"]),
        ("quantize -o q --candidates w4a16", ["leave out --candidates", "--budget"]),
        ("tune embedded --url http://h", ["leave out --url", "--engine vllm"]),
        ("bench --drafts none --temperatures 0 -1", ["temperature"]),
        ("bench --num-prompts 3 --batch-sizes 1 4", ["batch 4 of 3 prompts", "give 4"]),
        ("generate a --draft ngram --draft-vocabulary 100", ["--draft-vocabulary 100", "'ngram'", "LM head"]),
        ("generate a --draft none --draft-vocabulary auto", ["LM head", "--draft MODEL"]),
        ("generate a --draft embedded-draft --draft-vocabulary 0", ["give 1 to 4096"]),
        ("generate a --draft suffix+embedded-head --draft-vocabulary 9999", ["give 1 to 4096"]),
        (
            'generate a --draft embedded-head --draft-vocabulary 9 --draft-options {"vocabulary":"8"}',
            ["--draft-options", "--draft-vocabulary", "give one"],
        ),
    ],
)
def test_values_that_cannot_be_are_told_before_anything_runs(argv, words, capsys):
    assert cli.main(argv.split()) == cli.EXIT_USAGE
    said = capsys.readouterr().err
    assert all(word in said for word in words) and "failed" not in said
