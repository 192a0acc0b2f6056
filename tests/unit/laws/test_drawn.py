"""Mistakes drawn by a generator: which ones exist, and what becomes of each."""

from __future__ import annotations

import ast
import inspect
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from proof import judge
from proof.drawn import AREAS, DrawnMutant, draw, edits
from proof.mutant import Mutant

from sameseed.laws.checks import chosen
from sameseed.spec import step, verify
from sameseed.tokenizer import Tokenizer

CALL = "_walk(path, table[row:end], seq, draft_tokens, parents, made, eos_token_ids)"


@pytest.fixture(scope="module")
def bench(pair_folders: tuple[Path, Path]) -> judge.Bench:
    return judge.Bench(Tokenizer.from_folder(pair_folders[0]), chosen(["L3", "S1"]), slack=3.0, sizes=(0.2,))


def test_the_same_seed_draws_the_same_mutants_and_each_can_be_put_in_place() -> None:
    first, again, other = (list(islice(draw(seed), 60)) for seed in (3, 3, 4))
    names, same, others = ([d.mutant.name for d in drawn] for drawn in (first, again, other))
    assert names == same != others and len(set(names)) == 60
    assert {d.area for d in first} == set(AREAS)
    for one in first:
        code = inspect.unwrap(one.mutant.function).__code__
        with one.mutant.alive():
            assert inspect.unwrap(one.mutant.function).__code__ is not code
        assert inspect.unwrap(one.mutant.function).__code__ is code


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("a < b", "a <= b"),
        ("a - b", "b - a"),
        ("a and b and c", "a and b"),
        ("3", "4"),
        ("min(a, b)", "max(a, b)"),
        ("f(a, b)", "f(b, a)"),
        ("f(a, b=c)", "f(a)"),
        ("a[i]", "a[i + 1]"),
        ("a[:i]", "a[:i + 1]"),
    ],
)
def test_what_may_go_wrong_in_an_expression(source: str, wrong: str) -> None:
    node = ast.parse(source, mode="eval").body
    assert wrong in [ast.unparse(ast.fix_missing_locations(new)) for _, new in edits(node)]


@pytest.mark.parametrize(
    ("function", "old", "new", "outcome"),
    [
        (verify.verify, CALL, CALL.replace("row:end", "row + 1:end"), judge.BROKE_DOWN),
        (verify.verify, CALL, CALL.replace("table[row:end]", "table[row:end][::-1].copy()"), judge.CAUGHT),
        (verify.verify, CALL, CALL.replace("table[row:end]", "[None for _ in iter(int, 1)]"), judge.NO_END),
        (verify.verify, CALL, "__import__('os')._exit(3)", judge.BROKE_DOWN),
        (verify.verify, CALL, CALL + " # nothing", judge.MISSED),
        (step._propose, "drafter.propose(seqs, num_draft)", "drafter.propose(num_draft, seqs)", judge.BROKE_DOWN),
    ],
)
def test_what_becomes_of_a_mistake(bench: judge.Bench, function: Any, old: str, new: str, outcome: str) -> None:
    """A draft that fails unheard breaks down, although the texts are right."""
    verdict = judge.judge(DrawnMutant(Mutant("one", function, old, new), "verification", "a kind"), bench)
    assert verdict.outcome == outcome, verdict
    assert (verdict.by is None) == (outcome == judge.MISSED)
