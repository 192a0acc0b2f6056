"""EAGLE heads: equal to the papers' formulas, in every layout and format; unsound ones are refused."""

import json

import pytest
import torch
from fixtures_eagle import combine, plain_head, random_head, raw_config, write_head
from fixtures_models import backends
from lawkit import MODEL_VOCAB, write_model
from safetensors.torch import load_file

from sameseed import ops, scheme
from sameseed.batch import Rows, build_batch
from sameseed.errors import ConfigError, ModelLoadError, VocabularyError
from sameseed.kvcache.cache import KVCache
from sameseed.models import config
from sameseed.models.config import own_draft
from sameseed.models.eagle import HeadRunner, TreeLevel
from sameseed.models.eagle_loader import embedding_signs, head_bytes, load_head, with_vocabulary
from sameseed.models.head_config import is_head, parse_head_config, read_head_config
from sameseed.models.loader import load_model
from sameseed.ops import plain_rows
from sameseed.request import SamplingParams, Sequence
from sameseed.scheme import QuantScheme

QWEN3 = "Eagle3Qwen3ForCausalLM"
KINDS = {
    "eagle": ("eagle", {}, ("embed_tokens.weight", "lm_head.weight")),
    "eagle, all its own": ("eagle", {"head_dim": 4, "num_attention_heads": 6}, ()),
    "eagle without bias": ("eagle", {}, ("fc.bias", "embed_tokens.weight")),
    "eagle3": ("eagle3", {"draft_vocab_size": 130}, ("embed_tokens.weight",)),
    "eagle3, whole vocabulary": ("eagle3", {}, ("embed_tokens.weight", "d2t", "lm_head.weight")),
    "eagle3, norms": ("eagle3", {"draft_vocab_size": 130, "norm_before_fc": True, "norm_output": True}, ()),
    "speculators": ("speculators", {"draft_vocab_size": 100, "norm_before_residual": True}, ()),
    "speculators, norms": ("speculators", {"draft_vocab_size": 100, "fc_norm": True, "norm_output": True}, ()),
    "EAGLE3.1": ("eagle3", {"draft_vocab_size": 130, "norm_before_fc": True, "fc_norm": True, "norm_output": True}, ()),
    "biases": ("eagle3", {"draft_vocab_size": 130, "attention_bias": True, "mlp_bias": True}, ()),
    "Qwen3": ("eagle3", {"architectures": [QWEN3], "draft_vocab_size": 130, "norm_before_residual": True}, ()),
    "speculators, Qwen3": ("speculators", {"model_type": "qwen3", "draft_vocab_size": 100, "fc_norm": True}, ()),
    "of EAGLE's authors": ("eagle3", {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 130}, ()),
    "for Phi": ("eagle3", {"model_type": "phi3", "draft_vocab_size": 130}, ()),
    "another width": ("eagle3", {"hidden_size": 24, "target_hidden_size": 32, "draft_vocab_size": 100}, ()),
}


def target_folder(root, **changes):
    write_model(root, **{"num_hidden_layers": 3, **changes})
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return target_folder(tmp_path_factory.mktemp("eagle") / "target")


@pytest.fixture(scope="module", params=backends())
def target(request, folder):
    return load_model(folder, ops.resolve(request.param))


def made(root, kind):
    layout, changes, drop = KINDS[kind]
    raw = raw_config(layout, MODEL_VOCAB, None if layout == "eagle" else [1, 2, 3], **changes)
    config = parse_head_config(raw)
    at = "midlayer" if layout == "eagle3" else "layers.0"
    tensors = {n: t for n, t in random_head(config, 3, at).items() if n not in drop}
    return write_head(root, raw, tensors), config, tensors, at


def make_runner(head, window=None):
    c = head.config.layer
    return HeadRunner(head, KVCache(c.kv_shapes, 16, 4), window)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_formulas(target, tmp_path, kind):
    """Two prompts in unequal steps, then two levels of a tree, equal one dense pass over all rows."""
    folder, config, w, at = made(tmp_path, kind)
    head = load_head(folder, target, target.ops)
    runner = make_runner(head)
    generator = torch.Generator().manual_seed(1)
    lengths = (9, 5)
    tokens = [torch.randint(0, MODEL_VOCAB, (n + 5,), generator=generator) for n in lengths]
    width = config.num_captures * config.target_hidden_size
    hidden = [torch.randn(n, width, generator=generator) for n in lengths]
    holders = [Sequence(i, (), SamplingParams(), 0) for i in range(2)]
    for holder, n in zip(holders, lengths):
        assert runner.blocks.reserve(holder, n + 5)
    runner.extend(holders, [t[:2].tolist() for t in tokens], [h[:2] for h in hidden], False)
    steps = [t[2:n].tolist() for t, n in zip(tokens, lengths)]
    logits, features, _ = runner.extend(holders, steps, [h[2:] for h in hidden], True)
    # Nodes 0, 1 and 2 follow the last row; 3 follows 1, 4 follows 2. The second sequence has only the first level.
    first, firsts = runner.expand(
        [TreeLevel(h, t[n : n + 3].tolist(), [1, 2, 4], 0) for h, t, n in zip(holders, tokens, lengths)],
        features[torch.tensor([0, 0, 0, 1, 1, 1])],
    )
    second, _ = runner.expand([TreeLevel(holders[0], tokens[0][12:14].tolist(), [10, 20], 3)], firsts[1:3])

    for b, n in enumerate(lengths):
        known = combine(config, w, hidden[b], target)
        features_of, sees = known, torch.ones(n, n).tril().bool()
        wanted, own = plain_head(config, w, tokens[b][:n], known, torch.arange(n), sees, target, at)
        torch.testing.assert_close(logits[b], wanted[-1], rtol=1e-4, atol=1e-4)
        for nodes in ([0, 1, 2], [0, 1, 2, 3, 4]):
            parents = {0: n - 1, 1: n - 1, 2: n - 1, 3: n + 1, 4: n + 2}
            size = n + len(nodes)
            sees = torch.zeros(size, size).bool()
            sees[:n, :n] = torch.ones(n, n).tril().bool()
            positions = list(range(n))
            features_of = known
            for i in nodes:
                sees[n + i] = sees[parents[i]]
                sees[n + i, n + i] = True
                positions.append(positions[parents[i]] + 1)
                features_of = torch.cat([features_of, own[parents[i]][None]])
            part = tokens[b][:size]
            wanted, own = plain_head(config, w, part, features_of, torch.tensor(positions), sees, target, at)
            if len(nodes) == 3:
                torch.testing.assert_close(first[3 * b : 3 * b + 3], wanted[n:], rtol=1e-4, atol=1e-4)
            elif b == 0:
                torch.testing.assert_close(second, wanted[n + 3 :], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quant", ["auto", "w4a8"])
@pytest.mark.parametrize("kind", KINDS)
def test_replayed_passes_have_the_bits_of_direct_ones(folder, tmp_path, kind, quant):
    if "cpu" not in backends():
        pytest.skip("the native module is not built")
    target = load_model(folder, ops.resolve("cpu"))
    where, config, _, _ = made(tmp_path, kind)
    head = load_head(where, target, target.ops, QuantScheme.parse(quant))
    direct, replayed = make_runner(head).cache, make_runner(head).cache
    generator = torch.Generator().manual_seed(1)
    widths = {False: config.layer.hidden_size, True: config.num_captures * config.target_hidden_size}
    for count, captured, window in ((3, True, 0), (20, True, 4), (5, False, 0)):
        pending = torch.randint(0, MODEL_VOCAB, (count,), generator=generator).tolist()
        batch = build_batch([Rows(pending, 2, [7, 8, 9], [-1, -1, 0], list(range(8)), True)], 4)
        x = torch.randn(count + 3, widths[captured], generator=generator)
        with torch.inference_mode():
            wanted = head._forward(head.ops, batch, direct, (int(captured), window), x)
        found = head.run(x, batch, replayed, window or None, captured=captured)[:2]
        assert all(map(torch.equal, found, wanted))
        assert direct.layers[0].k.equal(replayed.layers[0].k)
        plan = head._run.recorded(1, replayed, (int(captured), window), [x.shape[1]])
        assert plan is not None, "nothing of it runs op by op"


def test_a_window_hides_what_is_far(target, tmp_path):
    folder, config, w, at = made(tmp_path, "eagle3")
    runner = make_runner(load_head(folder, target, target.ops), window=4)
    tokens, hidden = torch.arange(3, 15), torch.randn(12, 96, generator=torch.Generator().manual_seed(2))
    holder = Sequence(0, (), SamplingParams(), 0)
    assert runner.blocks.reserve(holder, 12)
    logits, _, _ = runner.extend([holder], [tokens.tolist()], [hidden], True)
    sees = torch.ones(12, 12).tril().triu(-3).bool()
    known = combine(config, w, hidden, target)
    wanted, _ = plain_head(config, w, tokens, known, torch.arange(12), sees, target, at)
    torch.testing.assert_close(logits[0], wanted[-1], rtol=1e-4, atol=1e-4)


def test_the_shared_tensors_are_the_targets_own(target, tmp_path):
    head = load_head(made(tmp_path, "eagle")[0], target, target.ops)
    assert head.weights.embedding is target.weights.embedding
    assert head.weights.lm_head is target.weights.lm_head
    other = load_head(tmp_path, target, target.ops, QuantScheme.parse("auto,lm_head=w4a8"))
    assert other.weights.lm_head.format == "int4"
    assert other.weights.fc.format == "fp32"


def test_a_quantized_checkpoint(folder, tmp_path):
    """The codes of a compressed-tensors checkpoint are kept."""
    head, _, tensors, at = made(tmp_path / "dense", "eagle3")
    raw = json.loads((head / "config.json").read_text())
    quant, stored = QuantScheme.parse("w8a16"), dict(tensors)
    for name in [n for n in tensors if n.startswith(at) and tensors[n].dim() == 2]:
        q = quant.encode(stored.pop(name))
        stored |= scheme.get(q.format).checkpoint(name.removesuffix(".weight"), q)
        raw["quantization_config"] = scheme.get(q.format).config(q)
    raw["quantization_config"]["ignore"] = ["lm_head", "fc", "embed_tokens"]
    write_head(tmp_path / "codes", raw, stored)
    model = load_model(folder, ops.resolve("reference"))
    loaded = load_head(tmp_path / "codes", model, model.ops).weights.layer.o
    wanted = quant.encode(tensors[f"{at}.self_attn.o_proj.weight"])
    assert loaded.format == "int8"
    for part, value in wanted.parts.items():
        assert torch.equal(loaded.parts[part], value)


@pytest.mark.parametrize("quant", ["auto", "w8a8", "w4a8", "nf4", "fp8-b128"])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_reduced_vocabulary_keeps_the_logits(target, tmp_path, kind, quant):
    folder = made(tmp_path, kind)[0]
    whole = load_head(folder, target, target.ops, QuantScheme.parse(quant))
    ids = torch.tensor(sorted({5, 9, 40, 41, 100, 133, 200, 303}))
    few = with_vocabulary(whole, ids)
    own = torch.arange(MODEL_VOCAB) if whole.weights.target_ids is None else whole.weights.target_ids.long()
    assert set(few.weights.target_ids.tolist()) == set(ids.tolist()) & set(own.tolist())
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(4))
    columns = torch.isin(own, ids).nonzero().flatten()
    full = target.ops.product(plain_rows(x), whole.weights.lm_head)[:, columns]
    exact = quant != "fp8-b128"  # blocks of rows share scales here, so selected rows are kept as bf16
    rounding = 1e-6 if exact else 2e-2
    torch.testing.assert_close(
        target.ops.product(plain_rows(x), few.weights.lm_head), full, rtol=rounding, atol=rounding
    )
    with pytest.raises(ConfigError, match="none of the tokens"):
        with_vocabulary(few, torch.tensor([6]))


def refused(folder, target, error, text):
    model = load_model(target, ops.resolve("reference"))
    with pytest.raises(error, match=text):
        head_bytes(folder, QuantScheme(), model.config)
    with pytest.raises(error, match=text):
        load_head(folder, model, model.ops)


def test_heads_for_another_target(folder, tmp_path):
    head = made(tmp_path / "head", "eagle3")[0]
    wide = target_folder(tmp_path / "wide", hidden_size=40)
    refused(head, wide, ConfigError, "32 values, not 40")
    words = target_folder(tmp_path / "words", vocab_size=310)
    refused(head, words, VocabularyError, "304 tokens, the target 310")
    flat = target_folder(tmp_path / "flat", num_hidden_layers=2)
    refused(head, flat, ConfigError, r"layers \[1, 2, 3\] of the target's 2")


def test_names_that_begin_with_model(folder, tmp_path):
    """NeMo's names: all but the LM head's and `d2t` begin with `model.`."""
    head, _, tensors, _ = made(tmp_path, "EAGLE3.1")
    model = load_model(folder, ops.resolve("reference"))
    plain = load_head(head, model, model.ops)
    raw = json.loads((head / "config.json").read_text())
    named = {n if n in ("lm_head.weight", "d2t") else f"model.{n}": t for n, t in tensors.items()}
    write_head(head, raw, named)
    again = load_head(head, model, model.ops)
    assert again.weights.fc.parts["weight"].equal(plain.weights.fc.parts["weight"])
    assert all(a.equal(b) for a, b in zip(again.weights.fc_norms, plain.weights.fc_norms, strict=True))
    write_head(head, raw, {**named, "fc.weight": tensors["fc.weight"].clone()})
    refused(head, folder, ModelLoadError, "has model.fc.weight and fc.weight; take one of them out")


def test_the_window_is_that_of_its_first_layer():
    raw = {**raw_config("eagle3", 304, architectures=[QWEN3]), "sliding_window": 64}
    assert parse_head_config(raw).layer.windows == (None,)
    assert parse_head_config({**raw, "use_sliding_window": True}).layer.windows == (64,)
    for kinds, window in ((["sliding_attention"], 64), (["full_attention", "sliding_attention"], None)):
        assert parse_head_config({**raw, "use_sliding_window": True, "layer_types": kinds}).layer.windows == (window,)


def test_captured_layers_are_inputs():
    """Published ids name the input of a layer, so the output of the layer before it is captured."""
    third = parse_head_config(raw_config("eagle3", 304, eagle_config={"eagle_aux_hidden_state_layer_ids": []}))
    assert third.captures(32) == (1, 15, 28)
    assert parse_head_config(raw_config("speculators", 304, [2, 18, 33])).captures(36) == (1, 17, 32)
    assert parse_head_config(raw_config("eagle", 304)).captures(32) == (31,)
    with pytest.raises(ConfigError, match="reads what enters"):
        third.captures(2)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"architectures": ["MedusaModel"]}, "kind 'MedusaModel' is not supported"),
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"draft_vocab_size": "many"}, "draft_vocab_size must be a whole number"),
        ({"eagle_aux_hidden_state_layer_ids": [1.5]}, "must list layers"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"eagle_config": [3]}, "eagle_config must be an object"),
        ({"speculators_model_type": "medusa"}, "kind 'medusa' is not supported"),
        ({"speculators_model_type": "LlamaForCausalLMEagle3", "transformer_layer_config": {}}, "is not supported"),
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
    ],
)
def test_unsound_configs(change, text):
    with pytest.raises(ModelLoadError, match=text):
        parse_head_config({**raw_config("eagle3", 304), **change})


def test_unsound_vocabularies(folder, tmp_path):
    head = made(tmp_path, "eagle3")[0]
    raw, tensors = json.loads((head / "config.json").read_text()), load_file(head / "model.safetensors")
    write_head(head, raw, {**tensors, "d2t": tensors["d2t"] + 300})
    refused(head, folder, ModelLoadError, "d2t names tokens outside")
    write_head(head, raw, {n: t for n, t in tensors.items() if n != "d2t"})
    refused(head, folder, ModelLoadError, "d2t is missing")
    write_head(head, raw, {**tensors, "surplus": torch.zeros(2)})
    refused(head, folder, ModelLoadError, "unexpected tensor surplus")
    write_head(head, raw, {n: t for n, t in tensors.items() if n != "lm_head.weight"})
    refused(head, folder, ModelLoadError, "lm_head.weight is missing, and the target's has another shape")
    write_head(head, raw, {**tensors, "norm.weight": torch.full((32,), torch.nan)})
    model = load_model(folder, ops.resolve("reference"))
    with pytest.raises(ModelLoadError, match="NaN"):
        load_head(head, model, model.ops)


def test_old_heads_are_known_by_their_fc(folder, tmp_path):
    """The first EAGLE checkpoints claim to be a LlamaForCausalLM of one layer."""
    head = made(tmp_path, "eagle")[0]
    raw = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps({**raw, "architectures": ["LlamaForCausalLM"]}))
    assert is_head(head)
    assert read_head_config(head).kind == "eagle"
    assert not is_head(folder)
    assert not is_head(target_folder(tmp_path / "one", num_hidden_layers=1))


def test_a_head_is_known_by_the_signs_of_its_targets_embedding(folder, tmp_path, monkeypatch):
    head, _, _, _ = made(tmp_path / "head", "eagle3")
    target = load_model(folder, ops.resolve("reference"))
    raw = json.loads((head / "config.json").read_text())
    raw |= {"target_signs": embedding_signs(target), "target_hidden_size": target.config.hidden_size}
    (head / "config.json").write_text(json.dumps(raw))
    rounded = load_model(folder, ops.resolve("reference"), QuantScheme.parse("w4a8,lm_head=w4a8"))
    for same in (target, rounded):
        load_head(head, same, same.ops)
    write_model(tmp_path / "other", num_hidden_layers=3, seed=77)
    other = load_model(tmp_path / "other", ops.resolve("reference"))
    with pytest.raises(ConfigError, match="trained for this target"):
        load_head(head, other, other.ops)
    monkeypatch.setattr(config, "PACKAGED_HEADS", ("one-head",))
    monkeypatch.setitem(config.EMBEDDED, "one-head", str(head))
    assert [own_draft(str(model)) for model in (folder, tmp_path / "other")] == ["one-head", "none"]
    (head / "config.json").write_text(json.dumps({**raw, "target_signs": "zz"}))
    with pytest.raises(ModelLoadError, match="download"):
        load_head(head, target, target.ops)
