"""`sameseed info`: what this machine can run and what its registries hold."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence as Seq
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

import sameseed
from sameseed import devices, registry, scheme
from sameseed.cli.console import show_table, stdout_console
from sameseed.cli.flags import InfoArgs
from sameseed.cli.options import Parsed
from sameseed.cost.experts import counted, in_words
from sameseed.errors import ModelLoadError
from sameseed.formats import _losses
from sameseed.measure.shapes import SHAPES
from sameseed.memory import available_memory
from sameseed.models.config import EMBEDDED
from sameseed.models.head_config import is_head, read_head_config
from sameseed.models.loader import load_tokenizer, named_tokens, read_config, resolve_model
from sameseed.plan.memory import memory
from sameseed.plan.paper import sheet
from sameseed.report import record, table as layout
from sameseed.scheme import QuantScheme
from sameseed.spec.drafter import Drafter

FITS = "w8a8"  # the format of the models to suggest: it loses little
TEXT = 4096  # tokens of context that must fit for a model to be suggested
KV_FORMS = {
    "KEYS/VALUES": "formats apart, e.g. int8/bf16; no kernel: the reference, slow",
    "NEAR+FAR": "piecewise, e.g. bf16+int4, in the memory of NEAR; no kernel: the reference, slow",
}
WIDTH = 4096  # values in a row of weights, for the bits per weight
SHOWN_TOKENS = 8  # special tokens without a role that are listed


def run(parsed: Parsed[InfoArgs]) -> int:
    """Collect and print."""
    args = parsed.args
    found = collect() if args.model is None else {"models": {args.model: _model(args.model)}}
    if args.json:
        print(json.dumps(found))
        return 0
    console = stdout_console()
    if args.model is None:
        console.print(f"[bold]sameseed {found['version']}[/] ({found['commit']})\n")
        summary = Table.grid(padding=(0, 2))
        for name, text in _summary(found):
            summary.add_row(name, escape(text))
        console.print(summary)
    for title, head, rows in _tables(found):
        cells = [[escape(str(cell)) for cell in row] for row in rows]
        table = layout.table(f"\n{title}", head or ("", ""), cells, left=range(len(head) or 2))
        table.show_header = bool(head)
        show_table(table)
    return 0


def collect() -> dict[str, Any]:
    """Everything that `info` says, as plain data."""
    return {
        "version": sameseed.__version__,
        "commit": record.commit(),
        "machine": record.machine(),
        "devices": devices.describe(),
        "start": _start(),
        **registries(),
        "models": {name: _model(name) for name in EMBEDDED if name != "embedded-target"},
    }


def _start() -> dict[str, Any]:
    """Free memory, and the known shapes that fit in it in `FITS`, each with its longest text, the largest first."""
    free, fits = available_memory(), []
    for name in SHAPES:
        own = sheet(name, FITS)
        longest = memory(own, (), free, TEXT, (1,)).max_context[1]
        fits += [(own.weights, name, longest)] if longest >= TEXT else []
    return {"free_bytes": free, "fits": {name: longest for _, name, longest in sorted(fits, reverse=True)}}


def _summary(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    machine, gpus, fits = found["machine"], found["devices"]["gpus"], found["start"]["fits"]
    yield "CPU", f"{machine['cpu']}, {machine['cores']} cores, {machine['isa'] or 'no native kernels'}"
    for gpu in gpus:
        free = f"{gpu['free_bytes'] / 2**30:.1f} of {gpu['memory_bytes'] / 2**30:.1f} GiB free"
        yield "GPU", f"{gpu['device']}: {gpu['name']}, capability {gpu['capability']}, {gpu['multiplies']}, {free}"
    if not gpus:
        yield "GPU", f"none: {found['devices']['reason']}"
    yield "memory", f"{found['start']['free_bytes'] / 2**30:.1f} GiB free"
    able = [b for b in found["backends"].values() if b["runs_here"]]
    loss = _losses.likely(QuantScheme.parse(FITS))
    yield "formats", ", ".join(sorted({f for b in able for f in b["weights"]}))
    largest = next(iter(fits), None)
    if largest is None:
        yield "fits", "the embedded model; known shapes take more memory, even in 8 bits"
    else:
        yield "fits", f"in 8 bits (--format {FITS}: {loss}), the largest first: {', '.join(fits)}"
    yield "begin", "sameseed demo" + (f", then: sameseed estimate --shape {largest}" if largest else "")


def registries() -> dict[str, dict[str, Any]]:
    """Backends, formats and drafters, and the names that --format takes besides the formats'."""
    found: dict[str, dict[str, Any]] = {"backends": {}, "formats": {}, "presets": {}, "drafters": {}}
    for name, module in registry.loaded("ops").items():
        known = getattr(module, "has_kernel", lambda *_: False)  # K-quants have kernels for int8 activations only
        integer = {n for n in registry.loaded("formats") if known(n, "int8")}
        found["backends"][name] = {
            "runs_here": module.unavailable() is None,
            "reason": module.unavailable(),
            "devices": sorted(getattr(module, "DEVICES", ("cpu", "cuda"))),
            "row_invariant": module.row_invariant,
            "weights": sorted(module.LINEAR_FORMATS | integer),
            "kv_cache": sorted(module.KV_FORMATS),
        }
    for name, module in registry.loaded("formats").items():
        fmt = module.FORMAT
        bits = round(fmt.bits_per_weight(WIDTH, scheme.own_args(fmt.groups, WIDTH)), 3) if fmt.weights else None
        what = _first_line(module.__doc__)
        found["formats"][name] = {"what": what, "bits_per_weight": bits, "kv_cache": fmt.kv_dtype is not None}
    for name, (weights, activations) in scheme.PRESETS.items():
        found["presets"][name] = {"weights": weights, "activations": activations or "float32"}
    found["kv_forms"] = dict(KV_FORMS)
    for name, module in registry.loaded("drafters").items():
        options = {f.name: f.default for f in dataclasses.fields(module.DRAFTER.Options)}
        facts = {"what": _first_line(module.__doc__), "needs": _needs(module.DRAFTER), "options": options}
        found["drafters"][name] = facts
    return found


def _needs(drafter: type[Drafter]) -> str:
    """What a drafter needs: a model of its own, drafters below it (whose drafts are counted separately)."""
    own = {"": "", "model": "a draft model", "head": "a draft head", "target": "the target's weights"}[drafter.owns]
    least, most = drafter.num_below
    below = "" if most == 0 else "a drafter below" if most == 1 else "two drafters or more below"
    return " and ".join(filter(None, (own, below if least else below and f"maybe {below}")))


def _first_line(text: str | None) -> str:
    return (text or "").strip().splitlines()[0] if text else ""


def _model(name: str) -> dict[str, Any]:
    """Shape and size of an embedded model, and the path of its card; for a missing model the reason."""
    folder = resolve_model(name)
    try:
        head = read_head_config(folder) if is_head(folder) else None
        config = read_config(folder) if head is None else head.layer
    except ModelLoadError as error:
        return {"missing": str(error)}
    parameters = config.num_parameters
    if head is not None:  # the embedding is the target's; so is an LM head for all tokens
        whole = head.draft_vocab_size == config.vocab_size
        borrowed = ("embed_tokens.weight", "d2t", *(["lm_head.weight"] if whole else []))
        parameters = sum(math.prod(shape) for n, shape in head.tensors().items() if n not in borrowed)
    card, experts = folder / "README.md", in_words(counted(config, folder))
    licence = re.search(r"^license: *(\S+)", card.read_text("utf-8") if card.exists() else "", re.MULTILINE)
    return {
        "parameters": parameters,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "heads": f"{config.num_heads}/{config.num_kv_heads}",
        "vocabulary": config.vocab_size,
        "context": config.max_model_len,
        "bytes": sum(f.stat().st_size for f in ([folder] if folder.is_file() else folder.glob("*.safetensors"))),
        "card": str(card) if card.exists() else None,
        "license": licence and licence[1],
        **({"distinct_experts": experts} if experts else {}),
        **({} if head is not None else _named(folder)),
    }


def _named(folder: Path) -> dict[str, list[str]]:
    """The model's end tokens and special tokens, and where each is named."""
    tokenizer, (ends, roles) = load_tokenizer(folder), named_tokens(folder)
    others = [t for t in tokenizer.special_ids if t not in roles]
    shown = {t: roles.get(t, ["no role"]) for t in (*sorted(roles), *others[:SHOWN_TOKENS])}
    found = {"end_tokens": ends, "special_tokens": shown}
    lines = {k: [f"{t} {tokenizer.token(t)!r} ({'; '.join(v)})" for t, v in each.items()] for k, each in found.items()}
    lines["special_tokens"] += [f"and {len(others) - SHOWN_TOKENS} more"] if len(others) > SHOWN_TOKENS else []
    return lines


Sheet = tuple[str, Seq[str], Seq[Seq[object]]]


def _tables(found: Mapping[str, Any]) -> Iterator[Sheet]:
    """Title, column heads (none: two columns without heads) and rows of each table."""
    if "machine" in found:
        yield "machine", (), [(k, "none" if v is None else v) for k, v in found["machine"].items()]
        heads = ("name", "runs here", "device", "row invariant", "weights", "KV cache")
        rows: list[Seq[object]] = []
        for name, b in found["backends"].items():
            here = "yes" if b["runs_here"] else f"no: {b['reason'].partition(';')[0]}"
            same = "yes" if b["row_invariant"] else "no"
            rows.append((name, here, " ".join(b["devices"]), same, " ".join(b["weights"]), " ".join(b["kv_cache"])))
        yield "backends", heads, rows
        rows = []
        for name, f in found["formats"].items():
            bits = "" if f["bits_per_weight"] is None else f"{f['bits_per_weight']:g}"
            rows.append((name, f["what"].removeprefix(f"Format {name}: "), bits, "yes" if f["kv_cache"] else "no"))
        yield "formats", ("name", "what", "bits a weight", "KV cache"), rows
        title = "more names for --format (variants: docs/guides/formats.md)"
        presets = [(n, p["weights"], p["activations"]) for n, p in found["presets"].items()]
        yield title, ("name", "weights", "activations"), presets
        yield "more names for --kv-format", ("name", "what"), list(found["kv_forms"].items())
        drafters = [(n, d["what"], d["needs"], json.dumps(d["options"])) for n, d in found["drafters"].items()]
        yield "drafters", ("name", "what", "needs", "options (--draft-options)"), drafters
    for name, model in found["models"].items():
        yield f"model {name}", (), [(k, "\n".join(v) if isinstance(v, list) else v) for k, v in model.items() if v]
