"""The setup of a study: its models, prompts, lengths, threads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sameseed import ops
from sameseed.errors import ConfigError
from sameseed.fields import check_ranges, flag, within
from sameseed.measure.prompt_sets import Prompt
from sameseed.measure.workload import DEFAULT_PROMPTS, prompts_name, read_prompts
from sameseed.memory import available_memory
from sameseed.plan.paper import sheet
from sameseed.report.record import model_name
from sameseed_lab.twin import find_shape, make_twin

GIB = 2**30
PER_PROMPT, MOST = 1024, 32768  # tokens of the text for perplexity: for each of --num-prompts, and in all
Progress = Callable[[str, int, int], None]
SIZES = ("small", "real", "true")
TARGET, HEAD = "embedded-target", "embedded-head"
SMALL: Mapping[str, str] = {"target": TARGET, "1b": "embedded-draft", "head": HEAD}
CODER = "Qwen/Qwen2.5-Coder-{}-Instruct-GGUF:Q4_K_M"
REAL: Mapping[str, str] = {"target": CODER.format("1.5B"), "1b": CODER.format("0.5B")}
TRUE: Mapping[str, tuple[str, str]] = {  # by role: the twin's shape, and the small model whose function it computes
    "target": ("llama-3.1-8b", TARGET),
    "1b": ("llama-3.2-1b", "embedded-draft"),
    "3b": ("llama-3.2-3b", "embedded-draft"),
    "head": ("llama-3.1-8b", HEAD),
}


def role_name(role: str, size: str) -> str:
    """The name of a role's model in tables and plots: the embedded model's at size "small", else the role."""
    return SMALL.get(role, role) if size == "small" else role


@dataclass(frozen=True)
class StudySetup:
    """The settings of a study's run. Raises ConfigError for a value out of range."""

    size: str  # small: the embedded family; true: its twins at true shapes, in `out`/twins; real: `models`
    out: Path
    prompts: Path | None = None
    num_prompts: int = within(12, 1)
    max_tokens: int = within(64, 1)
    repeat: int = within(3, 1)
    threads: int | None = within(None, 1)
    data: Path | None = None  # folder of evaluation sets, for cells that measure quality
    problems: int | None = within(None, 1)  # how many of HumanEval are taken
    models: Mapping[str, str] = field(default_factory=lambda: REAL)  # by role a model, or a drafter's name
    progress: Progress = field(default=lambda title, done, total: None, compare=False)

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise ConfigError(f"--size is {', '.join(SIZES[:-1])} or {SIZES[-1]}, got {self.size!r}")
        check_ranges(self, flag)

    @property
    def names(self) -> Mapping[str, str]:
        """Names of the models for tables and plots, by role."""
        if self.size == "real":
            return {role: model_name(model).removesuffix(".gguf") for role, model in self.models.items()}
        return {role: role_name(role, self.size) for role in (SMALL if self.size == "small" else TRUE)}

    def read(self) -> list[Prompt]:
        """The prompts. Raises ConfigError."""
        return read_prompts(self.prompts or DEFAULT_PROMPTS, self.num_prompts)

    def text(self) -> str:
        """The joined texts of all prompts without later turns, also those beyond `num_prompts`. Raises ConfigError."""
        return "\n\n".join(p.said for p in read_prompts(self.prompts or DEFAULT_PROMPTS) if not p.then)

    @property
    def text_tokens(self) -> int:
        """The tokens of `text` whose perplexity is measured, at most."""
        return min(MOST, PER_PROMPT * self.num_prompts)

    @property
    def prompts_name(self) -> str:
        return prompts_name(self.prompts) if self.prompts else "packaged prompts"

    @property
    def cores(self) -> int:
        return self.threads or ops.available_cores()

    def source(self, role: str) -> str:
        """The model of a role; for a twin the small model behind it. Raises ConfigError if there is no such role."""
        models = {"small": SMALL, "real": self.models}.get(self.size) or {r: small for r, (_, small) in TRUE.items()}
        if role not in models:
            raise ConfigError(f"no {role!r} among the models; name one with --{'head' if role == 'head' else 'draft'}")
        return models[role]

    def model(self, role: str) -> str:
        """Name or folder of a role's model. A missing twin is made first. Raises what `make_twin` raises."""
        of = self.source(role)
        if self.size != "true":
            return of
        shape = TRUE[role][0]
        folder = self.out / "twins" / f"{role}-{shape}"
        if not folder.exists():

            def report(done: int, total: int) -> None:
                self.progress(f"twin {shape} (million weights)", done // 10**6, total // 10**6)

            make_twin(find_shape(shape), of, folder, name=shape, progress=report)
        return str(folder)

    def check_memory(self, loaded: Seq[tuple[str, str]]) -> None:
        """Raise ConfigError if these twins do not fit in free memory. `loaded`: their roles and weight formats."""
        if self.size != "true":
            return
        models = {(TRUE[r][0], form): sheet(TRUE[r][0], form).weights for r, form in loaded if r != "head"}
        others = GIB * (2 if any(role == "head" for role, _ in loaded) else 1)
        need, free = sum(models.values()) + others, available_memory()
        if need > free:
            parts = ", ".join(f"{shape} {form} {n / GIB:.1f}" for (shape, form), n in models.items())
            what = f"{parts}, caches and heads {others / GIB:.0f}"
            raise ConfigError(f"{need / GIB:.1f} GiB are needed ({what}) and {free / GIB:.1f} are free")

    def digest(self, cell: Any) -> str:
        """Hash of everything that determines a cell's results, except the code and the machine."""
        texts = [(p.id, *p.facts) for p in self.read()]
        facts = [type(cell).__name__, asdict(cell), self.size, self.max_tokens, self.repeat, self.cores, texts]
        facts += [dict(self.models)] if self.size == "real" else []
        task = getattr(cell, "task", "")
        facts += [self.problems] if self.problems and task == "humaneval" else []
        facts += [self.text_tokens] if task == "perplexity" else []
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
