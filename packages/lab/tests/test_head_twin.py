"""The twin of a head drafts for the target's twin the tokens that the small head drafts for the small target."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures_block import fit_block, parsed, random_block, raw_config as raw_block
from fixtures_eagle import knowing_head, random_head, raw_config, silence, write_head
from fixtures_models import llama_shape
from lawkit import MAX_LEN, MODEL_VOCAB, SAMPLED, Pair, load_pair, make_engine, random_prompts, run, texts, write_model

from sameseed import ops
from sameseed.cli import main
from sameseed.engine.engine import Engine
from sameseed.engine.settings import make_config
from sameseed.errors import ConfigError, VocabularyError
from sameseed.models.block import BlockHead
from sameseed.models.config import ModelConfig, read_json
from sameseed.models.eagle_loader import load_head
from sameseed.models.head_config import BlockConfig, parse_head_config, read_head_config
from sameseed.models.loader import load_model
from sameseed.request import SamplingParams
from sameseed.scheme import QuantScheme
from sameseed_lab.twin import make_head_twin, make_twin
from sameseed_lab.twin.loaded import load_twins

PROMPTS = random_prompts(2, seed=4)
GREEDY = SamplingParams(max_tokens=20, seed=6, ignore_eos=True)
DRAWN = replace(GREEDY, **SAMPLED)


shape = partial(llama_shape, layers=7)
# The source: 304 tokens, hidden 32, 3 layers, 4 heads and 2 KV heads of 8.
FITTING = {
    "powers of 4": (shape(512, (8, 4, 32)), 350),
    "two copies": (shape(384, (8, 4, 16)), 320),
    "packed": (shape(65, (8, 4, 16)), None),
    "any head_dim": (shape(320, (4, 2, 12)), None),
    "no more tokens": (shape(64, (4, 2, 16), vocab=304), None),
}
# Random block heads: with all tensors of their own, with a small vocabulary, and with those of the target.
BORROWED = ("embed_tokens.weight", "lm_head.weight", "d2t")
BLOCKS: tuple[tuple[str, str, dict[str, Any], tuple[str, ...]], ...] = (
    ("block own", "DeepSpec", {"num_hidden_layers": 3}, ("d2t",)),
    ("block reduced", "dspark", {"draft_vocab_size": 130, "sample_from_anchor": False}, BORROWED[:1]),
    ("block borrows", "z-lab", {"num_hidden_layers": 1, "block_size": 9}, BORROWED),
)


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
    write_model(root / "plain")
    fit_block(root / "knows block", load_model(root / "plain", ops.resolve()), model_type="llama")
    for name, layout, changes, drop in BLOCKS:
        own = raw_block(layout, MODEL_VOCAB, [0, 2], model_type="llama", **changes)
        tensors = random_block(parsed(own), 5)
        write_head(root / name, own, {n: t for n, t in tensors.items() if n not in drop})
    return root


def with_head(target: Path, head: Path) -> Pair:
    pair = load_pair(target, target)
    loaded = load_head(head, pair.target, ops.resolve())
    return replace(pair, **{"block" if isinstance(loaded, BlockHead) else "head": loaded})


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


def assert_drafts_alike(big: ModelConfig, small: Path, head: Path, target: Path, twin: Path) -> None:
    """The small pair, the twins in folders and twins made in memory only write the same texts by the same drafts."""
    loaded = load_twins(big, str(small), str(head), make_config(str(head), max_model_len=MAX_LEN))
    pairs = [with_head(small, head), with_head(target, twin)]
    kind = "head" if pairs[0].block is None else "block"
    pairs.append(replace(pairs[0], **{"target": loaded.target, kind: loaded.drafts[0]}))
    method, options = ("eagle", {"depth": 4, "top_k": 4}) if kind == "head" else ("block", {"siblings": 1})
    for asked in (GREEDY, DRAWN):
        mine, its, third = (make_engine(p, method, k=12, options=options) for p in pairs)
        written = drafted(mine, asked)
        assert drafted(its, asked) == written and drafted(third, asked) == written
        assert its.metrics.num_accepted_tokens == mine.metrics.num_accepted_tokens
        assert not head.name.startswith("knows") or its.metrics.num_accepted_tokens > (8 if kind == "head" else 5)


@pytest.mark.parametrize(
    ("fit", "head"), [*((fit, "knows") for fit in FITTING), ("two copies", "own"), ("powers of 4", "borrows")]
)
def test_it_drafts_what_the_small_head_drafts(small: Path, tmp_path: Path, fit: str, head: str) -> None:
    big, num_tokens = FITTING[fit]
    target = make_twin(big, str(small / "target"), tmp_path / "target").folder
    twin = make_head_twin(big, str(small / head), str(small / "target"), tmp_path / "head", num_tokens=num_tokens)
    assert read_head_config(twin.folder) == twin.head.config
    if fit in ("powers of 4", "two copies"):
        assert twin.head.config.draft_vocab_size == num_tokens
    assert_drafts_alike(big, small / "target", small / head, target, twin.folder)


@pytest.mark.parametrize(
    ("fit", "head", "num_tokens"),
    [
        *((fit, "knows block", None) for fit in FITTING),
        ("powers of 4", "knows block", 350),
        ("two copies", "block own", None),
        ("powers of 4", "block reduced", 200),
        ("packed", "block borrows", None),
        ("tied", "block borrows", None),
    ],
)
def test_the_twin_of_a_block_head(small: Path, tmp_path: Path, fit: str, head: str, num_tokens: int | None) -> None:
    """Its layers are as many as the small head's; its Markov head has the usual rank, its vocabulary is whole."""
    big = shape(512, (8, 4, 32), tied=True) if fit == "tied" else FITTING[fit][0]
    of = small / ("plain" if head == "knows block" else "tied" if fit == "tied" else "target")
    target = make_twin(big, str(of), tmp_path / "target").folder
    twin = make_head_twin(big, str(small / head), str(of), tmp_path / "block", num_tokens=num_tokens)
    config, own = read_head_config(twin.folder), read_head_config(small / head)
    assert isinstance(config, BlockConfig) and isinstance(own, BlockConfig) and config == twin.head.config
    for name in ("block_size", "mask_token", "from_anchor"):
        assert getattr(config, name) == getattr(own, name)
    assert (config.layer.num_layers, config.layer.hidden_size) == (own.layer.num_layers, big.hidden_size)
    assert config.markov_rank == (256 if own.markov_rank else 0)
    assert config.draft_vocab_size == (num_tokens or big.vocab_size)
    assert_drafts_alike(big, of, small / head, target, twin.folder)


@pytest.mark.parametrize("form", ["w8a8", "w4a8-g32", "bf16"])
def test_the_twin_of_a_block_head_in_few_bits(small: Path, tmp_path: Path, form: str) -> None:
    """It loads in the formats of any head, and its padding tokens stay unlikely."""
    big = FITTING["powers of 4"][0]
    target = make_twin(big, str(small / "target"), tmp_path / "target").folder
    twin = make_head_twin(big, str(small / "block reduced"), str(small / "target"), tmp_path / "block")
    pair = load_pair(target, target)
    block = load_head(twin.folder, pair.target, ops.resolve(), QuantScheme.parse(form))
    assert isinstance(block, BlockHead)
    _, drafts = drafted(make_engine(replace(pair, block=block), "block", k=4), GREEDY)
    tokens = [token for row, _ in drafts for token in row]
    assert tokens and set(tokens) <= set(twin.head.target_ids[: twin.head.num_live].tolist())


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
        ("eagle3", {"norm_output": True}, "norm_output"),
        ("eagle3", {"rms_norm_eps": 1e-6}, "rms_norm_eps 1e-06"),
        ("eagle3", {"head_dim": 4}, "head_dim 4"),
        ("eagle3", {"hidden_size": 24, "target_hidden_size": 32}, "of another width"),
        ("eagle3", {"vocab_size": 310}, "vocabulary has 310 tokens"),
        ("dspark", {"model_type": "qwen3"}, "with Llama layers"),
        ("dspark", {"attention_bias": True}, "biases"),
        ("dspark", {"rms_norm_eps": 1e-6}, "rms_norm_eps 1e-06"),
        ("dspark", {"hidden_size": 24, "target_hidden_size": 32}, "of another width"),
        ("dspark", {"intermediate_size": 200}, "the source needs 200"),
        ("dspark", {"aux_hidden_state_layer_ids": [1, 9]}, "enters the target's layers"),
    ],
)
def test_what_has_no_twin(kind: str, small: Path, tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    if kind == "eagle3":
        raw = raw_config(kind, changes.pop("vocab_size", MODEL_VOCAB), [1, 2, 3], **changes)
        write_head(tmp_path / "head", raw, random_head(parse_head_config(raw)))
    else:
        raw = raw_block(kind, MODEL_VOCAB, [0, 2], **{"model_type": "llama", **changes})
        write_head(tmp_path / "head", raw, random_block(parsed(raw)))
    with pytest.raises((ConfigError, VocabularyError), match=named):
        make_head_twin(FITTING["two copies"][0], str(tmp_path / "head"), str(small / "target"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_eagle_1_and_odd_vocabularies(small: Path, tmp_path: Path) -> None:
    raw = raw_config("eagle", MODEL_VOCAB)
    write_head(tmp_path / "head", raw, random_head(parse_head_config(raw), 0, "layers.0"))
    big, same = FITTING["two copies"][0], FITTING["no more tokens"][0]
    for head, where, tokens, named in (
        (tmp_path / "head", big, None, "of kind 'eagle'"),
        (small / "knows", big, 289, "290 to 400 tokens, got 289"),
        (small / "knows", big, 401, "290 to 400"),
        (small / "knows", same, 300, "290 to 290"),
    ):
        with pytest.raises(ConfigError, match=named):
            make_head_twin(where, str(head), str(small / "target"), tmp_path / "out", num_tokens=tokens)


def test_a_twin_with_padding_is_not_rotated(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its constant for padding tokens would be lost in rounding once rotated; without padding there is no constant."""
    for fit, code in (("powers of 4", 2), ("no more tokens", 0)):
        twin = make_twin(FITTING[fit][0], str(small / "target"), tmp_path / fit).folder
        out = str(tmp_path / f"{fit} turned")
        argv = ["quantize", str(twin), "-o", out, "--scheme", "w8a16", "--method", "rotate", "--json"]
        assert main(argv) == code, capsys.readouterr().err
        assert code == 0 or "a twin with padding tokens" in capsys.readouterr().err
