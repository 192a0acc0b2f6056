"""Stored greedy tokens of the embedded target: run `python tests/golden/embedded.py --write` after new weights.

Each entry of FORMATS is a weight format and a KV cache format. The file holds the hash of the weights, so that tokens
of older weights are recognized.
"""

import argparse
import hashlib
import json
from pathlib import Path

from sameseed import LLM, SamplingParams
from sameseed.models.loader import resolve_model

FILE = Path(__file__).with_name("embedded.json")
FORMATS = [("bf16", "fp32"), ("bf16", "bf16"), ("int8", "int8")]
PROMPTS = [
    "What is the capital of France?",
    "Tom has 3 boxes with 12 pencils each. He gives away 7 pencils. How many pencils are left?",
    "Write a Python function that returns the largest number of a list.",
    "Write this as JSON.\nAnna Weber is 31 years old, lives in Oslo and works as a pilot.",
    "I am looking for a cheap restaurant in the centre of town.",
    "Once upon a time there was a fox who",
    "List three things that plants need to grow.",
]
MAX_TOKENS = 64


def weights_hash():
    """SHA-256 of the embedded target's weights."""
    return hashlib.sha256((resolve_model("embedded") / "model.safetensors").read_bytes()).hexdigest()


def greedy(llm):
    """Output tokens of every prompt, with the end token if there is one."""
    prompts = [llm.tokenizer.chat([{"role": "user", "content": text}]) for text in PROMPTS]
    return [list(c.token_ids) for c in llm.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS))]


def build(backend, weights, kv_format, model="embedded", **settings):
    return LLM(model, backend=backend, format=weights, kv_format=kv_format, max_model_len=512, **settings)


def write():
    """Compute and store the tokens with the fastest backend; the tests then compare every backend with them."""
    tokens = {}
    for weights, kv_format in FORMATS:
        llm = build("auto", weights, kv_format)
        tokens[f"{weights}/{kv_format}"] = outputs = greedy(llm)
        texts = "".join(f"\n  {llm.tokenizer.decode(ids)!r}" for ids in outputs)
        print(f"{weights} weights, {kv_format} cache: {sum(map(len, outputs))} tokens{texts}")
    lines = ",\n".join(f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in tokens.items())
    FILE.write_text(f'{{\n  "weights": "{weights_hash()}",\n  "tokens": {{\n{lines}\n  }}\n}}\n')


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", required=True, help=f"write {FILE.name}")
    parser.parse_args()
    write()
