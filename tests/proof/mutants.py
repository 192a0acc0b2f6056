"""The mutation test: each known wrong version of the code must be rejected by a check of the laws."""

import random
from dataclasses import dataclass, field, replace

from proof.mistakes import MISTAKES
from proof.mutant import Mutant
from proof.toy import toy_loaded
from sameseed.config import CacheConfig, EngineConfig, SpecConfig
from sameseed.laws.check import FAILED, PASSED, Effort, Result, run_check
from sameseed.laws.checks import CHECKS
from sameseed.laws.subject import Subject
from sameseed.ops import Ops, reference
from sameseed.request import SamplingParams
from sameseed.spec import sampling, verify
from sameseed.tokenizer import Tokenizer

VOCAB = 64
NOISE = 0.1  # of the toy draft: right often enough for A1, wrong often enough for all other checks
EFFORT = Effort(1e-9, 0.2)  # mutants are wrong enough to show at a fifth of the least sizes
MUTANTS = tuple(m for m in MISTAKES if sampling.HAS_NATIVE or not m.native)


def toy_subject(tokenizer, format="auto", kv="auto", backend="auto", device="cpu", draft="draft_model"):
    """A random toy target with its draft, and four short prompts."""
    spec = SpecConfig(draft, "toy", num_draft_tokens=4)
    config = EngineConfig(backend=backend, device=device, format=format, cache=CacheConfig(format=kv), spec=spec)
    rng = random.Random(5)
    prompts = [tuple(rng.randrange(3, VOCAB) for _ in range(n)) for n in (3, 5, 8, 6)]
    params = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=16, ignore_eos=True)
    loaded = toy_loaded(tokenizer, VOCAB, config, Ops(reference) if backend == "reference" else None, NOISE)
    return Subject(loaded, prompts, params, max_tokens=16, batch=4)


@dataclass
class Baseline:
    """Results of checks on correct code, each run once: only a check that passes there can judge a mutant."""

    tokenizer: Tokenizer
    results: dict[tuple[str, str], Result] = field(default_factory=dict)

    def result(self, name, settings, native=False):
        """The result of a check on correct code, on a toy with these settings and the sampler that mutants use."""
        key = (name, repr(sorted(settings.items())) + " native" * native)
        if key not in self.results:
            with Mutant("nothing is wrong", verify.verify, "row = 0", "row = 0", native=native).alive():
                self.results[key] = self.look(name, settings)
        return self.results[key]

    def look(self, name, settings):
        """Run one check on a fresh toy with these settings, with the code as it is now."""
        subject = toy_subject(self.tokenizer, **settings)
        checks = {c.id: c for c in CHECKS}
        if name in ("A1", "C2"):  # these judge what other checks left behind; A1 needs enough draft tokens
            more = 10 if name == "A1" else 1
            run_check(checks["L3"], subject, replace(EFFORT, least=EFFORT.least * more))
            if name == "C2":
                run_check(checks["P1"], subject, EFFORT)
        return run_check(checks[name], subject, EFFORT)


def caught(mutant, baseline):
    """Run the checks that should reject a mutant until one does: (whether one did, the last message).

    A check counts only if it passes on correct code. One that ends in an exception has not rejected the mutant.
    """
    said = ""
    for name in mutant.checks:
        right = baseline.result(name, mutant.settings, mutant.native)
        if right.status != PASSED:
            said = f"{name} does not pass without the mutant either: {right.found.findings} {right.found.notes}"
            continue
        with mutant.alive():
            result = baseline.look(name, mutant.settings)
        if result.status == FAILED:
            first = result.found.findings[0]
            said = f"{first.where}: {first.found}"[:300]
            if not result.found.unfinished:
                return True, said
    return False, said
