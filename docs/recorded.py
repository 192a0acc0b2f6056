"""Tables from the measured records: what stands between the markers `table:NAME`, and where it was measured."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "results"


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]], right: Iterable[int] = ()) -> str:
    """A table in Markdown; `right` are the columns that are numbers."""
    head, numbers = list(head), set(right)
    rule = ["---:" if i in numbers else "---" for i in range(len(head))]
    lines = [head, rule, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def script(name: str) -> ModuleType:
    """One of benchmarks/, which are no package."""
    path = ROOT / "benchmarks" / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for it there
    spec.loader.exec_module(module)
    return module


def peers() -> str:
    """sameseed beside other engines, as benchmarks/peers/table.py shows it."""
    path = RECORDS / "peers.jsonl"
    if not path.exists():
        return "*No record yet: `make peers`, then `make bench-peers` write one.*"
    module = script("peers/table.py")
    return "\n\n".join(module.render(record) for record in module.newest(path)) + "\n"


def gpu() -> str:
    """What was aimed at on a GPU beside what was found, by benchmarks/gpu_summary.py; dry runs do not count."""
    path = RECORDS / "gpu.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    lines = [x for x in lines if not x["dry_run"]]
    if not lines:
        return "*No record yet: `make bench-gpu` writes one, on a machine with a GPU.*"
    newest = [x for x in lines if x["run"] == lines[-1]["run"]]
    rows = [[row.what, row.aim, row.got, row.verdict] for row in script("gpu_summary.py").rows(newest)]
    first = newest[0]
    where = f"{first['machine']['gpu']}, PyTorch {first['machine']['torch']}, CUDA {first['cuda']}"
    left = [x for x in newest if x["part"] == "end"]
    lost = "; ".join(f"{x['what']} ({x['why']})" for x in left[-1]["left_out"]) if left else "what an interrupt cut off"
    about = f"{where}, {first['time'][:10]}, commit {first['commit']}. Left out: {lost or 'nothing'}."
    return f"{markdown(['what', 'aim', 'found', ''], rows)}\n\n{about}\n"


def evaluations() -> str:
    """What number formats cost: the newest comparison of `sameseed eval`."""
    from sameseed.study import record
    from sameseed.study.quality import tables

    path = RECORDS / "eval.jsonl"
    found = [r for r in record.read(path) if r["comparison"] is not None] if path.exists() else []
    if not found:
        return "*No record yet: `sameseed eval --compare ... --out benchmarks/results/eval.jsonl` writes one.*"
    newest = [r for r in found if r["run"] == found[-1]["run"]]
    head, rows = tables.compared(newest)
    machine = newest[0]["machine"]
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, {machine['isa']}"
    where += f"; {newest[0]['time'][:10]}, commit {newest[0]['commit']}"
    return f"{markdown(head, rows, range(1, len(head)))}\n\n{where}.\n"


def newest(name: str, key: Callable[[dict[str, Any]], Any]) -> list[dict[str, Any]]:
    """The last record of each kind in a file that is not read by study.record."""
    path = RECORDS / f"{name}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return list({key(r): r for r in map(json.loads, lines)}.values())


def measured_on(found: dict[str, Any]) -> str:
    """Where and when a record was made."""
    machine = found["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores; {found['time'][:10]}, commit {found['commit']}"


def quantizers() -> str:
    """Held-out perplexity by method and format, as benchmarks/quantize.py found it."""
    found = newest("quantize", lambda r: (r["config"]["scheme"], r["config"]["method"]))
    if not found:
        return "*No record yet: `benchmarks/quantize.py` writes one.*"
    rows = []
    for r in sorted(found, key=lambda r: (r["bits_per_weight"], r["config"]["scheme"], r["relative"]["ratio"])):
        c, ratio = r["config"], r["relative"]
        interval = f"{ratio['low']:.4f} .. {ratio['high']:.4f}"
        bits = f"{r['bits_per_weight']:.3f}"
        rows.append([c["scheme"], c["method"], bits, f"{ratio['ratio']:.4f}", interval, c["calibration"] or ""])
    head = ["scheme", "method", "bits a weight", "perplexity over the original's", "95 %", "calibrated on"]
    c = found[-1]["config"]
    about = f"{c['model']}, {c['held_out_tokens']} held-out tokens; linear layers of the decoder only."
    return f"{markdown(head, rows, (2, 3))}\n\n{about} {measured_on(found[-1])}.\n"


def gguf() -> str:
    """Our logits beside llama.cpp's on the same file, as benchmarks/gguf_logits.py found them."""
    found = newest("gguf", lambda r: (r["file"], r["format"]))
    if not found:
        return "*No record yet: `benchmarks/gguf_logits.py` writes one.*"
    rows = [
        [
            r["file"],
            r["format"],
            f"{r['mean_difference']:.4f}",
            f"{r['max_difference']:.3f}",
            f"{r['kl']:.1e}",
            f"{r['argmax_agreement']:.1%}",
        ]
        for r in found
    ]
    head = ["file", "--format", "mean difference", "largest", "KL", "same likeliest token"]
    last = found[-1]
    about = f"{last['num_tokens']} tokens; the logits' standard deviation is {last['logit_deviation']:.2f}"
    return (
        f"{markdown(head, rows, range(2, 6))}\n\n{about}; llama-cpp-python {last['llama_cpp_python']}. "
        f"{measured_on(last)}.\n"
    )


def certificates() -> str:
    """What was certified: how much was looked at, and what differed. The newest of the same checks counts."""
    path = RECORDS / "certificates.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    if not lines:
        return "*No record yet: `sameseed verify-lossless --out benchmarks/results/certificates.jsonl` writes one.*"
    newest: dict[tuple[object, ...], dict[str, Any]] = {}
    for r in map(json.loads, lines):
        c = r["config"]
        key = (c["label"], c["format"], c["kv_format"], r["mutants"] is None, *(check["id"] for check in r["checks"]))
        newest.pop(key, None)  # the newest comes last
        newest[key] = r
    found = list(newest.values())
    sizes = {"L1": "products", "L2": "compared_rows", "L3": "tokens", "L6": "texts", "L5": "sequences", "L5s": "draws"}
    rows = []
    for r in found:
        checks = {c["id"]: c for c in r["checks"]}
        seen = [
            {**checks[i]["sizes"], **checks[i]["statistic"]}[key] if i in checks else None for i, key in sizes.items()
        ]
        cells = ["" if n is None else f"{n:,.0f}" for n in seen]
        if "L1" in checks and "row_counts" not in checks["L1"]["sizes"]:
            cells[0] += " \\*"
        differing = sum(v for c in r["checks"] for k, v in c["statistic"].items() if k.startswith("differing"))
        passed = sum(c["status"] == "passed" for c in r["checks"])
        mutants = r["mutants"]
        c = r["config"]
        cells += [f"{differing:,.0f}", f"{mutants['caught']} of {mutants['total']}" if mutants else ""]
        rows.append([c["label"], c["format"], c["kv_format"], f"{passed} of {len(r['checks'])}", *cells])
    head = ["draft", "weights", "cache", "checks passed", "products", "logits rows", "greedy tokens", "seeded texts"]
    head += ["texts of the law", "draws of the sampler", "differing values and texts", "mutants rejected"]
    where = f"Model `{found[-1]['config']['model']}`; the last: {measured_on(found[-1])}."
    if any("\\*" in cell for row in rows for cell in row):
        where += "\n\n\\* An older record: passes of six sizes only (2, 9, 16, 23, 30 and 128 rows)."
    return f"{markdown(head, rows, range(3, len(head)))}\n\n{where}\n"


def policies() -> str:
    """Goodput beside the best fixed length of the same draft, as benchmarks/policies.py measured them."""
    from statistics import median

    from sameseed.study import record

    path = RECORDS / "policies.jsonl"
    found = record.read(path) if path.exists() else []
    if not found:
        return "*No record yet: `benchmarks/policies.py` writes one.*"
    found = [r for r in found if r["run"] == found[-1]["run"]]
    rows, errors, ratios = [], [], []
    for (workload, batch), group in itertools.groupby(found, lambda r: (r["workload"], r["config"]["batch_size"])):
        settings = list(group)
        errors += [abs(r["prediction"]["error"]) for r in settings if r.get("prediction")]
        for good in (r for r in settings if r["config"]["policy"] == "goodput"):
            draft = good["config"]["label"].split(" k=")[0]
            fixed = [r for r in settings if r["config"]["label"].startswith(f"{draft} k=") and r is not good]
            best = max((r for r in fixed if r["config"]["policy"] == "fixed"), key=lambda r: float(r["speedup"]))
            pairs = zip(good["repetitions"], best["repetitions"], strict=True)
            ratio = median(a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs)
            ratios.append(ratio)
            predicted = f"{good['prediction']['speedup']:.2f}x"
            cells = [workload, str(batch), draft, f"{best['speedup']:.2f}x (k={best['config']['num_draft_tokens']})"]
            rows.append([*cells, f"{good['speedup']:.2f}x", predicted, f"{ratio:.2f}"])
    head = ["workload", "batch", "draft", "best fixed", "goodput", "predicted", "over best fixed"]
    c = found[-1]["config"]
    text = "all texts as plain decoding's" if all(r["equals_plain"] for r in found) else "SOME TEXTS DIFFER"
    about = (
        f"{c['model']} ({c['num_parameters'] / 1e6:.1f} M, {c['format']}), greedy, {c['num_prompts']} prompts a "
        f"workload, {len(found[-1]['repetitions'])} runs; {text}. Goodput over the best fixed length: "
        f"{min(ratios):.2f} at least, {sum(ratios) / len(ratios):.2f} in the mean. Predicted against measured, "
        f"all settings: {median(errors):.0%} apart in the median, {max(errors):.0%} at most. "
        "Load before the last workload: "
        f"{found[-1]['machine']['load_1min']}; {measured_on(found[-1])}."
    )
    return f"{markdown(head, rows, (1, 3, 4, 5, 6))}\n\n{about}\n"


def headline() -> str:
    """Speculation on real shapes beside plain decoding and a peer, as benchmarks/speculation.py found it."""
    found = newest("headline", lambda r: r["title"])
    if not found:
        return "*No record yet: `benchmarks/speculation.py` writes one.*"
    head = ["decoding", "tokens/s", "over its own plain", "over our plain", "accepted", "first token", "same text"]
    parts = []
    for r in found:
        ours, count, rows = r["ways"][0]["tokens_per_s"], r["prompts"]["count"], []
        for way in r["ways"]:
            own = "1" if way["num_draft_tokens"] == 0 else f"{way['speedup_mean']:.2f}x"
            rate, same = way["acceptance_rate"], way["equal_texts"]
            cells = [way["label"], f"{way['tokens_per_s']:.2f}", own, f"{way['tokens_per_s'] / ours:.2f}x"]
            cells += ["" if rate is None else f"{rate:.0%}", f"{way['ttft_ratio']:.2f}x"]
            rows.append([*cells, "yes" if same == count else f"{same} of {count}"])
        about = (
            f"{count} prompts of {r['prompts']['file']}, {r['prompts']['max_tokens']} tokens each, greedy, one at a "
        )
        about += f"time; {r['repeat']} run(s). {r['note']} {measured_on(r | {'time': r['date']})}, load "
        about += f"{r['machine']['load_1min']} at the end."
        parts.append(f"**{r['title']}**\n\n{markdown(head, rows, range(1, 6))}\n\n{about}\n")
    return "\n".join(parts)


def load() -> str:
    """Speculation on against off through the server, as `sameseed bench serve` found it."""
    found = newest("load", lambda r: tuple(str(r["config"][k]) for k in ("model", "lengths", "concurrency", "label")))
    found = [r for r in found if r["config"]["label"] == "on" and r["config"].get("served")]
    if not found:
        return "*No record yet: `sameseed bench serve --compare-speculation` writes one.*"
    head = ["model", "draft", "prompt-answer", "clients", "tokens/s", "over off", "first token over off", "accepted"]
    rows = []
    for r in sorted(found, key=lambda r: (r["config"]["model"], r["config"]["lengths"], r["config"]["concurrency"])):
        c, rate = r["config"], (r["acceptance"] or {}).get("acceptance_rate")
        cells = [c["model"], f"{c['served']['method']}, {c['served']['policy']}", c["lengths"], str(c["concurrency"])]
        cells += [f"{r['output_tokens_per_s']:.1f}", f"{r['speedup']:.2f}x", f"{r['ttft_ratio']:.2f}x"]
        rows.append([*cells, "" if rate is None else f"{rate:.0%}", "yes" if len(set(r["same_texts"])) == 1 else "NO"])
    loads = [r["machine"]["load_1min"] for r in found]
    about = f"Medians of {len(found[-1]['repetitions'])} runs, arms in turns; load before a cell "
    about += f"{min(loads)} to {max(loads)}; the last: {measured_on(found[-1])}."
    return f"{markdown([*head, 'same text'], rows, range(3, 8))}\n\n{about}\n"


def server() -> str:
    """The costs of what surrounds the engine, a row a record."""
    rows = []
    for r in newest("overhead", lambda r: r["config"]["draft"]):
        figures = f"{r['overhead_ms']:.2f} ms a token; CPU {r['path_cpu_ms']:.2f} ms, of which the server's process "
        rows.append(["HTTP at one client", f"{figures}{r['server_cpu_ms']:.2f} ms", r])
    for r in newest("prefix", lambda r: tuple(str(r.get("config", {}).get(k)) for k in ("draft", "prefix_tokens"))):
        if "hit" in r and "ttft_s" in r["hit"]:
            c, hit, miss = r["config"], r["hit"]["ttft_s"] * 1e3, r["miss"]["ttft_s"] * 1e3
            about = f"first token {hit:.0f} ms where it is known, {miss:.0f} ms where not"
            rows.append([f"a beginning of {c['prefix_tokens']} tokens, draft {c['draft']}", about, r])
    for r in newest("grammar", lambda r: r["grammar"]):
        if r.get("mask"):
            about = f"mask {r['mask']['mean_ms']:.2f} ms a decision in the mean, compiled in {r['compile_s']:.2f} s"
            rows.append([f"grammar '{r['grammar']}', {r['vocab_size']:,} tokens", about, r])
    for r in newest("soak", lambda r: r["num_requests"]):
        before, after = r["resident_kb"]["before"], r["resident_kb"]["after"]
        grown = ", ".join(f"{b / a - 1:+.1%}" for a, b in zip(before, after, strict=True))
        counts = ", ".join(f"{k} {v}" for k, v in r["answers"].items())
        about = f"{counts}; memory of server and engine {grown}; {r['num_texts_equal']} of {r['num_texts_compared']} "
        rows.append([f"{r['num_requests']:,} requests, {r['concurrency']} at once", f"{about}texts as alone", r])
    if not rows:
        return "*No record yet: `benchmarks/overhead.py` and others write some.*"
    cells = [
        [what, found, str(r["machine"]["load_1min"]), f"{r['time'][:10]}, {r['commit']}"] for what, found, r in rows
    ]
    return markdown(["what", "found", "load", "measured"], cells, (2,)) + "\n"


def table(name: str) -> str:
    """The newest run of one record file, a table for each workload, and where and when it was measured."""
    if name in OWN:
        return OWN[name]()
    from sameseed.study import record, report

    path = RECORDS / f"{name}.jsonl"
    found = record.read(path) if path.exists() else []
    if not found:
        return f"*No record yet: `sameseed {name} --out benchmarks/results/{name}.jsonl` writes one.*"
    newest = [r for r in found if r["run"] == found[-1]["run"]]
    parts = []
    for title, group in itertools.groupby(newest, key=lambda r: report.title(r["config"])):
        rows = [report.cells(r) for r in group]
        parts.append(f"**{title}**\n\n{markdown(report.COLUMNS, rows, range(1, len(report.COLUMNS) - 1))}\n")
    machine, times = found[-1]["machine"], len(newest[-1]["repetitions"])
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, {machine['isa']}"
    median = f"median of {times} runs" if times > 1 else "one run"
    parts.append(f"{where}; {median}, {newest[-1]['time'][:10]}, commit {newest[-1]['commit']}. {report.LEGEND}.")
    return "\n".join(parts)


OWN: dict[str, Callable[[], str]] = {
    "peers": peers,
    "gpu": gpu,
    "eval": evaluations,
    "quantize": quantizers,
    "gguf": gguf,
    "certificates": certificates,
    "policies": policies,
    "headline": headline,
    "load": load,
    "server": server,
}
