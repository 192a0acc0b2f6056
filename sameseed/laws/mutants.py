"""Mutants: the shipped code with one piece of its source replaced. Each must be rejected by a check of the laws."""

from __future__ import annotations
import __future__

import inspect
import logging
import random
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import CodeType, FunctionType
from typing import Any

from sameseed import batch, scheme
from sameseed.config import CacheConfig, EngineConfig, SpecConfig
from sameseed.engine.running import Running
from sameseed.engine.scheduler import Scheduler
from sameseed.errors import SameseedError
from sameseed.laws.check import FAILED, PASSED, Effort, Result, run_check
from sameseed.laws.checks import CHECKS
from sameseed.laws.subject import Subject
from sameseed.laws.toy import toy_loaded
from sameseed.models.runner import ModelRunner
from sameseed.ops import Ops, reference
from sameseed.request import SamplingParams
from sameseed.spec import sampling, verify
from sameseed.tokenizer import Tokenizer

log = logging.getLogger("sameseed")
VOCAB = 64
NOISE = 0.1  # of the toy draft: it is right often enough for A1 and wrong often enough for all others
REFERENCE = {"backend": "reference"}  # where a kernel is wrong: its ops are Python
EFFORT = Effort(1e-9, 0.2)  # mutants are wrong enough to show in a fifth of the least sizes


class MutantError(SameseedError):
    """A mutant that no longer fits the code: the text that it replaces is not there, or more than once."""


@dataclass(frozen=True)
class Mutant:
    """`function` with `old` in its source replaced by `new`; `checks`: those that should notice, the cheapest first.

    `settings`: of the toy that they look at.
    """

    name: str
    function: Any
    old: str
    new: str
    checks: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    def code(self) -> CodeType:
        """The compiled wrong version. Raises MutantError where the source has changed."""
        source = textwrap.dedent(inspect.getsource(self.function))
        if source.count(self.old) != 1:
            raise MutantError(
                f"mutant {self.name!r}: {self.old!r} occurs {source.count(self.old)} times in "
                f"{self.function.__qualname__}, not once; write the mutant anew"
            )
        flags = __future__.annotations.compiler_flag
        wrong = compile(source.replace(self.old, self.new), "<mutant>", "exec", flags, dont_inherit=True)
        return next(c for c in wrong.co_consts if isinstance(c, CodeType) and c.co_name == self.function.__name__)

    @contextmanager
    def alive(self) -> Iterator[None]:
        """The function runs the wrong version, whoever calls it; afterwards the right one again.

        Meanwhile the specification's sampler runs instead of the native one, and nothing is logged.
        """
        function: FunctionType = inspect.unwrap(self.function)
        kept = function.__code__, sampling.HAS_NATIVE, log.disabled
        try:
            function.__code__, sampling.HAS_NATIVE, log.disabled = self.code(), False, True
            yield
        finally:
            function.__code__, sampling.HAS_NATIVE, log.disabled = kept


_WALK = "_walk(path, table[row:end], seq, draft_tokens, parents, greedy, eos_token_ids)"
_CHOOSE = "token = choose(table[at], seq, path.tokens, eos_token_ids)"
_CHILD = "child = children.get((node, token))"
_AT = "at, position = 1 + node,"
_GUESS = """from sameseed.spec.sampling import probability
            sampled = () if seq.params.greedy else [t for p, t in children if p == node]
            good = [t for t in sampled if probability(table[at], seq, t) > {limit}]
            token = good[0] if good else choose(table[at], seq, path.tokens, eos_token_ids)"""
_UNIFORM = "__import__('random').Random(seq.seed * 7919 + position).random()"
_PRODUCT = "out = _by_row(lambda row: torch.mv(weight, row), x, w.shape[0])"
_SUM = "out = sum(_by_row(lambda x, w=p: torch.mv(w.contiguous(), x), r.contiguous(), w.shape[0]) for p, r in parts)"
_PARTS = "parts = list(zip(weight.split(width, 1), x.split(width, 1)))\n        " + _SUM


def _walk(name: str, old: str, new: str, *checks: str) -> Mutant:
    return Mutant(name, verify._walk, old, new, checks or ("L3",))


def _commit(name: str, old: str, new: str) -> Mutant:
    return Mutant(f"commit {name}", ModelRunner.commit, old, new, ("C1", "L3", "L6"))


def _mask(name: str, old: str, new: str) -> Mutant:
    return Mutant(name, batch.ancestor_masks, old, new, ("L2", "L3"), REFERENCE)


def _product(name: str, new: str, check: str = "L1") -> Mutant:
    return Mutant(name, reference.product, _PRODUCT, new, (check,), REFERENCE)


MUTANTS: tuple[Mutant, ...] = (
    _walk(
        "accepts one token too many",
        f"path.tokens.append(token)\n        {_CHILD}",
        f"{_CHILD}\n        if child is None and node < 0 and draft_tokens:\n"
        "            child, token = 0, draft_tokens[0]\n        path.tokens.append(token)",
    ),
    _walk("accepts any guess", _CHILD, "child = next((c for (p, _), c in children.items() if p == node), None)"),
    _walk(
        "accepts by a threshold instead of the rule",
        _CHOOSE,
        _GUESS.format(limit="0.25"),
        "L6",
        "L5",
    ),
    _walk(
        "rejects by probability and forgets the residual",  # min(1, p / q), here q = 1, without what is left of p
        _CHOOSE,
        _GUESS.format(limit=_UNIFORM),
        "L6",
        "L5",
    ),
    _walk("takes the bonus token from the row before", _AT, "at, position = max(node, 0),"),
    _walk("takes a node's row by its depth in the tree", _AT, "at, position = len(path.nodes),"),
    Mutant("loses count of the rows of a batch", verify.verify, "row = end", "row += 1 + len(path.nodes)", ("L3",)),
    _walk(
        "forgets the drafted path: noise and penalties are used twice",
        _CHOOSE,
        _CHOOSE.replace("path.tokens", "[]"),
        "L6",
    ),
    Mutant(
        "mixes the place in the batch into the seed",
        verify.verify,
        _WALK,
        f"seq.seed += b\n                {_WALK}\n                seq.seed -= b",
        ("L6",),
    ),
    _walk(
        "log-probabilities forget the drafted path",
        "token_logprob(table[at], seq, path.tokens,",
        "token_logprob(table[at], seq, [],",
        "L9",
    ),
    _walk("rejects every guess", _CHILD, "child = None", "A1"),
    _commit(
        "keeps a rejected row",
        "seq.num_cached = known + len(nodes[b])",
        "seq.num_cached = known + len(nodes[b])\n"
        "        last = nodes[b][-1] + 1 if nodes[b] else 0\n"
        "        if 0 < last < output.row_offsets[b + 1] - output.row_offsets[b] - num_pending[b]:\n"
        "            src.append(self._slot(seq, known + last))\n"
        "            dst.append(self._slot(seq, seq.num_cached - 1))",
    ),
    _commit("moves nothing", "if src:", "if False:"),
    _commit(
        "to the place after",
        "dst.append(self._slot(seq, known + place))",
        "dst.append(self._slot(seq, known + place + 1))",
    ),
    _commit(
        "from the place before",
        "src.append(self._slot(seq, known + node))",
        "src.append(self._slot(seq, known + node - 1))",
    ),
    _mask(
        "the tree mask is shifted by a bit", "return masks,", "return [m >> 1 | 1 << i for i, m in enumerate(masks)],"
    ),
    _mask("a node sees its siblings", "masks[parent] | 1 << i", "masks[parent] | (2 << i) - 1"),
    _mask("a node does not see its grandparents", "masks[parent] | 1 << i", "1 << parent | 1 << i"),
    _mask("a node's position is its place, not its depth", "depths[parent] + 1", "i"),
    Mutant(
        "moves keys and forgets values", reference.move_kv, "_flat(layer)", "_flat(layer)[::2]", ("C1", "L3"), REFERENCE
    ),
    Mutant("noise ignores the position", sampling.noise_key, "position * ", "0 * ", ("L7", "L5")),
    Mutant("noise ignores the seed", sampling.noise_key, "seed & _MASK", "0", ("L7", "L5s")),
    Mutant("noise ignores the token", sampling.gumbel_noise, "z += _ONE", "z[:] = _ONE", ("L7", "L5s")),
    Mutant("noise is uniform, not Gumbel", sampling.gumbel_noise, "for _ in range(2):", "for _ in range(0):", ("L5s",)),
    Mutant(
        "completions of one request share a seed",
        sampling.derive_seed,
        "_mix((seed + index * _GOLDEN) & _MASK) >> 1",
        "seed",
        ("L5s", "L7"),
    ),
    Mutant(
        "top-k keeps one token too many",
        sampling.survivors,
        "-params.top_k)[-params.top_k]",
        "-params.top_k - 1)[-params.top_k - 1]",
        ("L5s",),
    ),
    Mutant(
        "top-p stops too early", sampling.survivors, "weights, params.top_p", "weights, params.top_p * 0.9", ("L5s",)
    ),
    Mutant(
        "the temperature is applied twice",
        sampling.survivors,
        "_scaled(row, params)",
        "_scaled(row, params) / _divisor(params)",
        ("L5s",),
    ),
    Mutant("penalties do not see the draft", sampling._penalize, "if path:", "if False:", ("L9", "L6")),
    Mutant("penalties of a draft stay", sampling._penalize, "counts = counts.copy()", "pass", ("L9", "L6")),
    _product(
        "split-K: several rows add up in two halves",
        f"width = -(-weight.shape[1] // (1 + (len(x) > 1)))\n        {_PARTS}",
    ),
    _product(
        "rows at odd places add up backwards",
        "out = torch.stack([torch.mv(weight.flip(1), r.flip(0)) if t % 2 else torch.mv(weight, r.clone())"
        " for t, r in enumerate(x)])",
    ),
    _product(
        "chunks of K depend on the number of threads",
        f"width = -(-weight.shape[1] // torch.get_num_threads())\n        {_PARTS}",
    ),
    _product(
        "a product forgets the last column",
        "out = _by_row(lambda r: torch.mv(weight[:, :-1], r[:-1]), x, w.shape[0])",
        "B1",
    ),
    Mutant(
        "a norm reads another row",
        reference.rms_norm,
        "row.square().mean()",
        "(row + 1e-3 * x[-1]).square().mean()",
        ("L1",),
        REFERENCE,
    ),
    Mutant(
        "attention scales elsewhere for several rows",
        reference.attention,
        "torch.bmm(grouped, k.permute(1, 2, 0)) * scale",
        "torch.bmm(grouped * 0.3, k.permute(1, 2, 0)) * (scale / 0.3)"
        " if len(q) > 1 else torch.bmm(grouped, k.permute(1, 2, 0)) * scale",
        ("L1a",),
        REFERENCE,
    ),
    *(
        Mutant(
            name,
            scheme.quantize_rows,
            "x.abs().amax(-1, keepdim=True)",
            "x.abs().amax().expand(*x.shape[:-1], 1)",
            checks,
            settings | REFERENCE,
        )
        for name, checks, settings in (
            ("activations of a pass share a scale", ("L1",), {"format": "w8a8"}),
            ("cached rows of a pass share a scale", ("C1", "L2"), {"kv": "int8"}),
        )
    ),
    Mutant(
        "a preempted sequence keeps its cache",
        Scheduler._preempt,
        "self.blocks.release(seq)",
        # It goes on counting as many rows as reserving, which counts blocks, does not notice.
        "self.blocks.forget(seq)\n    self.blocks.trim(seq, 0)\n"
        "    seq.num_cached = min(seq.num_cached, (len(seq) - 1) % self.blocks.block_size)",
        ("L6",),
    ),
    Mutant("a finished sequence keeps its blocks", Scheduler.finish, "self.blocks.release(seq)", "pass", ("C2",)),
    Mutant(
        "an end inside a round is missed",
        Running.take,
        "if reason is not None:",
        "if reason is not None and base + taken == len(self.seq):",
        ("S1",),
    ),
    Mutant(
        "one token more than asked for",
        Running._end,
        "num_output >= params.max_tokens",
        "num_output > params.max_tokens",
        ("S1",),
    ),
)


@dataclass(frozen=True)
class Trial:
    """What became of a mutant: the check that rejected it, or None, and what was said last."""

    name: str
    caught_by: str | None
    said: str
    seconds: float


def toy_subject(
    tokenizer: Tokenizer, format: str = "auto", kv: str = "auto", backend: str = "auto", device: str = "cpu"
) -> Subject:
    """A random pair, and four short prompts."""
    spec = SpecConfig("draft_model", "toy", num_draft_tokens=4)
    config = EngineConfig(backend=backend, device=device, format=format, cache=CacheConfig(format=kv), spec=spec)
    rng = random.Random(5)
    prompts = [tuple(rng.randrange(3, VOCAB) for _ in range(n)) for n in (3, 5, 8, 6)]
    params = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=16, ignore_eos=True)
    loaded = toy_loaded(tokenizer, VOCAB, config, Ops(reference) if backend == "reference" else None, NOISE)
    return Subject(loaded, prompts, params, max_tokens=16, batch=4)


@dataclass
class Baseline:
    """Which checks pass on the code as it is: only these say anything of a mutant. Each is tried once.

    `base`: settings of all toys (backend, device), where a mutant's own do not say otherwise.
    """

    tokenizer: Tokenizer
    base: dict[str, Any] = field(default_factory=dict)
    results: dict[tuple[str, str], Result] = field(default_factory=dict)

    def result(self, name: str, settings: dict[str, Any]) -> Result:
        """What the check says of the toy with these settings, under the sampler that mutants run."""
        key = (name, repr(sorted(settings.items())))
        if key not in self.results:
            with Mutant("nothing is wrong", verify.verify, "row = 0", "row = 0").alive():
                self.results[key] = self.look(name, settings)
        return self.results[key]

    def look(self, name: str, settings: dict[str, Any]) -> Result:
        """One check of a fresh toy with these settings, as the code is now."""
        subject = toy_subject(self.tokenizer, **self.base | settings)
        checks = {c.id: c for c in CHECKS}
        if name in ("A1", "C2"):  # these judge what other checks left behind; A1 wants guesses enough
            more = 10 if name == "A1" else 1
            run_check(checks["L3"], subject, replace(EFFORT, least=EFFORT.least * more))
        return run_check(checks[name], subject, EFFORT)


def try_mutant(mutant: Mutant, baseline: Baseline) -> Trial:
    """Run the checks that should notice, until one does that passes without the mutant.

    A check that cannot be finished has noticed nothing.
    """
    start, said = time.perf_counter(), ""
    for name in mutant.checks:
        if baseline.result(name, mutant.settings).status != PASSED:
            said = f"{name} does not pass without the mutant either"
            continue
        with mutant.alive():
            result = baseline.look(name, mutant.settings)
        if result.status == FAILED:
            first = result.found.findings[0]
            said = f"{first.where}: {first.found}"[:300]
            if not result.found.unfinished:
                return Trial(mutant.name, name, said, time.perf_counter() - start)
    return Trial(mutant.name, None, said, time.perf_counter() - start)


def try_all(
    tokenizer: Tokenizer,
    mutants: Seq[Mutant] = MUTANTS,
    tick: Callable[[str, int, int], None] = lambda name, done, total: None,
    **base: Any,
) -> dict[str, Any]:
    """The mutation score, as plain data: how many were caught, and by which check; `base`: see Baseline."""
    trials, baseline = [], Baseline(tokenizer, base=base)
    for i, mutant in enumerate(mutants):
        tick(f"mutant: {mutant.name}", i, len(mutants))
        trials.append(try_mutant(mutant, baseline))
    return {
        "caught": sum(t.caught_by is not None for t in trials),
        "total": len(trials),
        "seconds": round(sum(t.seconds for t in trials), 2),
        "trials": [vars(t) for t in trials],
    }
