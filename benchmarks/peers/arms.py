"""The compared arms. An arm is an engine with a checkpoint and settings; the arms of a group are loaded together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch


@dataclass(frozen=True)
class Arm:
    """`engine`: a module in engines/. `checkpoint`: a kind of checkpoints.py. `gib`: estimated memory in GiB.

    `draft`: the draft model, as (role of the shape: "draft" or "head", kind of checkpoint).
    """

    name: str
    engine: str
    checkpoint: str
    gib: float
    options: Mapping[str, object] = field(default_factory=dict)
    draft: tuple[str, str] | None = None

    @property
    def ours(self) -> bool:
        return self.engine == "sameseed"

    @property
    def guesses(self) -> bool:
        """Whether the arm uses speculation."""
        return self.draft is not None or "way" in self.options


def sameseed(fmt: str, gib: float) -> Arm:
    """An arm of sameseed with weights quantized to `fmt` from the bfloat16 checkpoint at load."""
    return Arm(f"sameseed {fmt}", "sameseed", "hf-bf16", gib, {"format": fmt})


PACE = Arm("AMD PACE bf16", "amd_pace", "hf-bf16", 5.0)
# Each group fits in 24 GiB. sameseed is in every group, so that each ratio comes from interleaved measurements.
PLANS: dict[str, dict[str, list[Arm]]] = {
    "llama-3.2-1b": {
        "8 bits and fewer": [
            sameseed("w4a8", 2.5),
            sameseed("w8a8", 3.0),
            Arm("llama.cpp Q4_0", "llama_cpp", "gguf-q4_0", 1.5),
            Arm("llama.cpp Q4_K_M", "llama_cpp", "gguf-q4_k_m", 1.5),
            Arm("llama.cpp Q8_0", "llama_cpp", "gguf-q8_0", 2.0),
            Arm("OpenVINO int4", "openvino", "openvino-int4", 2.5),
            Arm("OpenVINO int8", "openvino", "openvino-int8", 3.0),
            Arm("vLLM w8a8", "vllm", "hf-w8a8", 5.0),
        ],
        "16 bits": [
            sameseed("bf16", 3.5),
            sameseed("bf16-a16", 3.5),
            sameseed("w4a8", 2.5),
            Arm("llama.cpp bf16", "llama_cpp", "gguf-bf16", 3.0),
            Arm("vLLM bf16", "vllm", "hf-bf16", 6.0),
            Arm("transformers bf16", "transformers", "hf-bf16", 4.0),
        ],
        "16 bits by AVX-512 BF16": [
            sameseed("bf16", 3.5),
            sameseed("bf16-a16", 3.5),
            sameseed("w4a8", 2.5),
            PACE,
        ],
    },
    "llama-3.1-8b": {
        "4 bits": [
            sameseed("w4a8", 6.0),
            Arm("llama.cpp Q4_0", "llama_cpp", "gguf-q4_0", 6.0),
            Arm("OpenVINO int4", "openvino", "openvino-int4", 7.0),
        ],
        "8 bits": [sameseed("w4a8", 6.0), Arm("vLLM w8a8", "vllm", "hf-w8a8", 12.0)],
    },
}


def guessing(arm: Arm, label: str, draft: tuple[str, str] | None = None, **options: object) -> Arm:
    """The same engine and checkpoint with the engine's own speculation added."""
    return replace(arm, name=f"{arm.name} + {label}", options={**arm.options, **options}, draft=draft)


OURS4, OURS16 = sameseed("w4a8", 1.5), sameseed("bf16", 3.5)
OURS = [
    OURS4,
    guessing(OURS4, "suffix + head", ("head", "hf-bf16"), way="suffix + {draft}", draft_format="w4a8"),
    guessing(OURS4, "draft model", ("draft", "hf-bf16"), way="{draft}", draft_format="w4a8"),
]
LLAMA = Arm("llama.cpp Q4_0", "llama_cpp", "gguf-q4_0", 1.5)
OPENVINO = Arm("OpenVINO int4", "openvino", "openvino-int4", 2.5)
VLLM = Arm("vLLM bf16", "vllm", "hf-bf16", 4.5)
PARALLEL = ("parallel", "hf-bf16")
TRANSFORMERS = Arm("transformers bf16", "transformers", "hf-bf16", 4.0)
DRAFT = ("draft", "hf-bf16")
# Texts with each engine's own speculation. The checkpoints are twins, which generate the embedded models' texts.
TEXTS: dict[str, dict[str, list[Arm]]] = {
    "twin-1b": {
        "llama.cpp": [
            *OURS,
            LLAMA,
            *(guessing(LLAMA, f"draft model k={k}", ("draft", "gguf-q8_0"), k=k) for k in (3, 6)),
            guessing(LLAMA, "n-grams", way="ngram-simple"),
        ],
        "OpenVINO": [
            *OURS,
            OPENVINO,
            *(guessing(OPENVINO, f"draft model k={k}", ("draft", "openvino-int8"), k=k) for k in (3, 6)),
            guessing(OPENVINO, "n-grams k=3", way="ngram", k=3),
        ],
        "vLLM": [
            *OURS[:2],
            VLLM,
            guessing(VLLM, "draft model k=3", DRAFT, way="draft_model", k=3),
            guessing(VLLM, "head k=3", ("head", "hf-bf16"), way="eagle3", k=3),
            guessing(VLLM, "n-grams k=3", way="ngram", k=3),
        ],
        "transformers": [
            OURS16,
            guessing(OURS16, "suffix + head", ("head", "hf-bf16"), way="suffix + {draft}"),
            TRANSFORMERS,
            guessing(TRANSFORMERS, "draft model", DRAFT),
            guessing(TRANSFORMERS, "n-grams k=10", way="ngram", k=10),
        ],
        "AMD PACE": [
            OURS16,
            guessing(OURS16, "suffix + head", ("head", "hf-bf16"), way="suffix + {draft}"),
            guessing(OURS16, "parallel draft", PARALLEL, way="{draft}"),
            PACE,
            guessing(PACE, "parallel draft k=4", PARALLEL, k=4),
        ],
    },
}
# For testing the scripts: the same arms on a small shape, with little memory each.
PLANS["tiny"] = {
    group: [replace(arm, gib=3.0 if arm.engine == "vllm" else 0.6) for arm in arms]
    for group, arms in PLANS["llama-3.2-1b"].items()
}
TEXTS["embedded"] = {
    group: [replace(arm, gib=3.0 if arm.engine == "vllm" else 0.7) for arm in arms]
    for group, arms in TEXTS["twin-1b"].items()
}
# A GGUF file of one's own (run.py --model FILE --draft FILE): llama.cpp reads it as stored, transformers in bf16.
STORED = Arm("sameseed as stored", "sameseed", "own", 0.0, {"format": "auto"})
BF16 = Arm("sameseed bf16", "sameseed", "own", 0.0, {"format": "bf16"})
FILE = Arm("llama.cpp", "llama_cpp", "own", 0.0)
DECODED = Arm("transformers bf16", "transformers", "own", 0.0)
OWN = ("draft", "own")
TEXTS["own"] = {
    "llama.cpp": [
        STORED,
        guessing(STORED, "auto", way="auto"),
        guessing(STORED, "draft model", OWN, way="{draft}"),
        FILE,
        *(guessing(FILE, f"draft model k={k}", OWN, k=k) for k in (3, 6)),
        guessing(FILE, "n-grams", way="ngram-simple"),
    ],
    "transformers": [
        BF16,
        guessing(BF16, "auto", way="auto"),
        guessing(BF16, "draft model", OWN, way="{draft}"),
        DECODED,
        guessing(DECODED, "draft model", OWN),
    ],
    "transformers, n-grams": [
        BF16,
        guessing(BF16, "n-grams", way="ngram"),
        DECODED,
        guessing(DECODED, "n-grams k=10", way="ngram", k=10),
    ],
}
ALL = {**PLANS, **TEXTS}


def choose(groups: Mapping[str, list[Arm]], patterns: list[str], formats: list[str]) -> dict[str, list[Arm]]:
    """The groups with the peers whose names match a pattern (all without patterns), and sameseed beside them.

    `formats`, if given, replace sameseed's formats. A group without any matching arm is left out.
    """
    chosen: dict[str, list[Arm]] = {}
    for group, arms in groups.items():
        ours = [arm for arm in arms if arm.ours]
        if formats:
            gib = max(arm.gib for arm in ours)
            ours = [sameseed(fmt, gib) for fmt in formats]
        peers = [arm for arm in arms if not arm.ours]
        if patterns:
            peers = [arm for arm in peers if any(fnmatch(arm.name.lower(), p.lower()) for p in patterns)]
            ours = [arm for arm in ours if peers or any(fnmatch(arm.name.lower(), p.lower()) for p in patterns)]
        if ours or peers:
            chosen[group] = [*ours, *peers]
    return chosen
