"""Passes of a nested target and of its lower weights, against plain 8 and 4 bits; and with a part of the cache.

    .venv/bin/python benchmarks/nested.py --shape llama-3.2-1b [--rows 1,2,4,8] [--contexts 4096,16384] [--out FILE]

One record: median milliseconds of a pass over random weights of a true shape. All formats, and all views, take turns in
each of `--repeat` rounds, so that a machine that slows down does so for all alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

from sameseed import ops
from sameseed.drafters.self_quant import SelfQuantDrafter
from sameseed.models.nested import nested_view
from sameseed.models.synthetic import random_model
from sameseed.scheme import QuantScheme
from sameseed.study import record
from sameseed.study.passes import Pass, Subject
from sameseed.study.shapes import get_shape, shape_as_dict

SCHEMA = "sameseed.nested/1"
SHORT = 256  # tokens of context of the passes that compare formats


def numbers(text: str) -> list[int]:
    """Whole numbers between commas."""
    return [int(n) for n in text.split(",")]


def main() -> None:
    """Load each format once, time passes in turn, append the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--formats", default="w8a8,w4a8")
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4, 8])
    parser.add_argument("--contexts", type=numbers, default=[4096, 16384])
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--kv-format", default="auto")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "nested.jsonl")
    args = parser.parse_args()
    record.prepare(args.out)
    if args.threads is not None:
        ops.set_num_threads(args.threads)
    config, backend = get_shape(args.shape, "--shape"), ops.resolve()
    longest = max([SHORT, *args.contexts])
    short = [Pass("chain", SHORT, rows) for rows in args.rows]
    long = [Pass("chain", context, 1) for context in args.contexts]
    target = random_model(config, backend, QuantScheme.parse("w8a8n"), longest + 64)
    others = {f: random_model(config, backend, QuantScheme.parse(f), longest + 64) for f in args.formats.split(",")}
    models = {"w8a8n": target, "w8a8n's view": nested_view(target), **others}
    subjects = {name: Subject(m, args.kv_format, short) for name, m in models.items()}
    draft = Subject(models["w8a8n's view"], args.kv_format, long)
    options = SelfQuantDrafter.Options(kv_window=args.window)
    part = SelfQuantDrafter(options, draft.runner)
    whole = SelfQuantDrafter(SelfQuantDrafter.Options(), draft.runner)

    def seen_by(drafter: SelfQuantDrafter, job: Pass) -> Callable[[], float]:
        def timed() -> float:
            draft.runner.unseen = drafter._unseen
            return draft.seconds(job)

        return timed

    jobs: dict[str, Callable[[], float]] = {}
    for name, subject in subjects.items():
        jobs |= {f"{name}, {p.rows} rows": (lambda s=subject, p=p: s.seconds(p)) for p in short}  # type: ignore[misc]
    for p in long:
        jobs[f"whole cache, context {p.context}"] = seen_by(whole, p)
        jobs[f"window, context {p.context}"] = seen_by(part, p)
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(args.repeat + 1):
        for name, job in jobs.items():
            times[name].append(job())
    line = {
        "schema": SCHEMA, "time": record.now(), "commit": record.commit(), "machine": record.machine(),
        "shape": shape_as_dict(args.shape, config), "kv_format": draft.kv_format, "context": SHORT,
        "kv_window": options.kv_window, "kv_sink": options.kv_sink,
        "weight_bytes": {name: s.weight_bytes for name, s in subjects.items() if "view" not in name},
        "repeat": args.repeat, "ms": {n: round(1e3 * statistics.median(t[1:]), 3) for n, t in times.items()},
        "least_ms": {n: round(1e3 * min(t[1:]), 3) for n, t in times.items()},
    }  # fmt: skip
    with args.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    for name, ms in line["ms"].items():
        print(f"{name:36} {ms:9.2f} ms, least {line['least_ms'][name]:9.2f}")


if __name__ == "__main__":
    main()
