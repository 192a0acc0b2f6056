"""L3: the same text with and without speculation, token by token."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence as Seq
from dataclasses import replace

from sameseed.engine.engine import Engine
from sameseed.laws.check import Effort, Found, check
from sameseed.laws.subject import Subject, outcome
from sameseed.request import Completion, Request, SamplingParams

SHOWN = 12  # tokens on either side of the first difference that a report quotes
NEAR = 1e-4  # margin between the two best logits that makes a near tie
GREEDY = SamplingParams(temperature=0.0)
SAME_TEXTS = "0 differing texts (tokens, text, reason of the end, seed)"


def compare(
    subject: Subject, found: Found, where: str, jobs: Seq[Request], plain: Seq[Completion], got: Seq[Completion]
) -> None:
    """Count completions that differ, and report where each first differs, with both continuations from there."""
    for i, (job, a, b) in enumerate(zip(jobs, plain, got, strict=True)):
        if outcome(a) == outcome(b):  # law 1
            continue
        pairs = enumerate(zip(a.token_ids, b.token_ids, strict=False))
        at = next((n for n, (x, y) in pairs if x != y), min(len(a.token_ids), len(b.token_ids)))
        if a.token_ids != b.token_ids:
            what = f"{where}, prompt {i} (seed {job.seed}): token {at}"
        else:
            names = ("tokens", "text", "finish reason", "seed", "log-probabilities")
            parts = [n for n, x, y in zip(names, outcome(a), outcome(b), strict=True) if x != y]
            what = f"{where}, prompt {i} (seed {job.seed}): {', '.join(parts)}"
        found.wrong("differing_texts", what, _quote(subject, a, at), _quote(subject, b, at))


def _quote(subject: Subject, c: Completion, at: int) -> str:
    decode = subject.loaded.tokenizer.decode
    before = decode(list(c.token_ids[max(0, at - SHOWN) : at]))
    after = decode(list(c.token_ids[at : at + SHOWN]))
    return f"...{before}|{after}... {list(c.token_ids[at : at + SHOWN])} ({c.finish_reason.value})"


def settings(
    subject: Subject, jobs: Seq[Request], plain: Seq[Completion], turn: int
) -> Iterator[tuple[str, Engine, bool]]:
    """Yield (name, engine, alone) of speculating engines: the configured draft and scripted trees, in several ways.

    Ways are batched, alone, and in small chunks. `alone`: the jobs run one after the other. Each turn tries one draft
    length of 1 to 8: the longest first, all of them after eight turns.
    """
    engine = subject.engine()
    subject.watch(engine, jobs, plain)
    yield "the draft, batched", engine, False
    k = 1 + (7 + 3 * turn) % 8
    yield f"the draft, k = {k}", subject.engine(replace(subject.config.spec, num_draft_tokens=k)), False
    way = turn % 3
    if way == 0:
        yield "the draft, alone", subject.engine(seqs=1), True
    elif way == 1:
        yield "the draft, chunks of 24 rows", subject.engine(block=16, rows=24), False
    yield "trees, batched", subject.engine(drafter=subject.trees(jobs, plain, turn), nodes=64), False
    if way == 2:
        yield "trees, alone", subject.engine(drafter=subject.trees(jobs, plain, turn)), True


@check(
    "L3",
    "greedy texts",
    SAME_TEXTS,
    least={"tokens": 400, "drafted": 50, "rejections": 10, "accepted": 10},
    tokens=1_000_000,
)
def greedy(subject: Subject, effort: Effort) -> Found:
    """Greedy decoding writes the same tokens with and without speculation.

    Drafts are the configured ones and adversarial trees: batched and, as far as the effort reaches, alone, in other
    chunks and draft lengths (the notes name the ways that ran).
    """
    wanted = effort.of(1_000_000, 400)
    found = Found({"tokens": 0, "texts": 0}, {"differing_texts": 0})
    own = subject.params
    params = replace(GREEDY, max_tokens=subject.max_tokens, ignore_eos=own.ignore_eos, min_tokens=own.min_tokens)
    size, turn, start = max(2, subject.batch), 0, 0
    ways: dict[str, None] = {}
    while found.sizes["tokens"] < wanted:
        jobs = subject.jobs(size, params, start)
        plain = subject.run(subject.plain(seqs=1), jobs, alone=True)
        if not any(c.token_ids for c in plain):
            found.add("plain decoding writes nothing", "at least one token")
            return found
        for name, engine, alone in settings(subject, jobs, plain, turn):
            got = subject.run(engine, jobs, alone)
            found.sizes["texts"] += len(got)
            found.sizes["tokens"] += sum(len(c.token_ids) for c in got)
            compare(subject, found, name, jobs, plain, got)
            ways[name] = None
        turn += 1
        start += size
    found.notes.append(f"ways that ran, in {turn} turn{'s' if turn > 1 else ''}: {'; '.join(ways)}")
    return found


@check("L3t", "near ties", SAME_TEXTS, least={"near_ties": 4, "texts": 16}, near_ties=1_000)
def near_ties(subject: Subject, effort: Effort) -> Found:
    """Where a bias brings the two best tokens to within 1e-4 of each other, speculation still picks the same one."""
    wanted = effort.of(1_000, 4)
    found = Found({"near_ties": 0, "texts": 0}, {"differing_texts": 0, "smallest_margin": 1.0})
    params = replace(GREEDY, max_tokens=min(8, subject.max_tokens), ignore_eos=True, logprobs=2)
    rng, start, size = random.Random(subject.seed), 0, 8
    while found.sizes["near_ties"] < wanted and start < 40 * wanted + 80:
        free = subject.run(subject.plain(), subject.jobs(size, params, start))
        jobs = []
        for i, c in enumerate(free):
            assert c.logprobs is not None
            at = rng.randrange(1, len(c.logprobs)) if len(c.logprobs) > 1 else 0
            (_, best), (second, other) = c.logprobs[at].top[:2]
            bias = {second: best - other - rng.choice((0.0, NEAR / 2, -NEAR / 2))}
            seed = subject.seed + start + i
            jobs.append(Request(f"c{i}", c.prompt_token_ids, replace(params, logit_bias=bias, seed=seed), seed))
        plain = subject.run(subject.plain(seqs=1), jobs, alone=True)
        for c in plain:
            margins = [t.top[0][1] - t.top[1][1] for t in c.logprobs or () if len(t.top) > 1]
            found.sizes["near_ties"] += sum(m < NEAR for m in margins)
            found.statistic["smallest_margin"] = min([found.statistic["smallest_margin"], *margins])
        for name, engine in subject.drafting(jobs, plain, start):
            got = subject.run(engine, jobs)
            found.sizes["texts"] += len(got)
            compare(subject, found, name, jobs, plain, got)
        start += size
    return found
