"""Speculation parts of `make bench-gpu`: twins of the embedded pair and head at 8B, and a 70B target in 4 bits."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

from gpu_clock import STAND_IN, Busy, busy, is_fault, wall
from gpu_models import DRAFT, HEAD, TARGET, forget, head_twin, twin
from gpu_parts import Tell, attempted
from gpu_plan import Sizes

from sameseed.config import CacheConfig, EngineConfig, SpecConfig
from sameseed.engine.build import assemble
from sameseed.engine.engine import Engine
from sameseed.measure import usage as memory
from sameseed.measure.bench import Job, Run, run_batch
from sameseed.measure.workload import DEFAULT_PROMPTS, read_prompts
from sameseed.models.decoder import Decoder
from sameseed.models.loader import load_tokenizer, resolve_model
from sameseed.ops import Ops
from sameseed.request import FinishReason, SamplingParams
from sameseed.scheme import QuantScheme

BLOCK = 16
PROMPT = 128  # most tokens of a prompt


@dataclass(frozen=True)
class Arm:
    """A way to decode: its speculation settings, the draft models it needs, and its batch sizes."""

    name: str
    spec: SpecConfig
    drafts: tuple[Any, ...] = ()
    batches: tuple[int, ...] = (1,)

    @property
    def num_draft(self) -> int:
        """The most draft tokens of a round."""
        return 0 if self.spec.method == "none" else self.spec.num_draft_tokens


class Stage:
    """A loaded target on which arms run, with the runs of plain decoding by batch size."""

    def __init__(self, sizes: Sizes, shape: str, target: Decoder, format: str, device: str, tell: Tell) -> None:
        self.sizes, self.target, self.device, self.tell = sizes, target, device, tell
        self.shared = {"part": "speculation", "shape": shape, "format": format}
        self.tokenizer = load_tokenizer(resolve_model(TARGET))
        self.plain: dict[int, Run] = {}

    def jobs(self, batch: int) -> list[Job]:
        """Prompts for one batch size, each with its sampling parameters."""
        count = max(batch, self.sizes.num_prompts)
        params = SamplingParams(max_tokens=self.sizes.max_tokens, ignore_eos=True)
        return [(tuple(p.encode(self.tokenizer))[-PROMPT:], params) for p in read_prompts(DEFAULT_PROMPTS, count)]

    def engine(self, arm: Arm, batch: int, jobs: Seq[Job]) -> Engine:
        """An engine for an arm. Its prefix cache is off, because prompts are run several times."""
        longest = max(len(prompt) for prompt, _ in jobs) + self.sizes.max_tokens + 64
        cache = CacheConfig(block_size=BLOCK, prefix_cache=False)
        config = EngineConfig(spec=arm.spec, max_num_seqs=batch, max_model_len=longest, device=self.device, cache=cache)
        return assemble(config, self.tokenizer, batch * -(-longest // BLOCK) + 8, self.target, arm.drafts)

    def run(self, arm: Arm, batch: int) -> None:
        """Write one record: tokens per second, acceptance, equality with plain decoding, the host's share of time."""
        jobs = self.jobs(batch)
        engine, run = self.engine(arm, batch, jobs), Run()
        first = jobs[:batch]
        for start in range(0, len(jobs) // batch * batch, batch):  # warm-up: compile and capture graphs for all rows
            run_batch(engine, jobs[start : start + batch], Run())
        forget_peak, first_tokens = memory.peak(self.device), 0.0
        for start in range(0, len(jobs) // batch * batch, batch):
            run_batch(engine, jobs[start : start + batch], run)
            first_tokens += max(c.metrics.time_to_first_token or 0.0 for c in run.completions[-batch:])
        failed = unfinished(run, self.sizes.max_tokens)
        if arm.spec.method == "none" and not failed:
            self.plain.setdefault(batch, run)
        plain = None if failed else self.plain.get(batch)  # no speed-up for a run whose texts ended early
        drafted, accepted = run.metrics.num_draft_tokens, run.metrics.num_accepted_tokens
        self.tell(
            {
                **self.shared, "arm": arm.name, "batch": batch, "k": arm.num_draft,
                "policy": arm.spec.policy, "options": dict(arm.spec.options),
                "num_prompts": len(run.completions), "seconds": run.seconds,
                "tokens_per_s": run.num_tokens / max(run.seconds, 1e-9), "failed": failed,
                "decode_tokens_per_s": (run.num_tokens - len(run.completions)) / max(run.seconds - first_tokens, 1e-9),
                "speedup": None if plain is None else plain.seconds / max(run.seconds, 1e-9),
                "equals_plain": None if plain is None else run.texts == plain.texts,
                "acceptance_rate": accepted / drafted if drafted else None,
                "tokens_per_round": run.num_tokens / max(run.num_steps, 1), "rounds": run.num_steps,
                "split_s": {"draft": run.times.draft, "target": run.times.target, "rest": run.overhead},
                "ttft_s": [c.metrics.time_to_first_token for c in run.completions],
                "peak_bytes": max(forget_peak, memory.peak(self.device)), **self.host(engine, first),
            }
        )  # fmt: skip

    def host(self, engine: Engine, jobs: Seq[Job]) -> dict[str, Any]:
        """The share of a run in which the device is idle: wall time of one batch against the profiler's busy time."""
        seconds = wall(lambda: run_batch(engine, jobs, Run()), self.device)
        if self.device == "cpu":
            run = Run()
            run_batch(engine, jobs, run)
            found = Busy(run.times.draft + run.times.target, STAND_IN)
            return {"host_share": run.overhead / run.seconds, "timed_by": found.source}
        try:
            found = busy(lambda: run_batch(engine, jobs, Run()), self.device)
        except RuntimeError as error:
            if is_fault(error):
                raise
            return {"host_share": None, "timed_by": str(error)[:120]}
        return {"host_share": 1 - found.seconds / seconds, "timed_by": found.source}


def unfinished(run: Run, max_tokens: int) -> int:
    """Number of completions that ended with an error or before `max_tokens`; such texts cannot be compared."""
    return sum(c.finish_reason is FinishReason.ERROR or len(c.token_ids) < max_tokens for c in run.completions)


def measure_speculation(sizes: Sizes, ops: Ops, device: str, tell: Tell, format: str, warm: bool = False) -> None:
    """Twins in one format: plain decoding, a draft model, a head; at batch 1, some at batch 4.

    `warm`: only compile the kernels, without records.
    """
    forget(device)
    quant = QuantScheme.parse(format)
    target = twin(TARGET, sizes.shape, quant, ops, device)
    few = tuple(b for b in (1, 4) if b in sizes.batches)
    stage = Stage(sizes, sizes.shape, target, format, device, tell)
    if not warm:
        with attempted("plain decoding at batch 1", tell):
            stage.run(Arm("plain", SpecConfig()), 1)  # first: the other arms are compared with it
    head = head_twin(sizes.shape, target, quant, ops, device)
    draft = twin(DRAFT, sizes.draft_shape, quant, ops, device)
    arms = [Arm("plain", SpecConfig(), batches=few)]
    for k, batches in ((3, few), (5, (1,)), (2, (1,))):
        chain = SpecConfig("eagle", HEAD, num_draft_tokens=k, options={"top_k": 1})
        arms.append(Arm("eagle", chain, (head,), batches))
    arms.append(Arm("eagle", SpecConfig("eagle", HEAD, num_draft_tokens=8), (head,), (1,)))
    for k, batches in ((4, few), (7, (1,))):
        arms.append(Arm("draft_model", SpecConfig("draft_model", DRAFT, num_draft_tokens=k), (draft,), batches))
    good = SpecConfig("eagle", HEAD, num_draft_tokens=8, policy="goodput", options={"top_k": 1})
    arms.append(Arm("eagle", good, (head,), few))
    run_arms(stage, arms, warm)


def measure_large(sizes: Sizes, ops: Ops, device: str, tell: Tell, warm: bool = False) -> None:
    """The large target in 4 bits: plain decoding, all two-level settings (head, draft model, n-grams), and cascades."""
    forget(device)
    sizes = replace(sizes, num_prompts=min(2, sizes.num_prompts))
    format = sizes.large_format
    quant = QuantScheme.parse(format)
    target = twin(TARGET, sizes.large_shape, quant, ops, device)
    draft = twin(DRAFT, sizes.draft_shape, quant, ops, device)
    stage = Stage(sizes, sizes.large_shape, target, format, device, tell)

    def cascade(k: int, below: int) -> Arm:
        spec = SpecConfig("cascade", DRAFT, num_draft_tokens=k, below=(SpecConfig("ngram", num_draft_tokens=below),))
        return Arm("cascade", spec, (draft,))

    def two(method: str, k: int, model: str | None = None, *drafts: Any) -> Arm:
        return Arm(method, SpecConfig(method, model, num_draft_tokens=k), drafts)

    arms = [Arm("plain", SpecConfig()), two("draft_model", 5, DRAFT, draft), cascade(8, 4)]
    arms += [two("draft_model", 8, DRAFT, draft), cascade(12, 4), two("draft_model", 3, DRAFT, draft)]
    run_arms(stage, arms, warm)
    head = head_twin(sizes.large_shape, target, quant, ops, device)
    chains = [
        Arm("eagle", SpecConfig("eagle", HEAD, num_draft_tokens=k, options={"top_k": 1}), (head,)) for k in (3, 5)
    ]
    rest = [*chains, two("eagle", 8, HEAD, head), two("ngram", 4), cascade(8, 2)]
    run_arms(stage, rest, warm)


def run_arms(stage: Stage, arms: Seq[Arm], warm: bool) -> None:
    """Run all arms at their batch sizes, batch 1 first. `warm`: a few tokens of each kind of arm, without records."""
    if warm:
        stage.sizes = replace(stage.sizes, max_tokens=4, num_prompts=1)
        kinds = {arm.spec.method: arm for arm in arms}
        for arm in kinds.values():
            jobs = stage.jobs(1)
            run_batch(stage.engine(arm, 1, jobs), jobs, Run())
        return
    done = {("plain", 1)} if 1 in stage.plain else set()
    for batch in sorted({b for arm in arms for b in arm.batches}):
        for arm in arms:
            if batch in arm.batches and (arm.name, batch) not in done:
                with attempted(f"{arm.name} k={arm.num_draft} at batch {batch}", stage.tell):
                    stage.run(arm, batch)
