"""EAGLE heads for the tests: the papers' formulas in plain PyTorch, and tiny heads that are fitted in a second."""

import json

import torch
from fixtures_models import whole_pass
from safetensors.torch import load_file, save_file

from sameseed.models.head_config import parse_head_config

LAYER = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 256, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def raw_config(kind, vocab_size, aux=None, **changes):
    """config.json of a head: "eagle", "eagle3", or "speculators" (EAGLE-3 in that layout)."""
    layer = {**LAYER, "vocab_size": vocab_size, **{k: v for k, v in changes.items() if k in LAYER}}
    rest = {k: v for k, v in changes.items() if k not in LAYER}
    if kind == "eagle":
        return {"architectures": ["EagleLlamaForCausalLM"], **layer, **rest}
    if kind == "eagle3":
        own = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": aux}} if aux else {}
        return {"architectures": ["LlamaForCausalLMEagle3"], **layer, **own, **rest}
    kind_of_layer = rest.pop("model_type", "llama")
    own = {"eagle_aux_hidden_state_layer_ids": aux, "transformer_layer_config": {"model_type": kind_of_layer, **layer}}
    return {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", **own, **rest}


def random_head(config, seed=0, layer="midlayer", scale=1.0):
    """Tensors of a random head; d2t is spread over the vocabulary if the head's vocabulary is smaller."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in config.tensors(layer).items():
        noise = torch.randn(shape, generator=generator)
        if name == "d2t":
            chosen = torch.randperm(config.layer.vocab_size, generator=generator)[: shape[0]].sort().values
            tensors[name] = chosen - torch.arange(shape[0])
        elif len(shape) == 1:
            tensors[name] = 0.3 * noise + (0.0 if name.endswith("bias") else 1.0)
        else:
            tensors[name] = noise * scale if "embed" in name or "w1" in name else noise * scale * shape[1] ** -0.5
    return tensors


def _norm(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _rotate(x, positions, theta):
    half = x.shape[-1] // 2
    angle = positions[:, None].float() / theta ** (torch.arange(half) / half)  # [T, D/2]
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def combine(config, w, hidden, target):
    """Features [T, C] of the target's captured hidden states [T, F]."""
    eps = config.layer.rms_eps
    if config.kind == "eagle":
        return _norm(hidden, target.weights.norm, target.config.rms_eps)
    if config.norm_before_fc:
        hidden = _norm(hidden, w["input_norm.weight"], eps)
    if config.fc_norm:
        parts = hidden.chunk(config.num_captures, dim=1)
        hidden = torch.cat([_norm(p, w[f"fc_norm.{i}.weight"], eps) for i, p in enumerate(parts)], dim=1)
    return hidden @ w["fc.weight"].T


def plain_linear(w, at, name, rows):
    return rows @ w[f"{at}.{name}.weight"].T + w.get(f"{at}.{name}.bias", torch.tensor(0.0))


def plain_attention(c, w, at, rows, positions, seen, places, sees):
    """What `rows` at `positions` [T] add by attention to the rows `seen` at `places` [S]; `sees` bool [T, S]."""
    inputs = (("q", rows), ("k", seen), ("v", seen))
    q, k, v = (plain_linear(w, at, f"self_attn.{n}_proj", x).view(len(x), -1, c.head_dim) for n, x in inputs)
    if c.qk_norm:
        q, k = (_norm(x, w[f"{at}.self_attn.{n}_norm.weight"], c.rms_eps) for x, n in ((q, "q"), (k, "k")))
    q, k = _rotate(q, positions, c.rope.theta), _rotate(k, places, c.rope.theta)
    k, v = (x.repeat_interleave(c.num_heads // c.num_kv_heads, dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * c.head_dim**-0.5
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    return plain_linear(w, at, "self_attn.o_proj", torch.einsum("hts,shd->thd", weights, v).flatten(1))


def plain_mlp(w, at, rows):
    gate = torch.nn.functional.silu(plain_linear(w, at, "mlp.gate_proj", rows))
    return plain_linear(w, at, "mlp.down_proj", gate * plain_linear(w, at, "mlp.up_proj", rows))


def plain_head(config, w, tokens, features, positions, sees, target, layer="midlayer"):
    """Logits [T, Vd] and features [T, C] of rows; `sees` bool [T, T]: which rows each row attends to."""
    c, eps, third = config.layer, config.layer.rms_eps, config.kind == "eagle3"
    theirs = (target.ops.unpack(x).parts["weight"].float() for x in (target.weights.embedding, target.weights.lm_head))
    embedding, lm_head = map(w.get, ("embed_tokens.weight", "lm_head.weight"), theirs)
    e = embedding[tokens]
    if third:
        normed = _norm(features, w[f"{layer}.hidden_norm.weight"], eps)
        entering = torch.cat([_norm(e, w[f"{layer}.input_layernorm.weight"], eps), normed], dim=1)
        residual = normed if config.norm_before_residual else features
    else:
        entering = residual = torch.cat([e, features], dim=1) @ w["fc.weight"].T + w.get("fc.bias", torch.tensor(0.0))
    x = residual + plain_attention(c, w, layer, entering, positions, entering, positions, sees)
    x = x + plain_mlp(w, layer, _norm(x, w[f"{layer}.post_attention_layernorm.weight"], eps))
    if not third:
        return x @ lm_head.T, x
    normed = _norm(x, w["norm.weight"], eps)
    return normed @ lm_head.T, normed if config.norm_output else x


def target_states(target, texts, captures, kv="fp32"):
    """Captured hidden states [T, F] and logits [T, V] of all positions, for each text."""
    passes = [whole_pass(target, text, captures, kv) for text in texts]
    return [(hidden.clone(), logits.clone()) for logits, hidden in passes if hidden is not None]


def fit_head(folder, target, seed=0):
    """Write an EAGLE-1 head for any target: fc is a least-squares fit of the next feature, other weights are small."""
    raw = raw_config("eagle", target.config.vocab_size)
    config = parse_head_config(raw)
    w = random_head(config, seed, "layers.0", scale=0.05)
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(1, 300, (64,), generator=generator).tolist() for _ in range(16)]
    embedding = target.ops.embedding(
        torch.arange(target.config.vocab_size, dtype=torch.int32), target.weights.embedding
    )
    inputs, wanted = [], []
    for text, (hidden, _) in zip(texts, target_states(target, texts, config.captures(target.config.num_layers))):
        features = combine(config, w, hidden, target)
        inputs.append(torch.cat([embedding[text[1:]], features[:-1], torch.ones(63, 1)], dim=1))
        wanted.append(features[1:])
    found = torch.linalg.lstsq(torch.cat(inputs), torch.cat(wanted)).solution.T  # [C, 2 C + 1]
    w["fc.weight"], w["fc.bias"] = found[:, :-1], found[:, -1]
    del w["embed_tokens.weight"], w["lm_head.weight"]
    return write_head(folder, raw, w)


def silence(folder, scale):
    """Change a model so that a head can predict it: only layer 0 adds to the embeddings, whose RMS becomes `scale`."""
    tensors = load_file(folder / "model.safetensors")
    rows = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = scale * rows / rows.pow(2).mean(1, keepdim=True).sqrt()
    for name, value in tensors.items():
        if "layers." in name and "layers.0." not in name and ("o_proj" in name or "down_proj" in name):
            tensors[name] = torch.zeros_like(value)
        if name in ("model.norm.weight", "model.layers.0.input_layernorm.weight"):
            tensors[name] = torch.ones_like(value)
    save_file(tensors, str(folder / "model.safetensors"))


def knowing_head(folder, target, kind, noise=0.0, **changes):
    """Write a head made of the first layer of a silenced model; it lacks only the first token of the text.

    An EAGLE-3 head does not pass the embedding itself on, so the model's `scale` should be small compared to what its
    layer adds.
    """
    model = load_file(target / "model.safetensors")
    own = json.loads((target / "config.json").read_text())
    layer = {k: own[k] for k in LAYER if k in own and k != "num_hidden_layers"}
    raw = raw_config(kind, own["vocab_size"], None if kind == "eagle" else [1, 2, 2], **{**layer, **changes})
    config = parse_head_config(raw)
    at = "midlayer" if kind == "eagle3" else "layers.0"
    w = random_head(config, 5, at)
    width = own["hidden_size"]
    for name in w:
        source = f"model.layers.0.{name.removeprefix(at + '.')}"
        if name.startswith(at) and source in model:
            mixed = model[source] + noise * model[source].std() * torch.randn(model[source].shape) * (noise > 0)
            w[name] = mixed if w[name].shape == mixed.shape else torch.cat([mixed, torch.zeros_like(mixed)], dim=1)
    if kind == "eagle":
        w["fc.weight"], w["fc.bias"] = torch.eye(width, 2 * width), torch.zeros(width)
        del w["lm_head.weight"]
    else:
        w["fc.weight"] = torch.zeros_like(w["fc.weight"])
        w[f"{at}.hidden_norm.weight"] = torch.ones(width)
        w["norm.weight"] = model["model.norm.weight"]
        ids = torch.arange(config.draft_vocab_size) + w["d2t"]
        w["lm_head.weight"] = model["lm_head.weight"][ids]
    del w["embed_tokens.weight"]
    return write_head(folder, raw, w)


def write_head(folder, raw, tensors):
    """Write a head as a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({n: t.contiguous() for n, t in tensors.items()}, str(folder / "model.safetensors"))
    return folder
