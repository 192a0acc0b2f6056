"""Our logits of GGUF files against llama.cpp's own: one record for each type of file.

    .venv/bin/python benchmarks/gguf_logits.py --llama-cpp PYTHON [--out RECORDS.jsonl]

PYTHON is that of an environment with `gguf` and `llama-cpp-python` (`make peers` makes one). The embedded target is
written as bfloat16 GGUF by the gguf package and quantized by llama.cpp (`peers/to_gguf.py`); both engines then read the
same file. llama.cpp rounds activations to 8 bits in groups of 32 where weights are quantized, and keeps its cache in
fp16: with format auto-a8 we round them too, with auto we do not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sameseed import ops
from sameseed.batch import Rows, build_batch
from sameseed.kvcache.cache import KVCache
from sameseed.models.loader import load_model, resolve_model
from sameseed.scheme import QuantScheme
from sameseed.study import record
from sameseed.tokenizer import Tokenizer

HERE = Path(__file__).parent
KINDS = ("bf16", "q8_0", "q4_0", "q4_k_m")
FORMATS = ("auto", "auto-a8")
LENGTH = 256  # tokens of a text
TEXTS = 4
ORACLE = """
import json, sys
import llama_cpp, numpy
path, texts, out = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
found = []
for tokens in texts:
    model = llama_cpp.Llama(path, n_ctx=1024, n_batch=1024, n_threads=2, logits_all=True, verbose=False)
    model.eval(tokens)
    found.append(numpy.array(model.scores[: len(tokens)]))
numpy.save(out, numpy.concatenate(found))
print(llama_cpp.__version__)
"""


def texts(folder: Path) -> list[list[int]]:
    """Token ids of held-out prompts, joined to the length."""
    lines = (HERE.parent / "sameseed" / "assets" / "prompts_heldout.jsonl").read_text(encoding="utf-8").splitlines()
    tokenizer = Tokenizer.from_folder(folder)
    joined = tokenizer.encode("\n\n".join(m["content"] for line in lines for m in json.loads(line).get("messages", [])))
    return [joined[i * LENGTH : (i + 1) * LENGTH] for i in range(TEXTS)]


def our_logits(path: Path, token_ids: list[list[int]], scheme: str) -> Tensor:
    """Logits float32 [T, V] of every position of the texts, one after the other."""
    model = load_model(path, ops.resolve("auto"), QuantScheme.parse(scheme), LENGTH)
    c = model.config
    found = []
    for ids in token_ids:
        cache = KVCache(c.num_layers, -(-LENGTH // 16), 16, c.num_kv_heads, c.head_dim, "fp16")
        batch = build_batch([Rows(ids, 0, [], [], list(range(-(-LENGTH // 16))), True)], 16)
        rows = torch.arange(len(ids), dtype=torch.int32)
        found.append(model.forward(replace(batch, logit_rows=rows), cache)[0].clone())
    return torch.cat(found)


def compare(got: Tensor, want: Tensor) -> dict[str, float]:
    """Difference of logits (after subtracting each row's mean: softmax knows no offset), and of what they say."""
    a, b = got - got.mean(-1, keepdim=True), want - want.mean(-1, keepdim=True)
    p, q = want.log_softmax(-1), got.log_softmax(-1)
    return {
        "max_difference": (a - b).abs().max().item(),
        "mean_difference": (a - b).abs().mean().item(),
        "logit_deviation": b.std().item(),
        "kl": (p.exp() * (p - q)).sum(-1).mean().item(),
        "argmax_agreement": (got.argmax(-1) == want.argmax(-1)).float().mean().item(),
    }


def perplexity(logits: Tensor, token_ids: list[list[int]]) -> float:
    """Of the texts' own next tokens."""
    losses = []
    for i, ids in enumerate(token_ids):
        rows = logits[i * LENGTH : (i + 1) * LENGTH - 1].log_softmax(-1)
        losses.append(-rows[torch.arange(LENGTH - 1), torch.tensor(ids[1:])])
    return torch.cat(losses).mean().exp().item()


def main() -> None:
    """Measure, print and append."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-cpp", required=True, help="Python of an environment with llama-cpp-python")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gguf.jsonl")
    args = parser.parse_args()
    ops.set_num_threads(1)
    source = resolve_model("embedded")
    token_ids = texts(source)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for kind in KINDS:
            path = folder / f"{kind}.gguf"
            start = source if kind == "bf16" else folder / "bf16.gguf"
            run = [args.llama_cpp, str(HERE / "peers" / "to_gguf.py"), str(start), kind, str(path)]
            subprocess.run(run, check=True, capture_output=True)
            ask = [args.llama_cpp, "-c", ORACLE, str(path), json.dumps(token_ids), str(folder / "logits.npy")]
            done = subprocess.run(ask, check=True, capture_output=True, text=True)
            want = torch.from_numpy(np.load(folder / "logits.npy")).float()
            for scheme in FORMATS if kind in ("q8_0", "q4_0") else FORMATS[:1]:
                got = our_logits(path, token_ids, scheme)
                found = compare(got, want)
                found["perplexity_ratio"] = perplexity(got, token_ids) / perplexity(want, token_ids)
                line = {
                    "schema": "sameseed.gguf/1",
                    "time": record.now(),
                    "commit": record.commit(),
                    "machine": record.machine(),
                    "model": "embedded",
                    "model_digest": record.weights_digest("embedded"),
                    "file": kind,
                    "format": scheme,
                    "llama_cpp_python": done.stdout.strip(),
                    "num_tokens": LENGTH * TEXTS,
                    **found,
                }
                print(kind, scheme, {k: round(v, 6) for k, v in found.items()})
                with args.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
