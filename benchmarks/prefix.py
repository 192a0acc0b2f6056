"""What the prefix cache saves and costs: time to the first token with a shared prefix that is found, or is not.

    .venv/bin/python benchmarks/prefix.py [RECORDS.jsonl] [--model M] [--drafts none embedded-draft embedded-head]

Each text is asked for twice in turn, by a tenant who was here before (hit) and by a new one (miss), so that both see
the same machine. The texts must be the same; acceptance tells whether a drafter misses the rows that were skipped.
Further: what hashing costs a request and a round, and whether a stranger's cached prefix can be told by the time (area
under the ROC curve, 0.5: it cannot).
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

from sameseed import LLM, SamplingParams
from sameseed.cli.options import draft_choice
from sameseed.kvcache.blocks import BlockManager
from sameseed.request import Completion, Request, Sequence
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
    """Medians of one side, and what its drafts were worth."""
    ttft = [c.metrics.time_to_first_token for c in done]
    drafts = sum(c.metrics.spec.num_drafts for c in done)
    accepted = sum(c.metrics.spec.num_accepted_tokens for c in done)
    return {
        "ttft_s": median(ttft),
        "ttft_s_each": ttft,
        "num_cached_tokens": median(c.metrics.num_cached_tokens for c in done),
        "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
    }


def hashing(num_tokens: int, block_size: int = 16, repeat: int = 200) -> dict[str, float]:
    """Microseconds of the block manager, without a model: of a request, known or not, and of a sequence's round."""
    tokens = [random.Random(0).randrange(50_000) for _ in range(num_tokens)]
    blocks = BlockManager(2 * num_tokens // block_size + 2, block_size)

    def timed(action: Any, seq: Sequence) -> float:
        start = time.perf_counter()
        action(seq)
        return (time.perf_counter() - start) * 1e6

    def store(seq: Sequence) -> None:
        seq.num_cached = num_tokens
        blocks.enter(seq, num_tokens)

    found: dict[str, list[float]] = {"miss_us": [], "enter_us": [], "hit_us": [], "round_us": []}
    for i in range(repeat):
        first, second = (Sequence(0, tokens, SamplingParams(), 0, str(i)) for _ in range(2))
        found["miss_us"].append(timed(blocks.adopt, first))
        blocks.reserve(first, num_tokens)
        found["enter_us"].append(timed(store, first))
        found["round_us"].append(timed(lambda seq: blocks.enter(seq, num_tokens), first))
        blocks.release(first)
        found["hit_us"].append(timed(blocks.adopt, second))
        assert second.num_cached == (num_tokens - 1) // block_size * block_size
        blocks.release(second)
    return {name: median(values) for name, values in found.items()}


def stranger(llm: LLM, prefix: int, pairs: int) -> dict[str, float]:
    """Can a tenant tell by the time that another has just sent the same prefix? In pairs, in random order."""
    rng = random.Random(1)
    size = llm.engine.runner.model.config.vocab_size
    times: dict[bool, list[float]] = {True: [], False: []}
    for i in range(pairs):
        for cached in rng.sample([True, False], 2):
            prompt = [rng.randrange(4, size) for _ in range(prefix)]
            other = prompt if cached else [rng.randrange(4, size) for _ in range(prefix)]
            ask(llm, other, f"victim {i} {cached}", 1)
            times[cached].append(ask(llm, prompt, f"attacker {i} {cached}", 1).metrics.time_to_first_token)
    wins = [(a < b) + (a == b) / 2 for a, b in itertools.product(times[True], times[False])]
    return {"pairs": pairs, "prefix_tokens": prefix, "auc": mean(wins)}


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
    parser.add_argument("--pairs", type=int, default=200, help="of requests for the test of what a stranger sees")
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
        if name == "none" and o.pairs:
            seen = stranger(llm, 256, o.pairs)
            write(o.out, {**head, "time": record.now(), "config": config, "stranger": seen})
            print(f"a stranger's cached prefix: AUC {seen['auc']:.3f} over {seen['pairs']} pairs")
        del llm
    for num_tokens in o.prefixes:
        cost = hashing(num_tokens)
        write(o.out, {**head, "time": record.now(), "config": {"num_tokens": num_tokens}, "hashing": cost})
        print(f"hashing, {num_tokens} tokens: " + ", ".join(f"{k} {v:.1f}" for k, v in cost.items()))


def write(out: Path, line: dict[str, Any]) -> None:
    """Append a record."""
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
