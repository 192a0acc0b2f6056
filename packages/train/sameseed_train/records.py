"""Small records generated from lists of names: people in words, and the same people as JSON, a table or a list."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator

HELD_OUT_PER_CENT = 8  # share of names, chosen by a hash of the name, that are not trained on
HELD_OUT_TEXTS = 60
FIRST = (
    *("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jonas", "Lena", "Omar", "Paula"),
    *("Rosa", "Simon", "Tara", "Victor", "Wanda", "Yusuf", "Zoe", "Maria", "Peter", "Nina", "Karim", "Lucy", "Tom"),
)
LAST = (
    *("Adams", "Baker", "Costa", "Diaz", "Evans", "Fischer", "Green", "Haas", "Ito", "Jensen", "King", "Lopez"),
    *("Miller", "Novak", "Olsen", "Park", "Rossi", "Silva", "Taylor", "Weber", "Young", "Khan", "Brown", "Moreau"),
)
CITIES = (
    *("Berlin", "Boston", "Cairo", "Dublin", "Geneva", "Lima", "Lisbon", "London", "Madrid", "Nairobi", "Oslo"),
    *("Paris", "Prague", "Rome", "Seoul", "Sydney", "Tokyo", "Toronto", "Vienna", "Warsaw"),
)
JOBS = (
    *("baker", "carpenter", "chemist", "cook", "dentist", "doctor", "driver", "farmer", "gardener", "lawyer"),
    *("nurse", "painter", "pilot", "plumber", "singer", "tailor", "teacher", "translator", "waiter", "writer"),
)
SAID = (
    "{name} is {age} years old, lives in {city} and works as a {job}.",
    "{name}, {age}, is a {job} in {city}.",
    "{name} is a {job} from {city} and is {age} years old.",
)
ASKED = {
    "json": ("Write this as JSON.", "Turn this into JSON, please.", "Give me the JSON of this."),
    "table": ("Write this as a table.", "Put this into a table, please.", "Make a table of this."),
    "list": ("Write this as a list.", "Turn this into a list, please.", "List the people, one on a line."),
}

Person = dict[str, str | int]


def written(people: list[Person], layout: str) -> str:
    """The answer: records as JSON, a Markdown table or a list."""
    if layout == "json":
        rows = ['{{"name": "{name}", "age": {age}, "city": "{city}", "job": "{job}"}}'.format(**p) for p in people]
        return rows[0] if len(rows) == 1 else "[\n  " + ",\n  ".join(rows) + "\n]"
    if layout == "table":
        head = "| Name | Age | City | Job |\n| --- | --- | --- | --- |\n"
        return head + "\n".join("| {name} | {age} | {city} | {job} |".format(**p) for p in people)
    return "\n".join("- {name}: {age} years old, {job}, {city}".format(**p) for p in people)


def record_texts(seed: int, *, held_out: bool) -> Iterator[tuple[str, str]]:
    """Questions and answers: without end for training, `HELD_OUT_TEXTS` with held-out names."""
    rng = random.Random(f"{seed}/records/{held_out}")
    names = [f"{first} {last}" for first in FIRST for last in LAST]
    names = [n for n in names if (zlib.crc32(n.encode()) % 100 < HELD_OUT_PER_CENT) == held_out]
    texts = 0
    while not held_out or texts < HELD_OUT_TEXTS:
        people: list[Person] = [
            {"name": name, "age": rng.randrange(18, 80), "city": rng.choice(CITIES), "job": rng.choice(JOBS)}
            for name in rng.sample(names, rng.choice((1, 2, 2, 3, 3, 4)))
        ]
        said = " ".join(rng.choice(SAID).format(**p) for p in people)
        layout = rng.choice(tuple(ASKED))
        order = (rng.choice(ASKED[layout]), said)
        yield "\n".join(order if rng.random() < 0.5 else order[::-1]), written(people, layout)
        texts += 1
