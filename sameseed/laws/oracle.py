"""T1: plain and speculative texts are the textbook's, token by token, and end where it says."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from sameseed.laws import textbook
from sameseed.laws.check import Effort, Found, check
from sameseed.laws.sampled import sampling_settings
from sameseed.laws.subject import Subject
from sameseed.request import Completion, Request, SamplingParams

COLD = 1e-3  # a temperature at which hardly anything but the best is left
HALF = "\ufffd"  # a character of which tokens are still missing
STOPPED = 3  # characters before a stop string begins


@check(
    "T1",
    "texts of the textbook",
    "0 tokens further from the textbook's choice than the tolerance, 0 wrong ends",
    least={"texts": 60, "tokens": 400, "exact": 200, "guesses": 50, "rejections": 10},
    texts=60_000,
)
def texts(subject: Subject, effort: Effort) -> Found:
    """Plain and speculative texts, greedy and sampled, are those of a decoder in plain NumPy that has no cache, no
    batch and no draft, and end where it says; what is too near to call for sums in float32 is counted.
    """
    count, length = max(2, effort.of(2_000, 2)), min(16, subject.max_tokens)
    bare = SamplingParams(max_tokens=length, ignore_eos=True)
    chosen = sampling_settings(subject.params) | {"greedy": bare, "cold": replace(bare, temperature=COLD, top_p=0.9)}
    written: list[tuple[str, Request, Completion]] = []
    for turn, (name, params) in enumerate(chosen.items()):
        jobs = subject.jobs(count, replace(params, max_tokens=length), turn * count)
        plain = subject.run(subject.plain(), jobs)
        stops = [c.text[STOPPED : STOPPED + 3] for c in plain]
        stops = ["" if HALF in s else s for s in stops]
        ended = [replace(job, params=replace(job.params, stop=(s,) if s else ())) for job, s in zip(jobs, stops)]
        written += [(f"{name}, plain", *each) for each in zip(jobs, plain, strict=True)]
        for way, engine in subject.guessing(jobs, plain, turn, nodes=64):
            written += [(f"{name}, {way}", *each) for each in zip(ended, subject.run(engine, ended), strict=True)]
    return judge(subject, written)


def judge(subject: Subject, written: Seq[tuple[str, Request, Completion]]) -> Found:
    """Count tokens of completions that are not the textbook's choice after those before them, and wrong ends.

    `written`: how each was made, what was asked for, and what came of it.
    """
    model, kv, decode = subject.target, subject.kv_format, subject.loaded.tokenizer.decode
    eos, share = model.config.eos_token_ids, textbook.tolerance(model, kv)
    sizes = {"tokens": 0, "exact": 0, "texts": len(written)}
    found = Found(sizes, {"near_ties": 0, "differing_tokens": 0, "wrong_ends": 0})
    found.notes.append(f"up to {share:g} of the largest logit from the textbook's choice is a near tie")
    every = {(*c.prompt_token_ids, *c.token_ids) for _, _, c in written}
    whole = [text for text in every if not any(text != other and other[: len(text)] == text for other in every)]
    logits = dict(zip(whole, textbook.forward(model, whole, kv), strict=True))
    for where, job, c in written:
        prompt, tokens = c.prompt_token_ids, c.token_ids
        rows = next(r for text, r in logits.items() if text[: len(prompt) + len(tokens)] == (*prompt, *tokens))
        near = share * float(np.abs(rows).max())
        found.sizes["tokens"] += len(tokens)
        for at, token in enumerate(tokens):
            row = rows[len(prompt) + at - 1]
            exact, close = textbook.judge(row, job.params, job.seed, prompt, tokens[:at], token, eos, near)
            found.sizes["exact"] += exact
            found.statistic["near_ties"] += close and not exact
            found.statistic["differing_tokens"] += not close
            if not close:
                found.add(f"{where} (seed {job.seed}): token {at}", "the textbook's choice", token)
        said = [decode(list(tokens[: n + 1])) for n in range(len(tokens))]
        end = textbook.ends(job.params, prompt, tokens, said, eos, subject.max_len)
        if end != len(tokens):
            found.statistic["wrong_ends"] += 1
            found.add(f"{where} (seed {job.seed}): {len(tokens)} tokens", f"an end after {end}", c.text)
    return found
