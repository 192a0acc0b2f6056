"""Speculation parts of `make bench-gpu`: twins of the embedded pair and head at 8B, and a 70B target in 4 bits."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

from gpu_models import DRAFT, HEAD, TARGET, forget, head_twin, twin
from gpu_passes import Tell, attempted
from gpu_sizes import Sizes

from sameseed.config import CacheConfig, EngineConfig, SpecConfig
from sameseed.engine.build import Loaded, assemble
from sameseed.measure import usage as memory
from sameseed.measure.bench import Job, Run, run_batch
from sameseed.measure.workload import DEFAULT_PROMPTS, read_prompts
from sameseed.models.decoder import Decoder
from sameseed.models.loader import load_tokenizer, resolve_model
from sameseed.ops import Ops
from sameseed.request import FinishReason, SamplingParams
from sameseed.scheme import QuantScheme

BLOCK, PROMPT = 16, 128  # tokens of a block; most tokens of a prompt


@dataclass(frozen=True)
class Arm:
    """A way to decode: its speculation settings, the draft models it needs, and its batch sizes."""

    spec: SpecConfig
    drafts: tuple[Any, ...] = ()
    batches: tuple[int, ...] = (1,)

    @property
    def name(self) -> str:
        """The drafter, or "plain"."""
        return "plain" if self.spec.method == "none" else self.spec.method


class Stage:
    """A loaded target on which arms run, with the runs of plain decoding by batch size."""

    def __init__(self, sizes: Sizes, shape: str, target: Decoder, format: str, device: str, tell: Tell) -> None:
        self.sizes, self.target, self.device, self.tell = sizes, target, device, tell
        self.shared = {"part": "speculation", "shape": shape, "format": format}
        self.tokenizer = load_tokenizer(resolve_model(TARGET))
        self.plain: dict[int, Run] = {}

    def run_all(self, arms: Seq[Arm], warm: bool) -> None:
        """Run all arms at their batch sizes, batch 1 first. `warm`: a few tokens of each kind, without records."""
        if warm:
            self.sizes = replace(self.sizes, max_tokens=4, num_prompts=1)
            arms = [replace(arm, batches=(1,)) for arm in {arm.name: arm for arm in arms}.values()]
        for batch in sorted({b for arm in arms for b in arm.batches}):
            for arm in (arm for arm in arms if batch in arm.batches):
                with attempted(f"{arm.name} k={arm.spec.num_draft_tokens} at batch {batch}", self.tell):
                    self.run(arm, batch, warm)

    def run(self, arm: Arm, batch: int, warm: bool) -> None:
        """Write one record: tokens per second, acceptance, equality with plain decoding."""
        params = SamplingParams(max_tokens=self.sizes.max_tokens, ignore_eos=True)
        prompts = read_prompts(DEFAULT_PROMPTS, max(batch, self.sizes.num_prompts))
        jobs: list[Job] = [(tuple(p.encode(self.tokenizer))[-PROMPT:], params) for p in prompts]
        jobs = jobs[: len(jobs) // batch * batch]
        longest = max(len(prompt) for prompt, _ in jobs) + params.max_tokens + 64
        cache = CacheConfig(block_size=BLOCK, prefix_cache=False)  # off: prompts run twice
        config = EngineConfig(spec=arm.spec, max_num_seqs=batch, max_model_len=longest, device=self.device, cache=cache)
        engine = assemble(Loaded(config, self.tokenizer, batch * -(-longest // BLOCK) + 8, self.target, arm.drafts))
        run, first_tokens = Run(), 0.0
        for start in range(0, len(jobs), batch):  # warm-up: compile, and capture graphs for all rows
            run_batch(engine, jobs[start : start + batch], Run())
        if warm:
            return
        for start in range(0, len(jobs), batch):
            run_batch(engine, jobs[start : start + batch], run)
            first_tokens += max(c.metrics.time_to_first_token or 0.0 for c in run.completions[-batch:])
        ended = [c.finish_reason is FinishReason.ERROR or len(c.token_ids) < params.max_tokens for c in run.completions]
        if arm.name == "plain" and not any(ended):
            self.plain.setdefault(batch, run)
        plain = None if any(ended) else self.plain.get(batch)  # no speed-up for a run whose outputs ended early
        drafted, accepted = run.metrics.num_draft_tokens, run.metrics.num_accepted_tokens
        self.tell(
            {
                **self.shared, "arm": arm.name, "batch": batch, "policy": arm.spec.policy, "failed": sum(ended),
                "k": 0 if arm.name == "plain" else arm.spec.num_draft_tokens, "options": dict(arm.spec.options),
                "num_prompts": len(jobs), "seconds": run.seconds, "tokens_per_s": run.num_tokens / run.seconds,
                "decode_tokens_per_s": (run.num_tokens - len(jobs)) / max(run.seconds - first_tokens, 1e-9),
                "speedup": None if plain is None else plain.seconds / run.seconds,
                "equals_plain": None if plain is None else run.texts == plain.texts,
                "acceptance_rate": accepted / drafted if drafted else None,
                "tokens_per_round": run.num_tokens / max(run.num_steps, 1), "rounds": run.num_steps,
                "split_s": {"draft": run.times.draft, "target": run.times.target, "rest": run.overhead},
                "peak_bytes": memory.peak(self.device),
            }
        )  # fmt: skip


def chain(head: Any, k: int, batches: tuple[int, ...] = (1,), policy: str = "fixed") -> Arm:
    """The head's chains."""
    return Arm(SpecConfig("eagle", HEAD, num_draft_tokens=k, policy=policy, options={"top_k": 1}), (head,), batches)


def measure_speculation(sizes: Sizes, ops: Ops, device: str, tell: Tell, format: str, warm: bool = False) -> None:
    """Twins in one format: plain decoding, a draft model, a head; at batch 1, some at batch 4."""
    forget(device)
    quant, few = QuantScheme.parse(format), tuple(b for b in (1, 4) if b in sizes.batches)
    target = twin(TARGET, sizes.shape, quant, ops, device)
    head = head_twin(sizes.shape, target, quant, ops, device)
    draft = twin(DRAFT, sizes.draft_shape, quant, ops, device)
    arms = [Arm(SpecConfig(), batches=few), chain(head, 3, few), chain(head, 5), chain(head, 2)]
    arms += [Arm(SpecConfig("eagle", HEAD, num_draft_tokens=8), (head,)), chain(head, 8, few, "goodput")]
    arms += [Arm(SpecConfig("draft_model", DRAFT, num_draft_tokens=k), (draft,), b) for k, b in ((4, few), (7, (1,)))]
    Stage(sizes, sizes.shape, target, format, device, tell).run_all(arms, warm)


def measure_large(sizes: Sizes, ops: Ops, device: str, tell: Tell, warm: bool = False) -> None:
    """The large target in 4 bits: plain decoding, a draft model, a head, and cascades of n-grams above the draft."""
    forget(device)
    sizes, quant = replace(sizes, num_prompts=min(2, sizes.num_prompts)), QuantScheme.parse(sizes.large_format)
    target = twin(TARGET, sizes.large_shape, quant, ops, device)
    draft = twin(DRAFT, sizes.draft_shape, quant, ops, device)
    head = head_twin(sizes.large_shape, target, quant, ops, device)
    arms = [Arm(SpecConfig()), *(Arm(SpecConfig("draft_model", DRAFT, num_draft_tokens=k), (draft,)) for k in (5, 8))]
    for k, n in ((8, 4), (12, 4)):
        arms.append(
            Arm(
                SpecConfig("cascade", DRAFT, num_draft_tokens=k, below=(SpecConfig("ngram", num_draft_tokens=n),)),
                (draft,),
            )
        )
    arms += [chain(head, 3), chain(head, 5)]
    Stage(sizes, sizes.large_shape, target, sizes.large_format, device, tell).run_all(arms, warm)
