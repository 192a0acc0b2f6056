"""T2: a text is what its tokens decode to, also where a token is part of a character or a special token."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial

from sameseed.laws import textbook
from sameseed.laws.check import Effort, Found, check
from sameseed.laws.subject import Subject
from sameseed.laws.textbook import HALF
from sameseed.request import Completion, Delta, Request, SamplingParams

LENGTH = 12  # most tokens of a text
PROMPT = 8  # most tokens of a prompt
HALVES, WHOLE = 128, 16  # about how many tokens of partial and of whole characters are used
HOT = 5.0  # temperature: all of these tokens get a share, whatever the model prefers


@check(
    "T2",
    "spelling",
    "0 texts other than what their tokens spell, whole or in pieces",
    least={"texts": 32, "held_back": 2, "places": 50},
    texts=20_000,
)
def spelling(subject: Subject, effort: Effort) -> Found:
    """A text is what the tokenizer decodes from all its tokens at once, to the last partial character.

    This holds with special tokens and without. The streamed pieces join to the same text, also where it ends as a stop
    string begins. Each token's reported offset is where the token begins. Bytes that form no character may be shown as
    more or fewer characters.
    """
    found = Found({"texts": 0, "half_ends": 0, "special_tokens": 0, "held_back": 0, "places": 0}, {"misspelt": 0})
    decode, size = subject.loaded.tokenizer.decode, subject.vocab_size
    prompts = [prompt[-PROMPT:] for prompt in subject.prompts[:2]]
    own = replace(subject, prompts=prompts, max_tokens=LENGTH)  # its collectors are the subject's
    half = [t for t in range(size) if decode([t]) == HALF]
    able = tuple(dict.fromkeys((*half[:: 1 + len(half) // HALVES], *range(0, size, 1 + size // WHOLE), *range(4))))
    whole = tuple(t for t in able if HALF not in (s := decode([t])) and s)
    rng = random.Random(subject.seed)
    for start in range(0, effort.of(20_000, 32), 16):
        jobs = own.jobs(16, SamplingParams(max_tokens=LENGTH), start)
        jobs = [_job(own, job, able if i % 4 else whole or able, rng) for i, job in enumerate(jobs)]
        plain = own.run(own.plain(), jobs)
        for i, c in enumerate(plain):
            if c.text and HALF not in c.text and not jobs[i].params.stop:
                # A stop string that begins like the end of the text: streaming must hold that end back, then release
                # it.
                stop = (c.text[-2:] + c.text[-2:] + "!",)
                jobs[i] = replace(jobs[i], params=replace(jobs[i].params, stop=stop))
        for engine in (own.plain(), own.engine(drafter=own.trees(jobs, plain, start))):
            deltas: list[Delta] = []
            _judge(found, own, jobs, own.run(engine, jobs, deltas=deltas), deltas)
    subject.num_emptied = own.num_emptied
    if not half:
        found.notes.append("no token of this vocabulary is half a character")
    return found


def _job(own: Subject, job: Request, able: tuple[int, ...], rng: random.Random) -> Request:
    """The job with a random length and only the tokens `able`; half show special tokens, a quarter get a stop."""
    spelled = [s for t in able if HALF not in (s := own.loaded.tokenizer.decode([t])) and s]
    stop = tuple(rng.sample(spelled, 1)) if spelled and rng.random() < 0.25 else ()
    params = replace(
        job.params,
        temperature=HOT,
        ignore_eos=True,
        allowed_token_ids=able,
        max_tokens=rng.randint(1, LENGTH),
        skip_special_tokens=rng.random() < 0.5,
        stop=stop,
    )
    return replace(job, params=params)


def _judge(found: Found, own: Subject, jobs: Seq[Request], got: Seq[Completion], deltas: Seq[Delta]) -> None:
    """Count texts that are not what their tokens decode to; of a text that a stop string ended, the part before it."""
    for job, c in zip(jobs, got, strict=True):
        decode = partial(textbook.spelt, own.loaded.tokenizer, job.prompt_token_ids)
        said = decode(list(c.token_ids), job.params.skip_special_tokens)
        bare = decode(list(c.token_ids), not job.params.skip_special_tokens)
        pieces = "".join(d.text for d in deltas if d.request_id == job.request_id)
        found.sizes["texts"] += 1
        found.sizes["special_tokens"] += said != bare
        found.sizes["half_ends"] += said.endswith(HALF)
        if c.finish_reason.value == "stop":
            right = said.replace(HALF, "").startswith(c.text.replace(HALF, ""))
        else:
            right = said.replace(HALF, "") == c.text.replace(HALF, "") and said.endswith(HALF) == c.text.endswith(HALF)
        begun = any(s[:2] == c.text[-2:] for s in job.params.stop)
        found.sizes["held_back"] += begun and c.finish_reason.value == "length"
        for n in range(len(c.token_ids)):  # a token begins where the text of the tokens before it ends
            before = decode(list(c.token_ids[:n]), job.params.skip_special_tokens)
            place = c.text_offset[n : n + 1]
            found.sizes["places"] += HALF not in before
            astray = HALF not in before and place != (len(before),)
            found.wrong("misspelt", f"tokens {c.token_ids}: the place of token {n}", len(before), place, astray)
        seen = c.text if pieces == c.text else f"{c.text!r}, in pieces {pieces!r}"
        found.wrong("misspelt", f"tokens {c.token_ids}", said, seen, not right or pieces != c.text)
