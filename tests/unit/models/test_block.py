"""Block heads: equal to the papers' formulas, in every published layout; unsound ones are refused."""

import pytest
import torch
from fixtures_block import LAYOUTS, parsed, plain_block, raw_config, saved_by_speculators
from fixtures_eagle import random_head, write_head
from fixtures_models import backends
from lawkit import MODEL_VOCAB, write_model

from sameseed import ops
from sameseed.errors import ConfigError, ModelLoadError
from sameseed.kvcache.cache import KVCache
from sameseed.models.block import BlockHead, BlockRunner
from sameseed.models.eagle_loader import load_head, with_vocabulary
from sameseed.models.head_config import is_block, is_head, read_head_config
from sameseed.models.loader import load_model
from sameseed.request import SamplingParams, Sequence

BORROWED = ("embed_tokens.weight", "lm_head.weight", "d2t")
WINDOWS = ["sliding_attention", "full_attention"]
KINDS = {
    "z-lab": ("z-lab", {}, BORROWED),
    "DeepSpec": ("DeepSpec", {}, ("d2t",)),
    "dflash": ("dflash", {"draft_vocab_size": 130}, ("embed_tokens.weight",)),
    "dspark": ("dspark", {"draft_vocab_size": 130}, ("embed_tokens.weight",)),
    "dspark, whole vocabulary": ("dspark", {}, BORROWED),
    "dspark from masks alone": ("dspark", {"sample_from_anchor": False}, BORROWED),
    "dflash from its anchor": ("dflash", {"sample_from_anchor": True}, BORROWED),
    "five layers": ("z-lab", {"num_hidden_layers": 5, "block_size": 16}, BORROWED),
    "a causal layer with a window": ("z-lab", {"layer_types": WINDOWS * 2, "sliding_window": 6}, BORROWED),
    "causal layers": ("dflash", {"causal": True}, BORROWED),
    "a window of all layers": ("z-lab", {"use_swa": True, "swa_window_size": 7}, BORROWED),
    "DFlash2": ("DFlash2", {"layer_types": WINDOWS[:1] * 2, "sliding_window": 6, "is_causal": False}, BORROWED),
    "llama layers": ("dflash", {"model_type": "llama"}, BORROWED),
    "biases": ("dflash", {"attention_bias": True, "mlp_bias": True}, BORROWED),
    "another width": ("dspark", {"hidden_size": 24, "target_hidden_size": 32, "draft_vocab_size": 100}, ()),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("block") / "target"
    write_model(root, num_hidden_layers=3)
    return root


@pytest.fixture(scope="module", params=backends())
def target(request, folder):
    return load_model(folder, ops.resolve(request.param))


def made(root, kind):
    layout, changes, drop = KINDS[kind]
    raw = raw_config(layout, MODEL_VOCAB, [0, 2], **changes)
    config = parsed(raw)
    tensors = {n: t for n, t in random_head(config, 3).items() if n not in drop}
    spare = {"confidence_head.proj.weight": torch.zeros(1, 8)} if layout == "DeepSpec" else {}
    stored = {n.replace("codebook.weight", "codebook"): t for n, t in (tensors | spare).items()}
    return write_head(root, raw, stored), config, tensors


def runner_of(head, block=4):
    c = head.config.layer
    return BlockRunner(head, KVCache(c.kv_shapes, 24, block))


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_formulas(target, tmp_path, kind):
    """Two prompts in unequal steps, then a block behind each, equal one dense pass in which every row sees all."""
    folder, config, w = made(tmp_path, kind)
    assert is_head(folder) and is_block(folder)
    head = load_head(folder, target, target.ops)
    runner = runner_of(head)
    generator = torch.Generator().manual_seed(1)
    hidden = [torch.randn(n, 2 * config.target_hidden_size, generator=generator) for n in (9, 5)]
    holders = [Sequence(i, (), SamplingParams(), 0) for i in range(2)]
    for holder in holders:
        assert runner.blocks.reserve(holder, 9 + config.block_size)
    runner.extend(holders, [[1, 1]] * 2, [h[:2] for h in hidden], False)
    runner.extend(holders, [[1] * (len(h) - 2) for h in hidden], [h[2:] for h in hidden], False)
    for _ in range(2):  # rows that a block leaves in the cache do not affect the next block
        logits, _ = runner.guess(holders, [7, 9], [config.num_guesses, 2])
    wanted = [plain_block(config, w, h, last, target) for h, last in zip(hidden, (7, 9))]
    torch.testing.assert_close(logits, torch.cat([wanted[0], wanted[1][:2]]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
@pytest.mark.parametrize(("kind", "size"), [("dflash", MODEL_VOCAB), ("dflash", 130), ("dspark", 130)])
def test_a_folder_that_speculators_wrote(target, tmp_path, kind, size, model_type):
    """The layers are Qwen3's whatever the model_type; t2d and the confidence head are not read."""
    raw = saved_by_speculators(kind, MODEL_VOCAB, [0, 2], model_type, size)
    config = parsed(saved_by_speculators(kind, MODEL_VOCAB, [0, 2], "qwen3", size))
    dropped = BORROWED if size == MODEL_VOCAB else BORROWED[:1]
    w = {n: t for n, t in random_head(config, 3).items() if n not in dropped}
    spare = {"t2d": torch.zeros(MODEL_VOCAB, dtype=torch.bool)} if "d2t" in w else {}
    if kind == "dspark":
        spare |= {"confidence_head.proj.weight": torch.zeros(1, 38), "confidence_head.proj.bias": torch.zeros(1)}
    head = load_head(write_head(tmp_path, raw, w | spare), target, target.ops)
    runner, states = runner_of(head), torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    holder = Sequence(0, (), SamplingParams(), 0)
    assert runner.blocks.reserve(holder, 6 + config.block_size)
    runner.extend([holder], [[1] * 6], [states], False)
    logits, _ = runner.guess([holder], [7], [config.num_guesses])
    torch.testing.assert_close(logits, plain_block(config, w, states, 7, target), rtol=1e-4, atol=1e-4)
    assert head.config.captures(3) == (0, 2)


def test_layouts_agree(target, tmp_path):
    """The same settings in all layouts; z-lab and DeepSpec name a layer by its output, speculators by its input."""
    read = {layout: parsed(raw_config(layout, MODEL_VOCAB, [0, 2])) for layout in LAYOUTS}
    for layout, config in read.items():
        assert config.captures(3) == (0, 2) and config.mask_token == MODEL_VOCAB - 1
        spark = layout in ("DeepSpec", "dspark")
        assert (config.from_anchor, config.markov_rank, config.num_guesses) == (spark, 6 * spark, 4 + spark)


def test_the_markov_head_is_its_two_matrices(target, tmp_path):
    folder, _, w = made(tmp_path, "dspark")
    head = load_head(folder, target, target.ops)
    bias = head.bias(torch.tensor([3, 200], dtype=torch.int32))
    wanted = w["markov_head.markov_w1.weight"][[3, 200]] @ w["markov_head.markov_w2.weight"].T
    torch.testing.assert_close(bias, wanted, rtol=1e-4, atol=1e-4)


def test_fewer_tokens_have_the_same_logits(target, tmp_path):
    folder, _, _ = made(tmp_path, "dspark")
    head = load_head(folder, target, target.ops)
    assert isinstance(head, BlockHead) and head.weights.target_ids is not None
    some = head.weights.target_ids[::3]
    fewer = with_vocabulary(head, torch.cat([some, torch.tensor([0], dtype=torch.int32)]).unique())
    places = torch.isin(head.weights.target_ids, fewer.weights.target_ids)
    token = torch.tensor([5], dtype=torch.int32)
    torch.testing.assert_close(fewer.bias(token), head.bias(token)[:, places])
    with pytest.raises(ConfigError, match="none of the tokens"):
        with_vocabulary(head, torch.tensor([MODEL_VOCAB + 1]))


@pytest.mark.parametrize(
    ("layout", "changes", "said"),
    [
        ("z-lab", {"mask_token_id": MODEL_VOCAB}, f"mask_token_id must be a whole number in 0..{MODEL_VOCAB - 1}"),
        ("dflash", {"block_size": 65}, "block_size must be a whole number in 2..64"),
        ("dspark", {"markov_head_type": "rnn"}, "markov_head_type 'rnn' is not supported"),
        ("dflash", {"projector_type": "domino"}, "projector_type 'domino' is not supported"),
        ("z-lab", {"dflash_config": [3]}, "dflash_config must be an object"),
        ("z-lab", {"use_sliding_window": True}, "swa_window_size must be a whole number in 1"),
        ("z-lab", {"layer_types": ["full_attention"]}, "layer_types must list 2 layers"),
        ("dflash", {"shift_label": True}, "shift_label 'True' is not supported"),
        ("z-lab", {"is_neox_style": False}, "is_neox_style 'False' is not supported"),
        ("DFlash2", {"output_multiplier": 0.5}, "output_multiplier"),
        ("DFlash2", {"selector_top_k": 0}, "do not fit together"),
        ("z-lab", {"input_embedding_scale": 2.0}, "input_embedding_scale"),
    ],
)
def test_what_changes_the_arithmetic_is_refused(tmp_path, layout, changes, said):
    raw = {**raw_config(layout, MODEL_VOCAB, [0, 2]), **changes}
    write_head(tmp_path, raw, {})
    with pytest.raises(ModelLoadError, match=said):
        read_head_config(tmp_path)
