"""The table of aims and results of `make bench-gpu`, made from a run's records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any

Lines = Seq[Mapping[str, Any]]
NONE = "not measured"
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


def aimed(what: str, aim: float, got: float | None, form: str, note: str = "", least: bool = True) -> Row:
    """A row whose result should be at least (or at most) the aim; `form`: of both, such as "{:.2f}x"."""
    met = None if got is None else got >= aim if least else got <= aim
    return Row(
        what, f"{'>=' if least else '<='} {form.format(aim)}", NONE if got is None else form.format(got) + note, met
    )


def chosen(lines: Lines, part: str, format: str = "", **wanted: Any) -> list[Mapping[str, Any]]:
    """The records of a part with these values; format "fp8" includes its variants, such as fp8-a8."""
    found = [x for x in lines if x["part"] == part and all(x.get(name) == value for name, value in wanted.items())]
    return [x for x in found if not format or format in (x["format"], x["format"].split("-")[0])]


def rows(lines: Lines) -> list[Row]:
    """The rows of all aims, then rows without an aim."""
    sizes = next(x["sizes"] for x in lines if x["part"] == "plan")
    return [*_passes(lines), *_speculation(lines, sizes), *_peers(lines), *_laws(lines), *_told(lines)]


def _passes(lines: Lines) -> list[Row]:
    found = []
    for format, aim in SHARES:
        got, graph = (chosen(lines, part, format, kind="batch", rows=1) for part in ("costs", "device"))
        note = f" ({graph[-1]['read_share']:.1%} without the host)" if graph else ""
        share = got[-1]["read_share"] if got else None
        found.append(aimed(f"decoding at batch 1, {format}: share of the copy bandwidth", aim, share, "{:.1%}", note))
    for format, num_rows, aim in ((f, m, aim) for f, aims in COSTS.items() for m, aim in aims):
        got, graph = (chosen(lines, part, format, kind="chain", rows=num_rows) for part in ("costs", "device"))
        first, there = (next((x for x in group if x["c"]), None) for group in (got, graph))  # the shortest context
        note = f" ({there['c']:.3f} without the host)" if there else ""
        found.append(aimed(f"c({num_rows}) of {format}", aim, first and first["c"], "{:.3f}", note, least=False))
    return found


def _best(found: Lines, *arms: str) -> Mapping[str, Any] | None:
    """The fastest of the records of these arms, without outputs that ended early."""
    known = [x for x in found if x["arm"] in arms and not x.get("failed")]
    return max(known, key=lambda x: float(x["tokens_per_s"]), default=None)


def _arm(x: Mapping[str, Any] | None) -> str:
    return "" if x is None else f" ({x['arm']}, k={x['k']}{', goodput' if x['policy'] == 'goodput' else ''})"


def _over(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> float | None:
    return one["tokens_per_s"] / other["tokens_per_s"] if one and other else None


def _speculation(lines: Lines, sizes: Mapping[str, Any]) -> list[Row]:
    mine = chosen(lines, "speculation", shape=sizes["shape"], batch=1)
    best = _best(chosen(mine, "speculation", "w4a16"), "eagle", "draft_model")
    plain = _best(chosen(mine, "speculation", "bf16"), "plain")
    large = chosen(lines, "speculation", shape=sizes["large_shape"], batch=1)
    cascade, two = _best(large, "cascade"), _best(large, "draft_model", "eagle", "ngram", "suffix")
    own, third = (x["speedup"] if x else None for x in (best, cascade))
    both = f"{_arm(cascade)} over{_arm(two)}"
    return [
        aimed("8B w4 with a head or a draft over plain bf16, batch 1", 5.3, _over(best, plain), "{:.2f}x", _arm(best)),
        aimed("8B w4 with a head or a draft over its own plain", 2.5, own, "{:.2f}x", _arm(best)),
        aimed("70B w4: cascade over its own plain", 2.78, third, "{:.2f}x", _arm(cascade)),
        aimed("70B w4: cascade over the best two-level setting", 1.31, _over(cascade, two), "{:.2f}x", both),
    ]


def _peers(lines: Lines) -> list[Row]:
    found = []
    for batch, aim in ((1, 3.0), (16, 2.0)):
        theirs = chosen(lines, "peers", engine="transformers", kind="decode", mode="sdpa", batch=batch)
        ours = sorted(chosen(lines, "costs", kind="batch", rows=batch), key=lambda x: float(x["median_ms"]))
        ratios = [(x["format"], theirs[-1]["median_ms"] / x["median_ms"]) for x in ours] if theirs else []
        note = f" ({', '.join(f'{format} {ratio:.2f}x' for format, ratio in ratios if format == 'bf16')})"
        got = ratios[0][1] if ratios else None
        found.append(aimed(f"plain decoding over transformers bf16, batch {batch}", aim, got, "{:.2f}x", note))
    return found


def _laws(lines: Lines) -> list[Row]:
    spoken, broken = chosen(lines, "speculation"), sorted({op for x in chosen(lines, "broken") for op in x["ops"]})
    known = [x["equals_plain"] for x in spoken if x["equals_plain"] is not None]
    unequal, failed = known.count(False), sum(x.get("failed", 0) for x in spoken)
    return [
        Row("law 1: settings of the twins whose outputs differ", "0", f"{unequal} of {len(known)}", unequal == 0),
        Row("outputs that ended in an error or too early", "0", f"{failed}", failed == 0),
        Row("kernels that do not compile", "0", f"{len(broken)} {', '.join(broken[:4])}".strip(), not broken),
    ]


def _told(lines: Lines) -> list[Row]:
    found = []
    for x in chosen(lines, "limits")[-1:]:
        got = f"{x['read_bytes_per_s'] / 1e12:.3f} TB/s, {(x['bf16_ops_per_s'] or 0) / 1e12:.0f} TFLOP/s"
        found.append(Row("the device's copy, and its bf16 product", "", got, None))
    prefill = chosen(lines, "costs", kind="prefill")
    for x in (x for x in prefill if x["rows"] == max(y["rows"] for y in prefill)):
        got = f"{x['median_ms']:.0f} ms, {x['compute_share']:.1%} of the bf16 product's rate, "
        got += f"peak {x['peak_bytes'] / 2**30:.1f} GiB"
        found.append(Row(f"first token of a prompt of {x['rows']}, {x['format']}", "", got, None))
    return found


def words(x: Mapping[str, Any]) -> str:
    """One record as a line for the terminal; "" for a record without such values."""
    kept = ("part", "shape", "engine", "format", "arm", "kind", "context", "rows", "batch")
    units = {"median_ms": "ms", "c": "times one row", "read_share": "of bandwidth", "tokens_per_s": "tokens/s"}
    said = [
        f"{found:.3g} {unit}"
        for name, unit in (units | {"speedup": "x"}).items()
        if isinstance(found := x.get(name), float)
    ]
    return ", ".join([*(f"{x[name]}" for name in kept if x.get(name) is not None), *said]) if said else ""


def text(lines: Lines) -> str:
    """The table for a terminal; of a dry run without verdicts."""
    dry = lines[0]["dry_run"]
    cells = [("what", "aim", "got", ""), *((r.what, r.aim, r.got, "" if dry else r.verdict) for r in rows(lines))]
    widths = [max(len(c[i]) for c in cells) for i in range(3)]
    made = ["  ".join([*(c[i].ljust(widths[i]) for i in range(3)), c[3]]).rstrip() for c in cells]
    lost = [f"left out: {x['what']}: {x['why']}" for x in lines[-1].get("left_out", ())]
    warning = ["DRY RUN: toy sizes on the CPU, these numbers mean nothing."] if dry else []
    return "\n".join([f"{lines[0]['run']}, commit {lines[0]['commit']}", *warning, *made, *lost])
