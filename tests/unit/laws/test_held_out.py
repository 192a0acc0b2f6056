"""Mistakes drawn by a generator: which ones exist, and what becomes of each."""

from __future__ import annotations

import ast
import inspect
import pickle
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from proof import held_out, mutants
from proof.drawn import AREAS, DrawnMutant, Places
from proof.edits import edits, silent
from proof.held_out import MutantBench
from proof.mutant import Mutant

from sameseed.laws.check import Check
from sameseed.laws.checks import chosen
from sameseed.spec import step, verify
from sameseed.tokenizer import Tokenizer

CALL = "_walk(path, table[row:end], seq, draft_tokens, parents, made, eos_token_ids)"

JUDGES = (held_out.judge_apart, held_out.judge)


@pytest.fixture(scope="module")
def places() -> Places:
    return Places(AREAS)


@pytest.fixture(scope="module")
def bench(pair_folders: tuple[Path, Path]) -> MutantBench:
    return MutantBench(Tokenizer.from_folder(pair_folders[0]), chosen(["L3", "S1"]), {verify.__file__, step.__file__})


def drawn(function: Any, old: str, new: str, line: int = 1) -> DrawnMutant:
    first = function.__code__.co_firstlineno
    mutant = Mutant("one", function, old, new)
    return DrawnMutant(mutant, "verification", "a kind", function.__code__.co_filename, range(first + line, first + 60))


def test_the_same_seed_draws_the_same_mutants(places: Places) -> None:
    first, again, other = ([(d.area, d.mutant.name) for d in islice(places.draw(seed), 100)] for seed in (3, 3, 4))
    assert first == again != other
    assert len(set(first)) == 100 and {area for area, _ in first} == set(AREAS)


def test_every_drawn_mutant_can_be_put_in_place(places: Places) -> None:
    for one in islice(places.draw(1), 400):
        code = inspect.unwrap(one.mutant.function).__code__
        assert len(one.lines) and one.lines.start >= code.co_firstlineno
        with one.mutant.alive():
            assert inspect.unwrap(one.mutant.function).__code__ is not code
        assert inspect.unwrap(one.mutant.function).__code__ is code


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("a < b", "a <= b"),
        ("a is None", "a is not None"),
        ("a - b", "b - a"),
        ("a and b and c", "a and b"),
        ("not a", "a"),
        ("3", "2"),
        ("True", "False"),
        ("min(a, b)", "max(a, b)"),
        ("f(a, b)", "f(b, a)"),
        ("f(a, b=c)", "f(a)"),
        ("a[i]", "a[i + 1]"),
        ("a[i:]", "a[i - 1:]"),
        ("a[:i]", "a[:i + 1]"),
        ("a[1:]", "a"),
        ("a if b else c", "c if b else a"),
    ],
)
def test_what_may_go_wrong_in_an_expression(source: str, wrong: str) -> None:
    node = ast.parse(source, mode="eval").body
    assert wrong in [ast.unparse(ast.fix_missing_locations(new)) for _, new in edits(node) if new is not None]


@pytest.mark.parametrize("source", ["f(a)", "a.b = c", "a += 1", "for a in b:\n    continue", "if a:\n    return 1"])
def test_what_may_be_left_out(source: str) -> None:
    node = ast.parse(source).body[0]
    node = getattr(node, "body", [node])[0]
    assert ("left out" in kind for kind, new in edits(node, early=True) if new is None)
    assert any(new is None for _, new in edits(node, early=True))


@pytest.mark.parametrize("source", ["raise ValueError(1 + 1)", "log.info('%d', 1 + 1)", "'words'", "import os"])
def test_what_only_speaks_to_people_is_left_alone(source: str) -> None:
    node = ast.parse(source).body[0]
    assert silent(node) or (isinstance(node, ast.Expr) and silent(node.value))


@pytest.mark.parametrize(
    ("new", "outcome"),
    [
        (CALL.replace("row:end", "row + 1:end"), held_out.BROKE_DOWN),
        ("_walk(path, table[row:end][::-1].copy(), seq, draft_tokens, parents, made, eos_token_ids)", held_out.CAUGHT),
        (CALL.replace("table[row:end]", "[None for _ in iter(int, 1)]"), held_out.NO_END),
        (CALL + " # nothing", held_out.MISSED),
    ],
)
def test_what_becomes_of_a_mistake(bench: MutantBench, monkeypatch: pytest.MonkeyPatch, new: str, outcome: str) -> None:
    monkeypatch.setattr(held_out, "SLACK", 3.0)
    verdict = held_out.judge(drawn(verify.verify, CALL, new), bench)
    assert verdict.outcome == outcome, verdict
    assert (verdict.by is None) == (outcome == held_out.MISSED)


def test_a_mistake_ends_with_its_process(bench: MutantBench) -> None:
    """A mistake judged in its own process gets the same verdict as here; if the process dies, the verdict says so."""
    there, here = (judge(drawn(verify.verify, CALL, CALL + " # nothing"), bench) for judge in JUDGES)
    assert vars(there) | {"seconds": 0} == vars(here) | {"seconds": 0}
    deadly = drawn(verify.verify, CALL, "__import__('os')._exit(3)")
    verdict = held_out.judge_apart(deadly, bench)
    assert (verdict.outcome, verdict.said) == (held_out.BROKE_DOWN, "its process died")


@pytest.mark.parametrize("one", mutants.CHECKS, ids=lambda c: c.id)
def test_another_process_gets_a_check_by_its_name(one: Check) -> None:
    assert pickle.loads(pickle.dumps(one)) is one


def test_another_process_gets_a_mutant_by_its_name(places: Places) -> None:
    some = list(islice(places.draw(2), 200))
    assert pickle.loads(pickle.dumps(some)) == some


def test_a_draft_that_fails_unheard_is_noticed(bench: MutantBench) -> None:
    """The engine goes on without drafts and the texts are right, but the failure is noticed."""
    failing = drawn(step._propose, "drafter.propose(seqs, num_draft)", "drafter.propose(num_draft, seqs)")
    verdict = held_out.judge(failing, bench)
    assert verdict.outcome == held_out.BROKE_DOWN and "not reported" in verdict.said


def test_lines_that_no_check_runs_are_told(bench: MutantBench) -> None:
    assert not bench.who(drawn(verify.verify, CALL, CALL, line=10**6))


@pytest.mark.parametrize(("hits", "count", "low", "high"), [(0, 0, 0, 1), (10, 10, 0.722, 1), (38, 40, 0.835, 0.986)])
def test_the_interval_of_a_share(hits: int, count: int, low: float, high: float) -> None:
    assert held_out.share_interval(hits, count) == pytest.approx((low, high), abs=1e-3)
