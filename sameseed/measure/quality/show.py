"""Variants (a model in number formats), their records (`EVAL_SCHEMA`), and tables and plots of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from sameseed import scheme, store
from sameseed.errors import ConfigError
from sameseed.measure.quality.tasks import EvalSettings, Quality
from sameseed.models.loader import resolve_model
from sameseed.report import record
from sameseed.report.plot import Panel, Series, draw, source
from sameseed.report.schemas import EVAL_SCHEMA
from sameseed.report.table import table
from sameseed.scheme import QuantScheme

WEIGHTS = ("*.safetensors", "*.gguf", "*.bin")


@dataclass(frozen=True)
class Variant:
    """A model in a weight format and a KV cache format. "auto": the checkpoint's format, and the cache's to match."""

    model: str
    format: str = "auto"
    kv_format: str = "auto"

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Parse MODEL[@FORMAT[@KVFORMAT]]; a path that exists is a model. Raises ConfigError or RegistryError."""
        parts = [text] if Path(text).exists() else text.split("@")
        if len(parts) > 3 or not all(parts):
            raise ConfigError(f"a variant is MODEL, MODEL@FORMAT or MODEL@FORMAT@KVFORMAT, got {text!r}")
        found = cls(*parts)
        QuantScheme.parse(found.format)
        if found.kv_format != "auto":
            scheme.kv_formats(found.kv_format)
        return found

    @property
    def label(self) -> str:
        """Short name for tables and messages."""
        parts = (record.model_name(self.model), self.format, f"kv {self.kv_format}")
        return " ".join(p for p in parts if p not in ("auto", "kv auto"))

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of LLM."""
        return {"format": self.format, "kv_format": self.kv_format}

    def disk_bytes(self) -> int:
        """Bytes of the checkpoint's weight files on disk, regardless of the format in which they are loaded."""
        folder = resolve_model(self.model)
        files = [folder] if folder.is_file() else next((f for p in WEIGHTS if (f := sorted(folder.glob(p)))), [])
        return sum(f.stat().st_size for f in files)


ANSWERS = ("limit", "chat", "temperature", "top_p", "max_tokens", "seed", "window", "stride")  # settings in a record


def make_record(
    variant: Variant,
    asked: EvalSettings,
    quality: Quality,
    config: Mapping[str, Any],
    comparison: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The record of one evaluated model. `config`: further settings that the results depend on."""
    return {
        **record.origin(EVAL_SCHEMA),
        "run": record.now(),
        "config": {
            "label": variant.label,
            "model": record.model_name(variant.model),
            "model_digest": store.weights_key(resolve_model(variant.model)),
            "asked_format": variant.format,
            "asked_kv_format": variant.kv_format,
            "tasks": list(asked.tasks),
            **{name: getattr(asked, name) for name in ANSWERS},
            "text_tokens": asked.tokens,
            **config,
        },
        **quality.as_dict(asked.seed),
        "comparison": comparison,
    }


LEGEND = (
    "in brackets: 95 % bootstrap intervals (over questions; of perplexity over stretches of text; of ratios paired). "
    "weights: in memory; as target: drafted for; as draft: drafting for the first column; per draft: tokens that a "
    "draft yields, the target's own one included"
)
NAMES_WIDTH, COLUMN_WIDTH = 24, 21  # characters of the names' column, and of a variant's (its intervals are widest)
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Figure:
    """A value for a table: number format `form`, value, 95 % interval, and the text `missing` shown without a value."""

    form: str
    value: float | None
    interval: Seq[float] | None = None
    missing: str = ""

    @classmethod
    def of(cls, form: str, found: Record | None, name: str = "value", missing: str = "not finite") -> Figure:
        """Make it from a part of a record; the whole part may be missing (None)."""
        return cls(form, None) if found is None else cls(form, found[name], found["interval"], missing)

    def text(self, between: str = " ") -> str:
        """The value with its interval in brackets, as text."""
        if self.value is None:
            return self.missing
        if self.interval is None:
            return f"{self.value:{self.form}}"
        low, high = self.interval
        return f"{self.value:{self.form}}{between}({low:{self.form}} .. {high:{self.form}})"


def figures(record: Record) -> dict[str, Figure]:
    """All figures of one record of a comparison, by name, in the order of the table."""
    c, p = record["comparison"], record["perplexity"]
    found = {
        "checkpoint MB": Figure(".1f", c["disk_bytes"] / 1e6),
        "weights MB": Figure(".1f", c["weight_bytes"] / 1e6),
        "KV bytes a token": Figure(".0f", c["kv_bytes_per_token"]),
        "perplexity": Figure.of(".2f", p),
        "  over the baseline's": Figure.of(".4f", c["perplexity_ratio"]),
        "bits a byte": Figure(".4f", p and p["bits_per_byte"]),
    }
    for t in record["tasks"]:
        found[t["task"]] = Figure.of(".1%", t)
        found[f"  {t['task']} less the baseline's"] = Figure.of("+.1%", c["differences"].get(t["task"]))
    found["tokens/s"] = Figure(".1f", c["tokens_per_s"])
    found["tokens/s drafted for"] = Figure(".1f", c["drafted_tokens_per_s"])
    for role in ("as target", "as draft"):
        its = c[role.replace(" ", "_")]
        found[f"accepted {role}"] = Figure.of(".1%", its, "acceptance_rate", "nothing drafted")
        found[f"  per draft {role}"] = Figure(".2f", its and its["mean_acceptance_length"])
    return found


def comparison(records: Seq[Record], width: int) -> list[Table]:
    """Tables of all variants' figures, one column per variant, split to fit a terminal of `width` characters."""
    first = records[0]
    turns = "interleaved" if first["comparison"]["interleaved"] else "one after the other: not all fit in memory"
    title = f"against {first['config']['label']}; draft: {first['config']['draft']}; speed {turns}"
    count = max(2, (width - NAMES_WIDTH) // COLUMN_WIDTH)
    tables = []
    for i in range(0, len(records), count):
        each = [figures(r) for r in records[i : i + count]]
        rows = [(name, *(its[name].text("\n") for its in each)) for name in each[0]]
        heads = ["", *(r["config"]["label"].replace(" ", "\n") for r in records[i : i + count])]
        tables.append(table(title, heads, [row for row in rows if any(row[1:])]))
    return tables


def quality(record: Record) -> Table:
    """Table of one model's perplexity and task scores, from its record."""
    c, p = record["config"], record["perplexity"]
    heads = ("task", "metric", "value (95 % interval)", "n", "")
    made = table(f"{c['model']}, {c['format']}, KV {c['kv_format']}", heads, left=(0, 1, 4))
    if p is not None:
        about = f"window {p['window']}, stride {p['stride']}"
        if p["bits_per_byte"] is not None:
            about = f"{p['bits_per_byte']:.4f} bits a byte; {about}"
        made.add_row(p["text"], "perplexity", Figure.of(".3f", p).text(), f"{p['tokens']} tokens", about)
    for t in record["tasks"]:
        parts = [f"chance {t['chance']:.1%}"] if "chance" in t else []
        parts += [f"with ####: {t['strict']:.1%}"] if "strict" in t else []
        parts += [f"{t['without_letter']} without a letter"] if t.get("without_letter") else []
        parts += [f"{name} {count}" for name, count in t.get("errors", {}).items()]
        made.add_row(t["task"], t["metric"], Figure.of(".1%", t).text(), str(t["num_questions"]), "; ".join(parts))
    return made


def notes(record: Record) -> list[str]:
    """Notes that belong to a record's values."""
    p = record["perplexity"]
    found = [f"perplexity: {note}" for note in (p["notes"] if p else [])]
    return found + [f"{t['task']}: {note}" for t in record["tasks"] for note in t["notes"]]


Bars = tuple[str, Mapping[str, str], float | None]  # title; figure names by legend label; value at which bars begin
ACCEPTED = {"as target": "accepted as target", "as draft of the baseline": "accepted as draft"}
SIZES = {"weights": "weights MB", "checkpoint": "checkpoint MB"}
BARS: tuple[Bars, ...] = (
    ("Perplexity over the baseline's", {"": "  over the baseline's"}, 1.0),
    ("Bits a byte", {"": "bits a byte"}, None),
    ("Drafted tokens that are accepted", ACCEPTED, None),
    ("Size in memory and on disk, MB", SIZES, None),
    ("Tokens/s, one sequence", {"plain": "tokens/s", "with the draft": "tokens/s drafted for"}, None),
)


def plot(records: Seq[Record], path: Path) -> tuple[Path, Path]:
    """Plot a comparison's records as PNG and SVG; returns their paths."""
    first, each = records[0], {str(r["config"]["label"]): figures(r) for r in records}
    p, c = first["perplexity"], first["config"]
    about = [f"{p['text']}: {p['tokens']} tokens, window {p['window']}, stride {p['stride']}"] if p is not None else []
    note = source(first, *about, f"{c['num_prompts']} prompts", "lines: 95 % intervals")
    tasks: Bars = ("Share of questions answered right", {t["task"]: t["task"] for t in first["tasks"]}, None)
    panels = [_panel(each, *bars) for bars in (*BARS[:2], tasks, *BARS[2:])]
    return draw(panels, path, f"against {c['label']}; draft: {c['draft']}", note, columns=2)


def _panel(
    each: Mapping[str, Mapping[str, Figure]], title: str, shown: Mapping[str, str], start: float | None
) -> Panel:
    series, form = [], ""
    for label, name in shown.items():
        bars = [(variant, f.value, f) for variant, its in each.items() for f in [its[name]] if f.value is not None]
        form = bars[0][2].form if bars else form
        spread = [(f.interval[0], f.interval[1]) if f.interval else (value, value) for _, value, f in bars]
        series.append(Series(label, [(variant, value) for variant, value, _ in bars], spread=spread))
    return Panel(title, "", series, "across", level=start, form=form)
