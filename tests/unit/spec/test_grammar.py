"""Grammars: only what is allowed is written, by the same seed the same with drafts and without."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from lawkit import EOS, MODEL_VOCAB, Pair, TreeDrafter, assert_nothing_left, knowing, make_engine

from foretoken.engine.engine import Engine
from foretoken.request import Completion, FinishReason, Grammar, Request, SamplingParams
from foretoken.spec.grammar import Choice, Vocabulary

CHOICES = ["the sum", "the whole", "the", "für", "你好", "list"]


@pytest.fixture
def vocabulary(pair: Pair) -> Vocabulary:
    pieces = [b""] * MODEL_VOCAB
    for token in range(1, 300):
        text = pair.tokenizer.token(token) or ""
        raw = bytes(BYTES[c] for c in text)
        pieces[token] = raw
    return Vocabulary(pieces, [EOS])


PLAIN = [*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTES = {chr(b): b for b in PLAIN} | {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in PLAIN)}


def write(engine: Engine, grammar: Grammar | None, params: SamplingParams, seeds: range) -> list[Completion]:
    done: dict[str, Completion] = {}
    for seed in seeds:
        engine.add(Request(str(seed), (40 + seed % 20, 50), params, seed, grammar=grammar))
    while engine.has_work:
        for delta in engine.step():
            if delta.completion is not None:
                done[delta.request_id] = delta.completion
    assert_nothing_left(engine)
    return [done[str(seed)] for seed in seeds]


def test_masks(vocabulary: Vocabulary) -> None:
    grammar = Choice(["ab", "a", "b你"], vocabulary)
    by_bytes = {p: t for t, p in enumerate(vocabulary.pieces) if p}
    a, b = by_bytes[b"a"], by_bytes[b"b"]

    def allowed(output: list[int], path: list[int]) -> set[int]:
        return set(np.flatnonzero(grammar.allowed(output, path)).tolist())

    assert {a, b} <= allowed([], [])
    assert all("ab".startswith(vocabulary.pieces[t].decode()) or t == b for t in allowed([], []))
    assert allowed([], [a]) == allowed([a], []) == {b, EOS}
    assert allowed([a], [b]) == {EOS} == allowed([a, b], [EOS])
    first = {t for t, p in enumerate(vocabulary.pieces) if p and "你".encode().startswith(p)}
    assert allowed([b], []) == first != set()
    assert not allowed([b, b], [])


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_drafts_change_nothing(
    reference_pair: Pair, vocabulary: Vocabulary, temperature: float, logprobs: int | None
) -> None:
    grammar = Choice(CHOICES, vocabulary)
    params = SamplingParams(max_tokens=20, temperature=temperature, logprobs=logprobs)
    seeds = range(12)
    plain = write(make_engine(reference_pair), grammar, params, seeds)
    assert {c.text for c in plain} <= set(CHOICES)
    assert {c.finish_reason for c in plain} == {FinishReason.STOP}
    prompts = [c.prompt_token_ids for c in plain]
    tree = TreeDrafter(knowing(prompts, [c.token_ids for c in plain]), MODEL_VOCAB, seed=3)
    drafters: list[dict[str, Any]] = [{"method": "draft_model"}, {"method": "ngram"}, {"drafter": tree, "k": 8}]
    accepted = 0
    for drafter in drafters:
        drafted = write(make_engine(reference_pair, seqs=4, **drafter), grammar, params, seeds)
        assert [(c.token_ids, c.logprobs) for c in drafted] == [(c.token_ids, c.logprobs) for c in plain]
        accepted += sum(c.metrics.spec.num_accepted_tokens for c in drafted)
    assert accepted > 5


def test_every_choice_can_be_made(pair: Pair, vocabulary: Vocabulary) -> None:
    hot = SamplingParams(max_tokens=20, temperature=8.0)
    counts = Counter(c.text for c in write(make_engine(pair, seqs=32), Choice(CHOICES, vocabulary), hot, range(120)))
    assert set(counts) == set(CHOICES)


def test_neighbours_without_a_grammar_do_not_notice(pair: Pair, vocabulary: Vocabulary) -> None:
    params = SamplingParams(max_tokens=9, temperature=1.0, ignore_eos=True)
    alone = write(make_engine(pair), None, params, range(1))[0]
    engine = make_engine(pair)
    engine.add(Request("other", (9, 9), SamplingParams(max_tokens=9), 1, grammar=Choice(CHOICES, vocabulary)))
    assert write(engine, None, params, range(1))[0].token_ids == alone.token_ids
