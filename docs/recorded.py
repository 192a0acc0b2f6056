"""Tables from the measured records, for the markers `table:NAME`, each with its own machines, days and commits."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean
from string import ascii_lowercase
from types import ModuleType
from typing import Any

Record = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "results"
# Sets of texts, by the name of their prompt file.
TEXTS = {
    "gsm8k": "GSM8K",
    "humaneval": "HumanEval",
    "mbpp": "MBPP",
    "mt-bench": "MT-Bench",
    "specbench104.jsonl": "Spec-Bench",
}


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


def last_of_each(found: Iterable[Record], key: Callable[[Record], Any]) -> list[Record]:
    """The last record of each `key`, in the order in which the keys first occur."""
    return list({key(r): r for r in found}.values())


def last_run(found: list[Record]) -> list[Record]:
    """The records of the run that wrote the last record."""
    return [r for r in found if r["run"] == found[-1]["run"]]


def measured_on(found: Record) -> str:
    """The machine, date and commit of a record."""
    machine = found["machine"]
    day = found["time"] if "time" in found else found["date"]
    parts = [
        machine["cpu"],
        f"{machine['cores']} core{'s' * (machine['cores'] != 1)}",
        *([machine["isa"]] if machine.get("isa") else []),
    ]
    return f"{', '.join(parts)}; {day[:10]}, commit {found['commit']}"


def origins(found: Iterable[Record]) -> str:
    """The machines of records, each with its days and commits."""
    known: dict[str, tuple[list[str], list[str]]] = {}
    for r in found:
        machine, _, rest = measured_on(r).partition("; ")
        day, _, commit = rest.partition(", commit ")
        days, commits = known.setdefault(machine, ([], []))
        days.append(day)
        commits.append(commit)
    parts = []
    for machine, (days, commits) in known.items():
        when = " to ".join(dict.fromkeys((min(days), max(days))))
        which = list(dict.fromkeys(commits))
        parts.append(f"{machine}: {when}, commit{'s' * (len(which) > 1)} {', '.join(which)}")
    return f"{'; '.join(parts)}."


def yes(same: bool) -> str:
    """Whether all outputs were equal, as a table cell; "NO" in capitals so that it is noticed."""
    return "yes" if same else "NO"


def named(found: Record) -> str:
    """A record's model, as downloaded, and the texts that it was measured on."""
    c = found["config"]
    name = Path(c["model"]).name.removesuffix(".gguf")
    return f"{name} on {TEXTS[c['prompts']]}" if c["prompts"] in TEXTS else name


def real_records() -> list[Record]:
    """Trained models of others: for each text and temperature the newest run, with the most draft tokens measured."""
    found = [r for name in ("real", "bench") for r in lines(name) if r["config"]["prompts"] in TEXTS]
    found = [r for r in found if not r["config"]["model"].startswith("embedded")]
    found.sort(key=lambda r: -r["config"]["num_parameters"])

    def texts(r: Record) -> tuple[object, ...]:
        return tuple(r["config"][k] for k in ("model", "format", "prompts", "temperature"))

    def decoding(r: Record) -> tuple[object, ...]:
        return *texts(r), re.sub(r" k=\d+", "", r["config"]["label"])

    newest = {texts(r): r["run"] for r in found}
    found = [r for r in found if r["run"] == newest[texts(r)]]
    most = {decoding(r): r for r in sorted(found, key=lambda r: r["config"]["num_draft_tokens"])}
    return [r for r in found if r is most[decoding(r)]]


def embedded_records() -> list[Record]:
    """The records of `make bench` with the packaged pair."""
    return [r for r in lines("bench") if r["config"]["model"].startswith("embedded")]


def summary(_: list[Record]) -> str:
    """README's table: trained models of others first, then the packaged pair, then shapes with made-up weights."""
    shapes = lines("shapes")
    found = [*real_records(), *(r for r in last_run(embedded_records()) if r["config"]["num_draft_tokens"] in (0, 5))]
    sizes = sorted({r["config"]["num_parameters"] for r in shapes})
    for size, temperature in ((s, t) for s in sizes for t in (0.0, 0.8)):
        found += last_run(
            [r for r in shapes if (r["config"]["num_parameters"], r["config"]["temperature"]) == (size, temperature)]
        )

    def run(r: Record) -> tuple[str, str]:
        """Its machine; its workload, day and commit."""
        machine, _, when = measured_on(r).partition("; ")
        c = r["config"]
        runs = f"{len(r['repetitions'])} runs".replace("1 runs", "1 run")
        return machine, f"{c['num_prompts']} x {c['max_tokens']}, {runs}, {when}"

    marks = dict(zip(dict.fromkeys(map(run, found)), ascii_lowercase))
    rows: dict[tuple[str, str], dict[float, str]] = {}
    for r in found:
        c = r["config"]
        if not c["num_draft_tokens"]:
            continue
        size = c["num_parameters"] / 1e6
        large = f"{size / 1e3:.1f} B" if size > 999 else f"{size:.0f} M" if size > 99 else f"{size:.1f} M"
        model = f"{large[:-4]}B-shaped, made-up weights" if r in shapes else f"{named(r)}, {large}"
        cell = f"**{r['speedup']:.2f}x**, {r['tokens_per_s']:.0f} tokens/s {marks[run(r)]}"
        rows.setdefault((f"{model}, {c['format']}", short(c["label"])), {})[c["temperature"]] = cell
    head, cells, last = ["model", "draft", "greedy", "temperature 0.8"], [], ""
    for (model, draft), shown in rows.items():
        cells.append(["" if model == last else model, draft, shown.get(0.0, ""), shown.get(0.8, "")])
        last = model
    same = yes(all(r["equals_plain"] for r in found))
    about = f"Speed-up over plain decoding. All outputs equal plain decoding's: {same}. "
    about += "The letter after a figure says how it was measured: prompts x tokens at most, runs, day, commit."
    for machine in dict.fromkeys(machine for machine, _ in marks):
        about += f" {machine}: {'; '.join(f'{mark} {of}' for (on, of), mark in marks.items() if on == machine)}."
    return f"{markdown(head, cells)}\n\n{about}"


def short(label: str) -> str:
    """A decoding's label in words, without the default policy and its maximum."""
    words = label.replace("eagle", "head").replace("draft_model", "draft model")
    return re.sub(r" k=12| w4a8(?= goodput|$)| goodput", "", words)


def bench(_: list[Record]) -> str:
    """The newest run with the embedded pair: speed-ups, greedy and sampled."""
    rows: dict[str, list[str]] = {}
    found = last_run(embedded_records())
    for r in found:
        if r["config"]["draft"] != "none":
            cells = [f"{r['speedup']:.2f}x ({r['prediction']['speedup']:.2f}x)", f"{r['acceptance_rate']:.0%}"]
            rows.setdefault(r["config"]["label"], []).extend(cells)
    head = ["draft", "greedy", "accepted", "temperature 0.8", "accepted"]
    c, plain = found[0]["config"], [f"{r['tokens_per_s']:.0f}" for r in found if r["config"]["draft"] == "none"]
    about = (
        f"In brackets: as costs and acceptance predict it. Plain: {' and '.join(plain)} tokens/s. {c['num_prompts']} "
    )
    about += f"prompts x at most {c['max_tokens']} tokens, median of {len(found[0]['repetitions'])} runs. All outputs "
    about += f"equal plain decoding's: {yes(all(r['equals_plain'] for r in found))}. {origins(found)}"
    return f"{markdown(head, [[name, *cells] for name, cells in rows.items()], range(1, 5))}\n\n{about}"


def policy_cells(found: list[Record]) -> list[Record]:
    """The newest record of each cell of benchmarks/policies.py."""
    names = ("model", "format", "draft", "draft_format", "temperature", "batch", "texts")
    return last_of_each(found, lambda r: tuple(r[name] for name in names))


def policies(found: list[Record]) -> str:
    """How the default policy compares with plain decoding in all cells of benchmarks/policies.py."""
    cells, rows = policy_cells(found), []
    for name in dict.fromkeys(r["model"] for r in cells):
        mine = [r for r in cells if r["model"] == name]
        lost = [r for r in mine if r["goodput"][0] < LOST]
        worst = min(mine, key=lambda r: float(r["goodput"][0]))
        over = [r["over_best_fixed"][0] for r in mine if r["over_best_fixed"]]
        row = [
            name.removesuffix(".gguf"),
            str(len(mine)),
            f"{mean(r['goodput'][0] for r in mine):.2f}x",
            str(len(lost)),
        ]
        row += [str(sum(r["goodput"][2] < LOST for r in lost)), f"{worst['goodput'][0]:.2f}x"]
        draft = worst["draft"].replace(".gguf", "")
        row += [f"{draft}, T {worst['temperature']:g}, batch {worst['batch']}, {worst['texts']}"]
        rows.append([*row, f"{mean(over):.2f}x, {min(over):.2f}x"])
    head = ["target", "cells", "mean", f"below {LOST}", "whole interval below", "worst", "where"]
    same = yes(all(r["equals_plain"] for r in cells))
    about = f"All outputs equal plain decoding's: {same}. Cells were measured on several machines and days; the last: "
    table = markdown([*head, "over the best fixed length: mean, worst"], rows, (1, 2, 3, 4, 5))
    return f"{table}\n\n{about}{measured_on(cells[-1])}."


LOST = 0.98


def regrets(found: list[Record]) -> str:
    """Results of `sameseed regret`: the newest run for each workload and number of threads."""

    def about(r: Record) -> tuple[str, int]:
        domains = r["config"].get("domains", [])
        return domains[0] if len(domains) == 1 else "packaged prompts", r["config"]["threads"][0]

    found = [r for r in found if "repeats" in r]  # older ones were judged by the run that had also found the best
    if not found:
        return hint("tune")
    chosen = sorted(last_of_each(found, about), key=about)
    rows = []
    for r in chosen:
        (name, threads), lag = about(r), r["choice"]["share"]
        row = [f"{name}, {threads} threads".replace("1 threads", "1 thread")]
        row += [r["choice"]["setting"].replace(f" threads={threads}", "")]
        row += [f"{lag['value']:.1%} ({lag['low']:.1%} to {lag['high']:.1%})"]
        row += [f"{r['baselines'][b]['share']['value']:.0%}" for b in ("plain", "longest acceptance", "k = 4")]
        rows.append([*row, f"{r['errors']['median']:.1%}, {r['errors']['p90']:.1%}", f"{r['errors']['coverage']:.0%}"])
    head = ["texts", "`tune` chose", "behind the best", "plain", "longest acceptance", "k = 4"]
    table = markdown([*head, "predictions off: median, p90", "within 80 %"], rows, range(2, 8))
    c = chosen[0]["config"]
    sizes = ", ".join(sorted({str(len(r["settings"])) for r in chosen}))
    return f"{table}\n\n{sizes} settings each, {c['num_prompts']} prompts x {c['max_tokens']} tokens. {origins(chosen)}"


def evaluations(found: list[Record]) -> str:
    """What number formats cost the embedded target: the newest comparison of `sameseed eval`."""
    from sameseed.measure.quality.show import figures

    found = last_run([r for r in found if r["comparison"] is not None and r["config"]["model"].startswith("embedded")])
    names = {"weights MB": "weights MB", "  over the baseline's": "perplexity over bf16's", "tokens/s": "tokens/s"}
    names |= {"accepted as target": "accepted as target", "accepted as draft": "as draft"}
    rows = [[r["config"]["label"], *(figures(r)[name].text() for name in names)] for r in found]
    text, c = found[0]["perplexity"], found[0]["config"]
    about = (
        f"{text['tokens']:,} tokens of {text['text'].split('.')[0]}; acceptance and speed of {c['num_prompts']} prompts"
    )
    about += f" x {c['max_tokens_of_speed']} tokens, draft {c['draft']}. {origins(found[:1])}"
    return f"{markdown(['', *names.values()], rows, range(1, 6))}\n\n{about}"


LOSS_MODELS = {"SmolLM2-135M": "smollm2", "Qwen2.5-Coder-1.5B": "qwen2.5-coder-1.5b"}  # and how their names begin


def loss_records() -> dict[str, list[Record]]:
    """By model of LOSS_MODELS: the newest comparison of each variant in eval.jsonl, without the baselines."""
    found = last_of_each([r for r in lines("eval") if r["comparison"]], lambda r: r["config"]["label"])
    found = [r for r in found if r["comparison"]["baseline"] != r["config"]["label"]]
    own = {
        title: [r for r in found if str(r["config"]["model"]).lower().startswith(name)]
        for title, name in LOSS_MODELS.items()
    }
    return {title: records for title, records in own.items() if records}


def losses(_: list[Record]) -> str:
    """What number formats cost on models of others, beside the picture."""
    found = loss_records()
    if not found:
        return hint("losses")
    texts = {title: records[-1]["perplexity"] for title, records in found.items()}
    each = [f"{n}: {p['tokens']:,} tokens, window {p['window']}, stride {p['stride']}" for n, p in texts.items()]
    about = f"WikiText-2's test set. {'; '.join(each)}. 95 % intervals, paired by blocks of one stride"
    return f"{about}. {origins([r for records in found.values() for r in records])}"


def gguf(found: list[Record]) -> str:
    """Differences between our logits and llama.cpp's on the same file, from gguf.jsonl."""
    rows = []
    for r in last_of_each(found, lambda r: (r["file"], r["format"])):
        figures = [f"{r['mean_difference']:.4f}", f"{r['max_difference']:.3f}", f"{r['kl']:.1e}"]
        rows.append([r["file"], r["format"], *figures, f"{r['argmax_agreement']:.1%}"])
    head = ["file", "--format", "mean difference", "largest", "KL", "same likeliest token"]
    last = found[-1]
    about = f"{last['num_tokens']} tokens; the logits' standard deviation is {last['logit_deviation']:.2f}; "
    about += f"llama-cpp-python {last['llama_cpp_python']}. {origins(found[-1:])}"
    return f"{markdown(head, rows, range(2, 6))}\n\n{about}"


def certificates(found: list[Record]) -> str:
    """What certificates compared in each configuration: of each check the largest run, and what differed in any."""
    known: dict[tuple[str, str], list[Record]] = {}
    for r in found:
        if not r.get("mutants"):
            known.setdefault((Path(r["config"]["model"]).stem, r["config"]["label"]), []).append(r)
    sizes = {"L1": "products", "L2": "compared_rows", "L3": "tokens", "L6": "texts", "L5": "sequences"}
    rows = []
    for key, mine in sorted(known.items(), key=lambda item: item[1][-1]["time"], reverse=True):
        checks = [
            {"id": c["id"], "effort": r["effort"], **c["sizes"], **c["statistic"]} for r in mine for c in r["checks"]
        ]
        most = {
            i: max((int(c[name]) for c in checks if c["id"] == i and name in c), default=0) for i, name in sizes.items()
        }
        differing = sum(v for c in checks for k, v in c.items() if k.startswith("differing"))
        efforts = max(r["effort"] for r in mine)
        formats = ", ".join(dict.fromkeys(r["config"]["format"] for r in mine))
        row = [*key, formats, "full" if efforts == 1 else f"{100 * efforts:.2g} %"]
        rows.append([*row, *(f"{n:,}" if n else "" for n in most.values()), f"{differing:,.0f}"])
    head = ["model", "draft", "weights", "effort", "products", "logits rows", "greedy tokens"]
    head += ["seeded outputs", "sampled outputs counted", "differing"]
    return f"{markdown(head, rows, range(4, 10))}\n\nEmpty: not checked. The newest: {origins(found[-1:])}"


def gpu(found: list[Record]) -> str:
    """Aims and results on a GPU, by benchmarks/gpu_summary.py. Dry runs are ignored."""
    found = [r for r in found if not r["dry_run"]]
    if not found:
        return hint("gpu")

    def measured(r: Record) -> tuple[Any, ...]:
        return tuple(r.get(name) for name in ("part", "shape", "format", "engine"))

    newest = {measured(r): r["run"] for r in found}
    found = [r for r in found if r["run"] == newest[measured(r)]]  # for each part, the newest run that has it
    rows = [[row.what, row.aim, row.got, row.verdict] for row in script("gpu_summary.py").rows(found)]
    first = last_run(found)[0]
    about = (
        f"{first['machine']['gpu']}, PyTorch {first['machine']['torch']}, CUDA {first['cuda']}, {first['time'][:10]}"
    )
    commits = ", ".join(dict.fromkeys(r["commit"] for r in found))
    return (
        f"{markdown(['what', 'aim', 'found', ''], rows)}\n\n{about}; of each part the newest run (commits {commits})."
    )


def server(_: list[Record]) -> str:
    """Costs of the server around the engine, one row per record: HTTP, prefix cache, grammars, soak test."""
    rows: list[tuple[str, str, Record]] = []
    for r in lines("overhead")[-1:]:
        about = f"{r['overhead_ms']:.2f} ms a token; CPU {r['path_cpu_ms']:.2f} ms"
        rows.append(("HTTP at one client", about, r))
    known = [r for r in lines("prefix") if "ttft_s" in r.get("hit", {}) and r["config"]["prefix_tokens"] > 500]
    for r in last_of_each(known, lambda r: r["config"]["draft"]):
        c, hit, miss = r["config"], r["hit"]["ttft_s"] * 1e3, r["miss"]["ttft_s"] * 1e3
        about = f"first token {hit:.0f} ms where it is known, {miss:.0f} ms where not"
        rows.append((f"a beginning of {c['prefix_tokens']} tokens, draft {c['draft']}", about, r))
    for r in last_of_each((r for r in lines("grammar") if r.get("mask")), lambda r: r["grammar"]):
        if r["grammar"] in ("schema", "regex", "tool call"):
            about = f"mask {r['mask']['mean_ms']:.2f} ms a decision, compiled in {r['compile_s']:.2f} s"
            rows.append((f"grammar '{r['grammar']}', {r['vocab_size']:,} tokens", about, r))
    for r in lines("soak")[-1:]:
        grown = ", ".join(f"{b / a - 1:+.1%}" for a, b in zip(r["resident_kb"]["before"], r["resident_kb"]["after"]))
        about = (
            f"memory of server and engine {grown}; {r['num_texts_equal']} of {r['num_texts_compared']} outputs as alone"
        )
        rows.append((f"{r['num_requests']:,} requests, {r['concurrency']} at once", about, r))
    cells = [[what, about, f"{r['time'][:10]}, {r['commit']}"] for what, about, r in rows]
    return markdown(["what", "found", "measured"], cells) if rows else hint("server")


OWN: dict[str, tuple[Callable[[list[Record]], str], str]] = {  # by table: its function, and how to write its records
    "gpu": (gpu, "`make bench-gpu` writes one, on a machine with a GPU"),
    "losses": (losses, "`sameseed eval --compare` on a model of others writes some"),
    "eval": (evaluations, "`sameseed eval --compare ... --out benchmarks/results/eval.jsonl` writes one"),
    "gguf": (gguf, "its script is in the history"),
    "certificates": (certificates, "`sameseed verify-lossless --out benchmarks/results/certificates.jsonl` writes one"),
    "policies": (policies, "`benchmarks/policies.py` writes one"),
    "tune": (regrets, "`sameseed regret embedded --records benchmarks/results/tune.jsonl` writes one"),
    "server": (server, "its scripts are in the history"),
    "summary": (summary, "`make bench` writes some, and `sameseed bench --model TWIN`"),
    "bench": (bench, "`make bench` writes some"),
}
COMBINED = {"server", "summary", "losses"}  # tables made from several record files


def hint(name: str) -> str:
    """The text in place of a table without records: the command that writes a record."""
    return f"*No record yet: {OWN[name][1]}.*"


def table(name: str) -> str:
    """The table of one marker, or a hint if it has no records."""
    found = lines(name)
    if not found and (name not in COMBINED or not lines("bench")):
        return hint(name)
    rows = OWN[name][0](found).rstrip("\n").splitlines()
    return "\n".join(row if row.startswith("|") else textwrap.fill(row, 120) for row in rows) + "\n"
