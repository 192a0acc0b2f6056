"""L6, L9, S1 and C2: seeded texts, their log-probabilities, where they end, and what requests leave behind."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import replace

from sameseed.laws.check import Effort, Finding, Found, check
from sameseed.laws.subject import Subject
from sameseed.laws.texts import SAME_TEXTS, compare
from sameseed.request import Completion, Delta, Request, SamplingParams


def sampling_settings(own: SamplingParams) -> dict[str, SamplingParams]:
    """The configured sampling and seven other settings, by name."""
    base = replace(own, seed=None, n=1, logprobs=None)
    bare = SamplingParams(max_tokens=own.max_tokens, ignore_eos=own.ignore_eos)
    return {
        "as configured": base,
        "temperature": replace(bare, temperature=1.0),
        "top-k": replace(bare, temperature=1.2, top_k=12),
        "top-p": replace(bare, temperature=0.9, top_p=0.85),
        "min-p": replace(bare, temperature=1.4, min_p=0.04),
        "penalties": replace(
            bare, temperature=0.8, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.6
        ),
        "greedy penalties": replace(bare, temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.8),
        "bias and bans": replace(bare, temperature=1.0, logit_bias={5: 2.5, 9: -4.0}, banned_token_ids=(11, 12, 13)),
    }


@check(
    "L6",
    "seeded sampling",
    SAME_TEXTS + "; pieces of a stream join to the text",
    least={"texts": 64, "preemptions": 1, "drafted": 50, "rejections": 10},
    requests=16_000,
    settings=8,
)
def seeded(subject: Subject, effort: Effort) -> Found:
    """A seeded request writes the same text as plain decoding does alone.

    This holds in any batch and order, after preemption, in small chunks, streamed or not, whatever the seeds of other
    requests.
    """
    count = max(4, effort.of(2_000, 4))
    found = Found({"requests": 0, "settings": 0, "texts": 0, "tokens": 0}, {"differing_texts": 0, "preemptions": 0})
    for turn, (name, setting) in enumerate(sampling_settings(subject.params).items()):
        if turn >= effort.of(8, 8):
            break
        params = replace(setting, max_tokens=min(subject.max_tokens, 32))
        found.sizes["settings"] += 1
        for start in range(0, count, 8):
            jobs = subject.jobs(min(8, count - start), params, start + 7 * turn)
            _seeded(subject, found, name, jobs, start // 8 + turn)
    return found


def _seeded(subject: Subject, found: Found, name: str, jobs: list[Request], turn: int) -> None:
    plain = subject.run(subject.plain(seqs=1), jobs, alone=True)
    found.sizes["requests"] += len(jobs)

    def compared(way: str, got: Seq[Completion]) -> None:
        found.sizes["texts"] += len(got)
        found.sizes["tokens"] += sum(len(c.token_ids) for c in got)
        compare(subject, found, f"{name}, {way}", jobs, plain, got)

    engine = subject.engine()
    subject.watch(engine, jobs, plain)
    deltas: list[Delta] = []
    compared("batched", subject.run(engine, jobs, deltas=deltas))
    for i, (job, c) in enumerate(zip(jobs, plain, strict=True)):  # the streamed pieces must join to the text
        mine = [d for d in deltas if d.request_id == job.request_id]
        text, tokens = "".join(d.text for d in mine), tuple(t for d in mine for t in d.token_ids)
        differs = (text, tokens) != (c.text, c.token_ids)
        found.wrong("differing_texts", f"{name}, streamed, prompt {i}", c.text, text, differs)
    if turn % 2:
        compared("in reverse order", subject.run(engine, jobs[::-1])[::-1])
    if turn % 3 == 0:
        compared("alone", subject.run(subject.engine(seqs=1), jobs, alone=True))
    longest = max(len(job.prompt_token_ids) for job in jobs) + jobs[0].params.max_tokens
    drafter = subject.trees(jobs, plain, turn) if turn % 2 else None
    tight = subject.engine(drafter=drafter, block=4, rows=40, seqs=4, tokens=longest + longest // 4 + 12)
    compared("short of blocks" + (", trees" if drafter else ""), subject.run(tight, jobs))
    found.statistic["preemptions"] += tight.scheduler.num_preemptions


@check(
    "L9",
    "log-probabilities",
    "0 differing texts, log-probabilities included",
    least={"tokens": 150, "drafted": 20, "rejections": 4},
    tokens=10_000,
)
def logprobs(subject: Subject, effort: Effort) -> Found:
    """Reported log-probabilities are the same bits with and without speculation, with penalties too."""
    wanted = effort.of(10_000, 150)
    found = Found({"tokens": 0}, {"differing_texts": 0})
    chosen = sampling_settings(subject.params)
    names, turn = ("as configured", "penalties", "greedy penalties", "top-p"), 0
    while found.sizes["tokens"] < wanted or turn < len(names):
        params = replace(chosen[names[turn % len(names)]], max_tokens=min(24, subject.max_tokens), logprobs=5)
        jobs = subject.jobs(4, replace(params, ignore_eos=True), turn * 4)
        plain = subject.run(subject.plain(seqs=1), jobs, alone=True)
        for way, engine in subject.drafting(jobs, plain, turn):
            got = subject.run(engine, jobs)
            found.sizes["tokens"] += sum(len(c.logprobs or ()) for c in got)
            compare(subject, found, f"{names[turn % len(names)]}, {way}", jobs, plain, got)
        turn += 1
    return found


@check(
    "S1",
    "stops",
    SAME_TEXTS + "; no token beyond the end",
    least={"requests": 12, "stopped": 3, "stopped_at_a_draft": 1, "drafted": 20},
    requests=2_000,
)
def stops(subject: Subject, effort: Effort) -> Found:
    """A stop string, a stop token or the length ends the text at the same place, also inside an accepted draft path."""
    count = max(6, effort.of(2_000, 12))
    sizes = {"requests": 0, "stopped": 0, "stopped_at_a_draft": 0}
    found = Found(sizes, {"differing_texts": 0, "tokens_beyond_the_end": 0})
    rng = random.Random(subject.seed)
    free = replace(subject.params, max_tokens=min(32, subject.max_tokens), ignore_eos=True)
    for start in range(0, count, 6):
        base = subject.jobs(min(6, count - start), free, start)
        long = subject.run(subject.plain(), base)
        jobs: list[Request] = []
        # Each job gets a stop somewhere in its text, and sometimes a minimum length that postpones it.
        for turn, (job, c) in enumerate(zip(base, long, strict=True), start):
            least = rng.randint(1, 6) if turn % 4 == 1 else 0
            if turn % 3 == 0 and c.text:
                at = rng.randrange(len(c.text))
                params = replace(job.params, stop=(c.text[at : at + rng.randint(1, 4)],), min_tokens=least)
            elif turn % 3 == 1:
                params = replace(job.params, stop_token_ids=(rng.choice(c.token_ids),), min_tokens=least)
            else:
                params = replace(job.params, max_tokens=rng.randint(1, job.params.max_tokens), min_tokens=0)
            jobs.append(replace(job, params=params))
        plain = subject.run(subject.plain(seqs=1), jobs, alone=True)
        found.sizes["requests"] += len(jobs)
        found.sizes["stopped"] += sum(c.finish_reason.value == "stop" for c in plain)
        for name, engine in subject.drafting(jobs, long, start):  # trees know the text beyond the end and draft past it
            got = subject.run(engine, jobs)
            compare(subject, found, name, jobs, plain, got)
            for job, c in zip(jobs, got, strict=True):
                found.sizes["stopped_at_a_draft"] += c.finish_reason.value == "stop" and c.accepted[-1]
                beyond = max(0, len(c.token_ids) - job.params.max_tokens, len(c.accepted) - len(c.token_ids))
                where = f"{name}: {job.params.max_tokens} tokens asked for"
                found.wrong("tokens_beyond_the_end", where, "no more", len(c.token_ids), beyond)
    return found


@check(
    "C2",
    "nothing leaks",
    "0 leaks",
    least={"times_emptied": 1},
    remedy="let checks that run engines come first (--only L3 C2, or no --only)",
)
def leaks(subject: Subject, effort: Effort) -> Found:
    """When the last request has left, every block of the cache is free."""
    found = Found({"times_emptied": subject.num_emptied}, {"leaks": len(subject.leaks)})
    found.findings = [Finding(text, "every block free when the last request has left") for text in subject.leaks]
    return found
