"""Block heads for the tests: the papers' formulas in plain PyTorch, and a tiny head fitted to a target's logits."""

import torch
from fixtures_eagle import LAYER, _norm, _rotate, random_head, target_states, write_head

from sameseed.models.head_config import BlockConfig, parse_head_config

LAYOUTS = ("z-lab", "DeepSpec", "dflash", "dspark")


def raw_config(layout, vocab_size, layers, **changes):
    """config.json of a block head with two layers; `layers`: the target layers whose outputs it reads."""
    layer = {**LAYER, "num_hidden_layers": 2, "vocab_size": vocab_size, "model_type": "qwen3"}
    layer |= {k: v for k, v in changes.items() if k in layer}
    rest = {"block_size": 5, **{k: v for k, v in changes.items() if k not in layer}}
    mask = {"mask_token_id": rest.pop("mask_token_id", vocab_size - 1)}
    if layout == "z-lab":
        own = {"dflash_config": {**mask, "target_layer_ids": layers}, "num_target_layers": 3}
        return {"architectures": ["DFlashDraftModel"], **layer, **own, **rest}
    if layout == "DeepSpec":
        markov = {"markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": True, "num_anchors": 512}
        return {"architectures": ["Qwen3DSparkModel"], **layer, **markov, **mask, "target_layer_ids": layers, **rest}
    own = {"speculators_model_type": layout, "aux_hidden_state_layer_ids": [i + 1 for i in layers], **mask}
    markov = {"markov_rank": 6, "markov_head_type": "vanilla"} if layout == "dspark" else {}
    names = {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}
    return {"architectures": [names[layout]], **own, **markov, "transformer_layer_config": layer, **rest}


def saved_by_speculators(kind, vocab_size, layers, model_type, size):
    """config.json with the keys that speculators 0.9 writes for a head of `size` tokens; arguments as `raw_config`."""
    raw = raw_config(kind, vocab_size, layers, draft_vocab_size=size)
    layer = {**raw["transformer_layer_config"], "model_type": model_type, "hidden_act": "silu", "pad_token_id": None}
    del layer["rope_theta"]
    layer["rope_parameters"] = {"rope_theta": LAYER["rope_theta"], "rope_type": "default"}
    if model_type == "qwen3":
        del layer["mlp_bias"]
        layer |= {"layer_types": ["full_attention"] * 2, "sliding_window": None, "use_sliding_window": False}
    own = {"architectures": ["DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"], "dtype": "float32"}
    own |= {"target_hidden_size": None, "sample_from_anchor": kind == "dspark", "sliding_window_non_causal": False}
    return {**raw, **own, "transformer_layer_config": layer, "tie_word_embeddings": False}


def parsed(raw):
    config = parse_head_config(raw)
    assert isinstance(config, BlockConfig)
    return config


def plain_block(config, w, states, last, target):
    """Logits [guesses, Vd] of one block after states [n, F], computed in one dense pass, without a Markov head."""
    c, eps, n = config.layer, config.layer.rms_eps, len(states)
    embedding = w.get("embed_tokens.weight", target.ops.unpack(target.weights.embedding).parts["weight"].float())
    context = _norm(states @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    x = embedding[torch.tensor([last] + [config.mask_token] * (config.block_size - 1))]
    places = torch.arange(n + config.block_size)
    for i in range(c.num_layers):
        at = f"layers.{i}"

        def linear(name, rows, at=at):
            return rows @ w[f"{at}.{name}.weight"].T + w.get(f"{at}.{name}.bias", torch.tensor(0.0))

        normed = _norm(x, w[f"{at}.input_layernorm.weight"], eps)
        q = linear("self_attn.q_proj", normed).view(len(x), -1, c.head_dim)
        both = torch.cat([context, normed])
        k, v = (linear(f"self_attn.{p}_proj", both).view(len(both), -1, c.head_dim) for p in "kv")
        if c.qk_norm:
            q, k = (_norm(y, w[f"{at}.self_attn.{p}_norm.weight"], eps) for y, p in ((q, "q"), (k, "k")))
        q, k = _rotate(q, places[n:], c.rope.theta), _rotate(k, places, c.rope.theta)
        k, v = (y.repeat_interleave(c.num_heads // c.num_kv_heads, dim=1) for y in (k, v))
        weights = (torch.einsum("thd,shd->hts", q, k) * c.head_dim**-0.5).softmax(-1)  # every position attends to all
        x = x + linear("self_attn.o_proj", torch.einsum("hts,shd->thd", weights, v).flatten(1))
        inner = _norm(x, w[f"{at}.post_attention_layernorm.weight"], eps)
        gate = torch.nn.functional.silu(linear("mlp.gate_proj", inner))
        x = x + linear("mlp.down_proj", gate * linear("mlp.up_proj", inner))
    lm_head = w.get("lm_head.weight", target.ops.unpack(target.weights.lm_head).parts["weight"].float())
    return _norm(x, w["norm.weight"], eps)[config.block_size - config.num_guesses :] @ lm_head.T


def fit_block(folder, target, seed=0, **changes):
    """Write a block head whose Markov head is fitted to the target's mean logits after each token, the rest small."""
    size, rank = target.config.vocab_size, 48
    raw = raw_config("dspark", size, [0, 1], markov_rank=rank, block_size=7, **changes)
    w = random_head(parsed(raw), seed, scale=0.05)
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(1, 300, (250,), generator=generator).tolist() for _ in range(6)]
    total, count = torch.zeros(size, size), torch.zeros(size, 1)
    for text, (_, logits) in zip(texts, target_states(target, texts, (0,)), strict=True):
        total.index_add_(0, torch.tensor(text), logits)
        count.index_add_(0, torch.tensor(text), torch.ones(len(text), 1))
    u, s, v = torch.linalg.svd((total + 2 * total.sum(0) / count.sum()) / (count + 2))
    w["markov_head.markov_w1.weight"] = u[:, :rank] * s[:rank].sqrt()
    w["markov_head.markov_w2.weight"] = v[:rank].T * s[:rank].sqrt()
    del w["embed_tokens.weight"], w["d2t"]
    return write_head(folder, raw, w)
