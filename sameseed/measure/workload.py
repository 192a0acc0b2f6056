"""Workloads and arms: the prompts of a measurement, their sampling settings, and the ways to decode them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from sameseed.config import ENDING, GOODPUT_DRAFT_TOKENS, SpecConfig, draft_text
from sameseed.engine.levels import drafter_class, resolve
from sameseed.errors import ConfigError, RequestError
from sameseed.fields import parse
from sameseed.lines import Line, read_lines, read_text
from sameseed.measure import prompt_sets
from sameseed.measure.prompt_sets import Prompt
from sameseed.measure.quality.data import take
from sameseed.models.decoder import Decoder
from sameseed.report.record import model_name
from sameseed.request import MAX_SEED, SamplingParams

ASSETS = Path(__file__).resolve().parent.parent / "assets"
DEFAULT_PROMPTS = ASSETS / "prompts.jsonl"


def prompts_name(source: Path) -> str:
    """The name of prompts in records: a file's name, or a prompt set's name with its task."""
    found = prompt_sets.parse(source)
    return source.name if found is None else "/".join(filter(None, found[:2]))


def read_prompts(source: Path, limit: int | None = None) -> list[Prompt]:
    """Read prompts from a file or a published set.

    A .jsonl file has {"prompt"} or {"messages"} per line, with optional "id" and "domain"; a .txt file has one prompt
    per line. Sets are named as `prompt_sets.parse` reads them. `limit`: number of prompts to take, spread evenly so
    that every domain stays in. Raises ConfigError with the line, or with what to fetch.
    """
    found = prompt_sets.parse(source)
    prompts = _read_file(source) if found is None else prompt_sets.read(*found)
    if limit is not None and limit < 1:
        raise ConfigError(f"--num-prompts must be at least 1, got {limit}")
    return take(prompts, limit)


def _read_file(path: Path) -> list[Prompt]:
    if path.suffix == ".jsonl":
        prompts = [_prompt(line) for line in read_lines(path, "messages", "prompt")]
    else:
        remedy = f"give a .jsonl or .txt file, or a set ({', '.join(prompt_sets.SETS)})"
        lines = read_text(path, "prompts", remedy).split("\n")
        prompts = [Prompt(str(n), "text", line) for n, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ConfigError(f"{path} holds no prompts; write one a line")
    return prompts


def _prompt(line: Line) -> Prompt:
    name, domain = str(line.row.get("id", line.number)), str(line.row.get("domain", ""))
    if line.kind == "prompt":
        return Prompt(name, domain, line.value)
    if not all(isinstance(m, dict) for m in line.value):
        raise ConfigError(f'{line.where}: messages must be a list of {{"role", "content"}} objects')
    return Prompt(name, domain, None, tuple(line.value), where=line.where)


def check_batches(sizes: Seq[int], num_prompts: int) -> None:
    """Raise ConfigError if the prompts do not fill the largest of these batches: it would be measured smaller."""
    if (most := max(sizes)) > num_prompts:
        raise ConfigError(f"batch {most} of {num_prompts} prompts: give {most} prompts or more, or a smaller batch")


@dataclass(frozen=True)
class Workload:
    """Encoded prompts with their sampling parameters, and their name for records."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    batch_size: int = 1  # how many run together
    stops: tuple[tuple[str, ...], ...] = ()  # of each prompt, besides those of `params`; empty: none

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"a batch size must be at least 1, got {self.batch_size}")
        if self.prompts:
            check_batches((self.batch_size,), len(self.prompts))
        if self.params.seed is None:
            raise RequestError("a measurement needs a seed: without one no two runs can be compared; give --seed")

    def batches(self) -> Iterator[list[tuple[tuple[int, ...], SamplingParams]]]:
        """Prompts with their parameters, `batch_size` at a time. Each prompt has its own seed."""
        seed = self.params.seed or 0
        stops = self.stops or ((),) * len(self.prompts)
        jobs = [
            (p, replace(self.params, seed=(seed + i) % (MAX_SEED + 1), stop=(*self.params.stop, *stop)))
            for i, (p, stop) in enumerate(zip(self.prompts, stops, strict=True))
        ]
        for start in range(0, len(jobs), self.batch_size):
            yield jobs[start : start + self.batch_size]


def without_past(spec: SpecConfig) -> SpecConfig:
    """The same levels with option `past` set to "none" wherever a drafter has that option and it is not set."""

    def one(level: SpecConfig) -> SpecConfig:
        known = {f.name for f in fields(drafter_class(level).Options)}
        return replace(level, options={"past": "none", **level.options}) if "past" in known else level

    return spec.with_each(one)


@dataclass(frozen=True, eq=False)  # compared by identity: each arm is its own dictionary key
class Arm:
    """One way to decode: a label, and its speculation settings (method "none" is plain decoding).

    Drafters that learn from past requests do not use them here unless their options ask for it. All arms generate the
    same texts, so a drafter would find each text in what another arm or an earlier repetition left.
    """

    label: str
    spec: SpecConfig

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec", without_past(self.spec))

    @property
    def plain(self) -> bool:
        return self.spec.method == "none"


PLAIN = Arm("plain", SpecConfig())


def arms(specs: Seq[SpecConfig], ks: Seq[int] | None) -> list[Arm]:
    """Plain decoding, then each draft at each draft length; without any, at those usual for its policy.

    A draft model that is a head gets the drafter of heads. Raises ConfigError for a length out of range, ModelLoadError
    for a draft that is missing.
    """
    made = [PLAIN]
    for spec in (resolve(spec).spec for spec in specs):
        if spec.method == "none":
            continue
        for k in ks or ((GOODPUT_DRAFT_TOKENS,) if spec.policy in ENDING else (3, 5, 7)):
            label = f"{draft_text(spec)} k={k}" + (f" p>={spec.confidence:g}" if spec.confidence is not None else "")
            label = f"{label} {spec.format}" if spec.format != "auto" else label
            label = f"{label} {spec.policy}" if spec.policy != "fixed" else label
            label = f"{label} overlap {spec.overlap}" if spec.overlap else label
            made.append(Arm(label, replace(spec, num_draft_tokens=k)))
    return made


def spec_as_dict(spec: SpecConfig) -> dict[str, object]:
    """A SpecConfig with all options and levels as plain data, without paths. Raises ConfigError or RegistryError."""
    return {
        "draft": spec.method,
        "draft_model": None if spec.model is None else model_name(spec.model),
        "draft_format": spec.format,
        "num_draft_tokens": 0 if spec.method == "none" else spec.num_draft_tokens,
        "confidence": spec.confidence,
        "policy": spec.policy,
        "draft_options": asdict(parse(drafter_class(spec).Options, spec.options)),
        **({"overlap": spec.overlap} if spec.overlap else {}),
        **({"below": [spec_as_dict(b) for b in spec.below]} if spec.below else {}),
    }


def stored(model: Decoder, asked: str, kv_format: str) -> dict[str, object]:
    """Size, formats and backend of a loaded model for a record; for "auto" the formats of its matrices: "int8+q4_1"."""
    formats = "+".join(sorted({m.format for m in model.weights.matrices}))
    return {
        "num_parameters": model.config.num_parameters,
        "format": formats if asked == "auto" else asked,
        "kv_format": kv_format,
        "backend": model.ops.name,
    }
