"""What `make bench-gpu` measures: shapes, formats, passes, and the parts of a run with their times."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
for package, folder in (("sameseed", ROOT), ("sameseed_lab", ROOT / "packages" / "lab")):
    if importlib.util.find_spec(package) is None:  # a plain checkout, without anything installed
        sys.path.insert(0, str(folder))

KINDS = ("limits", "costs", "speculation", "large", "transformers")  # in order of importance


@dataclass(frozen=True)
class Sizes:
    """Shapes by name, formats in order of importance, and the passes of a run. `seconds`: of each kind of part."""

    shape: str = "llama-3.1-8b"
    draft_shape: str = "llama-3.2-1b"
    large_shape: str = "llama-3.1-70b"
    formats: tuple[str, ...] = ("w4a16", "bf16", "fp8-a8", "w8a8", "w4a8-qoq")
    large_format: str = "w4a16"
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    contexts: tuple[int, ...] = (512, 8192, 32768)
    batches: tuple[int, ...] = (1, 4, 16, 64)
    batch_context: int = 1024
    prompts: tuple[int, ...] = (128, 2048)
    max_tokens: int = 64
    num_prompts: int = 4
    minutes: float = 8.5
    seconds: tuple[float, ...] = (8, 24, 38, 50, 30)

    def passes(self) -> list[Any]:
        """All passes of one format: chains as in verification, decode batches, prefills."""
        from sameseed.measure.passes import Pass

        found = [Pass("chain", context, rows) for context in self.contexts for rows in self.rows]
        found += [Pass("batch", self.batch_context, batch) for batch in self.batches]
        return found + [Pass("prefill", 0, length) for length in self.prompts]


DRY = Sizes(
    *("embedded",) * 3, formats=("w4a16", "bf16"), rows=(1, 2, 8), contexts=(32, 96), batches=(1, 4), batch_context=32,
    prompts=(16,), max_tokens=12, num_prompts=2, minutes=4.0, seconds=(20, 15, 25, 25, 40),
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One part of a run, in a process of its own. `arguments`: of its function, besides the common ones."""

    kind: str
    name: str
    seconds: float
    arguments: Mapping[str, Any] = field(default_factory=dict)


def parts(sizes: Sizes, kinds: Seq[str]) -> list[Part]:
    """The parts of a run, in order of importance: late ones are left out when time runs out."""
    seconds = dict(zip(KINDS, sizes.seconds))
    formats = {"costs": sizes.formats, "speculation": tuple(dict.fromkeys((sizes.large_format, "bf16")))}
    found = []
    for kind in (k for k in KINDS if k in kinds):
        for name in formats.get(kind, ("",)):
            found.append(Part(kind, f"{kind} {name}".strip(), seconds[kind], {"format": name} if name else {}))
    return found
