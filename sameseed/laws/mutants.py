"""L8: known-wrong versions, put in the place of the right ones in this process; each must be rejected by a check."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from sameseed import batch, scheme
from sameseed.config import CacheConfig, EngineConfig, SpecConfig
from sameseed.engine.running import Running
from sameseed.engine.scheduler import Scheduler
from sameseed.formats import int8
from sameseed.laws import (
    acceptance,
    closeness,
    kernels,
    law,
    logits,
    sampled,
    texts,
    wrong,
    wrong_kernels,
)
from sameseed.laws.check import FAILED, PASSED, Check, Effort, Result, run_check
from sameseed.laws.subject import Subject
from sameseed.laws.toy import toy_loaded
from sameseed.models.runner import ModelRunner
from sameseed.ops import Ops, reference
from sameseed.request import SamplingParams
from sameseed.spec import sampling, step
from sameseed.spec.verify import verify
from sameseed.tokenizer import Tokenizer

log = logging.getLogger("sameseed")
VOCAB = 64
NOISE = 0.1  # of the toy draft: it is right often enough for A1 and wrong often enough for all others
REFERENCE = {"backend": "reference"}  # where a kernel is replaced: its ops are Python
EFFORT = Effort(1e-9, 0.2)  # mutants are wrong enough to show in a fifth of the least sizes
CHECKS: dict[str, Check] = {
    c.id: c
    for c in (
        *kernels.CHECKS,
        *closeness.CHECKS,
        *logits.CHECKS,
        *texts.CHECKS,
        *sampled.CHECKS,
        *law.CHECKS,
        acceptance.ALARM,
        sampled.LEAKS,
    )
}


@dataclass(frozen=True)
class Mutant:
    """`owner.attribute` replaced by `wrong`; `checks`: those that should notice, the cheapest first.

    `settings`: of the toy that they look at. `breaks_down`: why it ends in an exception, where it can do nothing else.
    """

    name: str
    owner: Any
    attribute: str
    wrong: Any
    checks: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    breaks_down: str = ""


def _verify(flaw: str, name: str, *checks: str) -> Mutant:
    return Mutant(name, step, "verify", wrong.verify(flaw), checks)


def _commit(flaw: str) -> Mutant:
    return Mutant(f"commit {flaw}", ModelRunner, "commit", wrong.commit(flaw), ("C1", "L3", "L6"))


def _mask(flaw: str, name: str) -> Mutant:
    return Mutant(name, batch, "ancestor_masks", wrong.ancestor_masks(flaw), ("L2", "L3"), REFERENCE)


def _linear(flaw: str, name: str) -> Mutant:
    return Mutant(name, Ops, "linear", wrong_kernels.linear(flaw), ("L1",), REFERENCE)


MUTANTS: tuple[Mutant, ...] = (
    _verify("one too many", "accepts one token too many", "L3"),
    _verify("any child", "accepts any guess", "L3"),
    _verify("threshold", "accepts by a threshold instead of the rule", "L6", "L5"),
    _verify("no residual", "rejects by probability and forgets the residual", "L6", "L5"),
    _verify("row before", "takes the bonus token from the row before", "L3"),
    _verify("row by depth", "takes a node's row by its depth in the tree", "L3"),
    _verify("rows", "loses count of the rows of a batch", "L3"),
    _verify("path", "forgets the drafted path: noise and penalties are used twice", "L6"),
    _verify("seed by place", "mixes the place in the batch into the seed", "L6"),
    _verify("logprobs", "log-probabilities forget the drafted path", "L9"),
    _verify("reject all", "rejects every guess", "A1"),
    _commit("keeps a rejected row"),
    _commit("moves nothing"),
    _commit("to the place after"),
    _commit("from the place before"),
    _mask("shifted", "the tree mask is shifted by a bit"),
    _mask("siblings", "a node sees its siblings"),
    _mask("grandparents", "a node does not see its grandparents"),
    _mask("place", "a node's position is its place, not its depth"),
    Mutant("moves keys and forgets values", reference, "move_kv", wrong_kernels.move_kv, ("C1", "L3"), REFERENCE),
    Mutant("noise ignores the position", sampling, "noise_key", wrong.noise_key("position"), ("L7", "L5")),
    Mutant("noise ignores the seed", sampling, "noise_key", wrong.noise_key("seed"), ("L7", "L5s")),
    Mutant("noise ignores the token", sampling, "gumbel_noise", wrong.gumbel_noise("token"), ("L7", "L5s")),
    Mutant("noise is uniform, not Gumbel", sampling, "gumbel_noise", wrong.gumbel_noise("uniform"), ("L5s",)),
    Mutant("completions of one request share a seed", sampling, "derive_seed", wrong.derive_seed, ("L5s", "L7")),
    Mutant("top-k keeps one token too many", sampling, "survivors", wrong.survivors("top-k"), ("L5s",)),
    Mutant("top-p stops too early", sampling, "survivors", wrong.survivors("top-p"), ("L5s",)),
    Mutant("the temperature is applied twice", sampling, "survivors", wrong.survivors("temperature"), ("L5s",)),
    Mutant("penalties do not see the draft", sampling, "_penalize", wrong.penalize, ("L9", "L6")),
    _linear("split", "split-K: several rows add up in two halves"),
    _linear("odd rows", "rows at odd places add up backwards"),
    _linear("threads", "chunks of K depend on the number of threads"),
    Mutant("a product forgets the last column", Ops, "linear", wrong_kernels.linear("short"), ("B1",), REFERENCE),
    Mutant("a norm reads another row", reference, "rms_norm", wrong_kernels.rms_norm, ("L1",), REFERENCE),
    Mutant(
        "attention scales elsewhere for several rows",
        reference,
        "attention",
        wrong_kernels.attention,
        ("L1a",),
        REFERENCE,
    ),
    Mutant(
        "activations of a pass share a scale",
        scheme,
        "quantize_rows",
        wrong_kernels.quantize_rows,
        ("L1",),
        {"format": "w8a8", **REFERENCE},
    ),
    Mutant(
        "cached rows of a pass share a scale",
        int8,
        "quantize_rows",
        wrong_kernels.quantize_rows,
        ("C1", "L2"),
        {"kv": "int8", **REFERENCE},
    ),
    Mutant("a preempted sequence keeps its cache", Scheduler, "_preempt", wrong.preempt, ("L6",)),
    Mutant("a finished sequence keeps its blocks", Scheduler, "finish", wrong.finish, ("C2",)),
    Mutant("an end inside a round is missed", Running, "_end", wrong.late_end(Running._end), ("S1",)),
    Mutant("one token more than asked for", Running, "_end", wrong.long_end(Running._end), ("S1",)),
)

UNCHANGED = Mutant("nothing is wrong", step, "verify", verify, ())


@dataclass(frozen=True)
class Trial:
    """What became of a mutant: the check that rejected it, or None, and what was said last."""

    name: str
    caught_by: str | None
    said: str
    seconds: float


@contextmanager
def alive(mutant: Mutant) -> Iterator[None]:
    """The mutant in the place of the right version; the specification's sampler instead of the native one.

    Nothing is logged meanwhile: what engines say of drafts is of no use where the engine is wrong.
    """
    silent = log.disabled
    kept = [(mutant.owner, mutant.attribute, getattr(mutant.owner, mutant.attribute))]
    kept.append((sampling, "HAS_NATIVE", sampling.HAS_NATIVE))
    try:
        log.disabled, sampling.HAS_NATIVE = True, False
        setattr(mutant.owner, mutant.attribute, mutant.wrong)
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)
        log.disabled = silent


def toy_subject(
    tokenizer: Tokenizer, format: str = "auto", kv: str = "auto", backend: str = "auto", device: str = "cpu"
) -> Subject:
    """A random pair, and four short prompts."""
    spec = SpecConfig("draft_model", "toy", num_draft_tokens=4)
    config = EngineConfig(backend=backend, device=device, format=format, cache=CacheConfig(format=kv), spec=spec)
    rng = random.Random(5)
    prompts = [tuple(rng.randrange(3, VOCAB) for _ in range(n)) for n in (3, 5, 8, 6)]
    params = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=16, ignore_eos=True)
    # Fresh ops of the reference: they pick what is in its place now.
    loaded = toy_loaded(tokenizer, VOCAB, config, Ops(reference) if backend == "reference" else None, noise=NOISE)
    return Subject(loaded, prompts, params, max_tokens=16, batch=4)


@dataclass
class Sound:
    """Which checks pass where nothing is wrong: only these say anything of a mutant. Each is tried once.

    `base`: settings of all toys (backend, device), where a mutant's own do not say otherwise.
    """

    tokenizer: Tokenizer
    effort: Effort = EFFORT
    base: dict[str, Any] = field(default_factory=dict)
    results: dict[tuple[str, str], Result] = field(default_factory=dict)

    def result(self, name: str, settings: dict[str, Any]) -> Result:
        """What the check says of the toy with these settings."""
        key = (name, repr(sorted(settings.items())))
        if key not in self.results:
            with alive(UNCHANGED):
                self.results[key] = self.look(name, settings)
        return self.results[key]

    def look(self, name: str, settings: dict[str, Any]) -> Result:
        """One check of a fresh toy with these settings, as the code is now."""
        return _look(name, self.tokenizer, self.base | settings, self.effort)


def _look(name: str, tokenizer: Tokenizer, settings: dict[str, Any], effort: Effort) -> Result:
    """One check of a fresh toy."""
    subject = toy_subject(tokenizer, **settings)
    if name in ("A1", "C2"):  # these judge what other checks left behind; A1 wants guesses enough
        run_check(CHECKS["L3"], subject, replace(effort, least=effort.least * (10 if name == "A1" else 1)))
    return run_check(CHECKS[name], subject, effort)


def try_mutant(mutant: Mutant, sound: Sound) -> Trial:
    """Run the checks that should notice, until one does that passes without the mutant.

    A check that cannot be finished has noticed nothing, but where the mutant is declared to break down.
    """
    start = time.perf_counter()
    said = ""
    for name in mutant.checks:
        if sound.result(name, mutant.settings).status != PASSED:
            said = f"{name} does not pass without the mutant either"
            continue
        with alive(mutant):
            result = sound.look(name, mutant.settings)
        if result.status != FAILED:
            continue
        first = result.found.findings[0]
        said = f"{first.where}: {first.found}"[:300]
        if not result.found.unfinished or mutant.breaks_down:
            return Trial(mutant.name, name, said, time.perf_counter() - start)
    return Trial(mutant.name, None, said, time.perf_counter() - start)


def try_all(
    tokenizer: Tokenizer,
    mutants: Seq[Mutant] = MUTANTS,
    tick: Callable[[str, int, int], None] = lambda name, done, total: None,
    **base: Any,
) -> dict[str, Any]:
    """The mutation score, as plain data: how many were caught, and by which check; `base`: see Sound."""
    trials, sound = [], Sound(tokenizer, base=base)
    for i, mutant in enumerate(mutants):
        tick(f"mutant: {mutant.name}", i, len(mutants))
        trials.append(try_mutant(mutant, sound))
    return {
        "caught": sum(t.caught_by is not None for t in trials),
        "total": len(trials),
        "seconds": round(sum(t.seconds for t in trials), 2),
        "trials": [vars(t) for t in trials],
    }
