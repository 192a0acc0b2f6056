"""A server under 1 to 32 clients, speculation off and on: tokens/s, generation time, time to the first token.

After an article on vLLM's AsyncLLMEngine (2024): Llama-3.1-70B with an 8B draft, vLLM 0.5.4, four A100.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from sameseed_lab.studies._load import LoadCell
from sameseed_lab.studies._setup import role_name
from sameseed_lab.studies._study import (
    Panel,
    Plot,
    Published,
    Records,
    Report,
    Series,
    Study,
    Table,
    figure,
    only,
    pick,
    points,
)

CLIENTS = (1, 2, 4, 8, 16, 32)
LOW, HIGH, ACCEPTED = 2.0, 1.3, 0.7  # published speed-ups at few and at many clients; published acceptance rate


def cells(size: str) -> list[LoadCell]:
    """A cell for each draft with the policy goodput, and one for the first draft with four tokens in every round."""
    form = (("auto", "auto"),) if size == "small" else (("w4a8", "auto"),)
    drafts = ("1b", "head") if size == "small" else ("1b", "3b", "head")
    made = [LoadCell(f"{role_name(draft, size)} goodput", draft, CLIENTS, form) for draft in drafts]
    return [LoadCell(f"{role_name('1b', size)} k=4", "1b", CLIENTS, form, 4), *made]


def report(records: Records) -> Report:
    """The study's three plots, CPU use, and the speed-up of speculation on over off."""
    names = list(dict.fromkeys(r["cell"] for r in records))
    return Report(_findings(records, names), _published(records, names), [_plot(records, names)], [_table(records)])


def _findings(records: Records, names: list[str]) -> list[str]:
    said = []
    for name in names:
        gains = {r["config"]["concurrency"]: r for r in pick(records, cell=name, label="on") if r["speedup"]}
        if gains:
            few, many = gains[min(gains)], gains[max(gains)]
            said.append(
                f"{name}: {few['speedup']:.2f} times the tokens/s at {min(gains)} client, {many['speedup']:.2f} times "
                f"at {max(gains)}; time to the first token {few['ttft_ratio']:.2f} and {many['ttft_ratio']:.2f} times."
            )
    return said


def _published(records: Records, names: list[str]) -> list[Published]:
    made = []
    for name in names:
        for clients, theirs, note in ((1, LOW, "about, at low load"), (32, HIGH, "about, at high load")):
            ours = only(records, cell=name, label="on", concurrency=clients)
            value = None if ours is None else ours["speedup"]
            made.append(Published(f"{name}: tokens/s on / off, {clients} at once", theirs, value, note))
        ours = only(records, cell=name, label="on", concurrency=1)
        told = None if ours is None else ours["acceptance"]
        rate = None if told is None else told["acceptance_rate"]
        made.append(Published(f"{name}: share of drafted tokens accepted", ACCEPTED, rate))
    return made


def _plot(records: Records, names: list[str]) -> Plot:
    measures: tuple[tuple[str, Callable[[Any], float | None]], ...] = (
        ("output tokens/s", lambda r: r["output_tokens_per_s"]),
        ("generation time: median s", lambda r: r["e2e_ms"]["p50"] and r["e2e_ms"]["p50"] / 1e3),
        ("time to first token: median ms", lambda r: r["ttft_ms"]["p50"]),
        ("CPU: server's share of all cores", lambda r: r["usage"]["cpu_share"]),
    )
    gains = [Series(n, points(pick(records, cell=n, label="on"), "concurrency", lambda r: r["speedup"])) for n in names]
    gains = [Series("off", []), *gains, Series(names[0], [(1, LOW), (32, HIGH)], True)]
    panels = [Panel("tokens/s, on over off", "clients at once", gains, level=1.0)]
    for title, of in measures:
        off = points(pick(records, label="off"), "concurrency", of)  # over all cells: without drafts they are the same
        lines = [Series("off", [(c, median(v for n, v in off if n == c)) for c in dict(off)])]
        lines += [Series(n, points(pick(records, cell=n, label="on"), "concurrency", of)) for n in names]
        panels.append(Panel(title, "clients at once", lines))
    return Plot("clients", "By clients at once", panels)


def _table(records: Records) -> Table:
    heads = ("cell", "clients", "speculation", "tokens/s", "on / off", "first token ms", "on / off", "generation s")
    more = ("ms a token", "accepted", "CPU", "J a token", "same texts")
    rows = [_row(r) for r in records]
    return Table("All measurements", (*heads, *more), rows)


def _row(r: Mapping[str, Any]) -> list[str]:
    c, u, same = r["config"], r["usage"], r["same_texts"]
    told, end = r["acceptance"] or {}, r["e2e_ms"]["p50"]
    cost = u["gpu_j_per_token"] if u["gpu_j_per_token"] is not None else u["cpu_j_per_token"]
    return [
        r["cell"],
        str(c["concurrency"]),
        c["label"],
        figure(r["output_tokens_per_s"], ".1f"),
        figure(r["speedup"]),
        figure(r["ttft_ms"]["p50"], ".1f"),
        figure(r.get("ttft_ratio")),
        figure(None if end is None else end / 1e3),
        figure(r["tpot_ms"]["p50"]),
        figure(told.get("acceptance_rate"), ".0%"),
        figure(u["cpu_share"], ".0%"),
        figure(cost, ".3g"),
        "" if same is None else f"{same[0]} of {same[1]}",
    ]


STUDY = Study(
    title="A server under 1 to 32 clients, with and without speculation",
    source="an article on vLLM's AsyncLLMEngine, 2024: Llama-3.1-70B with an 8B draft, vLLM 0.5.4, four A100",
    differs=(
        "Theirs are trained models on four GPUs, with at most 8 sequences at once. Ours at --size small is the "
        "embedded family, at --size true its twins at 8B in w4a8 with 1B and 3B drafts: 70B does not fit.",
        "Their plots have no numbers: twice the tokens/s at low load and 30 % more at high load is what it says.",
        "Their first token comes later with speculation, for drafting begins before it. Ours comes from the prefill.",
        "goodput drafts only where that pays by measured costs; k=4 drafts always, as theirs.",
        "The generator and the server share the cores here.",
    ),
    data="Their prompts are not published. --prompts FILE takes yours; without, the packaged ones are asked.",
    cells=cells,
    report=report,
)
