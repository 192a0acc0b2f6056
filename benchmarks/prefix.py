"""What the prefix cache saves and costs: time to the first token with a shared prefix that is found, or is not.

    .venv/bin/python benchmarks/prefix.py [RECORDS.jsonl] [--model M] [--drafts none embedded-draft embedded-head]

Each text is asked for twice in turn, by a tenant who was here before (hit) and by a new one (miss), so that both see
the same machine. The texts must be the same; acceptance tells whether a drafter misses the rows that were skipped.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from statistics import median
from typing import Any

from sameseed import LLM, SamplingParams
from sameseed.cli.options import draft_choice
from sameseed.request import Completion, Request
from sameseed.study import record

OUT = Path(__file__).parent / "results" / "prefix.jsonl"
TALK = (
    "User: I need a train ticket to Cambridge on Saturday, for {0} people.\nAssistant: TR{0}1 leaves at 10:{0}. "
    "Shall I book it?\nUser: Yes, please.\nAssistant: It is booked. Anything else?\n"
)
CODE = 'def add_{0}(a, b):\n    """Add {0} and {0}."""\n    total = a + b + {0}\n    return total\n\n\n'
STORY = "One day, Lily saw {0} red birds in the park. She wanted to play with them, but the birds flew away. "
_ids = itertools.count()


def ask(llm: LLM, prompt: list[int], tenant: str, max_tokens: int) -> Completion:
    """One request alone, greedy."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0)
    llm.engine.add(Request(f"b{next(_ids)}", tuple(prompt), params, 0, tenant=tenant))
    while True:
        for delta in llm.engine.step():
            if delta.completion is not None:
                return delta.completion


def texts(llm: LLM, prefix: int, count: int) -> list[list[int]]:
    """Prompts in groups of four that share `prefix` tokens and go on for 20 each, in different ways."""
    found = []
    for i in range(count):
        template = (TALK, CODE, STORY)[i // 4 % 3]
        first = i // 4 * 10
        shared = llm.tokenizer.encode("".join(template.format(10 + (first + n) % 80) for n in range(60)))[:prefix]
        tail = llm.tokenizer.encode("".join(template.format(95 - i - n) for n in range(2)))[:20]
        found.append(shared + tail)
    return found


def hits_and_misses(llm: LLM, prefix: int, count: int, max_tokens: int) -> dict[str, Any]:
    """TTFT and acceptance of the same prompts, found and not, in turns."""
    sides: dict[str, list[Completion]] = {"hit": [], "miss": []}
    for i, prompt in enumerate(texts(llm, prefix, count)):
        if i % 4 == 0:
            ask(llm, prompt[:-10], "known", 2)
        for side in ("hit", "miss") if i % 2 else ("miss", "hit"):
            sides[side].append(ask(llm, prompt, "known" if side == "hit" else f"new {i}", max_tokens))
    same = [c.token_ids for c in sides["hit"]] == [c.token_ids for c in sides["miss"]]
    return {"equal_texts": same, **{name: summary(done) for name, done in sides.items()}}


def summary(done: list[Completion]) -> dict[str, Any]:
    """Medians of one side, and how long its accepted drafts were."""
    ttft = [c.metrics.time_to_first_token for c in done]
    drafts = sum(c.metrics.spec.num_drafts for c in done)
    accepted = sum(c.metrics.spec.num_accepted_tokens for c in done)
    return {
        "ttft_s": median(ttft),
        "ttft_s_each": ttft,
        "num_cached_tokens": median(c.metrics.num_cached_tokens for c in done),
        "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
    }


def main() -> None:
    """Measure, print, append."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", nargs="?", type=Path, default=OUT)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--format", default="auto")
    parser.add_argument("--drafts", nargs="+", default=["none", "embedded-draft", "embedded-head"])
    parser.add_argument("--prefixes", type=int, nargs="+", default=[192, 1000])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=None)
    o = parser.parse_args()
    here, run_id = record.machine(), record.now()
    head = {"schema": "sameseed.prefix/1", "run": run_id, "commit": record.commit(), "machine": here}
    for name in o.drafts:
        settings = {"num_draft_tokens": 6} if name != "none" else {}
        llm = LLM(o.model, draft_choice(name, o.model), format=o.format, threads=o.threads, max_num_seqs=4, **settings)
        ask(llm, texts(llm, 64, 1)[0], "warm-up", 16)
        config = {"model": o.model, "format": o.format, "draft": name, "threads": o.threads, **settings}
        for prefix in o.prefixes:
            line = {**head, "time": record.now(), "config": {**config, "prefix_tokens": prefix, "prompts": o.prompts}}
            line |= hits_and_misses(llm, prefix, o.prompts, o.max_tokens)
            write(o.out, line)
            hit, miss = line["hit"], line["miss"]
            lengths = [s["mean_acceptance_length"] for s in (hit, miss)]
            print(
                f"{name:16} {prefix:5} tokens: first token after {hit['ttft_s'] * 1e3:.1f} ms (hit), "
                f"{miss['ttft_s'] * 1e3:.1f} ms (miss); same texts: {line['equal_texts']}; acceptance length "
                + ", ".join(f"{x:.3f}" if x else "-" for x in lengths)
            )
        del llm


def write(out: Path, line: dict[str, Any]) -> None:
    """Append a record."""
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
