"""The twin of a head drafts for the target's twin the tokens that the small head drafts for the small target."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures_block import parsed, raw_config as raw_block
from fixtures_eagle import knowing_head, random_head, raw_config, silence, write_head
from fixtures_models import llama_shape
from lawkit import MODEL_VOCAB, SAMPLED, Pair, load_pair, make_engine, random_prompts, run, texts, write_model

from sameseed import ops
from sameseed.cli import main
from sameseed.engine.engine import Engine
from sameseed.errors import ConfigError, VocabularyError
from sameseed.models.config import read_json
from sameseed.models.eagle_loader import load_head
from sameseed.models.head_config import parse_head_config, read_head_config
from sameseed.request import SamplingParams
from sameseed_lab.twin import make_twin

PROMPTS = random_prompts(2, seed=4)
GREEDY = SamplingParams(max_tokens=20, seed=6, ignore_eos=True)
DRAWN = replace(GREEDY, **SAMPLED)


shape = partial(llama_shape, layers=7)
# The source: 304 tokens, hidden 32, 3 layers, 4 heads and 2 KV heads of 8.
FITTING = {
    "powers of 4": (shape(512, (8, 4, 32)), 350), "two copies": (shape(384, (8, 4, 16)), 320),
    "packed": (shape(65, (8, 4, 16)), None), "any head_dim": (shape(320, (4, 2, 12)), None),
    "no more tokens": (shape(64, (4, 2, 16), vocab=304), None),
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that a head can predict, a head that does, and random heads with and without an LM head of their own."""
    root = tmp_path_factory.mktemp("twins")
    write_model(root / "target", num_hidden_layers=3)
    silence(root / "target", 0.05)
    write_model(root / "tied", num_hidden_layers=3, tie_word_embeddings=True)
    torch.manual_seed(3)
    raw = {"draft_vocab_size": 290, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}
    knowing_head(root / "knows", root / "target", "eagle3", **raw)
    own = raw_config("eagle3", MODEL_VOCAB, [1, 2, 3], draft_vocab_size=130)
    write_head(root / "own", own, random_head(parse_head_config(own), 3))
    both = raw_config("eagle3", MODEL_VOCAB, [1, 2, 3])
    tensors = random_head(parse_head_config(both), 4)
    write_head(
        root / "borrows",
        both,
        {n: t for n, t in tensors.items() if n.split(".")[0] not in ("lm_head", "embed_tokens", "d2t")},
    )
    return root


def with_head(target: Path, head: Path) -> Pair:
    pair = load_pair(target, target)
    return replace(pair, head=load_head(head, pair.target, ops.resolve()))


def drafted(engine: Engine, asked: SamplingParams) -> tuple[list[Any], list[Any]]:
    """The texts, and the tokens and parents of every draft."""
    drafts: list[Any] = []
    propose = engine.drafter.propose

    def watched(*args: Any) -> Any:
        draft = propose(*args)
        drafts.append((draft.tokens.tolist(), draft.parents.tolist()))
        return draft

    engine.drafter.propose = watched  # type: ignore[method-assign]
    return texts(run(engine, PROMPTS, asked)), drafts


def assert_drafts_alike(small: Path, head: Path, target: Path, twin: Path) -> None:
    """The small pair and its twins write the same texts by the same drafts."""
    pairs = [with_head(small, head), with_head(target, twin)]
    for asked in (GREEDY, DRAWN):
        mine, its = (make_engine(p, "eagle", k=12, options={"depth": 4, "top_k": 4}) for p in pairs)
        assert drafted(its, asked) == drafted(mine, asked)
        assert its.metrics.num_accepted_tokens == mine.metrics.num_accepted_tokens
        assert head.name != "knows" or its.metrics.num_accepted_tokens > 8


@pytest.mark.parametrize(
    ("fit", "head"), [*((fit, "knows") for fit in FITTING), ("two copies", "own"), ("powers of 4", "borrows")]
)
def test_it_drafts_what_the_small_head_drafts(small: Path, tmp_path: Path, fit: str, head: str) -> None:
    big, num_tokens = FITTING[fit]
    target = make_twin(big, str(small / "target"), tmp_path / "target").folder
    twin = make_twin(big, str(small / head), tmp_path / "head", target=str(small / "target"), num_tokens=num_tokens)
    assert read_head_config(twin.folder) == twin.head.config
    if fit in ("powers of 4", "two copies"):
        assert twin.head.config.draft_vocab_size == num_tokens
    assert_drafts_alike(small / "target", small / head, target, twin.folder)


def test_the_folder_says_what_it_is(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_twin(FITTING["powers of 4"][0], str(small / "target"), tmp_path / "shape")
    argv = ["twin", "--shape", str(tmp_path / "shape"), "--of", str(small / "knows"), "--target", str(small / "target")]
    assert main([*argv, "-o", str(tmp_path / "head"), "--draft-vocab", "333"]) == 0
    assert "333 tokens" in capsys.readouterr().out
    record, config = (read_json(tmp_path / "head" / name) for name in ("twin.json", "config.json"))
    assert record["draft_vocab_size"] == 290 and record["hidden_offsets"] == [0]
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["hidden_size"] == 512
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert "of no use for any other target" in (tmp_path / "head" / "README.md").read_text()
    assert main([*argv, "-o", str(tmp_path / "head")]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main(["twin", "--shape", "llama-3.2-1b", "-o", str(tmp_path / "x"), "--draft-vocab", "5"]) == 2
    assert "is for twins of draft heads" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("eagle3", {"norm_before_residual": True}, "norm_before_residual"),
        ("eagle3", {"norm_output": True}, "norm_output"), ("eagle3", {"rms_norm_eps": 1e-6}, "rms_norm_eps 1e-06"),
        ("eagle3", {"head_dim": 4}, "head_dim 4"),
        ("eagle3", {"hidden_size": 24, "target_hidden_size": 32}, "of another width"),
        ("eagle3", {"vocab_size": 310}, "310 tokens"),
        ("eagle3", {"intermediate_size": 200}, "needs 200"), ("dspark", {}, "of kind 'block'"),
        ("eagle", {}, "of kind 'eagle'"),
    ],
)  # fmt: skip
def test_what_has_no_twin(kind: str, small: Path, tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    if kind == "dspark":
        raw = raw_block(kind, MODEL_VOCAB, [0, 2], model_type="llama")
        write_head(tmp_path / "head", raw, random_head(parsed(raw)))
    else:
        layers = [[1, 2, 3]] if kind == "eagle3" else []
        raw = raw_config(kind, changes.pop("vocab_size", MODEL_VOCAB), *layers, **changes)
        more = () if kind == "eagle3" else (0, "layers.0")
        write_head(tmp_path / "head", raw, random_head(parse_head_config(raw), *more))
    with pytest.raises((ConfigError, VocabularyError), match=named):
        make_twin(FITTING["two copies"][0], str(tmp_path / "head"), tmp_path / "out", target=str(small / "target"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("fit", "tokens", "named"),
    [("two copies", 289, "got 289"), ("two copies", 401, "290 to 400"), ("no more tokens", 300, "290 to 290")],
)  # fmt: skip
def test_odd_vocabularies(small: Path, tmp_path: Path, fit: str, tokens: int, named: str) -> None:
    target = str(small / "target")
    with pytest.raises(ConfigError, match=named):
        make_twin(FITTING[fit][0], str(small / "knows"), tmp_path / "out", target=target, num_tokens=tokens)


def test_a_twin_with_padding_is_not_rotated(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its constant for padding tokens would be lost in rounding once rotated; without padding there is no constant."""
    for fit, code in (("powers of 4", 2), ("no more tokens", 0)):
        twin = make_twin(FITTING[fit][0], str(small / "target"), tmp_path / fit).folder
        out = str(tmp_path / f"{fit} turned")
        argv = ["quantize", str(twin), "-o", out, "--scheme", "w8a16", "--method", "rotate", "--json"]
        assert main(argv) == code, capsys.readouterr().err
        assert code == 0 or "a twin with padding tokens" in capsys.readouterr().err
