"""How many drafted tokens turn out right: of each request, against a background of all, and the latest rounds first.

A drafter's own probabilities are calibrated: a node is right, where its parent was, as often as nodes of like
probability were (DSpark, 2026, calibrates a head's in the same place). A drafter that gives none is known by position.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence as Seq
from math import log

import numpy as np
from numpy.typing import NDArray

from sameseed.request import Sequence
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Round

POSITIONS = 16  # places of a draft that are told apart; those beyond share the last one's estimates
EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 0.99, 0.999)  # of a token's probability
NUM_BINS = len(EDGES) + 1
PRIOR_RATE, PRIOR_WEIGHT = 0.6, 2.0  # before anything is known: a draft token is taken to be right so often
SURE = 0.98  # no token is surer before it has been seen to be
OWN_WEIGHT = 1.5  # observations of its own that outweigh what other requests showed
DECAY = 0.92  # of what a request showed, a round later
DECAY_OF_ALL = 0.97  # of what all did, a request and round later
HALF_LIFE = 2048  # rounds in which nobody drafts, after which half of what all did is forgotten: texts change
KEPT = 0.25  # of what all did, in the next process: its texts may be others
MOST_TIMES = 1000.0  # rounds at once, after which nothing is left of what was seen
_MIDDLES = [(low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True)]
# A token's kind: its place where its probability is unknown, else its bin, a first token's apart from later ones'.
_PRIORS = [PRIOR_RATE] * POSITIONS + [0.9 * p for p in _MIDDLES] * 2


def kind(position: int, probability: float | None) -> int:
    """Under which heading a token is counted: by its probability after its parent or, unknown (None), its place."""
    if probability is None:
        return min(position, POSITIONS - 1)
    return POSITIONS + (NUM_BINS if position else 0) + bisect_right(EDGES, probability)


class Record:
    """What was seen of one request, or of all; it fades by `decay` a round.

    `tries` and `hits` by kind, where a token's parent was right. By rank (a node's place among those of its draft, the
    likeliest first): `asked` for, `there`, `gain` (probabilities) and `steps` (how deep the draft up to it reached).
    """

    def __init__(self, decay: float, num_draft_tokens: int) -> None:
        self.tries, self.hits = [0.0] * len(_PRIORS), [0.0] * len(_PRIORS)
        self.asked, self.there, self.gain, self.steps = ([0.0] * num_draft_tokens for _ in range(4))
        self.was, self.said = 0.0, 0.0  # tokens that were right, and that by their kinds' priors should have been
        self.weight = 1.0  # of what is added now: it grows, which is cheaper than making all old ones fade
        self._growth = 1.0 / decay

    def next(self, times: float = 1.0) -> None:
        """A round has passed, or so many times one."""
        self.weight *= self._growth if times == 1.0 else self._growth ** min(times, MOST_TIMES)
        if self.weight > 1e12:
            for counts in (self.tries, self.hits, self.asked, self.there, self.gain, self.steps):
                counts[:] = [c / self.weight for c in counts]
            self.was, self.said = self.was / self.weight, self.said / self.weight
            self.weight = 1.0


class Rates(dict[int, float]):
    """By kind: how often a token of a request is right where its parent was. Worked out where it is asked for."""

    def __init__(self, every: Record, own: Record | None) -> None:
        self.every = every
        self.own = own
        # A drafter that is too sure, or not sure enough, is so at most probabilities alike.
        w = PRIOR_WEIGHT * every.weight
        self.scale = (every.was + w) / (every.said + w)

    def __missing__(self, of: int) -> float:
        every, own = self.every, self.own
        w = PRIOR_WEIGHT * every.weight
        prior = PRIOR_RATE
        if of >= POSITIONS:
            prior = min(_PRIORS[of] * self.scale, SURE)
        elif of:  # a place that is not known is taken to be as the one before
            prior = self[of - 1]
        rate = (every.hits[of] + w * prior) / (every.tries[of] + w)
        if own is not None:
            w = OWN_WEIGHT * own.weight
            rate = (own.hits[of] + w * rate) / (own.tries[of] + w)
        self[of] = rate
        return rate


class DraftNodes:
    """The draft of one sequence as the estimates see it: kinds and depths of its nodes, and how likely each path is."""

    __slots__ = ("depths", "kinds", "likely", "parents")

    def __init__(self, parents: Seq[int], confidence: Seq[float] | None, rates: Rates) -> None:
        """`confidence`: the drafter's probabilities of whole paths, NaN where unknown; `likely`: calibrated."""
        self.parents = parents
        self.depths: list[int] = []
        self.kinds: list[int] = []
        self.likely: list[float] = []
        for i, parent in enumerate(parents):
            depth, before = (self.depths[parent] + 1, self.likely[parent]) if parent >= 0 else (0, 1.0)
            own: float | None = None
            if confidence is not None and confidence[i] == confidence[i]:
                path = confidence[parent] if parent >= 0 else 1.0
                own = min(1.0, confidence[i] / path) if path > 0.0 else 0.0
            of = kind(depth, own)
            self.depths.append(depth)
            self.kinds.append(of)
            self.likely.append(rates[of] * before)

    def ranked(self) -> list[int]:
        """Nodes, the likeliest first; none before its parent, which is as likely at least and comes first in order."""
        likely = self.likely
        return sorted(range(len(likely)), key=likely.__getitem__, reverse=True)  # stable: ties stay in order

    def kept(self, keep: Seq[int]) -> DraftNodes:
        """Some of the nodes (ascending, with their parents)."""
        new = DraftNodes.__new__(DraftNodes)
        place = {old: i for i, old in enumerate(keep)}
        new.parents = [place.get(self.parents[i], -1) for i in keep]
        new.depths, new.kinds = [self.depths[i] for i in keep], [self.kinds[i] for i in keep]
        new.likely = [self.likely[i] for i in keep]
        return new


class Acceptance:
    """Estimates for the drafts of one engine, by request; `num_draft_tokens`: the most nodes of a draft."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.all = Record(DECAY_OF_ALL, num_draft_tokens)
        self.own: dict[int, Record] = {}
        self.tells = False  # does the drafter give probabilities?

    def as_arrays(self) -> dict[str, NDArray[np.float64]]:
        """What all requests showed, to be kept."""
        every = self.all
        return {
            "kinds": np.array([every.tries, every.hits]) / every.weight,
            "ranks": np.array([every.asked, every.there, every.gain, every.steps]) / every.weight,
            "said": np.array([every.was, every.said]) / every.weight,
            "tells": np.array([float(self.tells)]),
        }

    def restore(self, arrays: Mapping[str, NDArray[np.float64]]) -> None:
        """Go on from what `as_arrays` gave; `KEPT` of it counts. Raises KeyError or ValueError for anything else."""
        every = Record(DECAY_OF_ALL, self.num_draft_tokens)
        kinds, ranks, said = arrays["kinds"], arrays["ranks"], arrays["said"]
        if kinds.shape != (2, len(every.tries)) or ranks.shape != (4, len(every.asked)) or said.shape != (2,):
            raise ValueError("counts of other lengths")
        if not all(np.isfinite(a).all() and (a >= 0.0).all() for a in (kinds, ranks, said)):
            raise ValueError("counts that are no counts")
        every.tries, every.hits = (KEPT * kinds).tolist()
        every.asked, every.there, every.gain, every.steps = (KEPT * ranks).tolist()
        every.was, every.said = (KEPT * said).tolist()
        self.all, self.tells = every, bool(arrays["tells"][0])

    def read(self, draft: Draft, seqs: Seq[Sequence]) -> dict[int, DraftNodes]:
        """What the nodes of a draft are held to be worth, by request; none of those without a guess."""
        if not len(draft.tokens):
            return {}
        self.tells = draft.confidence is not None
        parents = draft.parents.tolist()
        confidence = None if draft.confidence is None else draft.confidence.tolist()
        found, end = {}, 0
        for seq, count in zip(seqs, np.diff(draft.offsets).tolist(), strict=True):
            if count:
                part = slice(end, end + count)
                sure = None if confidence is None else confidence[part]
                found[seq.seq_id] = DraftNodes(parents[part], sure, self.rates(seq.seq_id))
            end += count
        return found

    def rates(self, seq_id: int) -> Rates:
        """By kind: how often such a token of this request is right where its parent was."""
        return Rates(self.all, self.own.get(seq_id))

    def offers(self, seq_id: int, count: int) -> list[tuple[float, float, float]]:
        """For each rank below `count`: tokens that it may be expected to bring, rows to be, and steps up to it."""
        return self._by_rank(seq_id, count) if self.tells else self._by_place(seq_id, count)

    def _by_place(self, seq_id: int, count: int) -> list[tuple[float, float, float]]:
        """Of chains without probabilities: how likely a token and all before it are right."""
        every, rates = self.all, self.rates(seq_id)
        own, w = self.own.get(seq_id), PRIOR_WEIGHT * every.weight
        mine = own.weight * OWN_WEIGHT if own is not None else 0.0
        offers, gain, steps = [], 1.0, 0.0
        for j in range(count):
            there = (every.there[j] + w) / (every.asked[j] + w)
            if own is not None:
                there = (own.there[j] + mine * there) / (own.asked[j] + mine)
            gain *= rates[min(j, POSITIONS - 1)]
            steps += there
            offers.append((gain * there, there, steps))
        return offers

    def _by_rank(self, seq_id: int, count: int) -> list[tuple[float, float, float]]:
        """Of drafts with probabilities: what nodes of that rank were like. Unknown ranks go on as those before."""
        every, own = self.all, self.own.get(seq_id)
        w, mine = every.weight, own.weight * OWN_WEIGHT if own is not None else 0.0
        offers, gain, there, steps, falls = [], 1.0, 1.0, 0.0, PRIOR_RATE
        for j in range(count):
            seen, before = every.there[j], gain
            gain = (every.gain[j] + PRIOR_WEIGHT * w * before * falls) / (every.asked[j] + PRIOR_WEIGHT * w)
            there = (seen + w * there) / (every.asked[j] + w)
            deeper = (every.steps[j] + w * (steps + 1.0)) / (seen + w)
            if own is not None:
                gain = (own.gain[j] + mine * gain) / (own.asked[j] + mine)
                there = (own.there[j] + mine * there) / (own.asked[j] + mine)
                deeper = (own.steps[j] + mine * deeper) / (own.there[j] + mine)
            steps = max(steps, deeper)
            falls = min(gain / before, SURE) if before > 0.0 else PRIOR_RATE
            offers.append((gain, there, steps))
        return offers

    def rested(self, rounds: int) -> None:
        """So many rounds have passed in which nobody drafted: what was seen before them says less of texts now."""
        self.all.next(rounds / HALF_LIFE * log(0.5) / log(DECAY_OF_ALL))

    def learn_round(self, round_: Round, read: Mapping[int, DraftNodes], ended: bool = False) -> None:
        """Learn from all drafts of a round; `read`: their nodes, as they were checked.

        `ended`: the chains would have gone on, had it paid.
        """
        for b, (seq, asked) in enumerate(zip(round_.seqs, round_.num_asked, strict=True)):
            if not asked:
                continue
            accepted = range(round_.num_accepted[b]) if round_.nodes is None else round_.nodes[b]
            nodes = read.get(seq.seq_id)
            if not round_.num_draft[b]:
                nodes = NOTHING
            elif nodes is None or len(nodes.parents) != round_.num_draft[b]:  # nobody trimmed: a chain
                nodes = DraftNodes(range(-1, round_.num_draft[b] - 1), None, self.rates(seq.seq_id))
            self.learn(seq.seq_id, asked, nodes, accepted, ended)

    def learn(self, seq_id: int, asked: int, nodes: DraftNodes, accepted: Seq[int], ended: bool = False) -> None:
        """A round: nodes asked for, the draft as it was checked, and the path of it that was right.

        Of a chain that `ended` where it no longer paid, the rest is taken to be as likely as its end promised.
        """
        asked = min(asked, self.num_draft_tokens)  # a request itself may ask for more
        own = self.own.get(seq_id)
        if own is None:
            own = self.own[seq_id] = Record(DECAY, self.num_draft_tokens)
        right = {-1, *accepted}
        outcomes = [(nodes.kinds[i], i in right) for i, parent in enumerate(nodes.parents) if parent in right]
        ranks: list[tuple[float, int]] = []
        if self.tells:
            steps = 0
            for i in nodes.ranked():
                steps = max(steps, nodes.depths[i] + 1)
                ranks.append((nodes.likely[i], steps))
            there = asked if ended and ranks else len(ranks)
            for j in range(len(ranks), there):
                last = ranks[-1][0]
                ranks.append((last * min(SURE, last ** (1 / j)), j + 1))
        else:
            there = len(nodes.parents)
        for record in (own, self.all):
            record.next()
            w = record.weight
            for of, hit in outcomes:
                record.tries[of] += w
                record.hits[of] += w * hit
                record.was += w * hit
                record.said += w * _PRIORS[of]
            for j in range(asked):
                record.asked[j] += w
            for j in range(min(there, asked)):
                record.there[j] += w
            for j, (likely, steps) in enumerate(ranks[:asked]):
                record.gain[j] += w * likely
                record.steps[j] += w * steps

    def release(self, seq_id: int) -> None:
        """The request is gone."""
        self.own.pop(seq_id, None)


NOTHING = DraftNodes((), None, Rates(Acceptance(1).all, None))
