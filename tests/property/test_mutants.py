"""The checks of the laws can fail: wrong versions of the code, each one line off, do not get past them.

A mutant is the function's own source with one piece replaced, so that it cannot fall behind the code. The checks are
the laws' in small: a few prompts on the reference backend, whose attention takes any mask.
"""

from __future__ import annotations
import __future__

import inspect
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import textbook
from lawkit import Pair, TreeDrafter, knowing, make_engine, random_prompts, run

from sameseed import batch, scheme
from sameseed.engine.scheduler import Scheduler
from sameseed.formats import int8
from sameseed.models.runner import ModelRunner
from sameseed.request import Completion, SamplingParams, Sequence
from sameseed.spec import sampling, step, verify

PROMPTS = random_prompts(4, seed=1, longest=10)
GREEDY = {"max_tokens": 14, "seed": 3, "ignore_eos": True}
ASKED = {
    "greedy": SamplingParams(**GREEDY),
    # Few tokens, so that they recur and the penalties bite.
    "penalties": SamplingParams(**GREEDY, temperature=1.0, frequency_penalty=1.5, allowed_token_ids=tuple(range(8))),
    # The probabilities too, bit for bit: a token may survive a wrong scale.
    "logprobs": SamplingParams(**GREEDY, logprobs=0),
}
Check = Callable[[Pair, dict[Any, Any]], None]


@pytest.fixture(scope="module")
def truth(reference_pair: Pair) -> dict[Any, Any]:
    """Plain texts, written before anything is broken."""
    known = {}
    for kv in ("fp32", "int8"):
        for name, asked in ASKED.items():
            known[kv, name] = outcome(run(make_engine(reference_pair, kv=kv), PROMPTS, asked))
    return known


def outcome(completions: list[Completion]) -> list[Any]:
    return [(c.token_ids, c.logprobs) for c in completions]


def law_1(pair: Pair, truth: dict[Any, Any], names: Seq[str] = ("greedy", "penalties"), kv: str = "fp32") -> None:
    """Trees with right and wrong paths, greedy and with penalties: the plain texts."""
    for name in names:
        plain = truth[kv, name]
        tree = TreeDrafter(knowing(PROMPTS, [tokens for tokens, _ in plain]), pair.target.config.vocab_size, seed=8)
        engine = make_engine(pair, k=8, block=4, kv=kv, drafter=tree)
        assert outcome(run(engine, PROMPTS, ASKED[name])) == plain


def law_1_int8(pair: Pair, truth: dict[Any, Any]) -> None:
    """The same on a cache with scales."""
    law_1(pair, truth, ["logprobs"], kv="int8")


def law_1_preempted(pair: Pair, truth: dict[Any, Any]) -> None:
    """A cache so small that sequences are preempted; and law 3 at the end."""
    engine = make_engine(pair, block=4, tokens=32, max_len=28)
    assert outcome(run(engine, PROMPTS, ASKED["greedy"])) == truth["fp32", "greedy"]
    assert engine.scheduler.num_preemptions > 0


def law_2(pair: Pair, truth: dict[Any, Any]) -> None:
    """Texts of two tokens from equal logits are uniform over the pairs."""
    row, params = np.zeros(4, np.float32), SamplingParams(temperature=1.0)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(3000):
        seq = Sequence(0, [1], params, seed)
        for _ in range(2):
            seq.token_ids.append(sampling.choose(row, seq, [], ()))
        counts[tuple(seq.output_token_ids)] += 1
    uniform = dict.fromkeys(product(range(4), range(4)), 1 / 16)
    assert textbook.chi_square_p(counts, uniform) > 1e-3


@dataclass(frozen=True)
class Mutant:
    """`function` with `old` replaced by `new`, put in the place of `owner.name`; `check` must notice."""

    function: Any
    old: str
    new: str
    owner: Any
    check: Check = law_1

    @contextmanager
    def alive(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        source = textwrap.dedent(inspect.getsource(self.function))
        assert source.count(self.old) == 1, "the code has changed: write this mutant anew"
        scope = dict(vars(sys.modules[self.function.__module__]))
        flags = __future__.annotations.compiler_flag
        exec(compile(source.replace(self.old, self.new), "<mutant>", "exec", flags=flags, dont_inherit=True), scope)
        with patch.context() as context:
            context.setattr(self.owner, self.function.__name__, scope[self.function.__name__])
            yield


CHILD = "child = children.get((node, token))"
MUTANTS = {
    "verify accepts one too many": Mutant(
        verify._walk, CHILD, CHILD[:-1] + ", 0 if node < 0 and draft_tokens else None)", verify
    ),
    "verify follows any child": Mutant(
        verify._walk, CHILD, "child = next((c for (p, _), c in children.items() if p == node), None)", verify
    ),
    "verify takes the bonus from the row before": Mutant(
        verify._walk, "at, position = 1 + node,", "at, position = max(node, 0),", verify
    ),
    "verify takes a node's row by its depth": Mutant(
        verify._walk, "at, position = 1 + node,", "at, position = len(path.nodes),", verify
    ),
    "verify loses count of the rows": Mutant(verify.verify, "row = end", "row += 1 + len(path.nodes)", step),
    "verify forgets the path": Mutant(
        verify._walk, "choose(table[at], seq, path.tokens, eos", "choose(table[at], seq, [], eos", verify
    ),
    "commit moves nothing": Mutant(ModelRunner.commit, "if src:", "if False:", ModelRunner),
    "commit moves to the place after": Mutant(
        ModelRunner.commit,
        "dst.append(self._slot(seq, known + place))",
        "dst.append(self._slot(seq, known + place + 1))",
        ModelRunner,
    ),
    "commit moves from the place before": Mutant(
        ModelRunner.commit,
        "src.append(self._slot(seq, known + node))",
        "src.append(self._slot(seq, known + node - 1))",
        ModelRunner,
    ),
    "commit keeps a rejected row": Mutant(
        ModelRunner.commit,
        "seq.num_cached = known + len(nodes[b])",
        "seq.num_cached = known + len(nodes[b]) + 1",
        ModelRunner,
    ),
    "a node sees its siblings": Mutant(
        batch.ancestor_masks, "masks[parent] | 1 << i", "masks[parent] | (2 << i) - 1", batch
    ),
    "a node does not see its grandparents": Mutant(
        batch.ancestor_masks, "masks[parent] | 1 << i", "1 << parent | 1 << i", batch
    ),
    "a node's position is its place": Mutant(batch.ancestor_masks, "depths[parent] + 1", "i", batch),
    "noise ignores the depth of a draft": Mutant(
        sampling.choose,
        "seq.seed, len(seq) + len(path))",
        "seq.seed, len(seq))",
        verify,
    ),
    "penalties of a draft stay": Mutant(sampling._penalize, "counts = counts.copy()", "pass", sampling),
    "penalties ignore the draft": Mutant(sampling._penalize, "if path:", "if False:", sampling),
    "noise ignores the position": Mutant(sampling.noise_key, "position * ", "0 * ", sampling, law_2),
    "noise ignores the token": Mutant(sampling.gumbel_noise, "z += _ONE", "z[:] = _ONE", sampling, law_2),
    "noise ignores the seed": Mutant(sampling.noise_key, "seed & _MASK", "0", sampling, law_2),
    "noise is uniform, not Gumbel": Mutant(
        sampling.gumbel_noise, "for _ in range(2):", "for _ in range(0):", sampling, law_1
    ),
    "a scale is shared by the rows of a pass": Mutant(
        scheme.quantize_rows,
        "x.abs().amax(-1, keepdim=True)",
        "x.abs().amax().expand(*x.shape[:-1], 1)",
        int8,
        law_1_int8,
    ),
    "a preempted sequence keeps its cache": Mutant(
        Scheduler._preempt, "self.blocks.release(seq)", "self.blocks.trim(seq, 0)", Scheduler, law_1_preempted
    ),
    "a finished sequence keeps its blocks": Mutant(
        Scheduler.finish, "self.blocks.release(seq)", "pass", Scheduler, law_1_preempted
    ),
}
CHECKS = {m.check.__name__: m.check for m in MUTANTS.values()}


@pytest.mark.parametrize("name", CHECKS)
def test_the_code_passes(reference_pair: Pair, truth: dict[Any, Any], name: str) -> None:
    CHECKS[name](reference_pair, truth)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_does_not(
    reference_pair: Pair, truth: dict[Any, Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    mutant = MUTANTS[name]
    if mutant.function is sampling.gumbel_noise:  # the specification's; test_sampling ties the native noise to it
        monkeypatch.setattr(sampling, "HAS_NATIVE", False)
    # Wrong rows may also lie beyond the sequence's blocks: an IndexError notices them as well.
    with mutant.alive(monkeypatch), pytest.raises((AssertionError, IndexError)):
        mutant.check(reference_pair, truth)
