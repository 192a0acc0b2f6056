"""suffix drafter (SuffixDecoding: Oliaro et al., 2024): what followed the last tokens here and in past requests?

If different tokens followed, the draft is a tree, scored by how often each did. Longer matches give longer drafts.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from sameseed.drafters._history import History, Place, TextStore
from sameseed.errors import ConfigError
from sameseed.fields import setting, within
from sameseed.request import Sequence
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Drafter, Parts

PAST = ("tenant", "all", "none")


Tree = tuple[list[int], list[int], list[float]]  # tokens, parents, and path probabilities estimated from counts


class SuffixDrafter(Drafter):
    """Drafts trees scored by frequency, from each sequence's own text and from the texts of ended requests."""

    branches = True

    @dataclass(frozen=True)
    class Options(Drafter.Options):
        min_match: int = within(2, 1, 1024, help="shortest match, in tokens")
        max_match: int = within(24, 1, 1024, help="longest match")
        length_factor: float = within(2.0, 0, above=True, help="longest path, in tokens per token of the match")
        min_probability: float = within(0.1, 0, 1, help="the least path probability of a node, estimated from counts")
        max_places: int = within(32, 1, help="how many places of an n-gram are kept, the latest ones")
        past: str = setting("tenant", "which past requests are used: those of the same tenant, all, or none")
        max_tokens: int = within(1_000_000, 1, help="most tokens of past requests that are kept; the oldest go")
        store: str = setting("", "a file that keeps past requests between runs (with past = all)")

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.min_match > self.max_match:
                raise ConfigError(f"min_match ({self.min_match}) must be at most max_match ({self.max_match})")
            if self.past not in PAST:
                raise ConfigError(f"past must be one of {', '.join(PAST)}, got {self.past!r}")
            if self.store and self.past != "all":
                raise ConfigError("a store holds the texts of all requests together: it needs past = 'all'")

    def __init__(self, options: Options | None = None, vocab_size: int | None = None) -> None:
        self.options = o = options or self.Options()
        self._own: dict[int, History] = {}  # by sequence
        self._past: dict[str, History] = {}  # by tenant, least recently used first; "" if all share one
        self._keys = count()
        self._store = TextStore(Path(o.store), o.max_tokens, vocab_size) if o.store else None
        for text in self._store.read() if self._store else []:
            self._remember("", text)

    @classmethod
    def build(cls, options: Drafter.Options, parts: Parts) -> SuffixDrafter:
        assert isinstance(options, cls.Options)
        return cls(options, parts.vocab_size)

    def propose(self, seqs: Seq[Sequence], num_draft: Seq[int]) -> Draft:
        pairs = zip(seqs, num_draft, strict=True)
        trees = [self._best(seq, k) if k and seq.draft_depth else ([], [], []) for seq, k in pairs]
        return Draft.trees([(tokens, parents) for tokens, parents, _ in trees], [likely for *_, likely in trees])

    def rewind(self, seq: Sequence, length: int) -> None:
        own = self._own.get(seq.seq_id)
        if own is not None:
            own.rewind(0, length)

    def release(self, seq: Sequence) -> None:
        if self._own.pop(seq.seq_id, None) is None or self.options.past == "none" or not len(seq):
            return
        text = list(seq.token_ids)
        self._remember(seq.tenant, text)
        if self._store is not None:
            self._store.append(text)

    def _remember(self, tenant: str, text: list[int]) -> None:
        """Add a text of a past request. Over the token limit, drop the histories of tenants unused for longest."""
        o = self.options
        key = tenant if o.past == "tenant" else ""
        past = self._past.pop(key, None) or History(o.min_match, o.max_places, o.max_tokens)
        self._past[key] = past  # now the last used
        past.add(next(self._keys), text)
        while len(self._past) > 1 and sum(each.num_tokens for each in self._past.values()) > o.max_tokens:
            del self._past[next(iter(self._past))]

    def _best(self, seq: Sequence, num_draft: int) -> Tree:
        """The tree with the most expected accepted tokens, among the trees for each match length."""
        o, tokens = self.options, seq.token_ids
        own = self._own.get(seq.seq_id)
        if own is None:
            own = self._own[seq.seq_id] = History(o.min_match, o.max_places)
        own.add(0, tokens)
        best: Tree = [], [], []
        if len(tokens) < o.min_match:
            return best
        suffix = tokens[-o.max_match :]
        found = [list(own.find(suffix, o.max_match))]
        key = seq.tenant if o.past == "tenant" else ""
        if key in self._past:
            past = self._past[key] = self._past.pop(key)  # now the last used
            found.append(list(past.find(suffix, o.max_match)))
        for places in found:
            for length in sorted({p.length for p in places}, reverse=True):
                depth = min(max(1, int(o.length_factor * length)), seq.draft_depth)
                tree = self._tree([p for p in places if p.length >= length], num_draft, depth)
                if sum(tree[2]) > sum(best[2]):  # expected accepted tokens
                    best = tree
        return best

    def _tree(self, places: list[Place], num_draft: int, depth: int) -> Tree:
        """The `num_draft` likeliest nodes that continue the matches at `places`, parents before children."""
        tokens, parents, chances = tree = list[int](), list[int](), list[float]()
        order = count()
        # -likely, order, token, parent, steps, places
        waiting: list[tuple[float, int, int, int, int, list[Place]]] = []

        def branch(parent: int, steps: int, likely: float, there: list[Place]) -> None:
            by_token: dict[int, list[Place]] = {}
            for place in there:
                text, at = place.text, place.end + steps
                token = -1  # no token follows
                if at < len(text):
                    token = text[at]
                elif period := len(text) - place.end:  # past a text's end, its repetition continues
                    token = text[place.end + steps % period]
                by_token.setdefault(token, []).append(place)
            total = sum(len(p) for token, p in by_token.items() if token >= 0)
            for token, those in by_token.items():
                share = likely * len(those) / total if token >= 0 else 0.0
                if share >= max(self.options.min_probability, 1e-9):
                    heapq.heappush(waiting, (-share, next(order), token, parent, steps, those))

        branch(-1, 0, 1.0, places)
        while waiting and len(tokens) < num_draft:
            minus, _, token, parent, steps, those = heapq.heappop(waiting)
            tokens.append(token)
            parents.append(parent)
            chances.append(-minus)
            if steps + 1 < depth:
                branch(len(tokens) - 1, steps + 1, -minus, those)
        return tree


DRAFTER = SuffixDrafter
