"""T1: plain and speculative texts equal the textbook's, token by token, and end where the textbook ends them."""

from __future__ import annotations

import bisect
import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from sameseed.errors import RequestError
from sameseed.grammar import Choice, Vocabulary
from sameseed.grammar.matching import Matching
from sameseed.laws import textbook
from sameseed.laws.check import Effort, Found, check
from sameseed.laws.sampled import sampling_settings
from sameseed.laws.subject import Subject, repeating
from sameseed.laws.textbook import HALF
from sameseed.laws.trees import TreeDrafter
from sameseed.request import Completion, Grammar, Request, SamplingParams

TEMPERATURES = (0.0, 0.05, 0.4, 1.0, 2.5)  # each with every processor on
STOPPED = (3, 1)  # characters before a stop string begins, in turn; some fall before the minimum length
LETTERS, CHOICES, SPELLED = 4, 24, 8  # of the grammar: letters, number of texts, letters of a text
NUM_NODES = 64  # nodes of a draft tree
AGAIN = ("as configured", "temperature", "greedy", "grammar at 0.9", "words at 0")  # settings of a check that goes on
EXPRESSION = "expression"  # name of the rule with a regular expression, which xgrammar compiles
PATTERN, LONGEST = "(?:{0}{1}|[{2}{3}]{{2,3}}){{1,2}}{0}?", 7  # over the letters, and the longest match
WORDS = "words"  # name of the rule with texts of long pieces
PIECES = (1, 1, 1, 2, 3, 3, 4, 7, 8, 8, 9, 15, 16, 16, 17)  # lengths of these pieces in letters
PORTION = 2**25  # most logits of the textbook in memory at a time, 8 bytes each
END = 36  # most tokens of a prompt: the textbook has no cache and computes every token anew
MANY = 2_000  # most tokens in a list of allowed tokens, which covers the whole vocabulary
WAIT = 4  # most tokens that one character may take


class Rule(NamedTuple):
    """A grammar as the textbook reads it.

    `choices`: the texts that are allowed; `pieces`: what tokens spell; `make`: makes the engine's own grammar.
    """

    choices: tuple[str, ...]
    pieces: dict[int, str]
    make: Callable[[], Grammar]


class Written(NamedTuple):
    """A completion with its request, how it was made, and its grammar rule, if any."""

    where: str
    job: Request
    completion: Completion
    rule: Rule | None = None


@check(
    "T1",
    "texts of the textbook",
    "0 tokens further from the textbook's choice than the tolerance, 0 wrong ends",
    least={
        "texts": 90,
        "tokens": 600,
        "exact": 300,
        "stops_met": 6,
        "stops_across_tokens": 2,
        "grammar_tokens": 20,
        "largest_tree": 40,
        "drafted": 50,
        "rejections": 10,
    },
    texts=60_000,
)
def texts(subject: Subject, effort: Effort) -> Found:
    """Plain and speculative texts equal those of a plain NumPy decoder without cache, batch or draft.

    They also end where that decoder says. They are greedy or sampled, with every processor on from temperature 0 to
    2.5, under grammars, and with trees of up to 64 nodes. Tokens too close to call for float32 sums are counted.
    """
    count, length = max(2, effort.of(2_000, 2)), min(16, subject.max_tokens)
    rules = ruled(subject)
    written: list[Written] = []
    trees = 0
    every = settings(subject, length, tuple(rules))
    if subject.turn:  # once all settings were seen, the cheapest of each kind must bring what is still missing
        every = {name: every[name] for name in AGAIN if name in every}
    for turn, (name, params) in enumerate(every.items()):
        jobs = [_short(job) for job in subject.jobs(count, replace(params, max_tokens=length), turn * count)]
        rule = rules.get(name.partition(" at ")[0])
        if rule is not None:
            jobs = [replace(job, grammar=rule.make()) for job in jobs]
        plain = subject.run(subject.plain(), jobs)
        stops = [c.text[STOPPED[i % 2] : STOPPED[i % 2] + 3] for i, c in enumerate(plain)]
        stops = ["" if HALF in s or subject.turn else s for s in stops]  # later, drafts are missing: no ends
        ended = [
            replace(job, params=replace(job.params, stop=(s,) if s else ())) for job, s in zip(jobs, stops, strict=True)
        ]
        written += [Written(f"{name}, plain", *each, rule) for each in zip(jobs, plain, strict=True)]
        for way, engine in subject.drafting(jobs, plain, turn, nodes=NUM_NODES):
            done = subject.run(engine, ended)
            trees = max(trees, engine.drafter.largest if isinstance(engine.drafter, TreeDrafter) else 0)
            written += [Written(f"{name}, {way}", *each, rule) for each in zip(ended, done, strict=True)]
    found = judge(subject, written)
    found.sizes["largest_tree"] = trees
    if EXPRESSION not in rules:
        found.notes.append("no regular expression was tried: xgrammar is not installed, or too few letters are tokens")
    return found


def _short(job: Request) -> Request:
    """The job with the end of its prompt; every second job ends in a phrase that repeats, for drafts by look-up."""
    prompt, odd = job.prompt_token_ids, int(job.request_id[1:]) % 2
    return replace(job, prompt_token_ids=repeating(prompt) if odd else prompt[-END:])


def settings(subject: Subject, length: int, grammars: Seq[str]) -> dict[str, SamplingParams]:
    """Sampling settings by name: those of L6, greedy, every processor at once at each temperature, each grammar."""
    bare = SamplingParams(max_tokens=length, ignore_eos=True)
    every = {f"everything at {t:g}": everything(subject, replace(bare, temperature=t)) for t in TEMPERATURES}
    under = {f"{g} at {t:g}": replace(bare, temperature=t, ignore_eos=False) for g in grammars for t in (0.0, 0.9)}
    often = {"greedy": bare, "frequency": replace(bare, frequency_penalty=0.3)}
    return sampling_settings(subject.params) | often | every | under


def everything(subject: Subject, params: SamplingParams) -> SamplingParams:
    """`params` with every processor on: truncation, penalties, bias, bans, allowed tokens, a minimum length."""
    few = tuple(range(0, subject.vocab_size, -(-subject.vocab_size // MANY)))
    few = tuple(t for i, t in enumerate(few) if i % 7 != 3)
    return replace(
        params,
        top_k=20,
        top_p=0.92,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        logit_bias={few[4]: 1.5, few[7]: -2.0, few[-1]: 0.7},
        banned_token_ids=few[9::5],
        allowed_token_ids=few,
        stop_token_ids=few[2::9],
        min_tokens=5,
    )


def ruled(subject: Subject) -> dict[str, Rule]:
    """Grammar rules by name: two choices of texts, and a regular expression that xgrammar compiles.

    Texts are made of letters that tokens spell one by one or together (but see `_worded`). The textbook knows each rule
    as a list of texts. For the expression these are all strings of its letters that Python's `re` matches: the textbook
    takes nothing of xgrammar.
    """
    tokenizer, eos = subject.loaded.tokenizer, subject.target.config.eos_token_ids
    spelled = {t: tokenizer.token(t) or "" for t in range(subject.vocab_size) if t not in eos}
    letters = [s for t, s in spelled.items() if len(s) == 1 and "!" <= s <= "~" and tokenizer.decode([t]) == s]
    rng = random.Random(subject.seed)
    plain = [s for s in letters if s.isalnum()]  # without a special meaning in an expression
    few = rng.sample(plain if len(plain) >= LETTERS else letters, min(LETTERS, len(letters)))
    found = {WORDS: _worded(subject, rng)}
    if not few:
        return found
    choices = tuple(sorted({"".join(rng.choices(few, k=SPELLED)) for _ in range(CHOICES)}))
    pieces = {t: s for t, s in spelled.items() if s and set(s) <= set(few)}
    every = [pieces.get(t, "").encode() for t in range(subject.target.config.vocab_size)]
    choice = Choice(choices, Vocabulary(every, eos))
    found["grammar"] = Rule(choices, pieces, lambda: choice)
    if len(plain) >= LETTERS:
        pattern = PATTERN.format(*few)
        try:
            matching = Matching(Vocabulary(every, eos))
            language = matching.language(matching.compiled("regex", pattern))
        except RequestError:  # xgrammar is not installed
            return found
        strings = ("".join(s) for n in range(1, LONGEST + 1) for s in itertools.product(few, repeat=n))
        texts = tuple(s for s in strings if re.fullmatch(pattern, s))
        found[EXPRESSION] = Rule(texts, pieces, lambda: matching.matched(language))
    return found


def _worded(subject: Subject, rng: random.Random) -> Rule:
    """A choice of texts whose tokens are assigned long pieces of few letters, whatever the tokens really spell.

    Real vocabularies have such tokens.
    """
    eos = subject.target.config.eos_token_ids
    tokens = rng.sample([t for t in range(subject.vocab_size) if t not in eos], len(PIECES))
    pieces = {t: "".join(rng.choices("ab", k=n)) for t, n in zip(tokens, PIECES, strict=True)}
    pieces |= dict(zip(tokens, "ab", strict=False))  # every text can be written letter by letter
    texts = tuple(sorted({"".join(rng.sample(list(pieces.values()), 2)) for _ in range(CHOICES)}))
    every = [pieces.get(t, "").encode() for t in range(subject.target.config.vocab_size)]
    choice = Choice(texts, Vocabulary(every, eos))
    return Rule(texts, pieces, lambda: choice)


def judge(subject: Subject, written: Seq[Written]) -> Found:
    """Count tokens that are not the textbook's choice after the tokens before them, and texts that end wrongly."""
    model, kv = subject.target, subject.kv_format
    eos, share = model.config.eos_token_ids, textbook.tolerance(model, kv)
    sizes = {"tokens": 0, "exact": 0, "texts": len(written), "stops_met": 0, "stops_across_tokens": 0}
    found = Found(sizes | {"grammar_tokens": 0}, {"near_ties": 0, "differing_tokens": 0, "wrong_ends": 0})
    found.notes.append(f"up to {share:g} of the largest logit from the textbook's choice is a near tie")
    for (where, job, c, rule), rows in _with_logits(subject, written):
        prompt, tokens = c.prompt_token_ids, c.token_ids
        near = share * float(np.abs(rows).max())
        found.sizes["tokens"] += len(tokens)
        found.sizes["grammar_tokens"] += len(tokens) if rule is not None else 0
        for at, token in enumerate(tokens):
            row, before = rows[at], tokens[:at]
            able = None if rule is None else textbook.allowed(rule.choices, rule.pieces, eos, before)
            exact, close = textbook.judge(row, job.params, job.seed, prompt, before, token, eos, near, able)
            found.sizes["exact"] += exact
            found.statistic["near_ties"] += close and not exact
            place = f"{where} (seed {job.seed}): token {at}"
            found.wrong("differing_tokens", place, "the textbook's choice", token, not close)
        _judge_end(subject, found, where, job, c)
    return found


def _with_logits(subject: Subject, written: Seq[Written]) -> Iterator[tuple[Written, textbook.Floats]]:
    """Yield each item with the textbook's logits from the last token of its prompt on.

    A text that begins another text shares that text's logits. Items come sorted by text, so that one portion of logits
    is in memory at a time: full sizes have tens of thousands of texts.
    """
    model, kv = subject.target, subject.kv_format
    known = {id(one): (*one.completion.prompt_token_ids, *one.completion.token_ids) for one in written}
    every = sorted(set(known.values()))  # sorted: a prefix comes before the longer text
    whole = [a for a, b in itertools.zip_longest(every, every[1:], fillvalue=()) if b[: len(a)] != a]
    places = {id(one): bisect.bisect_left(whole, known[id(one)]) for one in written}
    starts = [len(text) for text in whole]
    for one in written:
        starts[places[id(one)]] = min(starts[places[id(one)]], len(one.completion.prompt_token_ids) - 1)
    order, at = sorted(written, key=lambda one: places[id(one)]), 0
    rows = max((len(text) - start for text, start in zip(whole, starts, strict=True)), default=1)
    count = max(1, PORTION // (rows * model.config.vocab_size))
    for first in range(0, len(whole), count):
        part = slice(first, first + count)
        logits = textbook.forward(model, whole[part], kv, starts[part])
        while at < len(order) and (place := places[id(order[at])]) < first + count:
            yield order[at], logits[place - first][len(order[at].completion.prompt_token_ids) - 1 - starts[place] :]
            at += 1


def _judge_end(subject: Subject, found: Found, where: str, job: Request, c: Completion) -> None:
    """Count texts that do not end where the textbook ends them, for its reason, or do not say what their tokens say.

    A text is counted but not judged if its bytes form no character for WAIT tokens: how to show them is the decoder's
    choice.
    """
    eos, tokens = subject.target.config.eos_token_ids, c.token_ids
    spelt = partial(textbook.spelt, subject.loaded.tokenizer, c.prompt_token_ids)
    said = [spelt(tokens[: n + 1]) for n in range(len(tokens))]
    halves = "".join("h" if text.endswith(HALF) else " " for text in said)
    if "h" * WAIT in halves:
        found.sizes["texts_of_bytes"] = found.sizes.get("texts_of_bytes", 0) + 1
        return
    end = textbook.ends(job.params, c.prompt_token_ids, tokens, said, eos, subject.max_len)
    if end != len(tokens):
        found.wrong("wrong_ends", f"{where} (seed {job.seed}): {len(tokens)} tokens", f"an end after {end}", c.text)
        return
    last, enough = tokens[-1], len(tokens) >= job.params.min_tokens
    by_token = last in job.params.stop_token_ids or (last in eos and not job.params.ignore_eos)
    at = None if by_token or not enough else textbook.stopped(job.params, said)
    text = said[-2] if by_token and len(said) > 1 else "" if by_token else said[-1][:at]
    reason = "length" if at is None and not by_token else "stop"
    if at is not None:
        found.sizes["stops_met"] += 1
        found.sizes["stops_across_tokens"] += len(said) > 1 and at < len(said[-2])
    # How incomplete characters are shown is the decoder's choice: only texts without them are compared.
    if c.finish_reason.value != reason or (HALF not in text and c.text != text):
        right, seen = f"{text!r} ({reason})", f"{c.text!r} ({c.finish_reason.value})"
        found.wrong("wrong_ends", f"{where} (seed {job.seed}): the end", right, seen)
