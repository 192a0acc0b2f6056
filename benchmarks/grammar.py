"""What a grammar costs a decision: a record line a grammar, of times over the tokens of texts that match it.

    .venv/bin/python benchmarks/grammar.py TOKENIZER_FOLDER [--vocab-size 128256] [--out RECORDS.jsonl]

`mask` is the grammar's share: following the token before, and the mask of the next. `choose` is a greedy choice with
that mask, `plain` one without. `tree`: a draft of nine paths, three of them right, each asked for. All are CPU times.
Speed is measured here and asserted nowhere.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from sameseed.grammar import matching
from sameseed.grammar.matching import Language, Matching
from sameseed.request import SamplingParams, Sequence
from sameseed.server.text import vocabulary
from sameseed.spec.sampling import choose
from sameseed.study import record
from sameseed.tokenizer import Tokenizer

OUT = Path(__file__).parent / "results" / "grammar.jsonl"
NAMES = ["Ada Lovelace", "Jürgen Groß", "李小龍", "O'Neil, Shaun", "María José Álvarez"]
WORDS = ["the", "order", "was", "shipped", "late", "because", "a", "customer", "asked", "for", "another", "address"]
ORDER = {
    "type": "object",
    "properties": {
        "customer": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "email": {"type": "string", "format": "email"}},
            "required": ["name", "email"],
        },
        "status": {"enum": ["open", "paid", "shipped", "returned"]},
        "items": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "sku": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
                    "count": {"type": "integer"},
                },
                "required": ["sku", "count"],
            },
        },
        "note": {"type": ["string", "null"]},
    },
    "required": ["customer", "status", "items", "note"],
}


# As one writes it; no server takes it, for its trial would last too long.
BY_HAND = r"""root ::= object
object ::= "{" ws ("" | pair ("," ws pair)*) "}"
pair ::= string ws ":" ws value ws
array ::= "[" ws ("" | value ws ("," ws value ws)*) "]"
value ::= object | array | string | number | "true" | "false" | "null"
string ::= "\"" char* "\""
char ::= [^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4})
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [+-]? [0-9]+)?
ws ::= [ \n]?
"""


def order(rng: random.Random) -> dict[str, Any]:
    """A text's content."""
    items = [
        {"sku": f"AB-{rng.randrange(1000, 9999)}", "count": rng.randrange(1, 99)} for _ in range(rng.randint(1, 6))
    ]
    note = None if rng.random() < 0.2 else " ".join(rng.choice(WORDS) for _ in range(rng.randint(5, 60)))
    customer = {"name": rng.choice(NAMES), "email": "a.b@example.org"}
    return {"customer": customer, "status": rng.choice(["open", "paid"]), "items": items, "note": note}


def grammars(rng: random.Random, num_texts: int) -> list[tuple[str, str, str, list[str]]]:
    """Name, kind and source of each grammar, and texts that match."""
    orders = [json.dumps(order(rng), ensure_ascii=False) for _ in range(num_texts)]
    lines = [f"{rng.randrange(10**6):06d} {rng.choice(WORDS)}@{rng.choice(WORDS)}.org" for _ in range(num_texts)]
    begin, end = '<tool_call>\n{"name": "order", "arguments": ', "}\n</tool_call>"
    tag = {"type": "tag", "begin": begin, "content": {"type": "json_schema", "json_schema": ORDER}, "end": end}
    tools = {"type": "tags_with_separator", "separator": "\n", "at_least_one": True, "tags": [tag]}
    form = {"type": "structural_tag", "format": tools}
    return [
        ("schema", "json", json.dumps(ORDER), orders),
        ("any object", "object", "", orders),
        ("object as schema", "json", json.dumps({"type": "object"}), orders),
        ("json by hand", "grammar", BY_HAND, ['{"a": [1]}']),
        ("regex", "regex", r"[0-9]{6} [a-z]{1,20}@[a-z.]{1,20}", lines),
        ("tool call", "tag", json.dumps(form), [begin + text + end for text in orders]),
    ]


def untried(words: Matching, kind: str, source: str) -> str:
    """A grammar that is not asked whether it is fast enough."""
    return f"{kind} {words._compile(kind, source).serialize_json()}"


def measure(words: Matching, language: Language, texts: list[list[int]], eos: tuple[int, ...]) -> dict[str, Any]:
    """Milliseconds of CPU time a decision, over all tokens of the texts."""
    params, rng = SamplingParams(max_tokens=10**6), random.Random(1)
    logits = np.random.default_rng(0).normal(size=len(language.writable)).astype(np.float32)
    times: dict[str, list[float]] = {"mask": [], "choose": [], "plain": [], "tree": []}
    clock = time.thread_time
    for tokens in texts:
        alone, whole, tree = (words.matched(language) for _ in range(3))
        seq, free = Sequence(0, [1], params, 1), Sequence(1, [1], params, 1)
        seq.grammar = whole
        for i, token in enumerate([*tokens, eos[0]]):
            start = clock()
            mask = alone.allowed(tokens[:i], ())
            middle = clock()
            choose(logits, seq, (), eos)
            end = clock()
            choose(logits, free, (), eos)
            last = clock()
            assert mask[token], (i, tokens[: i + 1])
            times["mask"].append((middle - start) * 1e3)
            times["choose"].append((end - middle) * 1e3)
            times["plain"].append((last - end) * 1e3)
            nodes = [tokens[i : i + n] for n in range(3)] + [[rng.randrange(len(mask))] for _ in range(6)]
            start = clock()
            for path in nodes:
                tree.allowed(tokens[:i], path)
            times["tree"].append((clock() - start) * 1e3 / len(nodes))
            seq.token_ids.append(token)
    return {
        name: {"mean_ms": mean(v), "median_ms": median(v), "p99_ms": float(np.quantile(v, 0.99)), "max_ms": max(v)}
        for name, v in times.items()
    }


def main() -> None:
    """Measure, print and append."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--vocab-size", type=int, default=128256)
    parser.add_argument("--num-texts", type=int, default=24)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    matching.FREE = 600.0  # what no server would go on with is measured too
    tokenizer = Tokenizer.from_folder(args.tokenizer)
    eos = (0,)
    words = Matching(vocabulary(tokenizer, args.vocab_size, eos))
    for name, kind, source, texts in grammars(random.Random(0), args.num_texts):
        start = time.thread_time()
        data = words.compiled(kind, source) if name != "json by hand" else untried(words, kind, source)
        compiled = time.thread_time()
        language = words.language(data)
        loaded = time.thread_time()
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        line = {
            "schema": "sameseed.grammar/2",
            "time": record.now(),
            "commit": record.commit(),
            "machine": record.machine(),
            "grammar": name,
            "vocab_size": args.vocab_size,
            "num_tokenizer_tokens": tokenizer.vocab_size,
            "num_texts": len(ids),
            "num_decisions": sum(len(i) + 1 for i in ids),
            "compile_s": compiled - start,
            "load_s": loaded - compiled,
            "num_bytes": len(data),
            **measure(words, language, ids, eos),
        }
        print(
            f"{name:12} mask {line['mask']['mean_ms']:.4f} ms, choose {line['choose']['mean_ms']:.4f} "
            f"(plain {line['plain']['mean_ms']:.4f}), tree {line['tree']['mean_ms']:.4f}, "
            f"compile {line['compile_s'] * 1e3:.0f}"
        )
        with args.out.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
