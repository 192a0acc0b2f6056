"""W1, P1 and P2: crowded engines with aborts and preemption, texts with a common prefix, and scored prompts."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from sameseed.engine.engine import Engine
from sameseed.laws import textbook
from sameseed.laws.check import Effort, Found, check
from sameseed.laws.sampled import sampling_settings
from sameseed.laws.subject import FRESH, Subject, Tokens
from sameseed.laws.texts import SAME_TEXTS, compare
from sameseed.request import Completion, Delta, Request, SamplingParams, Sequence

SEQS, ROWS, BLOCK = 10, 14, 4  # limits of a crowded engine: sequences, rows of a pass, rows of a cache block
STAGES = ("waiting", "in_its_prompt", "writing", "preempted")  # stages of a request in which one is aborted
PROMPT = 24  # least tokens of a prompt: six blocks
REPEATED = 24  # tokens of a text that repeats nearly one token
CHANGED = (8, 11)  # positions of the one changed token of a prefix: first of a block, and last


def _long(subject: Subject, i: int) -> Tokens:
    """Prompt i, extended by the prompts after it to at least PROMPT tokens, then cut to fit."""
    made: Tokens = ()
    while len(made) < PROMPT:
        made += subject.prompts[i % len(subject.prompts)]
        i += 1
    return made[: max(PROMPT, min(len(made), 64))][-max(1, subject.max_len - subject.max_tokens - 1) :]


def _jobs(subject: Subject, count: int, start: int) -> list[Request]:
    """`count` requests with long prompts and the sampling settings in turn; more than an engine runs at once."""
    ways = list(sampling_settings(subject.params).values())
    jobs = []
    for i in range(start + subject.turn * FRESH, start + subject.turn * FRESH + count):
        params = replace(ways[i % len(ways)], max_tokens=min(16, subject.max_tokens), ignore_eos=True)
        seed = subject.seed * 1_000_003 + i
        jobs.append(Request(f"w{i}", _long(subject, i), replace(params, seed=seed), seed, owner=f"o{i % 3}"))
    return jobs


@check(
    "W1",
    "coming and going",
    SAME_TEXTS + "; texts of aborted requests are beginnings of theirs",
    least={
        "texts": 16,
        "preemptions": 2,
        "crowded_chunks": 2,
        **{f"aborted_{stage}": 1 for stage in STAGES},
        "drafted": 20,
        "rejections": 4,
    },
    requests=2_000,
)
def coming_and_going(subject: Subject, effort: Effort) -> Found:
    """Requests that stay write the same text as when run alone, while others come and are aborted.

    Requests arrive one after another. Some are aborted while waiting, during prefill, while decoding and after
    preemption. More than five sequences share passes of few rows.
    """
    count = effort.of(2_000, 24)
    sizes = {"requests": 0, "texts": 0, "crowded_chunks": 0, **{f"aborted_{stage}": 0 for stage in STAGES}}
    found = Found(sizes, {"differing_texts": 0, "preemptions": 0})
    for turn, start in enumerate(range(0, count, 12)):
        jobs = _jobs(subject, 12, start)
        plain = subject.run(subject.plain(seqs=1), jobs, alone=True)
        longest = max(len(j.prompt_token_ids) for j in jobs) + jobs[0].params.max_tokens
        for name, room in (("the draft", 3), ("trees", 3), ("the draft, room for all", SEQS)):
            drafter = subject.trees(jobs, plain, turn) if name == "trees" else None
            engine = subject.engine(drafter=drafter, block=BLOCK, rows=ROWS, seqs=SEQS, tokens=room * longest)
            done = _crowded(subject, found, engine, jobs)
            stayed = [i for i, c in enumerate(done) if c.finish_reason.value != "abort"]
            left = [i for i in range(len(jobs)) if i not in stayed]
            mine, truth, got = [jobs[i] for i in stayed], [plain[i] for i in stayed], [done[i] for i in stayed]
            compare(subject, found, name, mine, truth, got)
            for i in left:
                written = done[i].token_ids
                differs = written != plain[i].token_ids[: len(written)]
                found.wrong("differing_texts", f"{name}, aborted, prompt {i}", plain[i].token_ids, written, differs)
            found.sizes["requests"] += len(jobs)
            found.sizes["texts"] += len(stayed)
            found.statistic["preemptions"] += engine.scheduler.num_preemptions
    return found


def _crowded(subject: Subject, found: Found, engine: Engine, jobs: Seq[Request]) -> list[Completion]:
    """Completions, in order, of jobs that arrive four per step; the first request in each of STAGES is aborted.

    Counts passes of more than five sequences, one within its prompt.
    """
    done, coming, wanted = dict[str, Completion](), list(jobs), list(STAGES)
    steps = 400 + 60 * len(jobs)
    while (coming or engine.has_work) and steps:
        steps -= 1
        for job in coming[:4]:
            engine.add(job)
        del coming[:4]
        deltas: list[Delta] = []
        staged = ((_stage(engine, live.seq), live.request.request_id) for live in engine._live.values())
        stage, request_id = next((each for each in staged if each[0] in wanted), ("", ""))
        if stage:
            wanted.remove(stage)
            found.sizes[f"aborted_{stage}"] += 1
            deltas = engine.abort(request_id)
            if not deltas:
                found.add(f"aborted {stage.replace('_', ' ')}", "an end", "none")
        if not deltas:
            deltas, running = engine.step(), engine.scheduler.running
            begun = any(0 < seq.num_cached < seq.num_prompt for seq in running)
            found.sizes["crowded_chunks"] += begun and len(running) > 5
        done |= {d.request_id: d.completion for d in deltas if d.completion is not None}
    return subject.over(engine, [done[job.request_id] for job in jobs])


def _stage(engine: Engine, seq: Sequence) -> str:
    """The stage of a request in STAGES; "" between them."""
    if seq not in engine.scheduler.running:
        return "preempted" if seq.num_preemptions else "waiting"
    if not seq.num_output and seq.num_cached > 0:
        return "in_its_prompt"
    return "writing" if seq.num_output > 2 else ""


@check(
    "P1",
    "texts that begin alike",
    SAME_TEXTS + "; 0 rows from another tenant, or without a prefix cache",
    least={"texts": 24, "reused_tokens": 100, "refused_tenants": 2, "came_back": 1, "drafted": 20, "rejections": 4},
    remedy="leave --no-prefix-cache out, or take a higher --effort",
    requests=2_000,
)
def beginnings(subject: Subject, effort: Effort) -> Found:
    """Texts that reuse cached rows of earlier texts equal the texts written without a prefix cache.

    No rows are reused from another tenant, from a prefix beyond its first differing token, or with the cache off. A
    text that repeats one token is preempted and gets its own rows back.
    """
    sizes = {"texts": 0, "reused_tokens": 0, "refused_tenants": 0, "came_back": 0}
    found = Found(sizes, {"differing_texts": 0, "rows_of_others": 0})
    for turn in range(subject.turn, subject.turn + max(1, effort.of(2_000, 8) // 8)):
        jobs = _alike(subject, turn)
        plain = subject.run(subject.plain(seqs=1), jobs, alone=True)
        longest = max(len(j.prompt_token_ids) for j in jobs) + jobs[0].params.max_tokens
        shares = subject.config.cache.prefix_cache
        for name, on, alone, tokens in (
            ("one by one", shares, True, 8 * longest),
            ("one by one, trees", shares, True, 8 * longest),
            ("one by one, few blocks", shares, True, longest + longest // 2),
            ("together", shares, False, 8 * longest),
            ("one by one, no prefix cache", False, True, 8 * longest),
        ):
            drafter = subject.trees(jobs, plain, turn) if "trees" in name else None
            engine = subject.engine(drafter=drafter, block=BLOCK, rows=ROWS, seqs=3, tokens=tokens)
            engine.runner.blocks.shares = on
            got = subject.run(engine, jobs, alone)
            found.sizes["texts"] += len(jobs)
            compare(subject, found, name, jobs, plain, got)
            if alone:
                _judge_reuse(found, name, jobs, got, on)
        _come_back(subject, found, turn)
    return found


def _alike(subject: Subject, turn: int) -> list[Request]:
    """Eight requests with a common prefix: tenant a twice, b twice, a twice, then a twice with one token changed."""
    ways = list(sampling_settings(subject.params).values())
    begin, jobs = _long(subject, turn), []
    for i, tenant in enumerate("aabbaaaa"):
        own = begin
        if i >= 6:
            at = CHANGED[i - 6] % len(begin)
            own = (*begin[:at], (begin[at] + 1) % subject.vocab_size, *begin[at + 1 :])
        prompt = (*own, *_long(subject, turn + 1 + i % 2)[:5])
        params = replace(ways[(turn + i) % len(ways)], max_tokens=min(8, subject.max_tokens), ignore_eos=True)
        seed = subject.seed * 7_919 + turn * 8 + i
        jobs.append(Request(f"p{i}", prompt, replace(params, seed=seed), seed, tenant=tenant))
    return jobs


def _come_back(subject: Subject, found: Found, turn: int) -> None:
    """Preempt a long text of nearly one repeated token: its blocks hold equal tokens at different positions.

    The log-probability of the second allowed token shows which cached rows were read.
    """
    one = turn % (subject.vocab_size - 1)
    params = SamplingParams(
        max_tokens=REPEATED,
        ignore_eos=True,
        logprobs=2,
        temperature=0.0,
        allowed_token_ids=(one, one + 1),
        logit_bias={one: 40.0},
    )
    job = Request(f"r{turn}", _long(subject, turn)[:PROMPT], params, turn)
    plain = subject.run(subject.plain(seqs=1), [job])
    engine = subject.engine(block=BLOCK, rows=ROWS, seqs=1, tokens=4 * (PROMPT + REPEATED))
    done: list[Completion] = []
    engine.add(job)
    while engine.has_work:
        done += [d.completion for d in engine.step() if d.completion is not None]
        for seq in list(engine.scheduler.running):
            if seq.num_output > REPEATED // 2 and not seq.num_preemptions:
                engine.scheduler._preempt(seq)
                found.sizes["came_back"] += 1
    found.sizes["texts"] += 1
    compare(subject, found, "one token again and again, preempted", [job], plain, subject.over(engine, done))


def _judge_reuse(found: Found, name: str, jobs: Seq[Request], got: Seq[Completion], on: bool) -> None:
    """Count reused tokens, and the requests that reused more tokens than they may."""
    for i, (job, c) in enumerate(zip(jobs, got, strict=True)):
        reused = c.metrics.num_cached_tokens
        most = {0: 0, 2: 0, 6: CHANGED[0], 7: CHANGED[1]}.get(i, len(job.prompt_token_ids)) if on else 0
        found.sizes["reused_tokens"] += reused
        found.sizes["refused_tenants"] += on and i == 2 and not reused
        where, others = f"{name}, prompt {i}: rows taken over", reused if reused > most else 0
        found.wrong("rows_of_others", where, f"at most {most}", reused, others)


@check(
    "P2",
    "scored prompts",
    "0 differing bits; 0 scores further from the textbook's than the tolerance",
    least={"scores": 60, "other_texts": 2},
    requests=500,
)
def scores(subject: Subject, effort: Effort) -> Found:
    """Scores of a prompt's tokens (log-probabilities) are the same bits in small chunks beside other requests as alone.

    They are within the tolerance of the textbook's. Scoring a prompt changes neither the text after it nor the texts
    beside it, also under penalties and minimum lengths.
    """
    found = Found(
        {"scores": 0, "texts": 0, "other_texts": 0}, {"differing_scores": 0, "too_far": 0, "differing_texts": 0}
    )
    bare = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=2)
    # Sampling settings that depend on where the prompt ends: penalties, and a minimum length.
    free = SamplingParams(temperature=0.8, ignore_eos=True)
    penalties = replace(free, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.5)
    token = subject.run(subject.plain(), subject.jobs(1, SamplingParams(max_tokens=1, ignore_eos=True)))[0].token_ids
    limited = penalties, SamplingParams(min_tokens=2, stop_token_ids=token), replace(penalties, temperature=0.0)
    ways = [bare, *(replace(p, max_tokens=4, logprobs=2) for p in limited)]
    for turn in range(max(len(ways), effort.of(500, 4) // 4)):
        way, texts = ways[turn % len(ways)], [_long(subject, 4 * turn + i) for i in range(4)]
        jobs = [Request(f"s{i}", t, way, 4 * turn + i, score_prompt=i < 3) for i, t in enumerate(texts)]
        unscored = subject.run(subject.plain(seqs=1), [replace(job, score_prompt=False) for job in jobs], alone=True)
        plain = subject.run(subject.plain(seqs=1), jobs, alone=True)
        got = subject.run(subject.engine(block=BLOCK, rows=ROWS, seqs=4), jobs)
        for name, done in (("scored alone", plain), ("beside scored prompts", got)):
            compare(subject, found, name, jobs, unscored, done)
        found.sizes["texts"] += 2 * len(jobs)
        found.sizes["other_texts"] += len(jobs)
        for i in range(3):
            mine, its = got[i].prompt_logprobs, plain[i].prompt_logprobs
            found.wrong("differing_scores", f"scores of prompt {4 * turn + i}", its, mine, mine != its)
        if way is bare:
            _judge_scores(subject, found, texts, got)
    return found


def _judge_scores(subject: Subject, found: Found, texts: Seq[Tokens], got: Seq[Completion]) -> None:
    """Count prompt scores of the first three texts that differ from the textbook's by more than the tolerance."""
    share = textbook.tolerance(subject.target, subject.kv_format)
    for i, logits in enumerate(textbook.forward(subject.target, texts[:3], subject.kv_format)):
        largest = logits.max(-1, keepdims=True)
        exact = logits - largest - np.log(np.exp(logits - largest).sum(-1, keepdims=True))
        for at, one in enumerate(got[i].prompt_logprobs or ()):
            found.sizes["scores"] += 1
            wrong = one.token_id != texts[i][at + 1]
            if wrong or abs(one.logprob - exact[at, one.token_id]) > 2 * share * float(np.abs(logits).max()):
                found.wrong("too_far", f"a prompt, token {at + 1}", f"{exact[at, texts[i][at + 1]]:.5f}", one)
