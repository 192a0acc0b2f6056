"""Twins of the embedded pair against the pair itself: text, acceptance, and what quantization does to either.

    .venv/bin/python benchmarks/twins.py --shape llama-3.2-1b --formats bf16,w8a8,w4a8 [--limit 8] [--out RECORDS.jsonl]

One record for each format. `equal_texts` counts greedy completions of the twin pair that are the small pair's. `kl` and
`agreement` hold a model in that format against the small one in bf16, on the same texts (the small target's own), in
nats and in shares of positions with the same likeliest token.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from sameseed import LLM, SamplingParams
from sameseed.batch import Rows, build_batch
from sameseed.kvcache.cache import KVCache
from sameseed.models.llama import Llama
from sameseed.study import record
from sameseed.study.shapes import shape_as_dict
from sameseed.study.twin import find_shape, make_twin
from sameseed.study.workload import DEFAULT_PROMPTS, read_prompts

SCHEMA = "sameseed.twins/1"
PAIR = ("embedded-target", "embedded-draft")
LENGTH, LONGEST = 512, 256  # tokens of a text, and of its prompt at most
BLOCK = 16


def load(pair: tuple[str, str], scheme: str, threads: int | None, k: int) -> LLM:
    """Target and draft of a pair, both in a format."""
    how = {"kv_format": "fp32", "max_model_len": LENGTH, "threads": threads, "num_draft_tokens": k}
    return LLM(pair[0], draft=pair[1], format=scheme, draft_format=scheme, **how)


def logits(model: Llama, texts: list[list[int]], vocab: int) -> Tensor:
    """Log-probabilities float32 [T, V] of every position of the texts, one after the other."""
    c, found = model.config, []
    for ids in texts:
        blocks = list(range(-(-len(ids) // BLOCK)))
        cache = KVCache(c.num_layers, len(blocks), BLOCK, c.num_kv_heads, c.head_dim, "fp32")
        batch = build_batch([Rows(ids, 0, [], [], blocks, True)], BLOCK)
        rows = torch.arange(len(ids), dtype=torch.int32)
        found.append(model.forward(replace(batch, logit_rows=rows), cache)[0][:, :vocab].log_softmax(-1))
    return torch.cat(found)


def measure(llm: LLM, prompts: list[list[int]], max_tokens: int) -> tuple[list[list[int]], dict[str, float]]:
    """Greedy tokens, and what share of the drafted ones was accepted."""
    done = llm.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    spec = [c.metrics.spec for c in done]
    accepted, drafted = sum(s.num_accepted_tokens for s in spec), sum(s.num_draft_tokens for s in spec)
    rounds = sum(s.num_drafts for s in spec)
    found = {"acceptance_rate": accepted / drafted, "mean_acceptance_length": 1 + accepted / rounds}
    return [list(c.token_ids) for c in done], found


def distance(found: Tensor, true: Tensor) -> dict[str, float]:
    """Mean Kullback-Leibler divergence in nats, and agreement of the likeliest tokens, over rows [T, V]."""
    kl = (true.double().exp() * (true.double() - found.double())).sum(1).mean()
    return {"kl": float(kl), "agreement": float((found.argmax(1) == true.argmax(1)).double().mean())}


def main() -> None:
    """Make the twins, compare them in every format, append the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.2-1b", help="a known shape, or a model's folder")
    parser.add_argument("--twins", type=Path, help="folder where the twins are or go; unset: a temporary one")
    parser.add_argument("--formats", default="bf16,w8a8,w4a8")
    parser.add_argument("--limit", type=int, help="take so many prompts")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "twins.jsonl")
    args = parser.parse_args()
    record.prepare(args.out)
    shape = find_shape(args.shape)
    with tempfile.TemporaryDirectory() as temporary:
        folders = [(args.twins or Path(temporary)) / name for name in PAIR]
        for name, folder in zip(PAIR, folders):
            if not folder.exists():
                make_twin(shape, name, folder, name=Path(args.shape).name)
        compare(args, (str(folders[0]), str(folders[1])))


def compare(args: argparse.Namespace, twins: tuple[str, str]) -> None:
    """One record for each format."""
    llm = load(PAIR, "bf16", args.threads, args.k)
    prompts = [list(p.encode(llm.tokenizer))[-LONGEST:] for p in read_prompts(DEFAULT_PROMPTS, args.limit)]
    own, _ = measure(llm, prompts, args.max_tokens)
    texts = [p + o for p, o in zip(prompts, own)]
    vocab = llm.engine.runner.model.config.vocab_size
    true = logits(llm.engine.runner.model, texts, vocab)
    for scheme in args.formats.split(","):
        found: dict[str, object] = {}
        tokens = {}
        for name, pair in (("small", PAIR), ("twin", twins)):
            llm = load(pair, scheme, args.threads, args.k)
            tokens[name], share = measure(llm, prompts, args.max_tokens)
            found[name] = {**share, **distance(logits(llm.engine.runner.model, texts, vocab), true)}
            config = llm.engine.runner.model.config
        line = {
            "schema": SCHEMA, "time": record.now(), "commit": record.commit(), "machine": record.machine(),
            "shape": shape_as_dict(Path(args.shape).name, config), "pair": PAIR, "format": scheme, "k": args.k,
            "num_prompts": len(prompts), "max_tokens": args.max_tokens, "num_positions": len(true),
            "equal_texts": sum(a == b for a, b in zip(tokens["small"], tokens["twin"])), **found,
        }  # fmt: skip
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(scheme, line["equal_texts"], "of", len(prompts), "texts equal;", json.dumps(found))


if __name__ == "__main__":
    main()
