"""Length policies: goodput against every fixed length and plain decoding, by workload and batch size, in turns.

    .venv/bin/python benchmarks/policies.py [--batches 1 4 16] [--ks 2 4 8] [--repeat 3] [--out RECORDS.jsonl]
    .venv/bin/python benchmarks/policies.py --model DIR --drafts DIR --format w4a8 --draft-format w4a8 --data EVAL-DIR

Workloads: code, chat, translation-like (the text to be written is in the prompt, in other words) and repetitive. Their
prompts are the embedded ones; `--data` names a folder with humaneval, mt_bench and spec_bench (.jsonl.gz), which then
serve for the first three. A cache of suffixes looks at no past request here: the same prompts come again and again.
One record a setting, as `sameseed bench` writes them, with `workload` beside; `make docs` makes the table.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sameseed.config import SpecConfig, parse_draft
from sameseed.request import SamplingParams
from sameseed.study import record
from sameseed.study.measure import Bench
from sameseed.study.workload import ASSETS, DEFAULT_PROMPTS, Arm, Prompt, Workload, arms, read_prompts

RESULTS = Path(__file__).parent / "results" / "policies.jsonl"
CHAT = ("instructions", "orders", "exam", "math", "code-tasks")
LONGEST = 192  # tokens of a prompt that are taken, its end


def prompts_of(data: Path | None) -> dict[str, list[Prompt]]:
    """Prompts by workload."""
    found = [*read_prompts(ASSETS / "prompts_heldout.jsonl"), *read_prompts(DEFAULT_PROMPTS)]
    texts = [p for p in found if p.text is not None]
    code = [p for p in texts if p.domain == "code"]
    chat = [p for p in found if p.domain in CHAT]
    said = [replace(p, text=None, messages=user(f"Rewrite this text:\n\n{p.text}")) for p in texts if p not in code]
    copied = [replace(p, text=f"{p.text}\n\n{p.text}\n\n{(p.text or '')[:80]}") for p in texts]
    if data is not None:
        code = [Prompt(r["task_id"], "code", r["prompt"]) for r in lines(data / "humaneval.jsonl.gz")]
        asked = list(lines(data / "mt_bench.jsonl.gz"))
        chat = [Prompt(str(r["question_id"]), "chat", None, user(r["turns"][0])) for r in asked]
        asked = [r for r in lines(data / "spec_bench.jsonl.gz") if r["category"] == "translation"]
        said = [Prompt(str(r["question_id"]), "translation", None, user(r["turns"][0])) for r in asked]
    return {"code": code, "chat": chat, "translation": said, "repetitive": copied}


def user(text: str) -> tuple[dict[str, str], ...]:
    """A conversation of one message."""
    return ({"role": "user", "content": text},)


def lines(path: Path) -> Iterable[dict[str, Any]]:
    """The objects of a packed .jsonl file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def ways(args: argparse.Namespace) -> list[Arm]:
    """Plain decoding; each draft at each length; each draft with goodput, at most `--most` tokens."""
    made: list[Arm] = []
    for text in args.drafts:
        spec = settled(parse_draft(text), args)
        made += arms([spec], args.ks)[len(made) > 0 :]
        made += arms([replace(spec, policy="goodput")], [args.most])[1:]
    return made


def settled(spec: SpecConfig, args: argparse.Namespace) -> SpecConfig:
    """A draft's levels with their models and options."""
    below = tuple(settled(b, args) for b in spec.below)
    if spec.method == "draft_model":
        spec = replace(spec, model=spec.model or args.draft_model, format=args.draft_format)
    return replace(spec, below=below)


def main() -> None:
    """Measure all, append the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--draft-model", default="embedded-draft", help="what draft_model means in --drafts")
    parser.add_argument("--drafts", nargs="+", default=["draft_model", "suffix + draft_model"])
    parser.add_argument("--format", default="auto")
    parser.add_argument("--draft-format", default="auto")
    parser.add_argument("--workloads", nargs="+", default=["code", "chat", "translation", "repetitive"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--ks", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--most", type=int, default=12, help="draft tokens that goodput may ask for")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    record.prepare(args.out)
    size = {"max_num_seqs": max(args.batches), "max_model_len": LONGEST + args.max_tokens + 16}
    bench = Bench(args.model, ways(args), {"format": args.format, "threads": args.threads, **size})
    params = SamplingParams(max_tokens=args.max_tokens, seed=1, ignore_eos=True)
    run_id = record.now()
    given = prompts_of(args.data)
    for name in args.workloads:
        chosen = given[name][:: max(1, len(given[name]) // args.num_prompts)][: args.num_prompts]
        encoded = tuple(p.encode(bench.llm.tokenizer)[-LONGEST:] for p in chosen)
        for batch in args.batches:
            here = record.machine()
            workload = Workload(name, encoded[: max(batch, len(encoded) // batch * batch)], params, batch)
            bench.warm_up(workload)
            runs = bench.measure(workload, args.repeat)
            for line in record.make_records(bench, args.model, workload, runs, run_id, here):
                record.append(args.out, {**line, "workload": name})
                said = line.get("prediction", {}).get("speedup", 1.0)
                about = f"{line['speedup']:.2f}x (predicted {said:.2f}x), same text: {line['equals_plain']}"
                print(f"{name:12} batch {batch:2}  {line['config']['label']:36} {about}", flush=True)


if __name__ == "__main__":
    main()
