"""Tables from the measured records, for the markers `table:NAME`, with the machine and date of the measurements."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
import textwrap
from collections.abc import Callable, Iterable
from operator import itemgetter
from pathlib import Path
from statistics import mean, median
from types import ModuleType
from typing import Any

Record = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "results"


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]], right: Iterable[int] = ()) -> str:
    """A table in Markdown. `right`: indices of right-aligned columns (numbers)."""
    head, numbers = list(head), set(right)
    rule = ["---:" if i in numbers else "---" for i in range(len(head))]
    lines = [head, rule, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def script(name: str) -> ModuleType:
    """Import a script of benchmarks/, which is no package."""
    path = ROOT / "benchmarks" / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look up the module there
    spec.loader.exec_module(module)
    return module


def lines(name: str) -> list[Record]:
    """All records of a file in benchmarks/results; empty if the file does not exist."""
    path = RECORDS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def newest(found: Iterable[Record], key: Callable[[Record], Any]) -> list[Record]:
    """The last record of each `key`, in the order in which the keys first occur."""
    return list({key(r): r for r in found}.values())


def last_run(found: list[Record]) -> list[Record]:
    """The records of the run that wrote the last record."""
    return [r for r in found if r["run"] == found[-1]["run"]]


def measured_on(found: Record) -> str:
    """The machine, date and commit of a record."""
    machine = found["machine"]
    day = found["time"] if "time" in found else found["date"]
    parts = [machine["cpu"], f"{machine['cores']} cores", *([machine["isa"]] if machine.get("isa") else [])]
    return f"{', '.join(parts)}; {day[:10]}, commit {found['commit']}"


def yes(same: bool) -> str:
    """Whether all texts were equal, as a table cell; "NO" in capitals so that it is noticed."""
    return "yes" if same else "NO"


def peers(found: list[Record]) -> str:
    """The comparison with other engines, as rendered by benchmarks/peers/table.py."""
    module = script("peers/table.py")
    return "\n\n".join(module.render(record) for record in module.newest(RECORDS / "peers.jsonl"))


def gpu(found: list[Record]) -> str:
    """Aims and results on a GPU, by benchmarks/gpu_summary.py. Dry runs are ignored."""
    found = [r for r in found if not r["dry_run"]]
    if not found:
        return hint("gpu")
    newest: dict[tuple[Any, ...], str] = {}

    def measured(r: Record) -> tuple[Any, ...]:
        return tuple(r.get(name) for name in ("part", "shape", "format", "engine"))

    for r in found:
        newest[measured(r)] = r["run"]
    found = [r for r in found if r["run"] == newest[measured(r)]]  # for each part, the newest run that has it
    rows = [[row.what, row.aim, row.got, row.verdict] for row in script("gpu_summary.py").rows(found)]
    last = last_run(found)
    first, left = last[0], [r for r in last if r["part"] == "end"]
    lost = [f"{r['what']}: {r['why']}." for r in left[-1]["left_out"]] if left else ["What an interrupt cut off."]
    about = (
        f"{first['machine']['gpu']}, PyTorch {first['machine']['torch']}, CUDA {first['cuda']}, {first['time'][:10]}"
    )
    commits = ", ".join(dict.fromkeys(r["commit"] for r in found))
    return (
        f"{markdown(['what', 'aim', 'found', ''], rows)}\n\n"
        f"{about}; of each part the newest run (commits {commits}). Left out of the last:\n\n* "
        + "\n* ".join(lost or ["Nothing."])
    )


def evaluations(found: list[Record]) -> str:
    """The cost of number formats: the newest comparison of `sameseed eval`."""
    from sameseed.measure.quality import tables

    found = last_run([r for r in found if r["comparison"] is not None and r["config"]["model"].startswith("embedded")])
    head, rows = tables.compared(found)
    text, c = found[0]["perplexity"], found[0]["config"]
    about = f"Perplexity of {text['tokens']:,} tokens of {text['text'].split('.')[0]}; acceptance and speed of "
    about += f"{c['num_prompts']} prompts, {c['max_tokens_of_speed']} tokens each, draft {c['draft']}"
    return f"{markdown(head, rows, range(1, len(head)))}\n\n{about}. {measured_on(found[0])}."


def losses(_: list[Record]) -> str:
    """What number formats cost on models of others: the newest comparison of each variant in eval.jsonl."""
    from sameseed.measure.quality.tables import figures

    found = [r for r in lines("eval") if r["comparison"] and not r["config"]["model"].startswith("embedded")]
    found = [
        r for r in newest(found, lambda r: r["config"]["label"]) if r["comparison"]["baseline"] != r["config"]["label"]
    ]
    if not found:
        return hint("losses")
    names = ("weights MB", "  over the baseline's")
    rows = [[r["config"]["label"], *(figures(r)[n].text() for n in names)] for r in found]
    p = found[-1]["perplexity"]
    about = (
        f"{p['tokens']:,} tokens of WikiText-2's test set, window {p['window']}, stride {p['stride']}; 95 % intervals"
    )
    about += f", paired by blocks of one stride. {'; '.join(dict.fromkeys(map(measured_on, found)))}."
    return f"{markdown(['variant', 'weights MB', 'perplexity over as stored'], rows, (1, 2))}\n\n{about}"


def quantizers(found: list[Record]) -> str:
    """Held-out perplexity by method and format."""
    found = newest(found, lambda r: (r["config"]["scheme"], r["config"]["method"]))
    rows = []
    for r in sorted(found, key=lambda r: (r["bits_per_weight"], r["config"]["scheme"], r["relative"]["ratio"])):
        c, ratio = r["config"], r["relative"]
        cells = [c["scheme"], c["method"], f"{r['bits_per_weight']:.3f}", f"{ratio['ratio']:.4f}"]
        rows.append([*cells, f"{ratio['low']:.4f} .. {ratio['high']:.4f}", c["calibration"] or ""])
    head = ["scheme", "method", "bits a weight", "perplexity over the original's", "95 %", "calibrated on"]
    c = found[-1]["config"]
    about = f"{c['model']}, {c['held_out_tokens']} held-out tokens; linear layers of the decoder only."
    return f"{markdown(head, rows, (2, 3))}\n\n{about} {measured_on(found[-1])}."


def gguf(found: list[Record]) -> str:
    """Differences between our logits and llama.cpp's on the same file, from gguf.jsonl."""
    rows = []
    for r in newest(found, lambda r: (r["file"], r["format"])):
        figures = [f"{r['mean_difference']:.4f}", f"{r['max_difference']:.3f}", f"{r['kl']:.1e}"]
        rows.append([r["file"], r["format"], *figures, f"{r['argmax_agreement']:.1%}"])
    head = ["file", "--format", "mean difference", "largest", "KL", "same likeliest token"]
    last = found[-1]
    about = f"{last['num_tokens']} tokens; the logits' standard deviation is {last['logit_deviation']:.2f}"
    about += f"; llama-cpp-python {last['llama_cpp_python']}. {measured_on(last)}."
    return f"{markdown(head, rows, range(2, 6))}\n\n{about}"


def certificates(found: list[Record]) -> str:
    """The newest certificate of each configuration and set of checks: how much was compared, and how much differed."""
    last: dict[tuple[object, ...], Record] = {}
    for r in found:
        c = r["config"]
        key = (
            c["model"],
            c["label"],
            c["format"],
            c["kv_format"],
            not r.get("mutants"),
            *(check["id"] for check in r["checks"]),
        )
        last.pop(key, None)  # keeps the newest certificates last in the order
        last[key] = r
    sizes = {"L1": "products", "L2": "compared_rows", "L3": "tokens", "L6": "texts", "L5": "sequences", "L5s": "draws"}
    rows = []
    for r in reversed(last.values()):  # the newest first
        checks = {c["id"]: {**c["sizes"], **c["statistic"]} for c in r["checks"]}
        cells = [f"{checks[i][key]:,.0f}" if i in checks else "" for i, key in sizes.items()]
        if "row_counts" not in checks.get("L1", {"row_counts": 0}):
            cells[0] += " \\*"
        differing = sum(v for c in r["checks"] for k, v in c["statistic"].items() if k.startswith("differing"))
        passed = sum(c["status"] == "passed" for c in r["checks"])
        c, mutants = r["config"], r.get("mutants")
        cells += [f"{differing:,.0f}", f"{mutants['caught']} of {mutants['total']}" if mutants else ""]
        own = [name for name in checks if name not in ("A1", "C2")]  # these two are in every run
        share = "full" if r["effort"] == 1 else f"{100 * r['effort']:.2g} %"
        which = f"{passed} of {len(checks)}" + (f": {', '.join(own)}" if len(own) < 5 else "")
        rows.append([Path(c["model"]).stem, c["label"], c["format"], c["kv_format"], share, which, *cells])
    head = ["model", "draft", "weights", "cache", "size", "checks passed", "products", "logits rows", "greedy tokens"]
    head += [
        "seeded texts",
        "texts of the law",
        "draws of the sampler",
        "differing values and texts",
        "mutants rejected",
    ]
    about = f"The newest: {measured_on(found[-1])}."
    if any("\\*" in cell for row in rows for cell in row):
        about += "\n\n\\* An older record: passes of six sizes only (2, 9, 16, 23, 30 and 128 rows)."
    return f"{markdown(head, rows, range(6, len(head)))}\n\n{about}"


def policies(found: list[Record]) -> str:
    """Goodput over plain decoding by draft and batch, and all cells below LOST, measured by benchmarks/policies.py."""
    parts = []
    for (model, fmt), group in itertools.groupby(
        sorted(newest(found, _cell), key=lambda r: (r["model"], r["format"])), lambda r: (r["model"], r["format"])
    ):
        cells = list(group)
        rows = []
        for draft in dict.fromkeys(_way(r) for r in cells):
            row = [draft]
            for batch in (1, 2, 4, 8, 16, 32):
                good = [r["goodput"][0] for r in cells if _way(r) == draft and r["batch"] == batch]
                row.append(f"{median(good):.2f}x ({min(good):.2f})" if good else "")
            rows.append(row)
        table = markdown(["draft", *(f"batch {b}" for b in (1, 2, 4, 8, 16, 32))], rows, range(1, 7))
        lost = sorted((r for r in cells if r["goodput"][0] < LOST), key=lambda r: float(r["goodput"][0]))
        names = [
            f"{_way(r)}, T {r['temperature']:g}, batch {r['batch']}, {r['texts']}: {r['goodput'][0]:.3f} "
            f"({r['goodput'][1]:.3f} to {r['goodput'][2]:.3f})"
            for r in lost
        ]
        beyond = sum(r["goodput"][2] < LOST for r in lost)
        over = [r["over_best_fixed"][0] for r in cells if r["over_best_fixed"]]
        same = yes(all(r["equals_plain"] for r in cells))
        pairs = [r["num_pairs"] for r in cells]
        about = (
            f"{model}, weights {fmt}: {len(cells)} cells of draft, temperature, batch and texts; {min(pairs)} to "
            f"{max(pairs)} pairs of batches each, {sum(r['num_tokens'] for r in cells):,} tokens of plain decoding. "
            f"Below {LOST}: {len(lost)} cells, {beyond} of them with the whole interval. All texts as plain "
            f"decoding's: {same}."
        )
        if over:
            about += f" Over the best fixed length, {len(over)} cells: {mean(over):.2f} in the mean"
            about += f", {min(over):.2f} at least."
        own = [r["accounted"] for r in cells if "accounted" in r]
        if own:
            about += (
                f" By what goodput itself did (passes saved, draft rows, time outside passes), {len(own)} cells: "
                f"{median(own):.3f} in the median, {min(own):.2f} at least, {sum(o < LOST for o in own)} below {LOST}."
            )
        about += f" {measured_on(cells[-1])}."
        lines = [f"* {name}" for name in names]
        parts.append("\n\n".join([table, about, *(["Lost cells:\n\n" + "\n".join(lines)] if lines else [])]))
    return "\n\n".join(parts)


LOST = 0.98


def regrets(found: list[Record]) -> str:
    """Results of `sameseed regret`: the newest run for each workload and number of threads.

    Older records, without `repeats`, judged by the run that had also found the best.
    """

    def about(r: Record) -> tuple[str, int]:
        domains = r["config"].get("domains", [])
        return domains[0] if len(domains) == 1 else "packaged prompts", r["config"]["threads"][0]

    def share(found: dict[str, Any]) -> str:
        return f"{found['value']:.1%} ({found['low']:.1%} to {found['high']:.1%})"

    found = [r for r in found if "repeats" in r]
    if not found:
        return hint("tune")
    newest_ones = sorted(newest(found, about), key=about)
    rows = [
        [
            f"{name}, {r['config']['num_prompts']} x {r['config']['max_tokens']}",
            str(threads),
            r["choice"]["setting"].replace(f" threads={threads}", ""),
            share(r["choice"]["share"]),
            *(f"{r['baselines'][b]['share']['value']:.0%}" for b in ("plain", "longest acceptance", "k = 4")),
            f"{r['errors']['median']:.1%}, {r['errors']['p90']:.1%}",
            f"{r['errors']['coverage']:.0%}",
        ]
        for r in newest_ones
        for name, threads in [about(r)]
    ]
    head = [
        "texts, prompts x tokens",
        "threads",
        "`tune` chose",
        "behind the best",
        "plain",
        "longest acceptance",
        "k = 4",
    ]
    table = markdown([*head, "predictions off: median, p90", "within 80 %"], rows, (1, 3, 4, 5, 6, 7, 8))
    lacks = [r["choice"]["share"]["value"] for r in newest_ones]
    sizes = sorted({len(r["settings"]) for r in newest_ones})
    said = f"{' to '.join(map(str, sizes))} drafting settings each. Behind the best: {mean(lacks):.1%} in the mean, "
    return f"{table}\n\n{said}{max(lacks):.1%} at most. {'; '.join(dict.fromkeys(map(measured_on, newest_ones)))}."


def _way(r: Record) -> str:
    """The draft, with the format of its weights if it has weights."""
    return str(r["draft"]) if r["draft"] in ("ngram", "suffix") else f"{r['draft']} ({r['draft_format']})"


def _cell(r: Record) -> tuple[object, ...]:
    return tuple(r[name] for name in ("model", "format", "draft", "draft_format", "temperature", "batch", "texts"))


LOAD_SINCE = "2026-11-27"  # older records of `bench serve` have other policies


def load(found: list[Record]) -> str:
    """Speculation on against off through the server, by `sameseed bench serve`: the last record of each cell."""

    def cell(r: Record) -> tuple[Any, ...]:
        c = r["config"]
        return c["model"], c["lengths"], c["sampling"]["temperature"], c["concurrency"]

    found = [r for r in found if r["config"]["label"] == "on" and r["config"].get("served") and r["time"] > LOAD_SINCE]
    found = sorted(newest(found, cell), key=cell)
    head = ["model", "draft", "T", "prompt-answer", "clients", "requests", "tokens/s", "over off"]
    head += ["first token over off", "accepted", "same text", "machine"]
    rows = []
    for r in found:
        c, rate = r["config"], (r["acceptance"] or {}).get("acceptance_rate")
        cells = [c["model"], f"{c['served']['method']}, {c['served']['policy']}", f"{c['sampling']['temperature']:g}"]
        cells += [c["lengths"], str(c["concurrency"]), str(c["num_requests"]), f"{r['output_tokens_per_s']:.1f}"]
        cells += [f"{r['speedup']:.2f}x", f"{r['ttft_ratio']:.2f}x", "" if rate is None else f"{rate:.0%}"]
        rows.append([*cells, yes(len(set(r["same_texts"])) == 1), r["machine"]["isa"]])
    loads = [r["machine"]["load_1min"] for r in found]
    runs = sorted({len(r["repetitions"]) for r in found})
    about = f"Medians of {' to '.join(map(str, runs))} runs, arms in turns; load before a cell "
    about += f"{min(loads)} to {max(loads)}; the last: {measured_on(max(found, key=itemgetter('time')))}."
    return f"{markdown(head, rows, range(4, 10))}\n\n{about}"


def server(_: list[Record]) -> str:
    """Costs of the server around the engine, one row per record: HTTP, prefix cache, grammars, soak test."""
    rows: list[tuple[str, str, Record]] = []
    for r in newest(lines("overhead"), lambda r: r["config"]["draft"]):
        about = f"{r['overhead_ms']:.2f} ms a token; CPU {r['path_cpu_ms']:.2f} ms, of which the server's process "
        rows.append(("HTTP at one client", f"{about}{r['server_cpu_ms']:.2f} ms; {len(r['repetitions'])} runs", r))
    known = [r for r in lines("prefix") if "ttft_s" in r.get("hit", {})]
    for r in newest(known, lambda r: (r["config"]["draft"], r["config"]["prefix_tokens"])):
        c, hit, miss = r["config"], r["hit"]["ttft_s"] * 1e3, r["miss"]["ttft_s"] * 1e3
        about = f"first token {hit:.0f} ms where it is known, {miss:.0f} ms where not"
        rows.append((f"a beginning of {c['prefix_tokens']} tokens, draft {c['draft']}", about, r))
    for r in newest((r for r in lines("grammar") if r.get("mask")), lambda r: r["grammar"]):
        about = f"mask {r['mask']['mean_ms']:.2f} ms a decision in the mean of {r['num_decisions']:,}, compiled in "
        rows.append((f"grammar '{r['grammar']}', {r['vocab_size']:,} tokens", f"{about}{r['compile_s']:.2f} s", r))
    for r in newest(lines("soak"), lambda r: r["num_requests"]):
        before, after = r["resident_kb"]["before"], r["resident_kb"]["after"]
        grown = ", ".join(f"{b / a - 1:+.1%}" for a, b in zip(before, after, strict=True))
        counts = ", ".join(f"{k} {v}" for k, v in r["answers"].items())
        about = f"{counts}; memory of server and engine {grown}; {r['num_texts_equal']} of {r['num_texts_compared']} "
        rows.append((f"{r['num_requests']:,} requests, {r['concurrency']} at once", f"{about}texts as alone", r))
    cells = [
        [what, about, str(r["machine"]["load_1min"]), f"{r['time'][:10]}, {r['commit']}"] for what, about, r in rows
    ]
    return markdown(["what", "found", "load", "measured"], cells, (2,)) if rows else hint("server")


def summary(_: list[Record]) -> str:
    """README's table: trained models of others first, then the packaged pair, then shapes with made-up weights."""
    real, shapes = lines("real"), lines("shapes")
    found: list[Record] = []
    for records in (real, shapes):
        kinds = dict.fromkeys((r["config"]["num_parameters"], r["config"]["temperature"]) for r in records)
        for kind in sorted(kinds):
            found += last_run(
                [r for r in records if (r["config"]["num_parameters"], r["config"]["temperature"]) == kind]
            )
        if records is real:
            found += [r for r in last_run(lines("bench")) if r["config"]["num_draft_tokens"] in (0, 5)]
    marks = list(dict.fromkeys(map(measured_on, found)))
    rows, same = [], yes(all(r["equals_plain"] for r in found))
    for r in found:
        c, rate = r["config"], r["acceptance_rate"]
        size = c["num_parameters"] / 1e6
        large = f"{size / 1e3:.1f} B" if size > 999 else f"{size:.0f} M" if size > 99 else f"{size:.1f} M"
        name = f"{Path(c['model']).name}, {large}" if r not in shapes else f"{large[:-4]}B-shaped, made-up weights"
        cells = [f"{name}, {c['format']}"]
        cells += [f"temperature {c['temperature']}" if c["temperature"] else "greedy", c["label"]]
        cells += [f"{r['tokens_per_s']:.0f}", f"{r['speedup']:.2f}x" if c["num_draft_tokens"] else "1"]
        cells += ["" if rate is None else f"{rate:.0%}", f"{c['num_prompts']} x {c['max_tokens']}"]
        rows.append([*cells, str(len(r["repetitions"])), f"({'abcdefgh'[marks.index(measured_on(r))]})"])
    head = ["model", "output", "decoding", "tokens/s", "speed-up", "accepted", "prompts x tokens", "runs", ""]
    about = f"Tokens: at most this many a prompt. All outputs equal plain decoding's: {same}. Measured on: "
    about += "; ".join(f"({'abcdefgh'[i]}) {mark}" for i, mark in enumerate(marks))
    return f"{markdown(head, rows, (3, 4, 5))}\n\n{about}."


def runs(found: list[Record]) -> str:
    """The newest run of a record file: a table for each workload, with the machine and date."""
    from sameseed.measure import report

    found = last_run(found)
    parts = []
    for title, group in itertools.groupby(found, key=lambda r: report.title(r["config"])):
        rows = [report.cells(r) for r in group]
        parts.append(f"**{title}**\n\n{markdown(report.COLUMNS, rows, range(1, len(report.COLUMNS) - 1))}\n")
    machine, times = found[-1]["machine"], len(found[-1]["repetitions"])
    about = f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, {machine['isa']}; "
    about += (
        f"{f'median of {times} runs' if times > 1 else 'one run'}, at most {found[-1]['config']['max_tokens']} tokens "
    )
    about += f"a prompt, {found[-1]['time'][:10]}, commit {found[-1]['commit']}."
    return "\n".join([*parts, f"{about}\n\n{report.LEGEND.replace('; ', '. ')}."])


def drafters(found: list[Record]) -> str:
    """All drafters on a twin: the newest record of each setting, with the speed-up of each run of the same setting."""
    from sameseed.measure import report

    known: dict[tuple[str, str], list[Record]] = {}
    for r in found:
        known.setdefault((report.title(r["config"]), r["config"]["label"]), []).append(r)
    place, parts = report.COLUMNS.index("speed-up") + 1, []
    head = [*report.COLUMNS[:place], "each run", *report.COLUMNS[place:]]
    for title, group in itertools.groupby(sorted(known, key=lambda key: key[0]), key=lambda key: key[0]):
        rows = []
        for key in group:
            row, own = report.cells(known[key][-1]), known[key]
            each = "" if own[-1]["config"]["draft"] == "none" else ", ".join(f"{r['speedup']:.2f}" for r in own)
            rows.append([*row[:place], each, *row[place:]])
        parts.append(f"**{title}**\n\n{markdown(head, rows, range(1, len(head) - 1))}\n")
    days = sorted({r["time"][:10] for r in found})
    commits = list(dict.fromkeys(r["commit"] for r in found))
    machine = found[-1]["machine"]
    about = f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, {machine['isa']}; at most "
    about += f"{found[-1]['config']['max_tokens']} tokens a prompt; the last run, and the speed-up of each run. "
    about += f"{' and '.join(dict.fromkeys((days[0], days[-1])))}, commits {', '.join(commits)}."
    return "\n".join([*parts, f"{about}\n\n{report.LEGEND.replace('; ', '. ')}."])


OWN: dict[str, tuple[Callable[[list[Record]], str], str]] = {  # by table: its function, and how to write its records
    "peers": (peers, "`make peers`, then `make bench-peers` write one"),
    "gpu": (gpu, "`make bench-gpu` writes one, on a machine with a GPU"),
    "losses": (losses, "`sameseed eval --compare` on a model of others writes some"),
    "eval": (evaluations, "`sameseed eval --compare ... --out benchmarks/results/eval.jsonl` writes one"),
    "quantize": (quantizers, "its script is in the history"),
    "gguf": (gguf, "its script is in the history"),
    "certificates": (certificates, "`sameseed verify-lossless --out benchmarks/results/certificates.jsonl` writes one"),
    "policies": (policies, "`benchmarks/policies.py` writes one"),
    "tune": (regrets, "`sameseed regret embedded --records benchmarks/results/tune.jsonl` writes one"),
    "drafters_1b": (drafters, "`sameseed bench --model TWIN --out benchmarks/results/drafters_1b.jsonl` writes one"),
    "drafters_8b": (drafters, "`sameseed bench --model TWIN --out benchmarks/results/drafters_8b.jsonl` writes one"),
    "load": (load, "`sameseed bench serve --compare-speculation` writes one"),
    "server": (server, "its scripts are in the history"),
    "summary": (summary, "`make bench` writes some, and `sameseed bench --model TWIN`"),
}
COMBINED = {"server", "summary", "losses"}  # tables made from several record files


def hint(name: str) -> str:
    """The text in place of a table without records: the command that writes a record."""
    own = f"`sameseed {name} --out benchmarks/results/{name}.jsonl` writes one"
    return f"*No record yet: {OWN[name][1] if name in OWN else own}.*"


def table(name: str) -> str:
    """The table of one marker, or a hint if it has no records."""
    found = lines(name)
    if not found and (name not in COMBINED or not lines("bench")):
        return hint(name)
    make = OWN[name][0] if name in OWN else runs
    rows = make(found).rstrip("\n").splitlines()
    return "\n".join(row if row.startswith("|") else textwrap.fill(row, 120) for row in rows) + "\n"
