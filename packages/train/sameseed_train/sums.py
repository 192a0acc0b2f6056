"""Small sums in words: generated questions and answers for all pairs of small numbers, some of which are held out."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator

HELD_OUT_PER_CENT = 8  # share of sums, chosen by a hash of the sum, that are not trained on in any wording
HELD_OUT_TEXTS = 60
ASKED = ("What is {0}?", "How much is {0}?", "Please work out {0}.", "{0} = ?", "Can you tell me what {0} is?")
STORIES = {
    "+": (
        "{who} has {a} {things} and gets {b} more. How many {things} does {who} have now?",
        "There are {a} {things} on one table and {b} on another. How many {things} are there in all?",
    ),
    "-": (
        "{who} has {a} {things} and gives away {b}. How many {things} are left?",
        "Of {a} {things}, {b} are sold. How many {things} are left?",
    ),
    "*": (
        "{who} buys {a} boxes with {b} {things} in each. How many {things} does {who} buy?",
        "A shelf has {a} rows of {b} {things}. How many {things} are on it?",
    ),
}
SIGNS = {"+": ("+", "plus"), "-": ("-", "minus"), "*": ("*", "times")}
PEOPLE = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jonas", "Lena", "Omar")
THINGS = ("apples", "books", "coins", "cards", "cups", "eggs", "flowers", "pens", "shells", "stamps", "stones", "toys")


def sums(held_out: bool) -> list[tuple[int, str, int]]:
    """All a + b and a - b of numbers below 100, and a * b up to 12: the held-out ones, or all others."""
    small, times = range(100), range(1, 13)
    found = [(a, "+", b) for a in small for b in small] + [(a, "-", b) for a in small for b in small if b <= a]
    found += 12 * [(a, "*", b) for a in times for b in times]  # repeated, as there are fewer
    return [s for s in found if (zlib.crc32(repr(s).encode()) % 100 < HELD_OUT_PER_CENT) == held_out]


def value(a: int, sign: str, b: int) -> int:
    """The result of a sum."""
    return a + b if sign == "+" else a - b if sign == "-" else a * b


def sum_texts(seed: int, *, held_out: bool) -> Iterator[tuple[str, str]]:
    """Questions and answers: without end for training, `HELD_OUT_TEXTS` of held-out sums."""
    rng, known = random.Random(f"{seed}/sums/{held_out}"), sums(held_out)
    while True:
        for a, sign, b in rng.sample(known, len(known))[: HELD_OUT_TEXTS if held_out else None]:
            result = f"{a} {sign} {b} = {value(a, sign, b)}."
            if rng.random() < 0.5:
                who, things = rng.choice(PEOPLE), rng.choice(THINGS)
                question = rng.choice(STORIES[sign]).format(who=who, things=things, a=a, b=b)
                answer = f"{result} The answer is {value(a, sign, b)} {things}."
            else:
                question = rng.choice(ASKED).format(f"{a} {rng.choice(SIGNS[sign])} {b}")
                answer = f"{result} The answer is {value(a, sign, b)}."
            yield question[0].upper() + question[1:], answer
        if held_out:
            return
