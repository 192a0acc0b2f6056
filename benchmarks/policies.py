"""The policy goodput against plain decoding and fixed draft lengths, in cells of draft x temperature x batch x texts.

    .venv/bin/python benchmarks/policies.py [--ks 2 4 8] [--seconds 6] [--cells 60] [--out RECORDS.jsonl]
    .venv/bin/python benchmarks/policies.py --model DIR --drafts DIR 'suffix + HEAD' --format w4a8 --data EVAL-DIR

Texts: code, chat, maths, repetitive (prompts that contain their text twice) and random (random tokens). Prompts are the
packaged ones. `--data` names a folder with humaneval, mt_bench and gsm8k (.jsonl.gz), which then replace the first
three. Answers end at the model's end token. The suffix drafter uses no past requests here, because the same prompts are
repeated. What goodput learned in one cell is kept for the next one, as in a server.

In a cell, all arms run the same prompts, in a random order for each turn of `ROUNDS` times the batch. As many sequences
as the batch says run at once. One that ends makes room for the next, as in a server. Each turn gives a pair of
measurements with plain decoding. Before a cell, goodput runs alone for `--settle` seconds: a cell stands for a steady
workload, not for the moment after a change of texts. `--cells N` draws N of the cells. Writes one record per cell, with
80 % intervals; `make docs` makes the table.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import random
import time
from collections.abc import Iterable, Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sameseed.config import SpecConfig, parse_draft
from sameseed.measure.bench import Bench, Run, run_batch
from sameseed.measure.prompt_sets import Prompt
from sameseed.measure.workload import ASSETS, DEFAULT_PROMPTS, Arm, Workload, arms, read_prompts, without_past
from sameseed.report import record
from sameseed.request import SamplingParams

RESULTS = Path(__file__).parent / "results" / "policies.jsonl"
SCHEMA = "sameseed.policies/1"
CHAT = ("orders", "records", "sums")
TEXTS = ("code", "chat", "maths", "repetitive", "random")
LONGEST = 192  # most tokens of a prompt; only its last ones are used
ROUNDS = 3  # texts of each place in the batch
FEWEST = 4  # least pairs in a cell, regardless of time


def prompts_of(data: Path | None, encode: Any, vocab_size: int) -> dict[str, list[tuple[int, ...]]]:
    """Prompts as token ids, by kind of text."""
    found = [*read_prompts(ASSETS / "prompts_heldout.jsonl"), *read_prompts(DEFAULT_PROMPTS)]
    code = [p for p in found if p.domain == "code-tasks"]
    maths = [p for p in found if p.domain == "math"]
    chat = [p for p in found if p.domain in CHAT]
    copied = [Prompt(p.id, "repetitive", f"{p.said}\n\n{p.said}\n\n{p.said[:80]}") for p in found]
    if data is not None:
        user = {"role": "user"}
        code = [Prompt(r["task_id"], "code", r["prompt"]) for r in lines(data / "humaneval.jsonl.gz")]
        maths = [
            Prompt(str(i), "maths", None, (user | {"content": r["question"]},))
            for i, r in enumerate(lines(data / "gsm8k-test.jsonl.gz"))
        ]
        asked = list(lines(data / "mt_bench.jsonl.gz"))
        chat = [Prompt(str(r["question_id"]), "chat", None, (user | {"content": r["turns"][0]},)) for r in asked]
    rng = random.Random(0)
    noise = [tuple(rng.randrange(vocab_size) for _ in range(48)) for _ in range(64)]
    named = {"code": code, "chat": chat, "maths": maths, "repetitive": copied}
    return {**{name: [encode(p)[-LONGEST:] for p in kind] for name, kind in named.items()}, "random": noise}


def lines(path: Path) -> Iterable[dict[str, Any]]:
    """The JSON objects of a .jsonl.gz file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def speeds(bench: Bench, ways: Seq[Arm], workload: Workload, seconds: float) -> tuple[dict[Arm, list[Run]], bool]:
    """Run batches for about `seconds`: the runs of each arm, one per batch; and whether all texts are equal."""
    taken: dict[Arm, list[Run]] = {way: [] for way in ways}
    same, end, rng = True, time.perf_counter() + seconds, random.Random(0)
    for i, batch in enumerate(itertools.cycle(list(workload.batches()))):
        if i >= FEWEST and time.perf_counter() > end:
            break
        texts = []
        for way in rng.sample(ways, len(ways)):  # random order, since each arm's run affects the caches for the next
            run, engine = Run(), bench.install(way)
            engine.scheduler.max_num_seqs = workload.batch_size // ROUNDS
            run_batch(engine, batch, run)
            taken[way].append(run)
            texts.append(run.texts)
        same = same and all(text == texts[0] for text in texts)
    return taken, same


def ratio(these: Seq[Run], those: Seq[Run]) -> list[float]:
    """Ratio of tokens per second of two arms, [value, low, high], with an 80 % bootstrap interval over pairs."""
    one, other = (np.array([(run.num_tokens, run.seconds) for run in runs]) for runs in (these, those))
    rng = np.random.default_rng(0)
    picks = np.vstack([np.arange(len(one)), rng.integers(len(one), size=(1000, len(one)))])
    a, b = one[picks].sum(1), other[picks].sum(1)
    found = (a[:, 0] / a[:, 1]) / (b[:, 0] / b[:, 1])
    return [round(float(x), 4) for x in (found[0], *np.quantile(found[1:], (0.1, 0.9)))]


def measured(bench: Bench, ways: Seq[Arm], workload: Workload, seconds: float, settle: float) -> dict[str, Any]:
    """Measure one cell. `ways`: plain decoding, goodput, then fixed lengths. Returns the cell's results."""
    if settle:
        speeds(bench, ways[1:2], workload, settle)
    taken, same = speeds(bench, ways, workload, seconds)
    plain, good, *fixed = ways
    found = {str(way.spec.num_draft_tokens): ratio(taken[way], taken[plain]) for way in fixed}
    best = max(fixed, key=lambda way: ratio(taken[way], taken[plain])[0], default=None)
    return {
        "num_pairs": len(taken[plain]),
        "num_tokens": (tokens := sum(run.num_tokens for run in taken[plain])),
        "plain_tokens_per_s": round(tokens / sum(run.seconds for run in taken[plain]), 2),
        "goodput": ratio(taken[good], taken[plain]),
        "fixed": found,
        "over_best_fixed": None if best is None else ratio(taken[good], taken[best]),
        "equals_plain": same,
    }


def formatted(spec: SpecConfig, name: str) -> SpecConfig:
    """The same speculation settings, with the models of all levels in format `name`."""
    below = tuple(formatted(b, name) for b in spec.below)
    return replace(spec, below=below, format=name if spec.model else spec.format)


def main() -> None:
    """Measure the cells and append one record for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    usual = ["ngram", "embedded-draft", "embedded-head", "suffix + embedded-head"]
    parser.add_argument("--drafts", nargs="+", default=usual)
    parser.add_argument("--format", default="auto")
    parser.add_argument("--draft-format", help="unset: as --format")
    parser.add_argument("--texts", nargs="+", default=TEXTS, choices=TEXTS)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.8])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--ks", nargs="*", type=int, default=[], help="fixed lengths that run too")
    parser.add_argument("--most", type=int, default=12, help="draft tokens that goodput may ask for")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=6.0, help="of a cell")
    parser.add_argument("--settle", type=float, default=0.0, help="seconds of goodput before it, which do not count")
    parser.add_argument("--cells", type=int, help="so many, drawn; unset: all")
    parser.add_argument("--skip", type=int, default=0, help="so many of those drawn, which ran before")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.draft_format = args.draft_format or args.format
    ways = {}
    for text in args.drafts:
        spec = formatted(without_past(parse_draft(text)), args.draft_format)
        ways[text] = [*arms([replace(spec, policy="goodput")], [args.most]), *arms([spec], args.ks)[1:]]
    size = {"max_num_seqs": max(args.batches), "max_model_len": LONGEST + args.max_tokens + 16}
    every = [arm for group in ways.values() for arm in group]
    bench = Bench(args.model, list(dict.fromkeys(every)), {"format": args.format, "threads": args.threads, **size})
    tokenizer, vocab_size = bench.llm.tokenizer, bench.llm.engine.runner.model.config.vocab_size
    given = prompts_of(args.data, lambda p: p.encode(tokenizer), vocab_size)
    cells = list(itertools.product(args.drafts, args.temperatures, args.batches, args.texts))
    random.Random(0).shuffle(cells)  # so that a run that is cut short has a random sample of the cells
    cells = cells[: args.cells][args.skip :]
    run_id = record.now()
    for done, (draft, temperature, batch, texts) in enumerate(cells, 1):
        turn = ROUNDS * batch
        count = max(turn, args.num_prompts // turn * turn)
        prompts = tuple(itertools.islice(itertools.cycle(given[texts]), count))
        params = SamplingParams(temperature=temperature, max_tokens=args.max_tokens, seed=1)
        workload = Workload(texts, prompts, params, turn)
        line: dict[str, Any] = {"schema": SCHEMA, "run": run_id, "time": record.now(), "commit": record.commit()}
        line |= {"machine": record.machine(), "model": record.model_name(args.model), "format": args.format}
        line |= {"draft": " ".join(Path(word).name for word in draft.split()), "draft_format": args.draft_format}
        line |= {"settle": args.settle, "most": args.most, "max_tokens": args.max_tokens, "temperature": temperature}
        line |= {"batch": batch, "texts": texts, "num_prompts": count, "rounds": ROUNDS}
        line |= measured(bench, ways[draft], workload, args.seconds, args.settle)
        with args.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        good, same = line["goodput"], "" if line["equals_plain"] else "  OTHER TEXT"
        about = f"{good[0]:.3f} ({good[1]:.3f}-{good[2]:.3f})"
        about += f", best fixed {line['over_best_fixed']}{same}"
        print(f"{done:3}/{len(cells)} {draft:24} T {temperature:<4} b {batch:<3} {texts:10} {about}", flush=True)


if __name__ == "__main__":
    main()
