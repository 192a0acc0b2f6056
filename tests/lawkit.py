"""Shared code of the law tests: a tiny pair of models, engines made of loaded models, a drafter of random trees."""

import json
import random
from dataclasses import dataclass, replace

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as HFTokenizer, decoders, models, pre_tokenizers, trainers

from sameseed import ops, registry
from sameseed.config import CacheConfig, EngineConfig, SpecConfig
from sameseed.engine.build import Loaded, assemble
from sameseed.engine.overlap import Overlap
from sameseed.laws import subject
from sameseed.laws.trees import TreeDrafter as TreeDrafter, knowing as knowing
from sameseed.models.block import BlockHead
from sameseed.models.config import parse_config
from sameseed.models.decoder import Decoder
from sameseed.models.eagle import EagleHead
from sameseed.models.eagle_loader import load_head
from sameseed.models.loader import load_model
from sameseed.models.weights import expected_shapes
from sameseed.request import Request, SamplingParams, Sequence
from sameseed.scheme import QuantScheme
from sameseed.spec.draft import Draft
from sameseed.spec.sampling import derive_seed
from sameseed.tokenizer import Tokenizer

EOS = 0  # "<|end|>"
TOKENIZER_SIZE, MODEL_VOCAB = 300, 304  # the models are padded by four token ids that no text contains
MAX_LEN = 256
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
# Changes to the config of `write_model` that make a model of another family.
FAMILIES = {
    "llama": {},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], "tie_word_embeddings": False, "query_pre_attn_scalar": 8,
        "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma4": {
        "architectures": ["Gemma4ForCausalLM"], "tie_word_embeddings": False, "num_hidden_layers": 4,
        "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 16,
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": MODEL_VOCAB,
        "final_logit_softcapping": 30.0,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 5, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "norm_topk_prob": True, "mlp_only_layers": [0],
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
            "truncate": False,
        },
    },
    "qwen3_5": {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "num_hidden_layers": 5, "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "rms_norm_eps": 1e-6, "mtp_num_hidden_layers": 1,
    },
}  # fmt: skip
FAMILIES["phi3"] = {
    "architectures": ["Phi3ForCausalLM"], "sliding_window": None, "head_dim": 16,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "short_factor": [1.0] * 6,
        "original_max_position_embeddings": 64, "long_factor": [1.0, 1.5, 2.0, 4.0, 6.0, 9.0],
    },
}  # fmt: skip
FAMILIES["lfm2"] = {
    "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "num_hidden_layers": 5, "norm_eps": 1e-5,
    "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"], "block_auto_adjust_ff_dim": False,
    "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES["lfm2_moe"] = {
    **FAMILIES["lfm2"], "architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "num_experts": 6,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 1,
}  # fmt: skip
FAMILIES["qwen3_5_moe"] = {
    **FAMILIES["qwen3_5"], "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text",
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 24,
}  # fmt: skip
FAMILIES["gemma4_moe"] = {
    **FAMILIES["gemma4"], "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 6,
    "top_k_experts": 2, "moe_intermediate_size": 32,
}  # fmt: skip
DRAFTERS = [n for n in registry.names("drafters") if n != "assistant"]  # that drafts for a Gemma 4 only
WORDS = (
    "the sum of all parts is a whole; the loop ends when the list is empty. def add(a, b): return a + b  "
    "für über Größe naïve café — 你好 🙂 "
)


@dataclass(frozen=True)
class Pair:
    """A loaded target with its draft model, draft heads and tokenizer; `low`: the target in a lower format."""

    target: Decoder
    draft: Decoder
    tokenizer: Tokenizer
    low: Decoder | None = None
    head: EagleHead | None = None
    block: BlockHead | None = None


def write_tokenizer(folder, size=TOKENIZER_SIZE):
    """A byte-level BPE tokenizer with an end token, small enough that most words take several tokens."""
    backend = HFTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([WORDS] * 4, trainer)
    assert backend.get_vocab_size() == size, "the text is too short for so many merges"
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|end|>"}))


def write_model(folder, seed=0, noise=0.0, **changes):
    """Write a random Llama as a Hugging Face folder. `noise` mixes in other weights: a draft that often agrees.

    The LM head is scaled so that a few logits stand out: sampled text is neither noise nor constant.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": MODEL_VOCAB, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": MAX_LEN, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "eos_token_id": EOS, **changes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    own, other = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1000)
    tensors = {}
    for name, shape in expected_shapes(parse_config(config)).items():
        if len(shape) == 1:
            tensors[name] = 1.0 + 0.1 * torch.randn(shape, generator=own)
            continue
        gain = 0.7 if name == "lm_head.weight" else 1.0 if "embed" in name else 1.3 * shape[1] ** -0.5
        first, second = (torch.randn(shape, generator=g) for g in (own, other))
        tensors[name] = gain * (first + noise * second) / (1 + noise**2) ** 0.5
    save_file(tensors, str(folder / "model.safetensors"))
    write_tokenizer(folder)


def advance(r, seq, text, known, drafted, kept):
    """One pass: `known` tokens of the text, then a draft of which `kept` tokens are right; logits [1 + kept, V]."""
    end = seq.num_cached + known
    seq.token_ids = list(text[:end])
    assert r.blocks.reserve(seq, end + drafted)
    right = list(text[end : end + kept])
    out = r.forward([seq], Draft.chains([right + [1] * (drafted - kept)]), [known])
    r.commit([seq], [known], [list(range(kept))], out)
    return out.logits[: 1 + kept]


# The laws are tested on the CPU and, if there is one, on a GPU.
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def load_pair(target, draft, backend="auto", weights="auto", device="cpu"):
    """The pair in a number format, with its models on a device."""
    chosen, quant = ops.resolve(backend, device), QuantScheme.parse(weights)
    low = load_model(target, chosen, QuantScheme.parse("int8"), device=device)
    big, small = (load_model(folder, chosen, quant, device=device) for folder in (target, draft))
    folder = target.parent / "head"
    head = load_head(folder, big, chosen, device=device) if folder.exists() else None
    block_folder = target.parent / "block"
    block = load_head(block_folder, big, chosen, device=device) if block_folder.exists() else None
    assert not isinstance(head, BlockHead)
    assert not isinstance(block, EagleHead)
    small.config = replace(small.config, mask_token=MODEL_VOCAB - 1)  # so that the draft can also guess in parallel
    return Pair(big, small, Tokenizer.from_folder(target), low, head, block)


# The levels below drafters that work with others, unless a test says otherwise.
BELOW = {
    "cascade": (SpecConfig("ngram", num_draft_tokens=3),),
    "first": (SpecConfig("suffix", num_draft_tokens=8), SpecConfig("draft_model", num_draft_tokens=8)),
}


def below_of(method):
    """Levels below a drafter: those in BELOW, else as many n-gram drafters as it needs at least."""
    least = 0 if method == "none" else registry.load("drafters", method).DRAFTER.num_below[0]
    return BELOW.get(method, (SpecConfig("ngram", num_draft_tokens=3),) * least)


def models_of(spec, pair, target):
    """The models that the drafters of a SpecConfig own, for all levels. A head always belongs to the target."""
    drafter = None if spec.method == "none" else registry.load("drafters", spec.method).DRAFTER
    if drafter is not None and drafter.owns == "head":
        own_head = pair.block if spec.method == "block" else pair.head
        assert own_head is not None, "the pair has no draft head"
        return [own_head]
    own = [] if drafter is None or not drafter.owns else [target if drafter.owns == "target" else pair.draft]
    if drafter is not None and drafter.owns == "target" and target is pair.target and pair.low is not None:
        own = [pair.low]
    return own + [m for b in spec.below for m in models_of(b, pair, own[0] if own else target)]


def make_engine(
    pair,
    method="none",
    k=4,
    confidence=None,
    *,
    options=None,
    rows=512,
    seqs=8,
    block=16,
    tokens=4096,
    kv="fp32",
    max_len=None,
    drafter=None,
    below=None,
    policy="fixed",
    target=None,
    pass_ms=100.0,
):
    """An Engine of loaded models, on their device; its cache holds `tokens`. `drafter` replaces that of `method`."""
    device = str(pair.target.device)
    under = below_of(method) if below is None else below
    spec = SpecConfig(
        method, num_draft_tokens=k, confidence=confidence, policy=policy, options=options or {}, below=under
    )
    cache = CacheConfig(block_size=block, format=kv)
    config = EngineConfig(
        max_num_rows=rows,
        max_num_seqs=min(seqs, rows),
        max_model_len=max_len,
        max_pass_ms=pass_ms,
        device=device,
        cache=cache,
        spec=spec,
    )
    drafts = tuple(models_of(spec, pair, pair.target))
    engine = assemble(Loaded(config, pair.tokenizer, -(-tokens // block), pair.target, drafts), target)
    return engine if drafter is None else subject.draft_with(engine, drafter, k)


def run(engine, prompts, params, alone=False, streamed=False):
    """Run all prompts together, or one by one if `alone`; completions by prompt and index. Checks law 3 at the end."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    requests = [
        Request(f"r{i}", tuple(prompt), p, derive_seed(p.seed or 0, n), n, streamed=streamed)
        for i, (prompt, p) in enumerate(zip(prompts, each, strict=True))
        for n in range(p.n)
    ]
    done = subject.run(engine, requests, alone)
    assert_nothing_left(engine)
    return done


def sequences(count, length=1):
    return [Sequence(b, [1] * length, SamplingParams(), 0) for b in range(count)]


class Tireless(Overlap):
    """Drafts ahead until the target's pass ends, however long the drafter's passes take."""

    def fits(self, seconds):
        return True


def finished(engine):
    """Run an engine until it has no work; completions by request and index."""
    done = {}
    while engine.has_work:
        done |= {(d.request_id, d.index): d.completion for d in engine.step() if d.completion is not None}
    return done


def write(engine, grammar, params, seeds):
    """One completion per seed, each with its own copy of the grammar."""
    for seed in seeds:
        engine.add(Request(str(seed), (40 + seed % 20, 50), params, seed, grammar=grammar and grammar.another()))
    done = finished(engine)
    assert_nothing_left(engine)
    return [done[str(seed), 0] for seed in seeds]


def texts(completions):
    """The token ids, which law 1 compares."""
    return [c.token_ids for c in completions]


def assert_nothing_left(engine):
    """Law 3: every block of target and draft is free exactly once, and no request is remembered."""
    assert subject.leaks(engine) == []


def random_prompts(count, seed=0, longest=48, vocab_size=TOKENIZER_SIZE):
    """Token ids, lengths 1 to `longest`, with repeated phrases (so that the n-gram drafter finds something)."""
    rng = random.Random(seed)
    prompts = []
    for i in range(count):
        length = 1 + i * (longest - 1) // max(1, count - 1)
        phrase = [rng.randrange(1, vocab_size) for _ in range(rng.randint(2, 6))]
        tokens = [t for _ in range(length) for t in (phrase if rng.random() < 0.3 else [rng.randrange(1, vocab_size)])]
        prompts.append(tokens[:length])
    return prompts
