"""Questions and answers made up without end: small sums in words, and records written as JSON, tables or lists."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable, Iterator

HELD_OUT_PER_CENT = 8  # share of sums, and of names, chosen by a hash, that are not trained on in any wording
HELD_OUT_TEXTS = 60
SUMS = {
    "+": ("plus", "{who} has {a} {things} and gets {b} more. How many {things} does {who} have now?"),
    "-": ("minus", "{who} has {a} {things} and gives away {b}. How many {things} are left?"),
    "*": ("times", "{who} buys {a} boxes with {b} {things} in each. How many {things} does {who} buy?"),
}
QUESTIONS = ("What is {0}?", "How much is {0}?", "Please work out {0}.", "{0} = ?")
FIRST = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jonas", "Lena", "Omar", "Paula")
LAST = ("Adams", "Baker", "Costa", "Diaz", "Evans", "Fischer", "Green", "Haas", "Ito", "Jensen", "King", "Lopez")
THINGS = ("apples", "books", "coins", "cards", "cups", "eggs", "flowers", "pens", "shells", "stamps", "stones", "toys")
CITIES = ("Berlin", "Cairo", "Dublin", "Lima", "London", "Madrid", "Oslo", "Paris", "Prague", "Rome", "Seoul", "Tokyo")
JOBS = ("baker", "chemist", "cook", "doctor", "driver", "farmer", "lawyer", "nurse", "painter", "pilot", "teacher")
SAID = (
    "{name} is {age} years old, lives in {city} and works as a {job}.",
    "{name}, {age}, is a {job} in {city}.",
    "{name} is a {job} from {city} and is {age} years old.",
)
# How a list of people is asked for; what stands before, between and after them; one of them.
LAYOUTS = {
    "JSON": ("[\n  ", ",\n  ", "\n]", '{{"name": "{name}", "age": {age}, "city": "{city}", "job": "{job}"}}'),
    "a table": (
        "| Name | Age | City | Job |\n| --- | --- | --- | --- |\n",
        "\n",
        "",
        "| {name} | {age} | {city} | {job} |",
    ),
    "a list": ("", "\n", "", "- {name}: {age} years old, {job}, {city}"),
}
Text = tuple[str, str]  # question, answer


def is_held_out(value: object) -> bool:
    """Whether no training text has this sum or name."""
    return zlib.crc32(repr(value).encode()) % 100 < HELD_OUT_PER_CENT


def made_texts(kind: str, seed: int, *, held_out: bool) -> Iterator[Text]:
    """Texts of a kind in KINDS: without end for training, HELD_OUT_TEXTS of held-out ones."""
    rng, made = random.Random(f"{seed}/{kind}/{held_out}"), KINDS[kind]
    return itertools.islice(made(rng, held_out), HELD_OUT_TEXTS if held_out else None)


def sums(rng: random.Random, held_out: bool) -> Iterator[Text]:
    """a + b and a - b of numbers below 100, and a * b up to 12."""
    while True:
        sign = rng.choice(tuple(SUMS))
        a, b = sorted((rng.randrange(1, 13 if sign == "*" else 100) for _ in range(2)), reverse=True)
        if is_held_out((a, sign, b)) != held_out:
            continue
        value = {"+": a + b, "-": a - b, "*": a * b}[sign]
        word, story = SUMS[sign]
        if rng.random() < 0.5:
            things = rng.choice(THINGS)
            yield (
                story.format(who=rng.choice(FIRST), things=things, a=a, b=b),
                f"{a} {sign} {b} = {value}. The answer is {value} {things}.",
            )
        else:
            question = rng.choice(QUESTIONS).format(f"{a} {rng.choice((sign, word))} {b}")
            yield question, f"{a} {sign} {b} = {value}. The answer is {value}."


def records(rng: random.Random, held_out: bool) -> Iterator[Text]:
    """One to four people in words, and the same people as JSON, a table or a list."""
    names = [name for first in FIRST for last in LAST if is_held_out(name := f"{first} {last}") == held_out]
    while True:
        people = [
            {"name": name, "age": rng.randrange(18, 80), "city": rng.choice(CITIES), "job": rng.choice(JOBS)}
            for name in rng.sample(names, rng.choice((1, 2, 2, 3, 3, 4)))
        ]
        layout = rng.choice(tuple(LAYOUTS))
        before, between, after, one = LAYOUTS[layout]
        said = " ".join(rng.choice(SAID).format(**p) for p in people)
        order = (f"Write this as {layout}.", said)
        answer = before + between.join(one.format(**p) for p in people) + after
        yield "\n".join(order if rng.random() < 0.5 else order[::-1]), answer


KINDS: dict[str, Callable[[random.Random, bool], Iterator[Text]]] = {"sums": sums, "records": records}
