"""L3, L6, L9 and stops: the same text with and without speculation, to the last log-probability."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence as Seq
from dataclasses import replace

from foretoken.engine.engine import Engine
from foretoken.request import Completion, Delta, SamplingParams
from foretoken.study.certificate.check import Check, Effort, Finding, Found
from foretoken.study.certificate.subject import Job, Subject, Tokens, first_difference, outcome

SHOWN = 12  # tokens on either side of the first difference that a report quotes
NEAR = 1e-4  # margin between the two best logits that makes a near tie
GREEDY = SamplingParams(temperature=0.0)


def compare(
    subject: Subject, found: Found, where: str, jobs: Seq[Job], plain: Seq[Completion], got: Seq[Completion]
) -> None:
    """Count differences between completions, and tell of the first: with both continuations from that token on."""
    for i, (job, a, b) in enumerate(zip(jobs, plain, got, strict=True)):
        if outcome(a) == outcome(b):
            continue
        found.statistic["differing_texts"] = found.statistic.get("differing_texts", 0) + 1
        at = first_difference(a.token_ids, b.token_ids)
        if a.token_ids != b.token_ids:
            what = f"{where}, prompt {i} (seed {job.seed}): token {at}"
        else:
            names = ("tokens", "text", "finish reason", "seed", "log-probabilities")
            parts = [n for n, x, y in zip(names, outcome(a), outcome(b), strict=True) if x != y]
            what = f"{where}, prompt {i} (seed {job.seed}): {', '.join(parts)}"
        found.add(what, _quote(subject, a, at), _quote(subject, b, at))


def _quote(subject: Subject, c: Completion, at: int) -> str:
    decode = subject.loaded.tokenizer.decode
    before = decode(list(c.token_ids[max(0, at - SHOWN) : at]))
    after = decode(list(c.token_ids[at : at + SHOWN]))
    return f"...{before}|{after}... {list(c.token_ids[at : at + SHOWN])} ({c.finish_reason.value})"


def settings(subject: Subject, jobs: Seq[Job], plain: Seq[Completion], turn: int) -> Iterator[tuple[str, Engine, bool]]:
    """Engines that speculate, in turn: the settings' own draft and scripted trees, alone and batched, in small chunks.

    Each with whether the jobs run one after the other.
    """
    texts = [c.token_ids for c in plain]
    config = subject.config.spec
    ks = sorted({config.num_draft_tokens, 1 + turn % 8})
    engine = subject.engine()
    subject.watch(engine, jobs, texts)
    yield "the draft, batched", engine, False
    way = turn % 4
    if way == 0:
        yield "the draft, alone", subject.engine(seqs=1), True
    elif way == 1:
        block, rows = (4, 16, 32)[turn % 3], 24
        yield f"the draft, chunks of {rows} rows", subject.engine(block=block, rows=rows), False
    elif way == 2:
        spec = replace(config, num_draft_tokens=ks[0])
        yield f"the draft, k = {ks[0]}", subject.engine(spec), False
    trees = subject.scripted(jobs, texts, seed=turn)
    yield "trees, batched", subject.engine(drafter=trees), False
    if way == 3:
        yield "trees, alone", subject.engine(drafter=subject.scripted(jobs, texts, turn)), True


def greedy(subject: Subject, effort: Effort) -> Found:
    """L3: greedy texts, token by token."""
    wanted = effort.of(1_000_000, 400)
    found = Found({"tokens": 0, "texts": 0}, {"differing_texts": 0})
    own = subject.params
    params = replace(GREEDY, max_tokens=subject.max_tokens, ignore_eos=own.ignore_eos, min_tokens=own.min_tokens)
    size, turn, start = max(2, subject.batch), 0, 0
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
        turn += 1
        start += size
    return found


def near_ties(subject: Subject, effort: Effort) -> Found:
    """L3: a bias brings the second best token of one position to within 1e-4 of the best; nothing may tip over."""
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
            jobs.append(Job(c.prompt_token_ids, replace(params, logit_bias=bias, seed=subject.seed + start + i)))
        plain = subject.run(subject.plain(seqs=1), jobs, alone=True)
        for c in plain:
            margins = [t.top[0][1] - t.top[1][1] for t in c.logprobs or () if len(t.top) > 1]
            found.sizes["near_ties"] += sum(m < NEAR for m in margins)
            found.statistic["smallest_margin"] = min([found.statistic["smallest_margin"], *margins])
        texts = [c.token_ids for c in plain]
        for name, engine in (
            ("the draft", subject.engine()),
            ("trees", subject.engine(drafter=subject.scripted(jobs, texts, start))),
        ):
            got = subject.run(engine, jobs)
            found.sizes["texts"] += len(got)
            compare(subject, found, name, jobs, plain, got)
        start += size
    if found.sizes["near_ties"] < wanted and not found.findings:
        found.status = "warning"
        found.notes.append("too few near ties came about")
    return found


def sampling_settings(own: SamplingParams) -> dict[str, SamplingParams]:
    """The settings' own sampling, and seven more."""
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


def seeded(subject: Subject, effort: Effort) -> Found:
    """L6: seeded requests alone, batched, in other orders, after preemption, streamed; against plain decoding alone."""
    count = max(4, effort.of(2_000, 4))
    found = Found({"requests": 0, "settings": 0, "texts": 0, "tokens": 0}, {"differing_texts": 0, "preemptions": 0})
    for turn, (name, setting) in enumerate(sampling_settings(subject.params).items()):
        if turn >= effort.of(8, 8):
            break
        params = replace(setting, max_tokens=min(subject.max_tokens, 32))
        found.sizes["settings"] += 1
        for start in range(0, count, 8):
            jobs = subject.jobs(min(8, count - start), params, start + 7 * turn)
            _seeded(subject, found, name, jobs, start + turn)
    if not found.statistic["preemptions"] and not found.findings:
        found.status = "warning"
        found.notes.append("no request was preempted: that way was not tried")
    return found


def _seeded(subject: Subject, found: Found, name: str, jobs: list[Job], turn: int) -> None:
    plain = subject.run(subject.plain(seqs=1), jobs, alone=True)
    texts = [c.token_ids for c in plain]
    found.sizes["requests"] += len(jobs)

    def check(way: str, got: Seq[Completion]) -> None:
        found.sizes["texts"] += len(got)
        found.sizes["tokens"] += sum(len(c.token_ids) for c in got)
        compare(subject, found, f"{name}, {way}", jobs, plain, got)

    engine = subject.engine()
    subject.watch(engine, jobs, texts)
    deltas: list[Delta] = []
    check("batched", subject.run(engine, jobs, deltas=deltas))
    _streamed(found, name, jobs, plain, deltas)
    check("in reverse order", subject.run(engine, jobs[::-1])[::-1])
    if turn % 3 == 0:
        check("alone", subject.run(subject.engine(seqs=1), jobs, alone=True))
    longest = max(len(job.prompt) for job in jobs) + jobs[0].params.max_tokens
    for drafter in (None, subject.scripted(jobs, texts, turn)):
        tight = subject.engine(drafter=drafter, block=4, rows=40, seqs=4, tokens=longest + longest // 4 + 12)
        check("short of blocks" + (", trees" if drafter else ""), subject.run(tight, jobs))
        found.statistic["preemptions"] += tight.scheduler.num_preemptions


def _streamed(found: Found, name: str, jobs: Seq[Job], plain: Seq[Completion], deltas: Seq[Delta]) -> None:
    """The pieces of a stream are the text."""
    for i in range(len(jobs)):
        mine = [d for d in deltas if d.request_id == f"c{i}"]
        text, tokens = "".join(d.text for d in mine), tuple(t for d in mine for t in d.token_ids)
        if (text, tokens) != (plain[i].text, plain[i].token_ids):
            found.statistic["differing_texts"] += 1
            found.add(f"{name}, streamed, prompt {i}", plain[i].text, text)


def logprobs(subject: Subject, effort: Effort) -> Found:
    """L9: log-probabilities, with penalties too, bit for bit."""
    wanted = effort.of(10_000, 150)
    found = Found({"tokens": 0}, {"differing_texts": 0})
    chosen = sampling_settings(subject.params)
    names, turn = ("as configured", "penalties", "greedy penalties", "top-p"), 0
    while found.sizes["tokens"] < wanted or turn < len(names):
        params = replace(chosen[names[turn % len(names)]], max_tokens=min(24, subject.max_tokens), logprobs=5)
        jobs = subject.jobs(4, replace(params, ignore_eos=True), turn * 4)
        plain = subject.run(subject.plain(seqs=1), jobs, alone=True)
        trees = subject.scripted(jobs, [c.token_ids for c in plain], turn)
        for way, engine in (("the draft", subject.engine()), ("trees", subject.engine(drafter=trees))):
            got = subject.run(engine, jobs)
            found.sizes["tokens"] += sum(len(c.logprobs or ()) for c in got)
            compare(subject, found, f"{names[turn % len(names)]}, {way}", jobs, plain, got)
        turn += 1
    return found


def stops(subject: Subject, effort: Effort) -> Found:
    """Ends inside an accepted path: stop strings, stop tokens, lengths; where plain decoding ends, so does this."""
    count = max(6, effort.of(2_000, 12))
    found = Found({"requests": 0, "stopped": 0}, {"differing_texts": 0, "tokens_beyond_the_end": 0})
    rng = random.Random(subject.seed)
    free = replace(subject.params, max_tokens=min(32, subject.max_tokens), ignore_eos=True)
    for start in range(0, count, 6):
        base = subject.jobs(min(6, count - start), free, start)
        long = subject.run(subject.plain(), base)
        jobs = [_stopping(job, c, rng, start + i) for i, (job, c) in enumerate(zip(base, long, strict=True))]
        plain = subject.run(subject.plain(seqs=1), jobs, alone=True)
        found.sizes["requests"] += len(jobs)
        found.sizes["stopped"] += sum(c.finish_reason.value == "stop" for c in plain)
        # The script knows the text beyond the end: drafts run over it.
        trees = subject.scripted(jobs, [c.token_ids for c in long], start)
        for name, engine in (("the draft", subject.engine()), ("trees", subject.engine(drafter=trees))):
            got = subject.run(engine, jobs)
            compare(subject, found, name, jobs, plain, got)
            for job, c in zip(jobs, got, strict=True):
                beyond = max(0, len(c.token_ids) - job.params.max_tokens, len(c.accepted) - len(c.token_ids))
                found.statistic["tokens_beyond_the_end"] += beyond
                if beyond:
                    found.add(f"{name}: {job.params.max_tokens} tokens asked for", "no more", len(c.token_ids))
    return found


def _stopping(job: Job, long: Completion, rng: random.Random, turn: int) -> Job:
    """The job with an end somewhere in its text, and sometimes a least length that puts it off."""
    params, tokens, text = job.params, long.token_ids, long.text
    least = rng.randint(1, 6) if turn % 4 == 1 else 0
    if turn % 3 == 0 and text:
        at = rng.randrange(len(text))
        return Job(job.prompt, replace(params, stop=(text[at : at + rng.randint(1, 4)],), min_tokens=least))
    if turn % 3 == 1:
        token: Tokens = (rng.choice(tokens),)
        return Job(job.prompt, replace(params, stop_token_ids=token, min_tokens=least))
    return Job(job.prompt, replace(params, max_tokens=rng.randint(1, params.max_tokens), min_tokens=0))


def leaks(subject: Subject, effort: Effort) -> Found:
    """What is left in the caches of all engines of this certificate."""
    found = Found({"engines": subject.num_engines}, {"leaks": len(subject.leaks)})
    found.findings = [Finding(text, "every block free when the last request has left") for text in subject.leaks]
    return found


_ZERO = "0 differing texts (tokens, text, reason of the end, seed)"
CHECKS = (
    Check(
        "L3",
        "greedy texts",
        "Greedy decoding writes the same tokens with and without speculation: the configured draft and adversarial "
        "trees, alone and batched, in other chunks and draft lengths.",
        _ZERO,
        {"tokens": 1_000_000},
        greedy,
    ),
    Check(
        "L3t",
        "near ties",
        "Where the two best tokens are within 1e-4 of each other, speculation still picks the same one.",
        _ZERO + "; at least the stated number of near ties",
        {"near_ties": 1_000},
        near_ties,
    ),
    Check(
        "L6",
        "seeded sampling",
        "A seeded request writes the same text as plain decoding does alone: in any batch and order, after "
        "preemption, in small chunks, streamed or not; seeds of other requests do not matter.",
        _ZERO + "; pieces of a stream join to the text",
        {"requests": 16_000, "settings": 8},
        seeded,
    ),
    Check(
        "L9",
        "log-probabilities",
        "Reported log-probabilities are the same bits with and without speculation, with penalties too.",
        "0 differing texts, log-probabilities included",
        {"tokens": 10_000},
        logprobs,
    ),
    Check(
        "S1",
        "stops",
        "A stop string, a stop token or the length ends the text at the same place, also inside an accepted path.",
        _ZERO + "; no token beyond the end",
        {"requests": 2_000},
        stops,
    ),
)
LEAKS = Check(
    "C2",
    "nothing leaks",
    "When the last request has left, every block of the cache is free.",
    "0 leaks",
    {},
    leaks,
)
