"""Routing: chooses the replica for a request: one that computed the same prefix lately, unless it is too busy.

The replicas' prefix caches are not queried. The router remembers what it sent to each replica, as digests of text
beginnings (prefixes).
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple

FIRST, GROWTH, LONGEST = 64, 1.25, 2**20  # bytes of the shortest and longest prefix; GROWTH: ratio of lengths
MAX_KNOWN = 2**14  # prefixes that are remembered per replica: those of a few hundred long texts
SLACK = 2  # sequences that a replica may have beyond twice those of the least busy one
_BEGINS = {  # fields that the beginning of the model's prompt is made of
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
    """One request for vLLM. `beginnings`: digests of prefixes, the shortest first; `num_seqs`: sequences asked for."""

    path: str
    body: bytes
    beginnings: tuple[bytes, ...] = ()
    num_seqs: int = 1


def beginnings(path: str, body: Mapping[str, Any]) -> tuple[bytes, ...]:
    """Digests of prefixes of a request's text: the first 64 bytes, 80, 100, and so on, up to its length.

    Tenants share no digest: `cache_salt` is part of each.
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
    """Digests of prefixes that were sent to a replica. The least recently used one is forgotten first."""

    def __init__(self, most: int = MAX_KNOWN) -> None:
        self._most = most
        self._kept: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def length(self, found: Seq[bytes]) -> int:
        """The position, counted from 1, of the longest known one of these prefixes; 0 if none is known."""
        return next((i for i in range(len(found), 0, -1) if found[i - 1] in self._kept), 0)

    def add(self, found: Seq[bytes]) -> None:
        """Remember these prefixes."""
        for digest in found:
            self._kept[digest] = None
            self._kept.move_to_end(digest)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)


class Standing(NamedTuple):
    """A replica that could take a request: sequences in progress, length of its known prefix, requests so far."""

    load: int
    known: int
    served: int


def best(candidates: Seq[Standing], room: int) -> int:
    """The index of the candidate that takes the request. `room`: sequences that each replica runs at once.

    The longest known prefix wins, then the fewest sequences, then the fewest requests so far. A replica comes last if
    it is much busier than the least busy one, or full while that one is not.
    """
    least = min(candidate.load for candidate in candidates)

    def order(place: int) -> tuple[bool, int, int, int]:
        load, known, served = candidates[place]
        crowded = load > 2 * least + SLACK or load >= room > least
        return crowded, -known, load, served

    return min(range(len(candidates)), key=order)
