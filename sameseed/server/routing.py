"""Routing: which of several replicas takes a request. Where its beginning was computed lately, and not into a crowd.

A replica's prefix cache is not asked: what was sent to it is remembered, as digests of beginnings of the text.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple

FIRST, GROWTH, LONGEST = 64, 1.25, 2**20  # bytes of the shortest and longest beginning that is looked at; the steps
MAX_KNOWN = 2**14  # beginnings that are remembered of a replica: those of a few hundred long texts
SLACK = 2  # requests that a replica may have beyond twice those of the least busy one
_BEGINS = {  # what stands at the beginning of the text that a model reads
    "/v1/completions": ("prompt",),
    "/v1/chat/completions": ("tools", "messages"),
    "/v1/responses": ("instructions", "tools", "input"),
}


def _cuts() -> tuple[int, ...]:
    made, size = [], float(FIRST)
    while size <= LONGEST:
        made.append(int(size))
        size *= GROWTH
    return tuple(made)


CUTS = _cuts()


@dataclass(frozen=True)
class RoutedCall:
    """One request for vLLM. `beginnings`: digests, the shortest first; `num_seqs`: texts that it asks for."""

    path: str
    body: bytes
    beginnings: tuple[bytes, ...] = ()
    num_seqs: int = 1


def beginnings(path: str, body: Mapping[str, Any]) -> tuple[bytes, ...]:
    """Digests of the first 64 bytes of a request's text, of 80, 100, and so on, as long as it is.

    Tenants share none: `cache_salt` is part of each.
    """
    names = _BEGINS.get(path)
    if names is None:
        return ()
    said = [body.get(name) for name in names]
    alone = said[0] if len(said) == 1 else said
    text = (alone if isinstance(alone, str) else json.dumps(alone).rstrip("]}")).encode("utf-8", "replace")
    made, start = [], 0
    digest = hashlib.blake2b(f"{body.get('cache_salt', '')}\0".encode(), digest_size=12)
    for cut in CUTS:
        if cut > len(text):
            break
        digest.update(text[start:cut])
        made.append(digest.digest())
        start = cut
    return tuple(made)


class Known:
    """Beginnings that were sent to a replica; the one unused for longest is forgotten first."""

    def __init__(self, most: int = MAX_KNOWN) -> None:
        self._most = most
        self._kept: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def length(self, found: Seq[bytes]) -> int:
        """The longest of these that is known: its place, counted from 1; 0 for none."""
        return next((i for i in range(len(found), 0, -1) if found[i - 1] in self._kept), 0)

    def add(self, found: Seq[bytes]) -> None:
        """They are known from now on."""
        for digest in found:
            self._kept[digest] = None
            self._kept.move_to_end(digest)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)


class Standing(NamedTuple):
    """A replica that could take a request: sequences it works on, how much it knows of the text, requests so far."""

    load: int
    known: int
    served: int


def best(candidates: Seq[Standing], room: int) -> int:
    """The place of the one that takes the request. `room`: sequences that each runs at once.

    The longest known beginning wins, then the fewest sequences, then the fewest requests so far. Passed over is who is
    much busier than the least busy one, and who is full while that one is not.
    """
    least = min(candidate.load for candidate in candidates)

    def order(place: int) -> tuple[bool, int, int, int]:
        load, known, served = candidates[place]
        crowded = load > 2 * least + SLACK or load >= room > least
        return crowded, -known, load, served

    return min(range(len(candidates)), key=order)
