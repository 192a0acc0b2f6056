"""The table of aims and results of `make bench-gpu`, made from a run's records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any

Lines = Seq[Mapping[str, Any]]
NONE = "not measured"
TWO_LEVEL = ("draft_model", "eagle", "ngram", "suffix")
SHARES = (("bf16", 0.80), ("fp8", 0.75), ("w4a16", 0.65))  # of the copy bandwidth, decoding at batch 1
COSTS = {"w4a16": ((8, 1.1), (16, 1.15), (32, 1.3)), "fp8": ((8, 1.05), (16, 1.1), (32, 1.2))}


@dataclass(frozen=True)
class Row:
    """One aim with the result `got`. `met`: whether the aim is met; None without a result or without an aim."""

    what: str
    aim: str
    got: str
    met: bool | None

    @property
    def verdict(self) -> str:
        """The words met, MISSED or "not measured"; empty for a row without an aim."""
        return NONE if self.got == NONE else "" if self.met is None else "met" if self.met else "MISSED"


def chosen(lines: Lines, part: str, **wanted: Any) -> list[Mapping[str, Any]]:
    """The records of a part whose fields have the `wanted` values."""
    return [x for x in lines if x["part"] == part and all(x.get(name) == value for name, value in wanted.items())]


def of_format(found: Iterable[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    """The records in a format; "fp8" includes its variants, such as fp8-a8."""
    return [x for x in found if x["format"] == name or x["format"].split("-")[0] == name]


def above(what: str, aim: float, got: float | None, unit: str, note: str = "") -> Row:
    """A row whose result should be at least the aim."""
    form: Callable[[float], str] = (lambda v: f"{v:.1%}") if unit == "%" else (lambda v: f"{v:.2f}{unit}")
    return Row(what, f">= {form(aim)}", NONE if got is None else form(got) + note, None if got is None else got >= aim)


def below(what: str, aim: float, got: float | None, unit: str, note: str = "") -> Row:
    """A row whose result should be at most the aim."""
    form: Callable[[float], str] = (lambda v: f"{v:.1%}") if unit == "%" else (lambda v: f"{v:.3f}{unit}")
    return Row(what, f"<= {form(aim)}", NONE if got is None else form(got) + note, None if got is None else got <= aim)


def rows(lines: Lines) -> list[Row]:
    """The rows of all aims, then rows without an aim."""
    found: list[Row] = []
    for part in (_bandwidth, _chains, _speculation, _large, _host, _peers, _laws, _told):
        try:
            found += part(lines)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:  # bad records: keep the other rows
            found.append(Row(f"{part.__name__[1:]}: {type(error).__name__} {error}", "", NONE, None))
    return found


def over(one: float | None, other: float | None) -> float | None:
    """one / other; None if either is missing or `other` is 0."""
    return one / other if one is not None and other else None


def _shape(lines: Lines) -> str:
    return next((str(x["sizes"]["shape"]) for x in lines if x["part"] == "plan"), "")


def _bandwidth(lines: Lines) -> list[Row]:
    found = []
    for format, aim in SHARES:
        got = of_format(chosen(lines, "costs", kind="batch", rows=1), format)
        graph = of_format(chosen(lines, "device", kind="batch", rows=1), format)
        share = got[-1]["read_share"] if got else None
        note = f" ({graph[-1]['read_share']:.1%} without the host)" if graph and graph[-1]["read_share"] else ""
        found.append(above(f"decoding at batch 1, {format}: share of the copy bandwidth", aim, share, "%", note))
    return found


def _chains(lines: Lines) -> list[Row]:
    found = []
    for format, aims in COSTS.items():
        for num_rows, aim in aims:
            got = of_format(chosen(lines, "costs", kind="chain", rows=num_rows), format)
            graph = of_format(chosen(lines, "device", kind="chain", rows=num_rows), format)
            least = min((x["context"] for x in got), default=0)
            c = next((x["c"] for x in got if x["context"] == least), None)
            there = next((x["c"] for x in graph if x["context"] == least and x["c"]), None)
            note = f" ({there:.3f} without the host)" if there else ""
            found.append(below(f"c({num_rows}) of {format}", aim, c, "", note))
    return found


def _best(found: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The fastest of the records without unfinished texts."""
    return max((x for x in found if not x.get("failed")), key=lambda x: float(x["tokens_per_s"]), default=None)


def _arm(x: Mapping[str, Any] | None) -> str:
    return "" if x is None else f" ({x['arm']}, k={x['k']}{', goodput' if x['policy'] == 'goodput' else ''})"


def _speculation(lines: Lines) -> list[Row]:
    shape = _shape(lines)
    spoken = chosen(lines, "speculation", shape=shape, batch=1)
    low = [x for x in of_format(spoken, "w4a16") if x["arm"] in ("eagle", "draft_model")]
    best = _best(low)
    plain = _best(x for x in of_format(spoken, "bf16") if x["arm"] == "plain")
    ratio = over(best["tokens_per_s"], plain["tokens_per_s"]) if best and plain else None
    return [
        above("8B w4 with a head or a draft over plain bf16, batch 1", 5.3, ratio, "x", _arm(best)),
        above(
            "8B w4 with a head or a draft over its own plain", 2.5, best["speedup"] if best else None, "x", _arm(best)
        ),
    ]


def _large(lines: Lines) -> list[Row]:
    large = next((str(x["sizes"]["large_shape"]) for x in lines if x["part"] == "plan"), "")
    spoken = chosen(lines, "speculation", shape=large, batch=1)
    cascade = _best(x for x in spoken if x["arm"] == "cascade")
    two = _best(x for x in spoken if x["arm"] in TWO_LEVEL)
    ratio = over(cascade["tokens_per_s"], two["tokens_per_s"]) if cascade and two else None
    note = f"{_arm(cascade)} over{_arm(two)}" if ratio else ""
    return [
        above("70B w4: cascade over its own plain", 2.78, cascade["speedup"] if cascade else None, "x", _arm(cascade)),
        above("70B w4: cascade over the best two-level setting", 1.31, ratio, "x", note),
    ]


def _host(lines: Lines) -> list[Row]:
    found = []
    spoken = chosen(lines, "speculation", shape=_shape(lines), batch=1)
    for name in ("plain", "eagle", "draft_model"):
        best = _best(x for x in spoken if x["arm"] == name and x.get("host_share") is not None)
        stand_in = f"; {best['timed_by']}" if best and "stand-in" in best["timed_by"] else ""
        note = "" if best is None else f" ({best['format']}{stand_in})"
        share = best["host_share"] if best else None
        found.append(below(f"host share of a round at batch 1, {name}", 0.10, share, "%", note))
    return found


def _peers(lines: Lines) -> list[Row]:
    found = []
    for batch, aim in ((1, 3.0), (16, 2.0)):
        theirs = chosen(lines, "peers", engine="transformers", kind="decode", mode="sdpa", batch=batch)
        ours = chosen(lines, "costs", kind="batch", rows=batch)
        best = min(ours, key=lambda x: float(x["median_ms"]), default=None)
        ratio = over(theirs[-1]["median_ms"], best["median_ms"]) if theirs and best else None
        same = of_format(ours, "bf16")
        note = f" ({best['format']}" if best and ratio else ""
        own = over(theirs[-1]["median_ms"], same[-1]["median_ms"]) if theirs and same else None
        note += (f"; bf16 {own:.2f}x)" if own else ")") if note else ""
        found.append(above(f"plain decoding over transformers bf16 (sdpa), batch {batch}", aim, ratio, "x", note))
    return found


def _laws(lines: Lines) -> list[Row]:
    spoken, told = chosen(lines, "speculation"), chosen(lines, "broken")
    broken = sorted({op for x in told for op in x["ops"]})
    failed = sum(x.get("failed", 0) for x in spoken)
    known = [x for x in spoken if x["equals_plain"] is not None]
    unequal = sum(not x["equals_plain"] for x in known)
    return [
        Row("law 1: settings of the twins whose texts differ", "0",
            f"{unequal} of {len(known)}" if known else NONE, unequal == 0 if known else None),
        Row("texts that ended in an error or too early", "0",
            f"{failed}" if spoken else NONE, failed == 0 if spoken else None),
        Row("kernels that do not compile (computed by the reference)", "0",
            f"{len(broken)}{': ' + ', '.join(broken[:4]) if broken else ''}" if told else NONE,
            not broken if told else None),
    ]  # fmt: skip


def _told(lines: Lines) -> list[Row]:
    limits = chosen(lines, "limits")
    found = []
    if limits:
        rates = [(limits[-1][name] or 0) / 1e12 for name in ("read_bytes_per_s", "bf16_ops_per_s")]
        got = f"{rates[0]:.3f} TB/s, {rates[1]:.0f} TFLOP/s"
        found.append(Row("the device's copy, and its bf16 product", "", got, None))
    prefill = chosen(lines, "costs", kind="prefill")
    longest = max((x["rows"] for x in prefill), default=0)
    for x in prefill:
        if x["rows"] == longest:
            share = "" if x["compute_share"] is None else f", {x['compute_share']:.1%} of the bf16 product's rate"
            got = f"{x['median_ms']:.0f} ms{share}, peak {x['peak_bytes'] / 2**30:.1f} GiB"
            found.append(Row(f"first token of a prompt of {longest}, {x['format']}", "", got, None))
    return found


def words(x: Mapping[str, Any]) -> str:
    """One record as a line for the terminal; "" for a record without such values."""
    kept = ("part", "shape", "engine", "format", "mode", "arm", "kind", "op", "context", "rows", "batch")
    units = {"median_ms": "ms", "median_us": "us", "c": "times one row", "read_share": "of bandwidth"}
    units |= {"tokens_per_s": "tokens/s", "speedup": "x", "host_share": "host"}
    said = [f"{found:.3g} {unit}" for name, unit in units.items() if isinstance(found := x.get(name), float)]
    return ", ".join([*(f"{x[name]}" for name in kept if x.get(name) is not None), *said]) if said else ""


def text(lines: Lines) -> str:
    """The table for a terminal."""
    if not lines:
        return "nothing was measured"
    toys = lines[0]["dry_run"]  # toy sizes: no verdicts
    cells = [("what", "aim", "got", ""), *((r.what, r.aim, r.got, "" if toys else r.verdict) for r in rows(lines))]
    widths = [max(len(c[i]) for c in cells) for i in range(3)]
    made = ["  ".join([*(c[i].ljust(widths[i]) for i in range(3)), c[3]]).rstrip() for c in cells]
    where = lines[0]["machine"]["gpu"] if lines[0]["device"] != "cpu" else lines[0]["machine"]["cpu"]
    dry = " DRY RUN: toy sizes on the CPU, these numbers mean nothing." if lines[0]["dry_run"] else ""
    left = chosen(lines, "end")
    lost = "".join(f"\nleft out: {x['what']}: {x['why']}" for x in left[-1]["left_out"]) if left else ""
    head = f"{_shape(lines)} on {where}, {lines[0]['run']}, commit {lines[0]['commit']}.{dry}"
    return "\n".join([head, *made]) + lost
