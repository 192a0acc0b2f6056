"""Block heads for the tests: the papers' formulas in plain PyTorch, and a tiny head fitted to a target's logits."""

import torch
from fixtures_eagle import LAYER, _norm, plain_attention, plain_mlp, random_head, target_states, write_head

from sameseed.models.head_config import SELECTOR, BlockConfig, parse_head_config

LAYOUTS = ("z-lab", "DeepSpec", "dflash", "dspark")
SECOND = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 9}  # of DFlash2


def raw_config(layout, vocab_size, layers, **changes):
    """config.json of a block head with two layers; `layers`: the target layers whose outputs it reads."""
    layer = {**LAYER, "num_hidden_layers": 2, "vocab_size": vocab_size, "model_type": "qwen3"}
    layer |= {k: v for k, v in changes.items() if k in layer}
    rest = {"block_size": 5, **{k: v for k, v in changes.items() if k not in layer}}
    mask = {"mask_token_id": rest.pop("mask_token_id", vocab_size - 1)}
    if layout in ("z-lab", "DFlash2"):
        second = SECOND | {"block_size": rest.pop("block_size")} if layout == "DFlash2" else {}
        own = {"dflash_config": {**mask, **second, "target_layer_ids": layers}, "num_target_layers": 3}
        name = "DFlash2DraftModel" if second else "DFlashDraftModel"
        return {"architectures": [name], **layer, **own, **rest}
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


def plain_block(config, w, states, last, target, gates=False):
    """Logits [guesses, Vd] of one block after states [n, F], computed in one dense pass, without a Markov head.

    With `gates` also those of the selector [guesses, A].
    """
    c, eps, n = config.layer, config.layer.rms_eps, len(states)
    embedding = w.get("embed_tokens.weight", target.ops.unpack(target.weights.embedding).parts["weight"].float())
    context = _norm(states @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    x = embedding[torch.tensor([last] + [config.mask_token] * (config.block_size - 1))]
    places = torch.arange(n + config.block_size)
    back = places[n:, None] - places[None, :]
    for i, (window, causal) in enumerate(zip(c.windows, config.causal, strict=True)):
        at = f"layers.{i}"
        seen = back >= 0 if causal else torch.ones_like(back, dtype=torch.bool)
        if window is not None:
            seen &= (back if causal else n - places[None, :]) < window

        def mixed(rows, read, part, side, at=at):
            if f"{at}.{part}.base_kernel" not in w:
                return rows
            base, taps = w[f"{at}.{part}.base_kernel"][side], config.conv[0]
            made = (read @ w[f"{at}.{part}.kernel_projection.weight"].T).view(len(rows), 2, taps, -1)[:, side]
            total = torch.zeros_like(rows)
            for place in range(len(rows)):
                for tap in range(min(taps, place + 1)):
                    weights = base[tap] + made[place, tap].repeat_interleave(config.conv[1])
                    total[place] += weights * rows[place - tap]
            return total

        read = _norm(x, w[f"{at}.input_layernorm.weight"], eps)
        rows = mixed(read, read, "attention_conv", 0)
        added = plain_attention(c, w, at, rows, places[n:], torch.cat([context, rows]), places, seen)
        x = x + mixed(added, read, "attention_conv", 1)
        read = _norm(x, w[f"{at}.post_attention_layernorm.weight"], eps)
        x = x + mixed(plain_mlp(w, at, mixed(read, read, "mlp_conv", 0)), read, "mlp_conv", 1)
    lm_head = w.get("lm_head.weight", target.ops.unpack(target.weights.lm_head).parts["weight"].float())
    last = _norm(x, w["norm.weight"], eps)[config.block_size - config.num_guesses :]
    return (last @ lm_head.T, last @ w[f"{SELECTOR[0]}.weight"].T) if gates else last @ lm_head.T


def selected(config, w, row, last, gate):
    """The logits `row` of a place with the selector's scores after the token `last`; -inf but for its candidates."""
    before, after = (w[f"{table}.weight"] for table in SELECTOR[1:])
    best = row.topk(config.num_candidates).indices
    return torch.full_like(row, -torch.inf).scatter(0, best, row[best] + after[best] @ (before[last] * gate))


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
